"""Files that contradict themselves are refused as such, and not as wrong conversions."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from conversions import assert_refused
from onnx import ModelProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.program import weights


def rename_output(model: ModelProto, name: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if output == name else output for output in node.output]


def decoder_with_logits_through(*inputs: list[int], kind: str, **attrs) -> ModelProto:
    """Returns the toy whose logits go through one more node that changes their axes."""
    model = toy.decoder()
    rename_output(model, "logits", "inner_logits")
    names = [f"constant_{index}" for index in range(len(inputs))]
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value), name) for name, value in zip(names, inputs, strict=True)
    )
    model.graph.node.append(helper.make_node(kind, ["inner_logits", *names], ["logits"], **attrs))
    return model


def decoder_whose_present_is_its_past() -> ModelProto:
    model = toy.decoder()
    rename_output(model, "present.0.key", "joined")
    for node in model.graph.node:
        node.input[:] = ["joined" if name == "present.0.key" else name for name in node.input]
    model.graph.node.append(helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"]))
    return model


def decoder_with_causal_attention_over_joined_keys() -> ModelProto:
    """Returns the toy with an Attention whose is_causal does not know of the past: its keys are joined before it."""
    model = toy.decoder()
    kept = ("embedded", "place", "places", "rotated", "x", "q", "q4", "present.0.key", "mixed", "product", "logits")
    nodes = {name: toy.node(model, name) for name in kept}
    keys = ["q4", "present.0.key", "present.0.key"]
    attention = helper.make_node("Attention", keys, ["mixed4"], name="/attn/Attention", is_causal=1, scale=1.0)
    ordered = [*list(nodes.values())[:-3], attention, *list(nodes.values())[-3:]]
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    model.opset_import[0].version = 23
    return model


CONTRADICTIONS = {
    "two axes": (decoder_with_logits_through([-1, 16], kind="Reshape"), r"logits of shape \[13, 16\]"),
    "four axes": (decoder_with_logits_through([1], kind="Unsqueeze"), r"logits of shape \[1, 1, 13, 16\]"),
    "axes in another order": (decoder_with_logits_through(kind="Transpose", perm=[1, 0, 2]), r"\[13, 1, 16\]"),
    "one row alone": (
        decoder_with_logits_through([1, -1, 16], kind="Reshape"),
        r"\[1, 26, 16\] after 13 tokens of 2 row",
    ),
    "a present that does not grow": (decoder_whose_present_is_its_past(), r"'present.0.key' of shape \[1, 1, 0, 8\]"),
    "causal attention over joined keys": (decoder_with_causal_attention_over_joined_keys(), "token by token"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused_as_such(tmp_path, name):
    model, match = CONTRADICTIONS[name]
    error = assert_refused(toy.write(tmp_path / "source", model), tmp_path / "models" / "out", match)
    assert isinstance(error, ConvertError)
    assert error.found.startswith("a file that contradicts itself: ")
    assert error.expected
    assert error.do == "export the model again"
    assert ("/attn/Attention" in error.node) == ("causal" in name)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_no_rewrites_are_searched_for_a_file_that_contradicts_itself(tmp_path, monkeypatch, name):
    """With and without rewrites it disagrees: each set of rewrites of a large model would take minutes."""
    runs, run, written, save = [], proof.decoder_logits, [], weights.save
    monkeypatch.setattr(
        proof, "decoder_logits", lambda module, *args: runs.append(module.program) or run(module, *args)
    )
    monkeypatch.setattr(weights, "save", lambda *args: written.append(args) or save(*args))
    model, match = CONTRADICTIONS[name]
    assert_refused(toy.write(tmp_path / "source", model), tmp_path / "models" / "out", match)
    assert len({id(program) for program in runs}) <= 2
    assert len(written) <= 1
