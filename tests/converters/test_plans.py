"""Run plans, found by trial: padding on a side or none, one row at a time, states that read the mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import toy
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule

ROWS = [[3, 1, 15, 7, 4, 9, 2], [5, 5, 8], [11, 2, 6]]
NEW = [[2, 9], [7, 1], [13, 3]]


def converted(model: ModelProto, place: Path) -> ProgramModule:
    return load_folder(convert(toy.write(place / "source", model), "model.onnx", place / "out", progress=False)).decoder


def assert_plan(module: ProgramModule, model: ModelProto, plan: RunPlan) -> Decoder:
    """Checks the plan, and that a ragged batch, group by group, gives the logits of onnxruntime for each row."""
    decoder = Decoder(module, 3)
    assert decoder.plan == plan
    for group in decoder.group_rows([len(row) for row in ROWS]):
        session = decoder.begin_session([len(row) + 2 if i in group else 0 for i, row in enumerate(ROWS)])
        expected = [toy.steps(model, [row, *([token] for token in new)]) for row, new in zip(ROWS, NEW, strict=True)]
        for step in range(3):
            parts = [row if step == 0 else [new[step - 1]] for row, new in zip(ROWS, NEW, strict=True)]
            width = max(len(parts[i]) for i in group)
            counts = [len(part) if i in group else 0 for i, part in enumerate(parts)]
            tokens = [part[:width] + [0] * (width - len(part)) for part in parts]
            logits = session.step(np.array(tokens, np.int32), counts)
            session.evaluate(logits)
            for i in group:
                np.testing.assert_allclose(np.array(logits)[i], expected[i][step], atol=1e-4)
    return decoder


def without_attention_mask(model: ModelProto) -> ModelProto:
    """The toy whose tokens attend to all columns up to their own, whatever the attention mask says."""
    seen = toy.node(model, "seen")
    seen.op_type = "Identity"
    del seen.input[1]
    nodes = [node for node in model.graph.node if node.output[0] not in ("shown", "shown4")]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return without_input(model, "attention_mask")


def without_mask(model: ModelProto) -> ModelProto:
    """The toy without an attention mask: tokens attend to all columns up to their own."""
    toy.node(model, "mask_shape").input[0] = "input_ids"
    return without_attention_mask(model)


def without_positions(model: ModelProto) -> ModelProto:
    """The toy without positions: nothing but the order of the columns says which token is first."""
    x = toy.node(model, "x")
    x.op_type = "Identity"
    del x.input[1]
    nodes = [node for node in model.graph.node if node.output[0] not in ("place", "places", "rotated")]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return without_input(model, "position_ids")


def without_input(model: ModelProto, name: str) -> ModelProto:
    inputs = [value for value in model.graph.input if value.name != name]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    return model


def with_last_logits_only(model: ModelProto) -> ModelProto:
    """The toy that computes the logits of its last column alone."""
    toy.node(model, "logits").output[0] = "all"
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "minus"))
    model.graph.node.append(helper.make_node("Gather", ["all", "minus"], ["logits"], axis=1))
    return model


def with_mean_of_all_tokens(model: ModelProto) -> ModelProto:
    """The toy with the mean of all tokens in each: padding on either side would be in it."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "tokens"))
    mean = helper.make_node("ReduceMean", ["embedded", "tokens"], ["mean"])
    return toy.embedding(model, mean, helper.make_node("Add", ["embedded", "mean"], ["embedded2"]))


WITHOUT_CACHE = {
    "plain": (lambda model: model, "right"),
    "no mask": (without_mask, "right"),
    "no positions": (without_positions, "right"),
    "neither": (lambda model: without_positions(without_mask(model)), "right"),
    "the last logits alone": (with_last_logits_only, "left"),
    "a mean of all tokens": (with_mean_of_all_tokens, "none"),
}


