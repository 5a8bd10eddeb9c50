"""Names of inputs and outputs that genai_config.json declares."""

from __future__ import annotations

import pytest

from mlx_transmuter.converters.onnx_reader.genai_names import apply_genai_names
from mlx_transmuter.program import Node, Program, Value


def program(*inputs: str) -> Program:
    values = tuple(Value(name, "int64", None) for name in inputs)
    nodes = [Node("Add-7", inputs[:2], ("sum",)), Node("Neg-6", ("sum",), ("scores",))]
    return Program(values, (Value("scores", "float32", None), Value("sum", "float32", None)), nodes)


def config(**decoder) -> dict:
    return {"model": {"decoder": decoder}}


def test_inputs_and_logits_get_their_usual_names():
    names = config(inputs={"input_ids": "ids", "attention_mask": "mask"}, outputs={"logits": "scores"})
    renamed = apply_genai_names(program("ids", "mask"), names)
    renamed.validate()
    assert [value.name for value in renamed.inputs] == ["input_ids", "attention_mask"]
    assert [value.name for value in renamed.outputs] == ["logits", "sum"]
    assert renamed.nodes[0].inputs == ("input_ids", "attention_mask")
    assert renamed.nodes[1].outputs == ("logits",)


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"model": []},
        config(inputs=["ids"], outputs=None),
        config(inputs={"input_ids": 3, "past_key_names": "ids"}, outputs={"present_names": "scores"}),
        config(inputs={"input_ids": "absent"}),
        config(inputs={"attention_mask": "ids"}),  # another input has that name
    ],
    ids=str,
)
def test_other_declarations_change_nothing(names):
    before = program("ids", "attention_mask")
    assert apply_genai_names(before, names) == before
