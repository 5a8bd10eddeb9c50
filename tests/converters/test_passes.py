"""The rewrites: how many each makes per architecture, that near misses decline with their reason, and that what they
make runs.

Agreement with the unrewritten graph is the proof of each conversion; here its record is read, and goldens test the
rest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, NAMES

from mlx_transmuter.converters.graph.graph_view import GraphView, SkippedMatch, apply_rewrite, rename_values
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, POOL_REWRITES, apply_rewrites
from mlx_transmuter.converters.passes.attention.extract_attention_projections import extract_attention_projections
from mlx_transmuter.converters.passes.attention.fuse_head_reshapes import fuse_head_reshapes
from mlx_transmuter.converters.passes.attention.group_query_attention import lower_group_query_attention
from mlx_transmuter.converters.passes.attention.pooled_attention import fuse_pooled_attention
from mlx_transmuter.converters.passes.layers.embedding import make_embedding_layers
from mlx_transmuter.converters.passes.layers.fuse_norms import fuse_rms_norm
from mlx_transmuter.converters.passes.layers.linear import make_linear_layers
from mlx_transmuter.converters.passes.layers.matmul_nbits import make_block_quantized_layers
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.passes.simplify.expose_positions import expose_positions
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, outputs

# Fixtures have two layers, gemma3_text three. A layer of a llama has 7 products, 2 norms, 2 rotations, 1 gate, 2
# sums with the residual stream, 1 attention (with its two concatenations: three nodes replaced).
LLAMA = {
    "make_embedding_layers": 1,
    "make_linear_layers": 15,
    "fuse_rms_norm": 5,
    "fuse_rotary_embedding": 4,
    "fuse_activations": 2,
    "fuse_residual_add": 4,
    "fuse_pooled_attention": 6,
    "gather_last_token_logits": 1,
}
WANTED = {
    "llama": LLAMA,
    "llama_fp16": LLAMA,
    "llama_q4": LLAMA | {"make_linear_layers": 0, "make_block_quantized_layers": 15},
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"fuse_rms_norm": 9},  # queries and keys have norms too
    "smollm3": LLAMA | {"fuse_rotary_embedding": 2},  # every other layer has no rotation in this fixture
    "granite": LLAMA | {"fuse_residual_add": 0},  # products are scaled before their sum
    "olmo2": LLAMA | {"fuse_rms_norm": 9, "fuse_residual_add": 0},  # and here have a norm before it
    "phi3": LLAMA
    | {"make_linear_layers": 9, "fuse_slices_into_split": 10},  # q, k and v are one product, gate and up too
    "gemma": LLAMA | {"expose_positions": 2},
    "gemma2": LLAMA | {"expose_positions": 2, "fuse_rms_norm": 9, "fuse_residual_add": 0},
    "gpt2": {
        "make_embedding_layers": 2,
        "make_linear_layers": 9,
        "drop_row_reshapes": 8,
        "fuse_activations": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "gpt_neo": {
        "fuse_activations": 2,
        "make_embedding_layers": 2,
        "make_linear_layers": 13,
        "fuse_residual_add": 4,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "gpt_neox": {
        "fuse_activations": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 9,
        "fuse_rotary_embedding": 4,
        "fuse_residual_add": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "gptj": {
        "fuse_activations": 2,
        "fuse_rotary_embedding": 4,
        "fuse_slices_into_split": 8,
        "make_embedding_layers": 1,
        "make_linear_layers": 13,
        "fuse_residual_add": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "opt": {
        "make_embedding_layers": 2,
        "make_linear_layers": 13,
        "fuse_residual_add": 4,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "bloom": {
        "fuse_activations": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 9,
        "fuse_residual_add": 4,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "falcon": {
        "fuse_activations": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 9,
        "fuse_rotary_embedding": 4,
        "fuse_residual_add": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "llama_dynamo": LLAMA,
    "qwen2_dynamo_raw": LLAMA,
    "gpt2_dynamo": {
        "make_embedding_layers": 2,
        "make_linear_layers": 9,
        "drop_row_reshapes": 8,
        "fuse_activations": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "qwen3_dynamo": {
        "make_embedding_layers": 1,
        "make_linear_layers": 15,
        "fuse_activations": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "codegen": {
        "fuse_activations": 2,
        "fuse_rotary_embedding": 4,
        "make_embedding_layers": 2,
        "make_linear_layers": 9,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "falcon_alibi": {
        "fuse_activations": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 9,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    # Queries and keys of 12 and values of 6, by products of low rank: 8 products and 4 norms a layer.
    "deepseek_v3": {
        "fuse_activations": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 17,
        "fuse_rms_norm": 9,
        "fuse_rotary_embedding": 4,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "gpt_oss": {
        "expose_positions": 2,
        "make_embedding_layers": 1,
        "make_linear_layers": 11,
        "fuse_rms_norm": 5,
        "fuse_activations": 2,
        "make_switch_experts": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    # Four experts in the second layer: each has two indices, a gather, a scatter, and three products. Once they are
    # chosen a mixture has one gate, and of three stacks two are joined.
    "qwen3_moe": {
        "make_experts_dense": 16,
        "make_linear_layers": 25,
        "fuse_rms_norm": 9,
        "fuse_rotary_embedding": 4,
        "fuse_activations": 2,
        "make_switch_experts": 1,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "deepseek_v3_moe": {
        "make_experts_dense": 16,
        "make_linear_layers": 30,
        "fuse_activations": 3,
        "make_switch_experts": 1,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "mixtral": {
        "make_experts_dense": 32,
        "make_linear_layers": 35,
        "merge_projections": 10,
        "fuse_activations": 2,
        "make_switch_experts": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "olmoe_dynamo": {
        "make_experts_dense": 40,
        "make_linear_layers": 41,
        "fuse_activations": 2,
        "make_switch_experts": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    # Two products of each layer's experts.
    "granitemoe_dynamo": {
        "stack_sorted_experts": 4,
        "make_linear_layers": 11,
        "fuse_activations": 2,
        "fuse_pooled_attention": 6,
        "gather_last_token_logits": 1,
    },
    "gpt2_ort": {
        "extract_attention_projections": 2,
        "make_linear_layers": 9,
        "fuse_pooled_attention": 4,
        "gather_last_token_logits": 1,
    },
    "lfm2": {
        "make_embedding_layers": 1,
        "make_linear_layers": 18,
        "fuse_rms_norm": 9,
        "fuse_rotary_embedding": 2,
        "fuse_activations": 3,
        "fuse_pooled_attention": 3,
        "gather_last_token_logits": 1,
    },
    "llama_genai": {
        "make_embedding_layers": 1,
        "make_linear_layers": 11,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    "qwen3_genai_fp16": {
        "make_embedding_layers": 1,
        "make_linear_layers": 15,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    # Products over 48 have no whole blocks.
    "qwen3_genai_int4": {
        "make_embedding_layers": 1,
        "make_block_quantized_layers": 15,
        "fuse_activations": 2,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    # One table is embedding and head.
    "qwen2_genai_tied4": {
        "make_embedding_layers": 0,
        "make_linear_layers": 0,
        "make_block_quantized_layers": 12,
        "fuse_activations": 2,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    "qwen2_genai_tied8": {
        "make_embedding_layers": 0,
        "make_linear_layers": 0,
        "make_block_quantized_layers": 12,
        "fuse_activations": 2,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    "mistral_genai": {
        "make_embedding_layers": 1,
        "make_linear_layers": 11,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
}
# What the routers of mixtures have of their own: a softmax, and where experts are sorted, a sum by scatter.
ROUTED = {name: {"Softmax-13"} for name in ("gpt_oss", "qwen3_moe", "mixtral", "olmoe_dynamo")}
ROUTED["granitemoe_dynamo"] = {"Softmax-13", "ScatterND-11"}


def graph(name: str) -> Program:
    """The fixture's graph as a conversion sees it before the rewrites."""
    program = read_onnx(FIXTURES / name / "model.onnx")
    return name_weights(program.select_outputs(outputs(value.name for value in program.outputs)))


