"""Sizes of memory as users write them, and what a process may take."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from mlx_transmuter import memory
from mlx_transmuter.memory import MemorySizeError, parse_memory_size, usable_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("7", 7),
        ("6GB", 6 * 10**9),
        ("1.5 gib", 3 * 2**29),
        (" 800MB ", 8 * 10**8),
        ("2TiB", 2**41),
        ("1kb", 1000),
    ],
)
def test_a_size_is_bytes_or_a_number_with_a_unit(text, size):
    assert parse_memory_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "6 XB", "1e9", "0", 0, -5, True, None, "6GB7", "0.1B"])
def test_anything_else_is_refused(text):
    with pytest.raises(MemorySizeError, match="size of memory"):
        parse_memory_size(text)


def test_a_limit_of_the_process_counts():
    code = "from mlx_transmuter.memory import usable_memory; print(usable_memory())"
    limit = 2**33
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )  # fmt: skip
    assert int(run.stdout) == min(limit, usable_memory() // 3 * 4) // 4 * 3


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/box/inner\n", "box/memory.max"),
        ("3:cpu:/x\n4:memory:/box\n0::/\n", "memory/box/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_group_counts(groups, file, tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / file).parent.mkdir(parents=True)
    monkeypatch.setattr(memory, "CGROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    (tmp_path / file).write_text("max\n")
    unlimited = usable_memory()
    (tmp_path / file).write_text(f"{2**30}\n")
    assert usable_memory() == 2**30 // 4 * 3 < unlimited
