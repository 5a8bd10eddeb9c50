"""Near misses of the rewrites are skipped with their reason; a rewritten program is valid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fixture_programs import ALL_REWRITES, change_first_node, fixture_graph, program_before, skip_reasons

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.passes import GRAPH_REWRITES, apply_rewrites
from mlx_transmuter.converters.passes.attention.extract_attention_projections import extract_attention_projections
from mlx_transmuter.converters.passes.attention.fuse_head_reshapes import fuse_head_reshapes
from mlx_transmuter.converters.passes.attention.group_query_attention import lower_group_query_attention
from mlx_transmuter.converters.passes.attention.pooled_attention import fuse_pooled_attention
from mlx_transmuter.converters.passes.layers.embedding_layers import make_embedding_layers
from mlx_transmuter.converters.passes.layers.fuse_rms_norm import fuse_rms_norm
from mlx_transmuter.converters.passes.layers.linear_layers import make_linear_layers
from mlx_transmuter.converters.passes.layers.matmul_nbits import lower_matmul_nbits
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.passes.simplify.expose_positions import expose_positions
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.renaming import rename_values
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT


def test_a_norm_over_another_axis_is_skipped():
    program = program_before("llama", fuse_rms_norm)
    program.constants["other"] = np.array([1])
    node = next(node for node in program.nodes if node.op.startswith("ReduceMean"))
    program = change_first_node(program, "ReduceMean", inputs=(node.inputs[0], "other"))
    assert skip_reasons(program, fuse_rms_norm) == ["the mean is not of the last axis alone"]
    assert apply_rewrite(program, fuse_rms_norm)[1].replaced_count == 4


def test_attention_whose_mask_shows_later_columns_is_skipped():
    program = program_before("llama", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op.startswith("LessOrEqual"))
    program = change_first_node(program, "LessOrEqual", op="GreaterOrEqual-12")
    assert node.op != "GreaterOrEqual-12"
    assert skip_reasons(program, fuse_pooled_attention) == ["the mask is neither causal nor a sliding window"]
    assert apply_rewrite(program, fuse_pooled_attention)[1].replaced_count == 0


def test_attention_whose_past_another_node_reads_is_skipped():
    program = program_before("llama", fuse_pooled_attention)
    extra = Node("Identity-1", ("past_key_values.0.key",), ("copy",))
    added = Node("ReduceMean-18", ("copy",), ("mean",), {"keepdims": 0})
    node = program.producers()["logits"]
    nodes = [*program.nodes[:-1], extra, added]
    nodes += [replace(node, outputs=("plain",)), Node("Add-7", ("plain", "mean"), ("logits",))]
    assert program.nodes[-1] == node
    assert skip_reasons(replace(program, nodes=nodes), fuse_pooled_attention) == [
        "Identity-1 reads the past or the mask too"
    ]


def test_attention_whose_scores_are_shifted_is_skipped():
    program = program_before("llama", fuse_pooled_attention)
    softmax = next(node for node in program.nodes if node.op.startswith("Softmax"))
    program.constants["shift"] = np.array(1.0, np.float32)
    at = program.nodes.index(softmax)
    shifted = [Node("Add-7", (softmax.inputs[0], "shift"), ("shifted",)), replace(softmax, inputs=("shifted",))]
    program = replace(program, nodes=[*program.nodes[:at], *shifted, *program.nodes[at + 1 :]])
    assert skip_reasons(program, fuse_pooled_attention) == ["the scores come from Add-7"]


def test_a_table_that_another_node_reads_is_not_made_an_embedding():
    program = program_before("llama", make_embedding_layers)
    table = next(
        node for node in program.nodes if node.inputs[0] in program.weights and node.op.startswith("Gather")
    ).inputs[0]
    program.nodes.append(Node("Abs-6", (table,), ("magnitude",)))
    assert skip_reasons(program, make_embedding_layers) == ["the table is also read by Abs-6"]


def test_a_matrix_that_another_node_reads_is_not_made_a_linear_layer():
    program = program_before("llama", make_linear_layers)
    matrix = next(
        node for node in program.nodes if node.op.startswith("MatMul") and node.inputs[1] in program.weights
    ).inputs[1]
    program.nodes.append(Node("Abs-6", (matrix,), ("magnitude",)))
    found = skip_reasons(program, make_linear_layers)
    assert found == ["the matrix is read in several ways; expected products of one form"]


def test_weights_packed_for_another_machine_are_skipped():
    program = program_before("llama_q4", lower_matmul_nbits)
    node = next(node for node in program.nodes if node.op.startswith("com.microsoft.MatMulNBits"))
    program = change_first_node(program, "com.microsoft.MatMulNBits", attrs={**node.attrs, "weight_prepacked": 1})
    assert skip_reasons(program, lower_matmul_nbits) == ["it is packed for another machine"]


def test_group_query_attention_with_an_unknown_attribute_is_skipped():
    program = program_before("llama_genai", lower_group_query_attention)
    node = next(node for node in program.nodes if "GroupQueryAttention" in node.op)
    program = change_first_node(program, "com.microsoft.GroupQueryAttention", attrs={**node.attrs, "qk_output": 1})
    assert skip_reasons(program, lower_group_query_attention) == ["its attribute qk_output is 1"]


def test_attention_whose_scores_have_a_negative_scale_is_skipped():
    program = program_before("codegen", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op.startswith("Div") and "attn" in node.name)
    program.constants["less"] = -program.constants[node.inputs[1]]
    program = change_first_node(program, "Div", inputs=(node.inputs[0], "less"))
    assert skip_reasons(program, fuse_pooled_attention) == ["the scores come from Div-7"]


def test_attention_with_a_column_that_is_not_sinks_is_skipped():
    program = program_before("gpt_oss", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op == "Concat-4" and "Expand" in node.inputs[-1])
    at = program.nodes.index(node)
    moved = [Node("Exp-6", (node.inputs[1],), ("risen",)), replace(node, inputs=(node.inputs[0], "risen"))]
    program = replace(program, nodes=[*program.nodes[:at], *moved, *program.nodes[at + 1 :]])
    wanted = "the scores stand beside something else than a weight with a number for each head"
    assert skip_reasons(program, fuse_pooled_attention) == [wanted]


def test_attention_whose_window_a_prompt_lacks_is_skipped():
    """The mask is computed for a prompt longer than the window too, not only for a late step."""
    program = program_before("mistral", fuse_pooled_attention)
    compare = next(node for node in program.nodes if node.op.startswith("Greater-"))
    at = program.nodes.index(compare)
    program.constants |= {"axis": np.array(2), "zero": np.array(0)}
    early = [
        Node("Shape-1", ("past_key_values.0.key",), ("early.sizes",)),
        Node("Gather-1", ("early.sizes", "axis"), ("early.length",), {"axis": 0}),
        Node("Equal-7", ("early.length", "zero"), ("early",)),
        replace(compare, outputs=("windowed",)),
        Node("Or-7", ("windowed", "early"), compare.outputs),
    ]
    program = replace(program, nodes=[*program.nodes[:at], *early, *program.nodes[at + 1 :]])
    wanted = "the mask of a step of 10 tokens after 0 differs from later ones"
    assert skip_reasons(program, fuse_pooled_attention) == [wanted]


def test_attention_with_projections_of_unequal_sizes_is_skipped():
    program = program_before("gpt2_ort", extract_attention_projections)
    node = next(node for node in program.nodes if node.op.startswith("com.microsoft.Attention"))
    program = change_first_node(
        program, "com.microsoft.Attention", attrs={**node.attrs, "qkv_hidden_sizes": [32, 32, 16]}
    )
    assert skip_reasons(program, extract_attention_projections) == [
        "its projections are not one weight of three equal parts"
    ]
    assert apply_rewrite(program, extract_attention_projections)[1].replaced_count == 1


def test_positions_with_an_unknown_reader_are_skipped():
    program = program_before("gemma", expose_positions)
    value = next(
        node for node in program.nodes if node.op.startswith("Unsqueeze") and "Range" in node.inputs[0]
    ).outputs[0]
    program.nodes.append(Node("Sign-9", (value,), ("sign",)))
    assert skip_reasons(program, expose_positions) == ["Sign-9 reads positions, and may mean columns"]


def test_products_of_one_input_are_merged_with_their_weights_unchanged(loaded):
    program = program_before("llama", merge_projections)
    after, record = apply_rewrite(program, merge_projections)
    assert record.replaced_count == 10  # q, k and v, gate and up, of two layers
    layers = {path.removeprefix("model.layers.0.") for path in after.layers if ".0." in path}
    assert layers == {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    whole = after.tensors["model.layers.0.self_attn.qkv_proj.weight"].read()
    parts = [program.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read() for name in "qkv"]
    assert np.array_equal(whole, np.concatenate(parts))
    split = next(node for node in after.nodes if node.op_type == "Split")
    assert after.constants[split.inputs[1]].tolist() == [len(part) for part in parts]


@pytest.mark.parametrize("change", ["one has a bias", "one has another type", "one is read twice", "another input"])
def test_products_that_differ_are_not_merged(change):
    program = program_before("llama", merge_projections)
    path = "model.layers.0.mlp.up_proj"
    node = next(node for node in program.nodes if node.inputs[1:] == (path,))
    if change == "one has a bias":
        program.layers[path] = {**program.layers[path], "bias": True}
    elif change == "one has another type":
        program.tensors[f"{path}.weight"] = replace(program.tensors[f"{path}.weight"], dtype="float16")
    elif change == "one is read twice":
        program.nodes.append(Node("mlx.linear", (node.inputs[0], path), ("again",)))
    else:
        first = program.inputs[0].name
        program.nodes[program.nodes.index(node)] = replace(node, inputs=(first, path))
    after, record = apply_rewrite(program, merge_projections)
    assert record.replaced_count == 8
    assert path in after.layers or change == "another input"


def test_heads_are_split_in_one_node_and_merged_by_attention():
    program = program_before("llama", fuse_head_reshapes)
    after, record = apply_rewrite(program, fuse_head_reshapes)
    assert record.replaced_count == 10
    kinds = [node.op for node in after.nodes]
    assert (kinds.count("mlx.split_heads"), kinds.count("mlx.merge_heads")) == (6, 0)
    assert [node.attrs["merge"] for node in after.nodes if node.op == "mlx.attention"] == [1, 1]
    assert not any(node.op.startswith("Transpose") and node.attrs["perm"] == [0, 2, 1, 3] for node in after.nodes)


def test_heads_that_another_node_reads_are_merged_by_a_node_of_their_own():
    program = program_before("llama", fuse_head_reshapes)
    read = next(node for node in program.nodes if node.op == "mlx.attention").outputs[0]
    after, _ = apply_rewrite(
        replace(program, nodes=[*program.nodes, Node("Abs-6", (read,), ("too",))]), fuse_head_reshapes
    )
    kinds = [(node.op, node.attrs.get("merge")) for node in after.nodes]
    assert kinds.count(("mlx.merge_heads", None)) == 1
    assert kinds.count(("mlx.attention", 1)) == 1


@pytest.mark.parametrize("change", ["another order", "other rows"])
def test_other_transposes_and_reshapes_are_not_made_split_heads(change):
    program = program_before("llama", fuse_head_reshapes)
    if change == "another order":
        program = change_first_node(program, "Transpose", attrs={"perm": [0, 1, 3, 2]})
        at = next(i for i, node in enumerate(program.nodes) if node.attrs.get("perm") == [0, 2, 1, 3])
        program.nodes[at] = replace(program.nodes[at], attrs={"perm": [0, 1, 3, 2]})
    else:
        node = next(node for node in program.nodes if node.op.startswith("Reshape") and ".shape" in node.inputs[1])
        shape = program.constants[node.inputs[1]]
        program.constants[node.inputs[1]] = np.array([1, *shape[1:]])
    after = apply_rewrite(program, fuse_head_reshapes)[0].nodes
    assert sum(node.op == "mlx.split_heads" or node.attrs.get("merge", 0) for node in after) == 7


def test_a_rewrite_replaces_the_root_and_drops_the_nodes_that_nothing_reads():
    program = program_before("llama", fuse_rms_norm)
    after, record = apply_rewrite(program, fuse_rms_norm)
    assert record.replaced_count == 5
    assert len(after.nodes) == len(program.nodes) - 5 * 6  # seven nodes became one
    after.validate()


def test_a_continued_shape_probe_equals_a_new_one():
    """A shape probe is continued from program to program, and only new nodes are walked."""
    before, changed_count = GraphView(fixture_graph("gemma")), 0
    for rewrite in GRAPH_REWRITES:
        program = apply_rewrite(before.program, rewrite, before)[0]
        after = GraphView(program, before)
        continued, new = after.shape_probe, GraphView(program).shape_probe
        for name in {name for node in program.nodes for name in node.outputs if name}:
            assert continued.shapes(name) == new.shapes(name), (rewrite, name)
            assert np.array_equal(continued.constant_value(name), new.constant_value(name)), (rewrite, name)
            assert continued.dtype(name) == new.dtype(name), (rewrite, name)
        changed_count += program is not before.program
        before = after
    assert changed_count >= 5


def test_sizes_that_are_read_off_the_past_are_read_off_the_tokens():
    """Newer exporters take the number of rows from any input that has it; over pools the past has none."""
    program = program_before("llama", fold_static_shapes)
    graph_ = GraphView(program)
    program.constants |= {"first": np.array(0), "second": np.array(1), "third": np.array(2)}
    nodes, moved = [], 0
    for node in program.nodes:
        source = graph_.producer(node.inputs[0], "Shape") if node.op == "Gather-1" else None
        axis = program.constants.get(node.inputs[1]) if source is not None else None
        if source is None or axis is None or axis.size != 1 or source.inputs[0] not in ("position_ids", "input_ids"):
            nodes.append(node)
            continue
        moved += 1
        name = f"{node.outputs[0]}.past"
        nodes.append(Node("Shape-1", ("past_key_values.1.value",), (name,)))
        if axis.item() == 0:
            nodes.append(Node("Gather-1", (name, "first"), node.outputs))
            continue
        nodes += [
            Node("Shape-1", ("attention_mask",), (f"{name}.mask",)),
            Node("Gather-1", (f"{name}.mask", "second"), (f"{name}.total",)),
            Node("Gather-1", (name, "third"), (f"{name}.held",)),
            Node("Sub-7", (f"{name}.total", f"{name}.held"), node.outputs),
        ]
    assert moved
    after, records = apply_rewrites(
        replace(program, nodes=nodes), ALL_REWRITES[ALL_REWRITES.index(fold_static_shapes) :]
    )
    assert after.input(CACHE_INDEX_INPUT) is not None, [record.skip_reasons for record in records]
    assert {record.name: record.replaced_count for record in records}["fuse_pooled_attention"] == 6


def test_positions_that_two_uses_share_are_computed_for_each():
    """onnxruntime's optimizer lets the rotation and the mask share an Unsqueeze of the same positions."""
    program = program_before("gemma", expose_positions)
    graph = GraphView(program)
    shared = next(
        node
        for node in program.nodes
        if node.op.startswith("Unsqueeze") and any(n.op.startswith("Cast") for n in graph.consumers(node.outputs[0]))
    )
    program.constants["gather_last_token_logits"] = np.array([3])
    later = [
        Node("Unsqueeze-13", (shared.outputs[0], "gather_last_token_logits"), ("rows",)),
        Node("GreaterOrEqual-12", ("rows", "rows"), ("compared",)),
    ]
    program = replace(program, nodes=[*program.nodes, *later])
    assert skip_reasons(program, expose_positions) == []
    program = replace(program, outputs=(*program.outputs, Value("compared", "bool", None)))
    after, record = apply_rewrite(program, expose_positions)
    assert record.replaced_count == 3  # a Shape, the Unsqueeze, and the Cast after it
    reads = {node.outputs[0]: node.inputs for node in after.nodes}
    assert reads["rows"][0] == shared.outputs[0]
    assert reads[shared.outputs[0]][0] != "position_ids"
    assert reads[f"{shared.outputs[0]}.positions"][0] == "position_ids"


def test_a_value_may_have_the_name_of_an_input_of_programs_over_pools():
    """Exporters of today call values "index"; over pools that is the name of an input."""
    program = fixture_graph("llama")
    old = next(node.outputs[0] for node in program.nodes if node.op.startswith("Cos"))
    after, _ = apply_rewrites(rename_values(program, {old: CACHE_INDEX_INPUT}), ALL_REWRITES)
    assert after.input(CACHE_INDEX_INPUT) is not None
    assert [node.outputs for node in after.nodes if node.op.startswith("Cos")] == [(f"{CACHE_INDEX_INPUT}.value",)]
    after.validate()
