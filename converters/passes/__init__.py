"""The rewrites, in their order.

1. fold: what depends on constants alone is computed now; later rewrites then see constants where exporters wrote
chains.
   experts, grouped: before the rewrites that walk the graph, which they can't while the sizes of a step depend on its
   values. (hit is none of these: it is done to the graph before anything is compared with it.)
2. positions: a graph that takes positions from the length of its cache gets an input for them, so that it runs over a
buffer;
   before settle, which would leave fewer nodes to tell positions from columns by.
3. narrow: a cache that is a half type within the graph is one outside too; before settle and attention, which look for
   the cache itself.
4. settle: shapes that are the same in steps of every size become constants, and nodes that change nothing go; same:
   what is written several times is computed once; stored: what is done to a weight alone is done now.
   unpacked: onnxruntime's Attention gives its projections away, before linear, which makes a layer of them.
5. integers: before embedding and linear, which take what is left of its weights in floats.
   embedding: before linear, so that a head tied to the embedding finds its table.
6. linear, quantized: products with a constant matrix become layers; opened: those of a mixture in one operator too.
   flat: these take rows of any shape; chosen: those of alike experts stand in stacks; joined: those of one input become
   one.
7. norms, rotary, gates: one node for what exporters write in several; parted: after rotary, which looks for slices.
   residual: after all that look for products or sums, which are one node then.
8. attention: after settle, which leaves of the repeated keys and of the reshapes only what matters; the past and the
   present become pools, and the mask, which nothing reads any more, goes. group_query: the same for the operator that
   brings its rotation.
9. last: after attention; also where past and present stay as they are.
10. heads: after all that look for a transpose; together: what heads found of one product.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView, Rewrite, RewriteRecord, apply_rewrite, rename_values
from mlx_transmuter.converters.passes.attention.extract_attention_projections import extract_attention_projections
from mlx_transmuter.converters.passes.attention.fuse_head_reshapes import fuse_head_reshapes
from mlx_transmuter.converters.passes.attention.fuse_qkv_heads import fuse_qkv_heads
from mlx_transmuter.converters.passes.attention.group_query_attention import lower_group_query_attention
from mlx_transmuter.converters.passes.attention.pooled_attention import fuse_pooled_attention
from mlx_transmuter.converters.passes.attention.rotary import fuse_rotary_embedding
from mlx_transmuter.converters.passes.layers.dequantized_weights import absorb_dequantize_linear
from mlx_transmuter.converters.passes.layers.drop_row_reshapes import drop_row_reshapes
from mlx_transmuter.converters.passes.layers.embedding import make_embedding_layers
from mlx_transmuter.converters.passes.layers.fuse_activations import fuse_activations
from mlx_transmuter.converters.passes.layers.fuse_norms import fuse_rms_norm
from mlx_transmuter.converters.passes.layers.fuse_residual import fuse_residual_add
from mlx_transmuter.converters.passes.layers.linear import make_linear_layers
from mlx_transmuter.converters.passes.layers.matmul_nbits import make_block_quantized_layers
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.passes.logits.last_token_logits import gather_last_token_logits
from mlx_transmuter.converters.passes.moe.contrib_moe import expand_contrib_moe
from mlx_transmuter.converters.passes.moe.dense_experts import make_experts_dense
from mlx_transmuter.converters.passes.moe.sorted_experts import stack_sorted_experts
from mlx_transmuter.converters.passes.moe.switch_experts import make_switch_experts
from mlx_transmuter.converters.passes.simplify.eliminate_common_subexpressions import eliminate_common_subexpressions
from mlx_transmuter.converters.passes.simplify.expose_positions import expose_positions
from mlx_transmuter.converters.passes.simplify.fold_constants import fold_constants
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.converters.passes.simplify.fold_weight_transforms import fold_weight_transforms
from mlx_transmuter.converters.passes.simplify.half_precision_cache import use_half_precision_cache
from mlx_transmuter.converters.passes.simplify.slices_to_split import fuse_slices_into_split
from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import (
    CACHE_INDEX_INPUT,
    HEAD_INDEX_INPUT,
    LOGIT_INDICES_INPUT,
    OPTIONAL_INPUTS,
    TOKEN_INPUTS,
)

# What leaves past and present as they are, and what makes pools of them.
GRAPH_REWRITES: tuple[Rewrite, ...] = (
    fold_constants,
    make_experts_dense,
    stack_sorted_experts,
    expose_positions,
    use_half_precision_cache,
    fold_static_shapes,
    eliminate_common_subexpressions,
    fold_weight_transforms,
    extract_attention_projections,
    absorb_dequantize_linear,
    make_embedding_layers,
    make_linear_layers,
    make_block_quantized_layers,
    expand_contrib_moe,
    drop_row_reshapes,
    make_switch_experts,
    merge_projections,
    fuse_rms_norm,
    fuse_rotary_embedding,
    fuse_activations,
    fuse_slices_into_split,
    fuse_residual_add,
)
# Those that take sizes which depend on values out of a step: where one is made, the graph itself runs eagerly.
DATA_DEPENDENT_REWRITES = (make_experts_dense.__name__, stack_sorted_experts.__name__)
POOL_REWRITES: tuple[Rewrite, ...] = (
    fuse_pooled_attention,
    lower_group_query_attention,
    gather_last_token_logits,
    fuse_head_reshapes,
    fuse_qkv_heads,
)


def apply_rewrites(program: Program, rewrites: tuple[Rewrite, ...]) -> tuple[Program, list[RewriteRecord]]:
    """The program after the rewrites of `order`, without inputs that nothing reads any more; what each rewrite did."""
    given = {name for node in program.nodes for name in node.outputs}
    # A value of the graph may have a name that an input of a program over pools has: dynamo's exports call one "index".
    program = rename_values(
        program, {name: f"{name}.value" for name in given & {CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT}}
    )
    records, graph = [], GraphView(program)
    for one in rewrites:
        program, record = apply_rewrite(program, one, graph)
        records.append(record)
        if program is not graph.program:
            graph = GraphView(program, graph)
    known = {*OPTIONAL_INPUTS, *TOKEN_INPUTS}  # what is carried stays, also where nothing reads it
    read = {name for node in program.nodes for name in node.all_inputs()} | {value.name for value in program.outputs}
    return replace(
        program, inputs=tuple(value for value in program.inputs if value.name in read or value.name not in known)
    ), records


__all__ = ["DATA_DEPENDENT_REWRITES", "GRAPH_REWRITES", "POOL_REWRITES", "apply_rewrites"]