@pytest.mark.parametrize("what", WITHOUT_CACHE)
def test_padding_of_a_graph_without_a_cache_is_found_by_trial(what, tmp_path):
    change, padding = WITHOUT_CACHE[what]
    model = change(toy.without_cache())
    assert_plan(converted(model, tmp_path), model, RunPlan("grow", "whole", padding))


def test_presents_without_pasts_are_left_out(tmp_path):
    """As in decoder_model.onnx: nothing could read them."""
    module = converted(toy.without_cache(), tmp_path)
    assert [value.name for value in module.program.outputs] == ["logits"]


def test_a_graph_with_a_cache_and_neither_mask_nor_positions_grows(tmp_path):
    model = toy.decoder()
    toy.node(model, "mask_shape").input[0] = "present.0.key"
    toy.node(model, "total").input[1] = "two"
    model = without_positions(without_attention_mask(model))
    module = converted(model, tmp_path)
    assert_plan(module, model, RunPlan("grow"))


def with_fused_cache(model: ModelProto, *, rows: str = "batch_size") -> ModelProto:
    """The toy whose cache has three axes, [rows, positions, size], as gpt_bigcode keeps keys and values in one."""
    joined, nodes = toy.node(model, "present.0.key"), list(model.graph.node)
    joined.input[1], joined.attribute[0].i = "q", 1
    toy.node(model, "past").input[1] = "one0"
    wide = helper.make_node("Unsqueeze", ["present.0.key", "one"], ["wide"])
    for name in ("keys", "mixed4"):
        reader = toy.node(model, name)
        reader.input[:] = ["wide" if given == "present.0.key" else given for given in reader.input]
    nodes.insert(nodes.index(joined) + 1, wide)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for value, length in ((model.graph.input[-1], "past_len"), (model.graph.output[-1], "total")):
        shape = [rows, length, toy.DIM]
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, shape))
    return model


def test_keys_and_values_in_one_tensor_of_three_axes(tmp_path):
    model = with_fused_cache(toy.decoder())
    assert_plan(converted(model, tmp_path), model, RunPlan("append"))


def test_rows_and_heads_in_one_axis_are_refused_by_name(tmp_path):
    with pytest.raises(ConvertError, match="rows and heads in axes of their own") as error:
        converted(with_fused_cache(toy.decoder(), rows="batch_size x num_heads"), tmp_path)
    assert "past_key_values.0.key" in error.value.found


TYPES = {
    "int32": {"input_ids": TensorProto.INT32, "attention_mask": TensorProto.INT32, "position_ids": TensorProto.INT32},
    "a mask of bools": {"attention_mask": TensorProto.BOOL},
    "a mask of floats": {"attention_mask": TensorProto.FLOAT},
}


@pytest.mark.parametrize("what", TYPES)
def test_inputs_of_the_types_that_exporters_choose(what, tmp_path):
    model = toy.decoder()
    for value in model.graph.input:
        value.type.tensor_type.elem_type = TYPES[what].get(value.name, value.type.tensor_type.elem_type)
    assert_plan(converted(model, tmp_path), toy.decoder(), RunPlan("append"))


@pytest.mark.parametrize(("dtype", "limit"), [(TensorProto.FLOAT16, 1e-3), (TensorProto.BFLOAT16, 1e-2)])
def test_logits_in_half_types(dtype, limit, tmp_path):
    model = toy.decoder()
    toy.node(model, "logits").output[0] = "whole"
    model.graph.node.append(helper.make_node("Cast", ["whole"], ["logits"], to=dtype))
    model.graph.output[0].type.tensor_type.elem_type = dtype
    session = Decoder(converted(model, tmp_path), 1).begin_session([len(ROWS[0])])
    logits = session.step(np.array([ROWS[0]], np.int32), [len(ROWS[0])])
    session.evaluate(logits)
    expected = toy.onnxruntime_logits(toy.decoder(), ROWS[0])
    assert np.abs(ops.to_host(logits[0].astype(mx.float32)) - expected).max() <= limit * np.ptp(expected)


