"""The passes of a conversion, in their order, each with the passes that it must come after and why.

A pass is a generator function of a graph view that yields a replacement or a skipped match for each node that it looks
at. The order is data: the tests check that it keeps every `after`, and that it names each pass of these folders once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import Rewrite, RewriteRecord, apply_rewrite
from mlx_transmuter.converters.passes.attention.extract_attention_projections import extract_attention_projections
from mlx_transmuter.converters.passes.attention.fuse_head_reshapes import fuse_head_reshapes
from mlx_transmuter.converters.passes.attention.fuse_qkv_heads import fuse_qkv_heads
from mlx_transmuter.converters.passes.attention.group_query_attention import lower_group_query_attention
from mlx_transmuter.converters.passes.attention.pooled_attention import fuse_pooled_attention
from mlx_transmuter.converters.passes.attention.rotary import fuse_rotary_embedding
from mlx_transmuter.converters.passes.layers.dequantize_linear import absorb_dequantize_linear
from mlx_transmuter.converters.passes.layers.drop_row_reshapes import drop_row_reshapes
from mlx_transmuter.converters.passes.layers.embedding_layers import make_embedding_layers
from mlx_transmuter.converters.passes.layers.fuse_activations import fuse_activations
from mlx_transmuter.converters.passes.layers.fuse_residual import fuse_residual_add
from mlx_transmuter.converters.passes.layers.fuse_rms_norm import fuse_rms_norm
from mlx_transmuter.converters.passes.layers.linear_layers import make_linear_layers
from mlx_transmuter.converters.passes.layers.matmul_nbits import lower_matmul_nbits
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.passes.logits.last_token_logits import gather_last_token_logits
from mlx_transmuter.converters.passes.moe.contrib_moe import expand_contrib_moe
from mlx_transmuter.converters.passes.moe.dense_experts import make_experts_dense
from mlx_transmuter.converters.passes.moe.sorted_experts import stack_sorted_experts
from mlx_transmuter.converters.passes.moe.switch_experts import make_switch_experts
from mlx_transmuter.converters.passes.simplify.eliminate_common_subexpressions import eliminate_common_subexpressions
from mlx_transmuter.converters.passes.simplify.expose_length_switches import expose_length_switches, fix_side
from mlx_transmuter.converters.passes.simplify.expose_positions import expose_positions
from mlx_transmuter.converters.passes.simplify.fold_constants import fold_constants
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.converters.passes.simplify.fold_weight_transforms import fold_weight_transforms
from mlx_transmuter.converters.passes.simplify.fuse_slices_into_split import fuse_slices_into_split
from mlx_transmuter.converters.passes.simplify.half_precision_cache import use_half_precision_cache
from mlx_transmuter.converters.stages import enter_stage
from mlx_transmuter.program import Program
from mlx_transmuter.program.length_switches import LengthSwitches
from mlx_transmuter.program.renaming import rename_values
from mlx_transmuter.program.signature import (
    CACHE_INDEX_INPUT,
    HEAD_INDEX_INPUT,
    LOGIT_INDICES_INPUT,
    OPTIONAL_INPUTS,
    TOKEN_INPUTS,
)


@dataclass(frozen=True)
class Pass:
    """One rewrite and its place in the order.

    after: the passes that must run earlier, and for each the reason. removes_data_dependent_shapes: a graph in which
    this pass replaces a node has values whose shapes depend on other values, so the unrewritten graph runs eagerly.
    """

    rewrite: Rewrite
    after: Mapping[Rewrite, str] = field(default_factory=dict)
    removes_data_dependent_shapes: bool = False

    @property
    def name(self) -> str:
        """The name of the pass in the metadata of a converted folder: that of its function."""
        return self.rewrite.__name__


_BEFORE_THE_SHAPE_PROBE = "the shape probe runs no graph whose shapes depend on values"
_BEFORE_RESIDUALS = "a product and its sum with the residual stream are one node afterwards"

# Passes that leave the graph's pasts and presents as they are.
GRAPH_PASSES: tuple[Pass, ...] = (
    Pass(fold_constants),
    Pass(
        make_experts_dense,
        after={fold_constants: "it reads constants where exporters write chains of nodes"},
        removes_data_dependent_shapes=True,
    ),
    Pass(
        stack_sorted_experts,
        after={fold_constants: "it reads constants where exporters write chains of nodes"},
        removes_data_dependent_shapes=True,
    ),
    Pass(
        expose_positions,
        after={make_experts_dense: _BEFORE_THE_SHAPE_PROBE, stack_sorted_experts: _BEFORE_THE_SHAPE_PROBE},
    ),
    Pass(
        expose_length_switches,
        after={
            fold_constants: "it reads constants where exporters write chains of nodes",
            make_experts_dense: _BEFORE_THE_SHAPE_PROBE,
            stack_sorted_experts: _BEFORE_THE_SHAPE_PROBE,
        },
    ),
    Pass(
        use_half_precision_cache,
        after={make_experts_dense: _BEFORE_THE_SHAPE_PROBE, stack_sorted_experts: _BEFORE_THE_SHAPE_PROBE},
    ),
    Pass(
        fold_static_shapes,
        after={
            expose_positions: "what folding leaves no longer tells positions from columns of the mask",
            use_half_precision_cache: "it looks for sizes of the cache itself, not of a cast of it",
            expose_length_switches: "no step of the shape probe is as long as a switch, which it takes for a constant",
        },
    ),
    Pass(eliminate_common_subexpressions, after={fold_static_shapes: "equal shapes are equal constants by then"}),
    Pass(fold_weight_transforms, after={fold_static_shapes: "the shape of a weight's Reshape is a constant by then"}),
    Pass(extract_attention_projections, after={fold_constants: "it takes weights and biases, not what computes them"}),
    Pass(absorb_dequantize_linear, after={fold_weight_transforms: "it takes weights, not what reshapes them"}),
    Pass(
        make_embedding_layers,
        after={absorb_dequantize_linear: "it takes the weights that are left in floats"},
    ),
    Pass(
        make_linear_layers,
        after={
            extract_attention_projections: "the projections of com.microsoft's Attention are products by then",
            absorb_dequantize_linear: "it takes the weights that are left in floats",
            make_embedding_layers: "a head that is tied to the embedding finds the embedding's table",
        },
    ),
    Pass(
        lower_matmul_nbits,
        after={make_embedding_layers: "a head that is tied to the embedding finds the embedding's table"},
    ),
    Pass(
        expand_contrib_moe,
        after={fold_constants: "it takes weights and scales, not what computes them"},
    ),
    Pass(
        drop_row_reshapes,
        after={
            make_linear_layers: "layers take rows of any shape, products of matrices do not",
            lower_matmul_nbits: "layers take rows of any shape, products of matrices do not",
        },
    ),
    Pass(
        make_switch_experts,
        after={
            make_experts_dense: "its experts run over all tokens",
            make_linear_layers: "experts are found by their layers",
            lower_matmul_nbits: "experts are found by their layers",
            drop_row_reshapes: "reshapes around a layer hide that experts are alike",
        },
    ),
    Pass(
        merge_projections,
        after={
            make_linear_layers: "it merges layers of one input",
            lower_matmul_nbits: "it merges layers of one input",
            expand_contrib_moe: "it merges the stacks of a mixture's experts too",
            make_switch_experts: "it merges the stacks of a mixture's experts too",
        },
    ),
    Pass(fuse_rms_norm, after={fold_static_shapes: "reshapes and casts that change nothing are gone by then"}),
    Pass(fuse_rotary_embedding, after={fold_static_shapes: "the bounds of its slices are constants by then"}),
    Pass(fuse_activations, after={make_switch_experts: "a mixture has one activation by then, not one per expert"}),
    Pass(
        fuse_slices_into_split,
        after={fuse_rotary_embedding: "a rotation is found by its slices"},
    ),
    Pass(
        fuse_residual_add,
        after={
            drop_row_reshapes: _BEFORE_RESIDUALS,
            make_switch_experts: _BEFORE_RESIDUALS,
            merge_projections: _BEFORE_RESIDUALS,
            fuse_activations: _BEFORE_RESIDUALS,
        },
    ),
)
# Passes that put pools in the place of pasts and presents, and what is possible only then.
POOL_PASSES: tuple[Pass, ...] = (
    Pass(
        fuse_pooled_attention,
        after={
            fold_static_shapes: "the reshapes around repeated keys and values are gone by then",
            use_half_precision_cache: "it looks for the cache itself, not for a cast of it",
            extract_attention_projections: "it reads com.microsoft's MultiHeadAttention, which that pass makes",
        },
    ),
    Pass(
        lower_group_query_attention,
        after={use_half_precision_cache: "it looks for the cache itself, not for a cast of it"},
    ),
    Pass(
        gather_last_token_logits,
        after={
            make_linear_layers: "it looks for the head's layer",
            lower_matmul_nbits: "it looks for the head's layer",
        },
    ),
    Pass(
        fuse_head_reshapes,
        after={
            fuse_pooled_attention: "attention is found by the transposes of its heads",
            lower_group_query_attention: "that pass makes the reshapes and transposes that this one fuses",
        },
    ),
    Pass(
        fuse_qkv_heads,
        after={
            merge_projections: "it takes the heads of a merged product",
            fuse_rotary_embedding: "it rotates queries and keys in one node",
            fuse_head_reshapes: "it takes mlx.split_heads, which that pass makes",
        },
    ),
)
GRAPH_REWRITES: tuple[Rewrite, ...] = tuple(entry.rewrite for entry in GRAPH_PASSES)
POOL_REWRITES: tuple[Rewrite, ...] = tuple(entry.rewrite for entry in POOL_PASSES)


def had_data_dependent_shapes(records: Sequence[RewriteRecord]) -> bool:
    """Returns whether the rewrites removed shapes that depend on values; the graph without them then runs eagerly."""
    names = {entry.name for entry in (*GRAPH_PASSES, *POOL_PASSES) if entry.removes_data_dependent_shapes}
    return any(record.name in names and record.replaced_count for record in records)


def find_length_switches(program: Program) -> LengthSwitches:
    """Returns the length switches of a program as its file has it."""
    return LengthSwitches.from_program(_expose_length_switches(program))


def graphs_by_side(program: Program) -> list[Program]:
    """Returns the program as it is on each side of its length switches; the program alone where it has none."""
    exposed = _expose_length_switches(program)
    switches = LengthSwitches.from_program(exposed)
    return [fix_side(program, exposed, side) for side in range(switches.sides)] if switches else [program]


def _expose_length_switches(program: Program) -> Program:
    rewrites = [entry.rewrite for entry in GRAPH_PASSES]
    exposed, _ = apply_rewrites(program, rewrites[: rewrites.index(expose_length_switches) + 1])
    return exposed


def apply_rewrites(program: Program, rewrites: Sequence[Rewrite]) -> tuple[Program, list[RewriteRecord]]:
    """Returns the program after the rewrites, in their order, and the record of each.

    Inputs that nothing reads any more are dropped, except those of the cache.
    """
    outputs = {name for node in program.nodes for name in node.outputs}
    # A value of the graph may have the name of an input of programs over pools: dynamo's exports call one "index".
    program = rename_values(
        program,
        {name: f"{name}.value" for name in outputs & {CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT}},
    )
    records, graph = [], GraphView(program)
    for rewrite in rewrites:
        enter_stage(f"rewriting the graph, {rewrite.__name__}")
        program, record = apply_rewrite(program, rewrite, graph)
        records.append(record)
        if program is not graph.program:
            graph = GraphView(program, graph)
    droppable = {*OPTIONAL_INPUTS, *TOKEN_INPUTS}
    read = {name for node in program.nodes for name in node.all_inputs()} | {value.name for value in program.outputs}
    inputs = tuple(value for value in program.inputs if value.name in read or value.name not in droppable)
    return replace(program, inputs=inputs), records


__all__ = [
    "GRAPH_PASSES",
    "GRAPH_REWRITES",
    "POOL_PASSES",
    "POOL_REWRITES",
    "Pass",
    "apply_rewrites",
    "find_length_switches",
    "graphs_by_side",
    "had_data_dependent_shapes",
]
