"""Merged decoders: the branch with a cache alone where the branches agree, both where they differ, and each by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES, golden
from decoding import decoded, tokens_of
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes.simplify.select_cache_branch import select_branch
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import Model, load_folder
from mlx_transmuter.runtime.decoder import Decoder

IDS = [3, 1, 15, 7, 4]


def merged() -> ModelProto:
    """The fixture's graph: one If, with the weights outside of its branches."""
    return onnx.load(str(FIXTURES / "gpt2_merged" / "model.onnx"))


def branches(model: ModelProto) -> dict[str, onnx.GraphProto]:
    (chosen,) = [node for node in model.graph.node if node.op_type == "If"]
    return {attribute.name: attribute.g for attribute in chosen.attribute}


def test_only_the_branch_with_a_cache_is_converted_where_both_agree(loaded):
    """No If and no use_cache_branch are left, and weights and nodes are those of the unmerged decoder."""
    program, unmerged = loaded("gpt2_merged").decoder.program, loaded("gpt2").decoder.program
    assert program.metadata["branch"] == "cached"
    assert not any(node.op.startswith("If-") for node in program.all_nodes())
    assert "use_cache_branch" not in {value.name for value in program.inputs}
    assert program.weights == unmerged.weights
    kinds = [[node.op.rpartition("-")[0] or node.op for node in one.nodes] for one in (program, unmerged)]
    assert kinds[0] == kinds[1]  # the two were exported for different opsets
    assert "branch" not in unmerged.metadata


def test_either_branch_is_a_decoder_by_itself():
    graph = name_weights(read_onnx(FIXTURES / "gpt2_merged" / "model.onnx"))
    for taken, pasts in ((True, 4), (False, 0)):
        program = select_branch(graph, "use_cache_branch", taken)
        program.validate()
        assert [value.name for value in program.outputs] == [value.name for value in graph.outputs]
        read_by = {name for node in program.nodes for name in node.all_inputs()}
        assert sum(value.name.startswith("past") and value.name in read_by for value in program.inputs) == pasts
    assert len(graph.nodes) == 1  # the graph itself is as it was


def test_branches_with_copies_of_the_weights(tmp_path):
    model = merged()
    for name, branch in branches(model).items():
        for tensor in model.graph.initializer:
            copy = branch.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = f"{tensor.name}.{name}"
        for node in branch.node:
            own = [f"{given}.{name}" if any(given == t.name for t in model.graph.initializer) else given
                   for given in node.input]  # fmt: skip
            del node.input[:]
            node.input.extend(own)
    del model.graph.initializer[:]
    onnx.checker.check_model(model)
    found = converted(model, tmp_path)
    assert found.decoder.program.metadata["branch"] == "cached"
    weights = sum(np.prod(weight.shape) for weight in found.decoder.program.weights.values())
    assert (
        weights == sum(t.size for t in map(numpy_helper.to_array, merged().graph.initializer)) - 32 * 128
    )  # the head is tied
    rows = golden("gpt2_merged")["rows"]
    assert decoded(Decoder(found.decoder, 3), rows) == tokens_of(rows)


@pytest.mark.parametrize("name", ["then_branch", "else_branch"])
def test_one_branch_as_a_decoder_of_its_own(name, tmp_path):
    """decoder_with_past_model.onnx takes prompts over an empty cache; decoder_model.onnx takes the full context again."""
    model = merged()
    branch = branches(model)[name]
    names = {given for node in branch.node for given in node.input}
    graph = helper.make_graph(
        branch.node, "half", [v for v in model.graph.input if v.name in names], branch.output,
        [*(t for t in model.graph.initializer if t.name in names), *branch.initializer],
    )  # fmt: skip
    half = helper.make_model(graph, opset_imports=model.opset_import, ir_version=9)
    found = converted(half, tmp_path)
    assert found.cache_mode == ("append" if name == "then_branch" else "grow")
    rows = golden("gpt2_merged")["rows"]
    assert decoded(Decoder(found.decoder, 3), rows) == tokens_of(rows)


# Branches that differ: after a cache the toy's second graph mixes the tokens of a step, so it is right for one token only.


