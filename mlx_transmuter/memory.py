"""How much memory this process may take, and sizes of memory as users write them."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from mlx_transmuter.errors import TransmuterError

_UNITS = {"": 1} | {f"{prefix}B": 1000**n for n, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}

CGROUP_FILE, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class MemorySizeError(TransmuterError):
    """A text that is no size of memory."""


def parse_memory_size(size: int | str) -> int:
    """Returns the bytes of a size: a number of them, or a text as "6GB", "1.5GiB" or "800MB".

    Raises MemorySizeError for anything else, and for less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|)\s*", str(size), re.IGNORECASE)
    units = {unit.lower(): count for unit, count in _UNITS.items()}
    count = int(float(match[1]) * units[match[2].lower()]) if match and not isinstance(size, bool) else 0
    if count < 1:
        raise MemorySizeError("", f"the size of memory {size!r}", "bytes, or a number with a unit, as 6GB or 800MB")
    return count


def usable_memory() -> int:
    """Returns three quarters of the bytes that this process may take: of the machine's, or of fewer where a limit of
    the process or of its group says so.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_process_limits(), *_group_limits()]) // 4 * 3


def _process_limits() -> list[int]:
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return [limit for limit in limits if limit > 0 and limit != resource.RLIM_INFINITY]


def _group_limits() -> list[int]:
    """The limits of the process's control group, and of those around it: a container's."""
    try:
        groups = CGROUP_FILE.read_text()
    except OSError:
        return []
    limits = []
    for controllers, path in re.findall(r"^\d+:(memory|):/(.*)$", groups, re.MULTILINE):
        folder = CGROUP_ROOT / controllers / path
        file = "memory.limit_in_bytes" if controllers else "memory.max"  # of version 1 and version 2
        limits += [_read_limit(place / file) for place in (folder, *folder.parents)]
    return [limit for limit in limits if limit]


def _read_limit(file: Path) -> int:
    """The number in a file, 0 where there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
