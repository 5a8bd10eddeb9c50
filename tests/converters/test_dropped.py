"""Wrong rewrites and wrong modules: the proof of a conversion drops the one, records it, and refuses the other."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import toy
from conftest import FIXTURES, golden
from decoding import decoded, tokens_of

from mlx_transmuter.converters import pipeline as convert_file
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import Replacement
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import proof, trials
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import Node
from mlx_transmuter.runtime.decoder import Decoder

IDS = [3, 1, 15, 7]


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def only(found):
    """A rewrite that answers for the first MatMul with a layer what `found` makes of it."""

    def wrong(graph):
        node = next(node for node in graph.nodes if node.op.startswith(("mlx.linear", "MatMul")))
        yield Replacement(node, (found(node),))

    return wrong


WRONG = {
    "numbers": only(lambda node: replace(node, inputs=node.inputs[:1], op="Identity-1")),
    "a node that cannot run": only(lambda node: replace(node, inputs=node.inputs[:1] * 2)),
    "a value that nothing gives": only(lambda node: replace(node, inputs=("nothing", *node.inputs[1:]))),
    "no result": only(lambda node: replace(node, outputs=("elsewhere",))),
    "an operator that is none": only(lambda node: replace(node, op="mlx.nothing")),
    "not a number": only(lambda node: Node("Div-7", ("zero0", "zero0"), node.outputs)),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_wrong_rewrite_is_dropped_and_recorded(source, out, monkeypatch, what, place):
    wrong, right = WRONG[what], convert_file.GRAPH_REWRITES
    monkeypatch.setattr(convert_file, "GRAPH_REWRITES", (wrong, *right) if place == "first" else (*right, wrong))
    convert(source, "model.onnx", out, progress=False)
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(source / "model.onnx", IDS), atol=1e-4)
    record = {one["name"]: one for one in load_folder(out).decoder.program.metadata["rewrites"]}
    assert record["wrong"] == {"name": "wrong", "held": 0, "declined": {"the module disagreed with the graph": 1}}
    assert record["make_linear_layers"]["held"] == 2  # one wrong rewrite costs no other


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

    def wrong(module, plan, case):
        found = real(module, plan, case)
        return [[logits * np.nan for logits in row] for row in found] if plan.cache_mode == "append" else found

    monkeypatch.setattr(proof, "decoder_logits", wrong)
    convert(source, "model.onnx", out, progress=False)
    meta = json.loads((out / "program.json").read_text())["meta"]
    assert meta["cache_mode"] == "grow"
    assert meta["proof"]["tried"]["append"]
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(source / "model.onnx", IDS), atol=1e-4)


@pytest.mark.parametrize("what", ["numbers", "a node that cannot run", "no result", "a value that nothing gives"])
def test_a_wrong_rewrite_over_pools_leaves_the_graph_its_past(out, monkeypatch, what):
    monkeypatch.setattr(trials, "POOL_REWRITES", (*trials.POOL_REWRITES, WRONG[what]))
    convert(FIXTURES / "llama", "model.onnx", out, progress=False)
    model = load_folder(out)
    record = {one["name"]: one for one in model.decoder.program.metadata["rewrites"]}
    assert {record[name]["held"] for name in ("wrong", "fuse_pooled_attention", "gather_last_token_logits")} == {0}
    assert record["make_linear_layers"]["held"] == 15
    rows = golden("llama")["rows"]
    assert decoded(Decoder(model.decoder, 3), rows) == tokens_of(rows)