def for_one_row(model: ModelProto, *, fixed: bool) -> ModelProto:
    """The toy that declares a batch of 1. fixed: whether its nodes take no other."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    if fixed:
        nodes = list(model.graph.node)
        place = nodes.index(toy.node(model, "q4"))
        nodes[place].output[0] = "q4_"
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, -1, toy.DIM]), "q4.shape"))
        nodes.insert(place + 1, helper.make_node("Reshape", ["q4_", "q4.shape"], ["q4"]))
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_graph_for_one_row_runs_once_for_each_row_unless_it_takes_more(fixed, cache, tmp_path):
    model = for_one_row(toy.decoder() if cache else toy.without_cache(), fixed=fixed)
    plan = RunPlan("append") if cache else RunPlan("grow", "whole")
    assert_plan(converted(model, tmp_path), model, replace(plan, row_by_row=fixed))


def with_state(model: ModelProto, *, masked: bool) -> ModelProto:
    """The toy with a state: the sum of all embeddings so far. masked: whether those of padding are left out."""
    arrays = {"zero1": np.array([0]), "end": np.array([2**62]), "axis1": np.array([1])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    make = helper.make_node
    mask = [
        make("Shape", ["input_ids"], ["ids_shape"]),
        make("Gather", ["ids_shape", "one0"], ["seq"]),
        make("Neg", ["seq"], ["start"]),
        make("Unsqueeze", ["start", "zero1"], ["starts"]),
        make("Slice", ["attention_mask", "starts", "end1", "axis1"], ["shown_now"]),
        make("Cast", ["shown_now"], ["shown_float"], to=TensorProto.FLOAT),
        make("Unsqueeze", ["shown_float", "last"], ["factor"]),
        make("Mul", ["embedded", "factor"], ["kept"]),
    ]
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**62]), "end1"))
    toy.embedding(
        model,
        *(mask if masked else [make("Identity", ["embedded"], ["kept"])]),
        make("CumSum", ["kept", "one0"], ["summed"]),
        make("Unsqueeze", ["past_ssm.0", "one"], ["before"]),
        make("Add", ["summed", "before"], ["memory"]),
        make("Add", ["embedded", "memory"], ["embedded2"]),
        make("ReduceSum", ["kept", "one"], ["added"], keepdims=0),
        make("Add", ["past_ssm.0", "added"], ["present_ssm.0"]),
    )
    shape = TensorProto.FLOAT, ["batch_size", toy.DIM]
    model.graph.input.append(helper.make_tensor_value_info("past_ssm.0", *shape))
    model.graph.output.append(helper.make_tensor_value_info("present_ssm.0", *shape))
    return model


@pytest.mark.parametrize("masked", [True, False])
def test_rows_of_all_lengths_share_a_session_where_padding_changes_no_state(masked, tmp_path):
    model = with_state(toy.decoder(), masked=masked)
    decoder = assert_plan(
        converted(model, tmp_path), model, RunPlan("append", padding_side="right" if masked else "none")
    )
    assert decoder.group_rows([7, 3, 3]) == ([[0, 1, 2]] if masked else [[0], [1, 2]])


def test_a_plan_is_read_from_a_programs_metadata(tmp_path):
    program = converted(toy.decoder(), tmp_path).program
    signature = DecoderSignature.from_program(program)
    for plan in (
        RunPlan("grow", "whole", "left", True),
        RunPlan("append"),
        RunPlan("in_place", "token by token", "none"),
    ):
        assert RunPlan.from_program(replace(program, metadata=plan.to_metadata()), signature) == plan
    nonsense = {"cache_mode": "sideways", "prompts": 3, "padding": ["right"], "alone": "yes"}
    for metadata in ({}, nonsense):
        assert RunPlan.from_program(replace(program, metadata=metadata), signature) == RunPlan("append")