def before(name: str, one) -> Program:
    """The fixture's program as the rewrite `one` gets it."""
    order = (*GRAPH_REWRITES, *POOL_REWRITES)
    return apply_rewrites(graph(name), order[: order.index(one)])[0]


@pytest.mark.parametrize("name", sorted(WANTED))
def test_each_rewrite_is_made_as_often_as_the_architecture_asks(name, loaded):
    meta = loaded(name).decoder.program.metadata
    held = {record["name"]: record["held"] for record in meta["rewrites"]}
    wanted = WANTED[name]
    assert {rewrite: held[rewrite] for rewrite in wanted} == wanted


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt2_reread", "deltanet_ort")])  # no cache
def test_every_fixture_runs_over_pools_and_nothing_of_past_or_mask_is_left(name, loaded):
    program = loaded(name).decoder.program
    assert program.input(CACHE_INDEX_INPUT) is not None
    assert program.input("attention_mask") is None
    kinds = {node.op for node in program.nodes}
    gone = {"Softmax-13", "com.microsoft.GroupQueryAttention-1", "ScatterND-11", "Trilu-14", "IsNaN-9"}
    assert not kinds & (gone - ROUTED.get(name, set()))
    assert program.metadata["proof"]["tried"]["pools"] <= program.metadata["proof"]["limit"]


