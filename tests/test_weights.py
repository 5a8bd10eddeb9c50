"""Weights: one file or shards with an index, and files that are missing, broken or outside the folder."""

from __future__ import annotations

import json
import struct
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.program import Program, ProgramError, WeightInfo, weights


def arrays() -> dict[str, mx.array]:
    draw = np.random.default_rng(0)
    floats = {f"layers.{i}.weight": mx.array(draw.normal(size=(8, 4 + i)).astype(np.float32)) for i in range(6)}
    return {
        **floats,
        "halves": mx.array(draw.normal(size=9).astype(np.float16)),
        "brains": mx.array([1.5, -2.25], mx.bfloat16),
        "words": mx.array(draw.integers(0, 2**32, 3).astype(np.uint32)),
        "scalar": mx.array(3.0),
        "empty": mx.zeros((0, 4)),
    }


def program(items: dict[str, mx.array]) -> Program:
    names = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.uint32: "uint32"}
    return Program((), (), [], weights={n: WeightInfo(names[a.dtype], tuple(a.shape)) for n, a in items.items()})


def save(folder, items: dict[str, mx.array], **options) -> None:
    weights.save(folder, [weights.StoredWeight.of_array(*item) for item in items.items()], **options)


def are_equal_arrays(actual: dict[str, mx.array], expected: dict[str, mx.array]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == expected[name].dtype and actual[name].shape == expected[name].shape and mx.array_equal(actual[name], expected[name])
        for name in expected
    )  # fmt: skip


def test_weights_that_fit_are_in_one_file(tmp_path):
    save(tmp_path, arrays())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert are_equal_arrays(weights.load(tmp_path, program(arrays())), arrays())
    _, metadata = mx.load(str(tmp_path / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}


@pytest.mark.parametrize("limit", [1, 200, 400])
def test_more_weights_are_in_shards_with_an_index(tmp_path, limit):
    items = arrays()
    save(tmp_path, items, shard_bytes=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in items.values())
    assert index["weight_map"].keys() == items.keys()
    for file in files:
        held: Any = mx.load(str(tmp_path / file))
        assert held.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert sum(array.nbytes for array in held.values()) <= limit or len(held) == 1
    assert are_equal_arrays(weights.load(tmp_path, program(items)), items)


def test_shards_are_read_by_other_tools(tmp_path):
    """safetensors' own library reads them."""
    safetensors = pytest.importorskip("safetensors.numpy")
    items = {name: array for name, array in arrays().items() if array.dtype != mx.bfloat16}
    save(tmp_path, items, shard_bytes=300)
    actual = {}
    for path in tmp_path.glob("*.safetensors"):
        actual |= safetensors.load_file(path)
    assert {name: array.tolist() for name, array in actual.items()} == {
        n: np.array(a).tolist() for n, a in items.items()
    }


def test_one_array_at_a_time_is_in_memory(tmp_path):
    most = 0

    def rows():
        nonlocal most
        for _ in range(4):
            array = mx.zeros((2**16,))
            mx.eval(array)
            most = max(most, mx.get_active_memory())
            yield array

    mx.clear_cache()
    before = mx.get_active_memory()
    stored = [weights.StoredWeight(f"w{i}", mx.float32, (2**18,), rows) for i in range(3)]
    weights.save(tmp_path, stored)
    assert most - before <= 3 * 2**18  # the one that is written, its bytes, and the next
    assert (tmp_path / "model.safetensors").stat().st_size > 3 * 2**20


def test_each_array_is_aligned_to_its_elements(tmp_path):
    """What maps the file reads them in place."""
    save(tmp_path, arrays())
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    for name, array in arrays().items():
        begin, end = entries[name]["data_offsets"]
        assert (8 + length + begin) % array.itemsize == 0
        assert end - begin == array.nbytes


def test_an_empty_program_has_an_empty_file(tmp_path):
    save(tmp_path, {})
    assert weights.load(tmp_path, program({})) == {}


def refused(tmp_path, items, match: str) -> None:
    with pytest.raises(ProgramError, match=match) as error:
        weights.load(tmp_path, program(items))
    assert str(tmp_path) in error.value.where


def test_a_folder_without_weights_is_refused(tmp_path):
    refused(tmp_path, arrays(), "no file 'model.safetensors'")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, arrays(), "no file 'model.safetensors'")


def test_a_missing_shard_is_named(tmp_path):
    save(tmp_path, arrays(), shard_bytes=200)
    victim = sorted(tmp_path.glob("*.safetensors"))[2]
    victim.unlink()
    refused(tmp_path, arrays(), f"no file '{victim.name}'")


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", 3, None, ["x"]])
def test_an_index_that_points_outside_the_folder_is_refused(tmp_path, place):
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, {"w": mx.zeros(2)})
    (folder / "model.safetensors").rename(tmp_path / "secret")
    (folder / "a").mkdir()
    (folder / "a" / "b").write_bytes((tmp_path / "secret").read_bytes())
    index = {"metadata": {}, "weight_map": {"w": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, {"w": mx.zeros(2)}, "no file|no index")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": "w"}', "[" * 10**5, "\xff"]
)
def test_a_malformed_index_is_refused(tmp_path, text):
    save(tmp_path, {"w": mx.zeros(2)})
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    refused(tmp_path, {"w": mx.zeros(2)}, "no index")


def header(**changes) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    text = json.dumps({"w": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


BROKEN = {
    "empty": b"",
    "cut in the length": header()[:5],
    "cut in the header": header()[:30],
    "cut in the data": header()[:-1],
    "a header without end": struct.pack("<Q", 2**63 - 1) + header()[8:],
    "offsets past the end": header(data_offsets=[2**40, 2**40 + 8]),
    "negative offsets": header(data_offsets=[-8, 0]),
    "offsets that are text": header(data_offsets=["0", "8"]),
    "a shape of another size": header(shape=[3]),
    "a shape whose size overflows": header(shape=[2**31 - 1, 2**31 - 1]),
    "a negative shape": header(shape=[-2]),
    "an unknown type": header(dtype="F7"),
    "a type that MLX lacks": header(dtype="F64", shape=[1]),
    "no object": struct.pack("<Q", 2) + b"[]" + bytes(8),
    "nesting": struct.pack("<Q", 5 * 10**5) + b'{"a":' * 10**5,
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused(tmp_path, what):
    (tmp_path / "model.safetensors").write_bytes(header())
    assert mx.array_equal(weights.load(tmp_path, program({"w": mx.zeros(2)}))["w"], mx.zeros(2))
    (tmp_path / "model.safetensors").write_bytes(BROKEN[what])
    refused(tmp_path, {"w": mx.zeros(2)}, "no safetensors")
