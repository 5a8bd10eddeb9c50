"""Hostile converted folders: whatever a folder holds, it loads and runs, or it ends in our error. Nothing is run but arithmetic."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter import ops
from mlx_transmuter.model import load_folder
from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import ProgramError
from mlx_transmuter.program.signature import SignatureError
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError

OURS = (ProgramError, OperatorError, DecoderError, SignatureError)


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """A converted llama to change."""
    shutil.copytree(converted("llama"), tmp_path / "model")
    return tmp_path / "model"


def read(folder: Path) -> dict:
    return json.loads((folder / "program.json").read_text())


def write(folder: Path, program) -> None:
    (folder / "program.json").write_text(json.dumps(program))


def run(folder: Path) -> mx.array:
    """Two parts of a prompt of two rows through the folder's decoder."""
    model = load_folder(folder)
    assert model.cache_mode
    session = Decoder(model.decoder, 2).begin_session([5, 5])
    for size in (4, 1):
        logits = session.step(np.full((2, size), 3, np.int32), [size, size])
        session.evaluate(logits)
    return logits


def refused(folder: Path, match: str = "") -> None:
    with pytest.raises(OURS, match=match or None) as error:
        run(folder)
    assert len(str(error.value)) < 2000


def test_the_folder_that_is_changed_here_runs(folder):
    assert np.isfinite(np.array(run(folder))).all()