def test_a_llama_layer_has_as_many_nodes_as_a_person_would_write(loaded):
    program = loaded("llama").decoder.program
    layer = [node for node in program.nodes if "/layers.1/" in node.name]
    # norm, qkv, its heads, these split, rotation, split, attention with its heads joined, product and sum; norm, gate
    # and up, their parts, silu · up, down and sum
    assert len(layer) <= 13, [node.op for node in layer]


def reasons(program: Program, one) -> list[str]:
    """Why the rewrite declined what it found in the program."""
    return [answer.reason for answer in one(GraphView(program)) if isinstance(answer, SkippedMatch)]


def changed(program: Program, kind: str, **changes) -> Program:
    """The program with the first node of that kind changed."""
    at = next(i for i, node in enumerate(program.nodes) if node.op.rpartition("-")[0] == kind)
    nodes = list(program.nodes)
    nodes[at] = replace(nodes[at], **changes)
    return replace(program, nodes=nodes)


def test_a_norm_over_another_axis_declines():
    program = before("llama", fuse_rms_norm)
    program.constants["other"] = np.array([1])
    node = next(node for node in program.nodes if node.op.startswith("ReduceMean"))
    program = changed(program, "ReduceMean", inputs=(node.inputs[0], "other"))
    assert reasons(program, fuse_rms_norm) == ["the mean is not of the last axis alone"]
    assert apply_rewrite(program, fuse_rms_norm)[1].replaced_count == 4


def test_a_mask_that_shows_later_columns_declines():
    program = before("llama", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op.startswith("LessOrEqual"))
    program = changed(program, "LessOrEqual", op="GreaterOrEqual-12")
    assert node.op != "GreaterOrEqual-12"
    assert reasons(program, fuse_pooled_attention) == [
        "the mask shows other columns than the last ones up to a token's own"
    ]
    assert apply_rewrite(program, fuse_pooled_attention)[1].replaced_count == 0


def test_attention_with_a_past_that_something_else_reads_declines():
    program = before("llama", fuse_pooled_attention)
    extra = Node("Identity-1", ("past_key_values.0.key",), ("copy",))
    added = Node("ReduceMean-18", ("copy",), ("mean",), {"keepdims": 0})
    node = program.producers()["logits"]
    nodes = [*program.nodes[:-1], extra, added]
    nodes += [replace(node, outputs=("plain",)), Node("Add-7", ("plain", "mean"), ("logits",))]
    assert program.nodes[-1] == node
    assert reasons(replace(program, nodes=nodes), fuse_pooled_attention) == [
        "Identity-1 reads the past or the mask too"
    ]


