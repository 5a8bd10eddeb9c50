"""Wrong rewrites are left out by the proof, each alone, and recorded; a module that agrees in no mode is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import toy
from conftest import FIXTURES, golden
from decoding import decoded, tokens_of

from mlx_transmuter.converters import pipeline
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import Replacement
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import proof, trials
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import Node, weights
from mlx_transmuter.runtime.decoder import Decoder

IDS = [3, 1, 15, 7]
LEFT_OUT = {"the module disagreed with the graph": 1}


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def llama(loaded):
    """The program of a conversion without wrong rewrites."""
    return loaded("llama").decoder.program


@pytest.fixture
def written(monkeypatch):
    """The names of the weights of each time that they were written."""
    calls, save = [], weights.save

    def counted(folder, items, *args):
        items = list(items)
        calls.append([name for name, *_ in items])
        return save(folder, items, *args)

    monkeypatch.setattr(weights, "save", counted)
    return calls


def first_product(make_node):
    """A rewrite that replaces the first product with a matrix by what make_node makes of its node."""

    def wrong(graph):
        node = next(node for node in graph.nodes if node.op.startswith(("mlx.linear", "MatMul")))
        yield Replacement(node, (make_node(node),))

    return wrong


WRONG = {
    "numbers": first_product(lambda node: replace(node, inputs=node.inputs[:1], op="Identity-1")),
    "a node that cannot run": first_product(lambda node: replace(node, inputs=node.inputs[:1] * 2)),
    "a value that nothing gives": first_product(lambda node: replace(node, inputs=("nothing", *node.inputs[1:]))),
    "no result": first_product(lambda node: replace(node, outputs=("elsewhere",))),
    "an operator that is none": first_product(lambda node: replace(node, op="mlx.nothing")),
    "not a number": first_product(lambda node: Node("Div-7", ("zero0", "zero0"), node.outputs)),
}


def raises(error):
    """A rewrite that replaces the first product, and raises at a second one."""

    def wrong(graph):
        yield from first_product(lambda node: replace(node, attrs=dict(node.attrs)))(graph)
        raise error

    return wrong


WRONG |= {
    "a table that is too short": raises(IndexError("list index out of range")),
    "an attribute that is missing": raises(KeyError("axis")),
    "a size that does not divide": raises(ValueError("cannot reshape array")),
    "an impossibility": raises(AssertionError()),
}


def also_wrong(graph):
    """Another wrong rewrite, under a name of its own."""
    yield from WRONG["numbers"](graph)


def rewrite_records(folder) -> dict[str, dict]:
    return {record["name"]: record for record in load_folder(folder).decoder.program.metadata["rewrites"]}


def assert_runs_as_the_goldens(folder, name: str) -> None:
    rows = golden(name)["rows"]
    assert decoded(Decoder(load_folder(folder).decoder, 3), rows) == tokens_of(rows)


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_wrong_rewrite_is_left_out_and_recorded(source, out, monkeypatch, what, place):
    wrong, right = WRONG[what], pipeline.GRAPH_REWRITES
    monkeypatch.setattr(pipeline, "GRAPH_REWRITES", (wrong, *right) if place == "first" else (*right, wrong))
    convert(source, "model.onnx", out, progress=False)
    np.testing.assert_allclose(
        toy.converted_logits(out, IDS), toy.onnxruntime_logits(source / "model.onnx", IDS), atol=1e-4
    )
    records = rewrite_records(out)
    assert records["wrong"] == {"name": "wrong", "held": 0, "declined": LEFT_OUT}
    assert records["make_linear_layers"]["held"] == 2  # one wrong rewrite costs no other


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["numbers", "a node that cannot run", "no result", "a value that nothing gives", "an attribute that is missing"],
)
@pytest.mark.parametrize("place", [1, 2, 5])
def test_a_wrong_pool_rewrite_leaves_the_other_pool_rewrites_in_place(out, monkeypatch, what, place, llama):
    right = trials.POOL_REWRITES
    monkeypatch.setattr(trials, "POOL_REWRITES", (*right[:place], WRONG[what], *right[place:]))
    convert(FIXTURES / "llama", "model.onnx", out, progress=False)
    records = rewrite_records(out)
    assert records.pop("wrong") == {"name": "wrong", "held": 0, "declined": LEFT_OUT}
    assert list(records.values()) == llama.metadata["rewrites"]
    assert_runs_as_the_goldens(out, "llama")


@pytest.mark.slow
def test_two_wrong_rewrites_of_a_kind_leave_the_others_in_place(out, monkeypatch, llama):
    graph_rewrites, pool_rewrites = pipeline.GRAPH_REWRITES, trials.POOL_REWRITES
    wrong = WRONG["numbers"]
    monkeypatch.setattr(pipeline, "GRAPH_REWRITES", (*graph_rewrites[:3], wrong, *graph_rewrites[3:], also_wrong))
    monkeypatch.setattr(trials, "POOL_REWRITES", (pool_rewrites[0], wrong, *pool_rewrites[1:], also_wrong))
    convert(FIXTURES / "llama", "model.onnx", out, progress=False)
    records = load_folder(out).decoder.program.metadata["rewrites"]
    left_out = [record["name"] for record in records if record["declined"] == LEFT_OUT]
    assert left_out == ["wrong", "also_wrong"] * 2
    right = [record for record in records if record["declined"] != LEFT_OUT]
    assert right == llama.metadata["rewrites"]
    assert_runs_as_the_goldens(out, "llama")


def test_a_conversion_without_wrong_rewrites_writes_its_weights_once(out, written):
    convert(FIXTURES / "llama", "model.onnx", out, progress=False)
    assert len(written) == 1


def test_wrong_rewrites_write_weights_for_the_first_and_the_last_program_alone(out, monkeypatch, llama, written):
    """The programs in between run on the arrays that are there."""
    graph_rewrites, pool_rewrites = pipeline.GRAPH_REWRITES, trials.POOL_REWRITES
    monkeypatch.setattr(pipeline, "GRAPH_REWRITES", (*graph_rewrites, WRONG["numbers"]))
    monkeypatch.setattr(trials, "POOL_REWRITES", (*pool_rewrites, WRONG["a node that cannot run"]))
    convert(FIXTURES / "llama", "model.onnx", out, progress=False)
    assert len(written) == 2
    assert set(written[1]) == set(llama.weights)
    program = load_folder(out).decoder.program
    assert program.weights == llama.weights
    assert program.nodes == llama.nodes


def test_a_module_that_agrees_in_no_mode_is_refused(source, out, monkeypatch):
    real = proof.decoder_logits

    def wrong(*args):
        return [[logits + np.linspace(0, 1e-2, len(logits)) * np.ptp(logits) for logits in row] for row in real(*args)]

    monkeypatch.setattr(proof, "decoder_logits", wrong)
    with pytest.raises(ConvertError, match="disagrees with its graph") as error:
        convert(source, "model.onnx", out, progress=False)
    assert "append" in error.value.found
    assert "grow" in error.value.found
    assert not out.exists()


def test_a_mode_that_gives_no_numbers_is_not_taken_and_is_recorded(source, out, monkeypatch):
    real = proof.decoder_logits

    def wrong(module, plan, batch):
        rows = real(module, plan, batch)
        return [[logits * np.nan for logits in row] for row in rows] if plan.cache_mode == "append" else rows

    monkeypatch.setattr(proof, "decoder_logits", wrong)
    convert(source, "model.onnx", out, progress=False)
    metadata = json.loads((out / "program.json").read_text())["meta"]
    assert metadata["cache_mode"] == "grow"
    assert metadata["proof"]["tried"]["append"] == "infinite"
    np.testing.assert_allclose(
        toy.converted_logits(out, IDS), toy.onnxruntime_logits(source / "model.onnx", IDS), atol=1e-4
    )