# Paths.


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", "model.safetensors\0"]
)
def test_weights_are_read_from_the_folder_alone(folder, place):
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "sub").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "sub")
    (folder / "model.safetensors").rename(folder / "hidden")
    index = {"metadata": {}, "weight_map": dict.fromkeys(read(folder)["weights"], place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "no file")


@pytest.mark.parametrize("name", ["program.json", "model.safetensors"])
def test_special_files_are_not_opened(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)  # opening it would wait for ever
    refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    refused(folder)


def test_nothing_in_the_folder_is_executed(folder):
    for name in ("modeling_llama.py", "sitecustomize.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(folder / 'ran')!r})")
    (folder / "config.json").write_text(
        json.dumps({"auto_map": {"AutoModel": "modeling_llama.Llama"}, "trust_remote_code": True})
    )
    run(folder)
    assert not (folder / "ran").exists()


# Layers and weights.

LAYERS = {
    "an unknown kind": {"kind": "Sequential"},
    "a kind that is no layer": {"kind": "__class__"},
    "a module by its path": {"kind": "os.system"},
    "no kind": {},
    "a kind that is a list": {"kind": ["Linear"]},
    "a size without end": {"kind": "QuantizedLinear", "bits": 4, "group_size": 2**60},
    "a negative size": {"kind": "QuantizedLinear", "bits": 4, "group_size": -64},
    "bits without end": {"kind": "QuantizedEmbedding", "bits": 2**60, "group_size": 64},
    "another form": {"kind": "QuantizedLinear", "bits": 4, "group_size": 64},
    "an option that is none": {"kind": "Linear", "bias": True, "self": 1},
}


@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_that_is_none_is_refused(folder, what):
    program = read(folder)
    program["layers"]["model.layers.0.self_attn.q_proj"] = LAYERS[what]
    write(folder, program)
    refused(folder, r"the layer|a layer")


WEIGHTS = {
    "a shape without end": ("model.norm.weight", {"dtype": "float32", "shape": [2**47, 2**47]}),
    "a shape whose size counts to the right one": (
        "model.norm.weight",
        {"dtype": "float32", "shape": [2**31, 2**33, 1]},
    ),
    "another type": ("model.norm.weight", {"dtype": "int8", "shape": [64]}),
    "a type that MLX lacks": ("model.norm.weight", {"dtype": "float8_e5m2", "shape": [64]}),
    "a weight that is not there": ("model.other.weight", {"dtype": "float32", "shape": [64]}),
    "a name of the module's own": ("_program", {"dtype": "float32", "shape": [64]}),
    "a name of python's": ("__class__", {"dtype": "float32", "shape": [64]}),
    "a name inside another": ("model.norm.weight.more", {"dtype": "float32", "shape": [64]}),
    "a name without end": (".".join("a" * 10**5), {"dtype": "float32", "shape": [64]}),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_a_weight_that_is_none_is_refused(folder, what):
    name, weight = WEIGHTS[what]
    program = read(folder)
    program["weights"][name] = weight
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    if len(name) < 100 and "other" not in name:
        mx.save_safetensors(str(folder / "model.safetensors"), arrays | {name: arrays.get(name, mx.zeros(64))})
    write(folder, program)
    refused(folder)


# Values.


def with_node(folder: Path, op: str, *constants, attrs=None) -> None:
    """The logits of the folder plus what `op` makes of the constants, largest element of it."""
    program = read(folder)
    names = [f"attack.{i}" for i in range(len(constants))]
    for name, value in zip(names, constants, strict=True):
        array = np.asarray(value)
        program["constants"][name] = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }
    last = next(node for node in program["nodes"] if "logits" in node["outputs"])
    last["outputs"] = ["attack.logits"]
    program["nodes"] += [
        {"op": op, "inputs": names, "outputs": ["attack.made"], "attrs": attrs or {}, "name": "attack"},
        {"op": "Cast-9", "inputs": ["attack.made"], "outputs": ["attack.float"], "attrs": {"to": 1}},
        {"op": "ReduceMax-11", "inputs": ["attack.float"], "outputs": ["attack.most"], "attrs": {"keepdims": 0}},
        {"op": "Add-7", "inputs": ["attack.logits", "attack.most"], "outputs": ["logits"]},
    ]
    write(folder, program)


def test_a_node_that_is_added_runs(folder):
    before = np.array(run(folder))
    with_node(folder, "Expand-8", np.float32(2.5), [3, 3])
    np.testing.assert_allclose(np.array(run(folder)), before + 2.5, atol=1e-5)


HUGE = {
    "a shape without end": ("ConstantOfShape-9", [2**62]),
    "a shape that counts to nothing": ("ConstantOfShape-9", [2**30, 2**30, 2**30, 2**30]),
    "an expansion": ("Expand-8", np.float32(1), [2**20, 2**20, 2**20]),
    "a repetition": ("Tile-6", np.float32([1, 2]), [2**62]),
    "an edge": ("Pad-11", np.float32([1, 2]), [2**62, 2**62]),
    "a range": ("Range-11", np.int64(0), np.int64(2**62), np.int64(1)),
    "a long range": ("Range-11", np.int64(0), np.int64(2**31), np.int64(1)),
    "an endless range": ("Range-11", np.int64(0), np.int64(1), np.int64(0)),
    "an index past the end": ("Gather-1", np.float32([1, 2]), np.int64(2**40)),
    "an index before the beginning": ("Gather-1", np.float32([1, 2]), np.int64(-3)),
    "elements past the end": ("GatherElements-11", np.float32([1, 2]), [5]),
    "places past the end": ("GatherND-11", np.float32([1, 2]), [[7]]),
    "a store past the end": ("ScatterND-11", np.float32([1, 2]), [[7]], np.float32([1])),
    "a store by elements past the end": ("ScatterElements-11", np.float32([1, 2]), [2**31], np.float32([1])),
    "a slice without a step": ("Slice-10", np.float32([1, 2]), [0], [2], [0], [0]),
    "an axis that is not there": ("Concat-4", np.float32([1, 2])),
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE)
def test_a_value_that_no_machine_holds_is_never_made(folder, what):
    op, *constants = HUGE[what]
    with_node(folder, op, *constants)
    refused(folder, "attack")


def test_some_branches_in_branches_run(folder):
    """As deep as a file may go, what is read can be walked too."""
    program = read(folder)
    empty = {
        key: [] if key in ("inputs", "nodes") else {}
        for key in ("meta", "inputs", "layers", "weights", "constants", "nodes")
    }
    base = {**empty, "format": program["format"], "version": 1}
    program["constants"]["attack.flag"] = {"dtype": "bool", "shape": [], "data": [True]}
    last = next(node for node in program["nodes"] if "logits" in node["outputs"])
    last["outputs"] = ["attack.logits"]
    outcomes = set()
    for depth in (5, 30, 60, 90, 120):
        inner = {**base, "outputs": [{"name": "attack.logits", "dtype": "float32", "shape": None}]}
        for i in range(depth):
            branches = {
                "then_branch": {"program": inner},
                "else_branch": {
                    "program": {**base, "outputs": [{"name": "attack.logits", "dtype": "float32", "shape": None}]}
                },
            }
            name = "logits" if i == depth - 1 else f"b{i}"
            node = {"op": "If-1", "inputs": ["attack.flag"], "outputs": [name], "attrs": branches}
            inner = {**base, "nodes": [node], "outputs": [{"name": name, "dtype": "float32", "shape": None}]}
        write(folder, {**program, "nodes": [*program["nodes"], *inner["nodes"]]})
        try:
            outcomes.add(run(folder).shape[0])
        except OURS:
            outcomes.add("refused")
    assert 2 in outcomes


SIGNATURES = {
    "a vocabulary without end": ("outputs", "logits", ["b", "s", 2**47]),
    "another vocabulary": ("outputs", "logits", ["b", "s", 7]),
    "logits of another rank": ("outputs", "logits", ["b", 384]),
    "tokens that are gone": ("inputs", "input_ids", None),
}


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_program_that_says_other_things_of_itself_than_it_does_is_refused(folder, what):
    part, name, shape = SIGNATURES[what]
    program = read(folder)
    (value,) = (value for value in program[part] if value["name"] == name)
    if shape is None:
        program[part].remove(value)
    else:
        value["shape"] = shape
    write(folder, program)
    refused(folder)


@pytest.mark.parametrize("dim", [0, 2**20, 2**40])
def test_a_cache_without_end_is_refused(folder, dim):
    program = read(folder)
    for value in program["inputs"]:
        if value["name"].startswith("past"):
            value["shape"][-1 if dim else 1] = dim
    write(folder, program)
    refused(folder)


META = [
    {},
    {"cache_mode": "sideways"},
    {"cache_mode": {}},
    {"max_positions": 2**70},
    {"trained_length": 2**70},
    {"trained_length": "x"},
    {"proof": []},
    {"rewrites": 3},
]


@pytest.mark.parametrize("meta", META, ids=str)
def test_what_a_program_says_of_its_conversion_cannot_harm(folder, meta):
    wanted = np.array(run(folder))
    program = read(folder)
    write(folder, {**program, "meta": meta})
    assert np.array_equal(np.array(run(folder)), wanted)


# Anything.

VALUES = [0, 1, -1, 2, 2**31, 2**40, 2**62, -(2**63), "x", "", None, True, [], {}, [0], 1.5, "float32", "int64", 64]


def mutate_program(program: dict, draw: np.random.Generator) -> dict:
    """The program with a few things replaced: operators, inputs, attributes, constants, shapes, or any value anywhere."""
    program = copy.deepcopy(program)

    def pick(values):
        return values[int(draw.integers(len(values)))]

    names = [name for node in program["nodes"] for name in (*node["inputs"], *node["outputs"])]
    for _ in range(draw.integers(1, 4)):
        node, kind = pick(program["nodes"]), draw.integers(6)
        if kind == 0 and node["inputs"]:
            node["inputs"][int(draw.integers(len(node["inputs"])))] = pick(names)
        elif kind == 1:
            node["op"] = pick(list(ops.OPERATORS))
        elif kind == 2 and node.get("attrs"):
            node["attrs"][pick(list(node["attrs"]))] = pick(VALUES)
        elif kind == 3:
            constant = program["constants"][pick(list(program["constants"]))]
            constant["data"][:1] = [pick(VALUES)]
        elif kind == 4:
            pick(program["inputs"] + program["outputs"])["shape"] = pick(
                [None, [], [1], [2**40] * 4, ["a", "b", "c", "d"], [1, 2, 3, 4]]
            )
        else:
            place = program
            while True:
                key = pick(list(place)) if isinstance(place, dict) else int(draw.integers(len(place)))
                inner = place[key]
                if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.15:
                    place[key] = pick(VALUES)
                    break
                place = inner
    return program


def test_changed_programs_run_or_are_refused(folder):
    whole, outcomes = read(folder), []
    for seed in range(60):
        try:
            program = mutate_program(whole, np.random.default_rng(seed))
        except (TypeError, KeyError, AttributeError, IndexError):
            continue  # an earlier change was in the way of a later one
        write(folder, program)
        try:
            outcomes.append(run(folder).shape[0])
        except OURS as error:
            outcomes.append(type(error).__name__)
    assert {2, "ProgramError", "OperatorError"} <= set(outcomes)