def test_scores_that_are_shifted_as_well_decline():
    program = before("llama", fuse_pooled_attention)
    softmax = next(node for node in program.nodes if node.op.startswith("Softmax"))
    program.constants["shift"] = np.array(1.0, np.float32)
    at = program.nodes.index(softmax)
    shifted = [Node("Add-7", (softmax.inputs[0], "shift"), ("shifted",)), replace(softmax, inputs=("shifted",))]
    program = replace(program, nodes=[*program.nodes[:at], *shifted, *program.nodes[at + 1 :]])
    assert reasons(program, fuse_pooled_attention) == ["the scores come from Add-7"]


def test_a_table_that_something_else_reads_is_no_embedding():
    program = before("llama", make_embedding_layers)
    table = next(
        node for node in program.nodes if node.inputs[0] in program.weights and node.op.startswith("Gather")
    ).inputs[0]
    program.nodes.append(Node("Abs-6", (table,), ("magnitude",)))
    assert reasons(program, make_embedding_layers) == ["the table is also read by Abs-6"]


def test_a_matrix_that_something_else_reads_is_no_linear_layer():
    program = before("llama", make_linear_layers)
    matrix = next(
        node for node in program.nodes if node.op.startswith("MatMul") and node.inputs[1] in program.weights
    ).inputs[1]
    program.nodes.append(Node("Abs-6", (matrix,), ("magnitude",)))
    found = reasons(program, make_linear_layers)
    assert found == ["the matrix is read in several ways; wanted products of one form"]


def test_weights_packed_for_another_machine_stay():
    program = before("llama_q4", make_block_quantized_layers)
    node = next(node for node in program.nodes if node.op.startswith("com.microsoft.MatMulNBits"))
    program = changed(program, "com.microsoft.MatMulNBits", attrs={**node.attrs, "weight_prepacked": 1})
    assert reasons(program, make_block_quantized_layers) == ["it is packed for another machine"]


def test_grouped_attention_with_another_attribute_declines():
    program = before("llama_genai", lower_group_query_attention)
    node = next(node for node in program.nodes if "GroupQueryAttention" in node.op)
    program = changed(program, "com.microsoft.GroupQueryAttention", attrs={**node.attrs, "qk_output": 1})
    assert reasons(program, lower_group_query_attention) == ["its qk_output is 1"]


def test_scores_that_are_scaled_by_less_than_nothing_decline():
    program = before("codegen", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op.startswith("Div") and "attn" in node.name)
    program.constants["less"] = -program.constants[node.inputs[1]]
    program = changed(program, "Div", inputs=(node.inputs[0], "less"))
    assert reasons(program, fuse_pooled_attention) == ["the scores come from Div-7"]


def test_scores_beside_something_else_than_sinks_decline():
    program = before("gpt_oss", fuse_pooled_attention)
    node = next(node for node in program.nodes if node.op == "Concat-4" and "Expand" in node.inputs[-1])
    at = program.nodes.index(node)
    moved = [Node("Exp-6", (node.inputs[1],), ("risen",)), replace(node, inputs=(node.inputs[0], "risen"))]
    program = replace(program, nodes=[*program.nodes[:at], *moved, *program.nodes[at + 1 :]])
    wanted = "the scores stand beside something that is no weight of a number for each head"
    assert reasons(program, fuse_pooled_attention) == [wanted]


def test_a_mask_whose_window_a_prompt_lacks_declines():
    """The mask is computed for a prompt longer than the window too, not for a late step alone."""
    program = before("mistral", fuse_pooled_attention)
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
    wanted = "the mask shows other columns in a step of 10 tokens after 0 than in later ones"
    assert reasons(program, fuse_pooled_attention) == [wanted]


