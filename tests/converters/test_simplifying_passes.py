"""Passes that simplify a graph, and near misses: half-type caches, equal nodes, sizes, rotations, slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fixture_programs import program_before, skip_reasons

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import Replacement, apply_rewrite
from mlx_transmuter.converters.passes.attention.rotary import fuse_rotary_embedding
from mlx_transmuter.converters.passes.simplify.eliminate_common_subexpressions import eliminate_common_subexpressions
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.converters.passes.simplify.fuse_slices_into_split import fuse_slices_into_split
from mlx_transmuter.converters.passes.simplify.half_precision_cache import use_half_precision_cache
from mlx_transmuter.program import Node, Program


def with_float32_cache(program: Program, count: int) -> Program:
    """Returns a program of float16 with the first `count` tensors of its cache in float32, cast inside the graph."""
    pasts = set(sorted(value.name for value in program.inputs if value.name.startswith("past"))[:count])
    presents = {name.replace("past_key_values", "present") for name in pasts}
    inner_names = {name: f"{name}.half" for name in pasts} | {name: f"{name}.inner" for name in presents}
    nodes = [Node("Cast-9", (name,), (inner_names[name],), {"to": 10}) for name in pasts]
    for node in program.nodes:
        inputs, outputs = (
            tuple(inner_names.get(name, name) for name in names) for names in (node.inputs, node.outputs)
        )
        nodes.append(replace(node, inputs=inputs, outputs=outputs))
    nodes += [Node("Cast-9", (inner_names[name],), (name,), {"to": 1}) for name in presents]

    def in_float32(values):
        return tuple(replace(value, dtype="float32") if value.name in inner_names else value for value in values)

    return replace(program, nodes=nodes, inputs=in_float32(program.inputs), outputs=in_float32(program.outputs))


def test_a_cache_that_is_cast_to_a_half_type_is_stored_in_it():
    program, record = apply_rewrite(
        with_float32_cache(program_before("llama_fp16", use_half_precision_cache), 4), use_half_precision_cache
    )
    assert record.replaced_count == 8
    for value in (*program.inputs, *program.outputs):
        if value.name.startswith(("past", "present")):
            assert value.dtype == "float16"
    program.validate()


def test_a_cache_with_only_some_tensors_cast_to_a_half_type_is_skipped():
    program = with_float32_cache(program_before("llama_fp16", use_half_precision_cache), 2)
    assert skip_reasons(program, use_half_precision_cache) == [
        "only some tensors of the cache are cast to a half type; expected all"
    ]


def test_a_cache_that_is_rounded_when_it_is_stored_stays_float32():
    """In float32 its keys are less rounded than in the graph."""
    program = with_float32_cache(program_before("llama_fp16", use_half_precision_cache), 4)
    nodes = [replace(n, attrs={"to": 10}) if n.outputs[0].startswith("present") else n for n in program.nodes]
    assert apply_rewrite(replace(program, nodes=nodes), use_half_precision_cache)[1].replaced_count == 0


def test_equal_nodes_are_computed_once_unless_random():
    program = program_before("llama", eliminate_common_subexpressions)
    table = next(iter(program.weights))
    extra = [
        Node("Abs-6", (table,), ("a",)), Node("Abs-6", (table,), ("b",)), Node("Neg-6", (table,), ("c",)),
        Node("RandomNormalLike-1", (table,), ("d",)), Node("RandomNormalLike-1", (table,), ("e",)),
        Node("Concat-4", ("a", "b"), ("f",), {"axis": 0}), Node("Concat-4", ("b", "b"), ("g",), {"axis": 0}),
        Node("Concat-4", ("b", "b"), ("h",), {"axis": 1}),
    ]  # fmt: skip
    aliases = {}
    for outcome in eliminate_common_subexpressions(GraphView(replace(program, nodes=[*program.nodes, *extra]))):
        assert isinstance(outcome, Replacement)
        aliases |= outcome.aliases
    assert {name: other for name, other in aliases.items() if name in "abcdefgh"} == {"b": "a", "g": "f"}


def test_rows_are_read_off_the_tokens_and_the_length_of_the_cache_off_the_cache():
    """torch.onnx takes the number of rows from the last past, whose length is no size of a step's tokens."""
    program = program_before("llama_dynamo", fold_static_shapes)

    taken = [node for node in program.nodes if node.op == "Shape-1" and node.inputs[0].startswith("past")]
    assert [node.attrs["start"] for node in taken] == [2, 0]
    after = apply_rewrite(program, fold_static_shapes)[0]
    taken = [node for node in after.nodes if node.op == "Shape-1" and node.inputs[0].startswith("past")]
    assert [node.attrs["start"] for node in taken] == [2]


