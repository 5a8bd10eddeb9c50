"""How many nodes each rewrite replaces per architecture, and what the rewritten programs are made of.

Agreement with the unrewritten graph is the proof of each conversion; here its record is read, and goldens test the
rest.
"""

from __future__ import annotations

import pytest
from conftest import NAMES

from mlx_transmuter.program.signature import CACHE_INDEX_INPUT

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
    "llama_q4": LLAMA | {"make_linear_layers": 0, "lower_matmul_nbits": 15},
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
        "lower_matmul_nbits": 15,
        "fuse_activations": 2,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    # One table is embedding and head.
    "qwen2_genai_tied4": {
        "make_embedding_layers": 0,
        "make_linear_layers": 0,
        "lower_matmul_nbits": 12,
        "fuse_activations": 2,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
    "qwen2_genai_tied8": {
        "make_embedding_layers": 0,
        "make_linear_layers": 0,
        "lower_matmul_nbits": 12,
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
    "phi3_longrope": {
        "expose_length_switches": 1,
        "make_embedding_layers": 1,
        "make_linear_layers": 11,
        "lower_group_query_attention": 2,
        "gather_last_token_logits": 1,
    },
}
# What the routers of mixtures have of their own: a softmax, and where experts are sorted, a sum by scatter.
ROUTED = {name: {"Softmax-13"} for name in ("gpt_oss", "qwen3_moe", "mixtral", "olmoe_dynamo")}
ROUTED["granitemoe_dynamo"] = {"Softmax-13", "ScatterND-11"}


@pytest.mark.parametrize("name", sorted(WANTED))
def test_each_rewrite_replaces_as_many_nodes_as_the_architecture_has(name, loaded):
    meta = loaded(name).decoder.program.metadata
    held = {record["name"]: record["held"] for record in meta["rewrites"]}
    wanted = WANTED[name]
    assert {rewrite: held[rewrite] for rewrite in wanted} == wanted


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt2_reread", "deltanet_ort")])  # no cache
def test_every_fixture_runs_over_pools_without_nodes_of_past_or_mask(name, loaded):
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


@pytest.mark.parametrize("name", NAMES)
def test_no_rewrite_of_a_fixture_is_left_out_for_disagreeing_with_the_graph(name, loaded):
    reasons = [reason for record in loaded(name).decoder.program.metadata["rewrites"] for reason in record["declined"]]
    assert not [reason for reason in reasons if "disagreed" in reason]