def with_step_mean(model: ModelProto) -> ModelProto:
    """The toy with the mean of the step's embeddings added to each embedding."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "tokens"))
    mean = helper.make_node("ReduceMean", ["embedded", "tokens"], ["mean"])
    return toy.embedding(model, mean, helper.make_node("Add", ["embedded", "mean"], ["embedded2"]))


def with_doubled_embeddings(model: ModelProto) -> ModelProto:
    """The toy with each embedding added to itself: what `with_step_mean` does to a step of one token."""
    return toy.embedding(model, helper.make_node("Add", ["embedded", "embedded"], ["embedded2"]))


def merge(cached: ModelProto, prompts: ModelProto) -> ModelProto:
    """The two graphs as the branches of one If, as exporters merge them."""
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    graphs = {
        "then_branch": helper.make_graph(cached.graph.node, "with_past", [], cached.graph.output),
        "else_branch": helper.make_graph(prompts.graph.node, "no_past", [], prompts.graph.output),
    }
    names = [value.name for value in cached.graph.output]
    node = helper.make_node("If", ["use_cache_branch"], names, name="if", **graphs)
    graph = helper.make_graph(
        [node], "merged", [*cached.graph.input, flag], cached.graph.output, cached.graph.initializer
    )
    return helper.make_model(graph, opset_imports=cached.opset_import, ir_version=9)


def logits_of_steps(model: Model, steps: list[list[int]]) -> list[np.ndarray]:
    run = Decoder(model.decoder, 1).begin_session([sum(map(len, steps))])
    found = []
    for step in steps:
        logits = run.step(np.array([step], np.int32), [len(step)])
        run.evaluate(logits)
        found.append(np.array(logits)[0])
    return found


def converted(model: ModelProto, place: Path) -> Model:
    return load_folder(convert(toy.write(place / "source", model), "model.onnx", place / "out", progress=False))


def test_branches_that_differ_are_both_kept(tmp_path):
    """The prompt runs in one step, in the branch for prompts; the tokens after it run one by one in the other."""
    model = merge(with_step_mean(toy.decoder()), with_doubled_embeddings(toy.without_cache()))
    found = converted(model, tmp_path)
    meta = found.decoder.program.metadata
    assert (meta["branch"], meta["prompts"], found.cache_mode) == ("both", "whole", "grow")
    assert Decoder(found.decoder, 1).prompt_mode == "whole"
    steps = [IDS, [2], [9]]
    for one, other in zip(logits_of_steps(found, steps), toy.steps(model, steps), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_one_branch_is_kept_where_both_agree(tmp_path):
    model = merge(toy.decoder(), toy.without_cache())
    found = converted(model, tmp_path)
    meta = found.decoder.program.metadata
    assert (meta["branch"], meta["prompts"], found.cache_mode) == ("cached", "parts", "append")
    steps = [IDS, [2], [9]]
    for one, other in zip(logits_of_steps(found, steps), toy.steps(model, steps), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("signal", ["by its name", "by its shape"])
def test_a_graph_for_steps_of_one_token_takes_prompts_token_by_token(signal, tmp_path):
    model, name = (
        with_step_mean(toy.decoder()),
        "decoder_with_past_model.onnx" if signal == "by its name" else "model.onnx",
    )
    if signal == "by its shape":
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    found = load_folder(convert(toy.write(tmp_path / "source", model, name), name, tmp_path / "out", progress=False))
    assert found.decoder.program.metadata["prompts"] == "single"
    singles = [[token] for token in [*IDS, 2]]
    for one, other in zip(
        logits_of_steps(found, singles), toy.steps(with_step_mean(toy.decoder()), singles), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_graph_whose_steps_and_prompts_disagree_is_refused(tmp_path):
    """Nothing tells which of the two the model is meant to compute."""
    with pytest.raises(ConvertError, match=r"contradicts itself: .* token by token"):
        converted(with_step_mean(toy.decoder()), tmp_path)


def test_a_graph_that_takes_no_empty_cache_is_refused_with_the_node_at_fault(tmp_path):
    model = toy.embedding(
        toy.decoder(),
        helper.make_node("Gather", ["past_key_values.0.key", "minus"], ["newest"], name="newest", axis=2),
        helper.make_node("ReduceSum", ["newest"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "none"], ["nothing"]),
        helper.make_node("Add", ["embedded", "nothing"], ["embedded2"]),
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(-1), "minus"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), "none"))
    with pytest.raises(ConvertError, match="takes no empty cache") as error:
        converted(model, tmp_path)
    assert "merged" in error.value.do
    assert "newest" in error.value.found