def test_a_rotation_by_tables_whose_halves_differ_is_not_fused():
    program = program_before("llama", fuse_rotary_embedding)
    assert apply_rewrite(program, fuse_rotary_embedding)[1].replaced_count == 4
    at = next(i for i, node in enumerate(program.nodes) if node.op.startswith("Cos"))
    cos = program.nodes[at]
    summed = [replace(cos, outputs=("plain",)), Node("CumSum-11", ("plain", "last"), cos.outputs)]
    program.constants["last"] = np.array(-1)
    program = replace(program, nodes=[*program.nodes[:at], *summed, *program.nodes[at + 1 :]])
    assert apply_rewrite(program, fuse_rotary_embedding)[1].replaced_count == 0


def test_a_rotation_of_neighbors_by_tables_of_halves_is_not_fused():
    """gptj's tables repeat each angle for two neighbors; in the order of halves neighbors differ."""
    program = program_before("gptj", fuse_rotary_embedding)
    assert apply_rewrite(program, fuse_rotary_embedding)[1].replaced_count == 4
    nodes = []
    for node in program.nodes:
        if node.op.startswith("Tile") and node.inputs[0].endswith(("Unsqueeze_12_output_0", "Unsqueeze_14_output_0")):
            # [rows, seq, 1, angles, 1] tiled on the last axis; on the one before it come all angles, then all again
            program.constants["turns"] = np.array([1, 1, 1, 2, 1])
            node = replace(node, inputs=(node.inputs[0], "turns"))
        nodes.append(node)
    assert apply_rewrite(replace(program, nodes=nodes), fuse_rotary_embedding)[1].replaced_count == 0


PARTS = {
    "a gap": ([0, 5], [4, 8], False), "an overlap": ([0, 3], [4, 8], False), "not all": ([0, 4], [4, 7], False),
    "the same twice": ([0, 0], [8, 8], False), "one alone": ([0], [8], False),
    "in order": ([0, 4], [4, 8], True), "out of order": ([4, 0], [2**63 - 1, -4], True), "three": ([0, 2, 5], [2, 5, 8], True),
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(("axis", "step"), [(-1, 1), (3, 1), (-1, 2), (1, 1)])
def test_slices_become_a_split_where_they_are_consecutive_parts(parts, axis, step):
    begins, ends, wanted = PARTS[parts]
    program = program_before("qwen2", fuse_slices_into_split)
    k = next(node for node in program.nodes if node.op.startswith("Reshape") and "/self_attn/" in node.outputs[0])
    program.constants.update({"axis": np.array([axis]), "step": np.array([step])})
    extra, total = [], "plain"
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        program.constants |= {f"b{i}": np.array([begin]), f"e{i}": np.array([end])}
        last = "logits" if i == len(begins) - 1 else f"total{i}"
        extra += [
            Node("Slice-10", (k.outputs[0], f"b{i}", f"e{i}", "axis", "step"), (f"part{i}",)),
            Node("ReduceSum-13", (f"part{i}",), (f"sum{i}",), {"keepdims": 0}),
            Node("Add-7", (total, f"sum{i}"), (last,)),
        ]
        total = last
    given = [replace(node, outputs=("plain",)) if "logits" in node.outputs else node for node in program.nodes]
    program = replace(program, nodes=[*given, *extra])
    found = [
        answer
        for answer in fuse_slices_into_split(GraphView(program))
        if isinstance(answer, Replacement) and answer.nodes and answer.root.inputs[0] == k.outputs[0]
    ]
    assert bool(found) == (wanted and axis != 1 and step == 1)
    for answer in found:
        order = sorted(range(len(begins)), key=lambda i: begins[i])
        assert answer.nodes[0].outputs == tuple(f"part{i}" for i in order)
        assert sum(answer.constants[answer.nodes[0].inputs[1]]) == 8