def test_attention_with_projections_of_other_sizes_stays():
    program = before("gpt2_ort", extract_attention_projections)
    node = next(node for node in program.nodes if node.op.startswith("com.microsoft.Attention"))
    program = changed(program, "com.microsoft.Attention", attrs={**node.attrs, "qkv_hidden_sizes": [32, 32, 16]})
    assert reasons(program, extract_attention_projections) == ["its projections are no weight of three like parts"]
    assert apply_rewrite(program, extract_attention_projections)[1].replaced_count == 1


def test_positions_of_an_unknown_use_decline():
    program = before("gemma", expose_positions)
    value = next(
        node for node in program.nodes if node.op.startswith("Unsqueeze") and "Range" in node.inputs[0]
    ).outputs[0]
    program.nodes.append(Node("Sign-9", (value,), ("sign",)))
    assert reasons(program, expose_positions) == ["the use of positions by Sign-9 is not known"]


def test_products_of_one_input_are_joined_and_keep_their_numbers(loaded):
    program = before("llama", merge_projections)
    after, record = apply_rewrite(program, merge_projections)
    assert record.replaced_count == 10  # q, k and v, gate and up, of two layers
    layers = {path.removeprefix("model.layers.0.") for path in after.layers if ".0." in path}
    assert layers == {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    whole = after.tensors["model.layers.0.self_attn.qkv_proj.weight"].read()
    parts = [program.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read() for name in "qkv"]
    assert np.array_equal(whole, np.concatenate(parts))
    split = next(node for node in after.nodes if node.op == "Split-13")
    assert after.constants[split.inputs[1]].tolist() == [len(part) for part in parts]


@pytest.mark.parametrize("change", ["one has a bias", "one has another type", "one is read twice", "another input"])
def test_products_that_differ_stay_apart(change):
    program = before("llama", merge_projections)
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


def test_heads_are_parted_and_joined_in_one_node_each():
    program = before("llama", fuse_head_reshapes)
    after, record = apply_rewrite(program, fuse_head_reshapes)
    assert record.replaced_count == 10
    kinds = [node.op for node in after.nodes]
    assert (kinds.count("mlx.split_heads"), kinds.count("mlx.merge_heads")) == (6, 0)
    assert [node.attrs["merge"] for node in after.nodes if node.op == "mlx.attention"] == [1, 1]
    assert not any(node.op.startswith("Transpose") and node.attrs["perm"] == [0, 2, 1, 3] for node in after.nodes)


def test_heads_that_something_else_reads_are_joined_by_a_node_of_their_own():
    program = before("llama", fuse_head_reshapes)
    read = next(node for node in program.nodes if node.op == "mlx.attention").outputs[0]
    after, _ = apply_rewrite(
        replace(program, nodes=[*program.nodes, Node("Abs-6", (read,), ("too",))]), fuse_head_reshapes
    )
    kinds = [(node.op, node.attrs.get("merge")) for node in after.nodes]
    assert kinds.count(("mlx.merge_heads", None)) == 1
    assert kinds.count(("mlx.attention", 1)) == 1


@pytest.mark.parametrize("change", ["another order", "other rows"])
def test_a_transpose_of_something_else_is_no_parting_into_heads(change):
    program = before("llama", fuse_head_reshapes)
    if change == "another order":
        program = changed(program, "Transpose", attrs={"perm": [0, 1, 3, 2]})
        at = next(i for i, node in enumerate(program.nodes) if node.attrs.get("perm") == [0, 2, 1, 3])
        program.nodes[at] = replace(program.nodes[at], attrs={"perm": [0, 1, 3, 2]})
    else:
        node = next(node for node in program.nodes if node.op.startswith("Reshape") and ".shape" in node.inputs[1])
        shape = program.constants[node.inputs[1]]
        program.constants[node.inputs[1]] = np.array([1, *shape[1:]])
    after = apply_rewrite(program, fuse_head_reshapes)[0].nodes
    assert sum(node.op == "mlx.split_heads" or node.attrs.get("merge", 0) for node in after) == 7


def test_a_rewrite_replaces_the_root_alone_and_what_nothing_reads_falls():
    program = before("llama", fuse_rms_norm)
    after, record = apply_rewrite(program, fuse_rms_norm)
    assert record.replaced_count == 5
    assert len(after.nodes) == len(program.nodes) - 5 * 6  # seven nodes became one
    after.validate()


def test_rewrites_see_of_a_changed_program_what_a_walk_of_all_of_it_shows():
    """An observation is carried from program to program, and new nodes alone are walked; it must be as a fresh one."""
    before, fresh = GraphView(graph("gemma")), 0
    for one in GRAPH_REWRITES:
        program = apply_rewrite(before.program, one, before)[0]
        after = GraphView(program, before)
        seen, wanted = after.shape_probe, GraphView(program).shape_probe
        for name in {name for node in program.nodes for name in node.outputs if name}:
            assert seen.shapes(name) == wanted.shapes(name), (one, name)
            assert np.array_equal(seen.constant_value(name), wanted.constant_value(name)), (one, name)
            assert seen.dtype(name) == wanted.dtype(name), (one, name)
        fresh += program is not before.program
        before = after
    assert fresh >= 5


def test_numbers_of_rows_and_tokens_that_are_read_off_the_past_are_read_off_the_tokens():
    """Newer exporters take the number of rows from any input that has it; over pools the past has none."""
    program = before("llama", fold_static_shapes)
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
    order = (*GRAPH_REWRITES, *POOL_REWRITES)
    after, records = apply_rewrites(replace(program, nodes=nodes), order[order.index(fold_static_shapes) :])
    assert after.input(CACHE_INDEX_INPUT) is not None, [record.skip_reasons for record in records]
    assert {record.name: record.replaced_count for record in records}["fuse_pooled_attention"] == 6


def test_positions_that_are_shaped_once_for_two_uses_are_shaped_twice():
    """onnxruntime's optimiser lets the rotation and the mask share an Unsqueeze of the same positions."""
    program = before("gemma", expose_positions)
    seen = GraphView(program)
    shared = next(
        node
        for node in program.nodes
        if node.op.startswith("Unsqueeze") and any(n.op.startswith("Cast") for n in seen.consumers(node.outputs[0]))
    )
    program.constants["gather_last_token_logits"] = np.array([3])
    later = [
        Node("Unsqueeze-13", (shared.outputs[0], "gather_last_token_logits"), ("rows",)),
        Node("GreaterOrEqual-12", ("rows", "rows"), ("compared",)),
    ]
    program = replace(program, nodes=[*program.nodes, *later])
    assert reasons(program, expose_positions) == []
    program = replace(program, outputs=(*program.outputs, Value("compared", "bool", None)))
    after, record = apply_rewrite(program, expose_positions)
    assert record.replaced_count == 3  # a Shape, the Unsqueeze, and the Cast after it
    reads = {node.outputs[0]: node.inputs for node in after.nodes}
    assert reads["rows"][0] == shared.outputs[0]
    assert reads[shared.outputs[0]][0] != "position_ids"
    assert reads[f"{shared.outputs[0]}.positions"][0] == "position_ids"


def test_a_value_may_have_the_name_of_an_input_of_programs_over_pools():
    """Exporters of today call values "index"; over pools that is the name of an input."""
    program = graph("llama")
    old = next(node.outputs[0] for node in program.nodes if node.op.startswith("Cos"))
    after, _ = apply_rewrites(rename_values(program, {old: CACHE_INDEX_INPUT}), (*GRAPH_REWRITES, *POOL_REWRITES))
    assert after.input(CACHE_INDEX_INPUT) is not None
    assert [node.outputs for node in after.nodes if node.op.startswith("Cos")] == [(f"{CACHE_INDEX_INPUT}.value",)]
    after.validate()
