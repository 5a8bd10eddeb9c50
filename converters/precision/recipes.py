"""The layers to which a mixed recipe gives more bits, found by what they do in the graph; names may be opaque.

mlx_lm's recipes (convert.mixed_quant_predicate_builder, after llama.cpp's Q4_K_M) give more bits to the head, and in
the first and last eighth of the blocks and every third one between them to v_proj and down_proj. Here a value
projection is the layer whose output is kept as a value of the cache, a down projection the layer that reads a gated or
activated product of layers, the head the layer that gives the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import (
    ACTIVATION_OPS,
    BIASED_ACTIVATION_OPS,
    COPY_OPS,
    FUSED_ACTIVATION_OPS,
    LAYER_OPS,
    LINEAR_LAYER_OPS,
    SLICING_OPS,
)
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Node, Program

# What takes a part of a value: a projection that gives queries and keys too is no value projection.
_PART_OPS = (*SLICING_OPS, "Gather")
# What has the value as its first input, and a shape, axes or indices after it.
_FIRST_INPUT_OPS = (*COPY_OPS, *_PART_OPS)
_ACTIVATION_OPS = {*ACTIVATION_OPS, *BIASED_ACTIVATION_OPS, *FUSED_ACTIVATION_OPS, "mlx.expert_activation"}


def recipe_bits(program: Program, quantization: Quantization, path: Path) -> dict[str, int]:
    """Returns the bits of the layers to which the recipe gives more, by path; {} without a recipe.

    Raises ConvertError for a graph without a down projection.
    """
    if quantization.recipe is None:
        return {}
    graph = GraphView(program)
    order = {node.outputs[0]: i for i, node in enumerate(program.nodes) if node.outputs}
    value_projections = sorted(_value_projections(graph), key=lambda node: order[node.outputs[0]])
    down_projections = [node for node in graph.nodes if _is_down_projection(graph, node)]
    if not down_projections:
        raise ConvertError(
            path,
            f"no down projection among {len(program.layers)} layers",
            f"a gated or activated product, for the recipe {quantization.recipe}",
            "quantize to one number of bits",
        )
    blocks = len(value_projections) or len(down_projections)
    starts = [order[node.outputs[0]] for node in value_projections]
    paths = [node.inputs[1] for block, node in enumerate(value_projections) if _gets_more_bits(block, blocks)]
    for i, node in enumerate(down_projections):
        block = max(sum(start < order[node.outputs[0]] for start in starts) - 1, 0) if starts else i
        paths += [node.inputs[1]] if _gets_more_bits(block, blocks) else []
    paths += [node.inputs[1] for node in trace_layers(graph, ["logits"]).layers if node.op == "mlx.linear"]
    return dict.fromkeys(paths, quantization.more_bits)


def _gets_more_bits(block: int, blocks: int) -> bool:
    return block < blocks // 8 or block >= 7 * blocks // 8 or (block - blocks // 8) % 3 == 2


def _value_projections(graph: GraphView) -> Iterator[Node]:
    """Yields the layers that give the cache's values and nothing else, one of each block."""
    outputs = {value.name for value in graph.program.outputs}
    attentions = [
        node
        for node in graph.nodes
        if (node.op == "mlx.attention" and node.inputs[2]) or (len(node.outputs) > 2 and node.outputs[2] in outputs)
    ]
    values = [node.inputs[2] for node in attentions]
    attention_outputs = {name for node in attentions for name in node.outputs}
    presents = (value.name for value in graph.program.outputs if value.name not in attention_outputs)
    values += [name for name in presents if name.startswith("present") and "value" in name]
    for name in values:
        sources = trace_layers(graph, [name])
        is_part = not sources.operators.isdisjoint(_PART_OPS)
        if len(sources.layers) == 1 and sources.layers[0].op == "mlx.linear" and not is_part:
            yield sources.layers[0]


def _is_down_projection(graph: GraphView, node: Node) -> bool:
    """Returns whether the node is a layer of an activated or gated product of other layers, and of nothing else."""
    if node.op not in LINEAR_LAYER_OPS:
        return False
    sources = trace_layers(graph, [node.inputs[0]])
    return (
        bool(sources.layers)
        and all(source.op in LINEAR_LAYER_OPS for source in sources.layers)
        and not sources.operators.isdisjoint(_ACTIVATION_OPS)
        and sources.values.isdisjoint(value.name for value in graph.program.inputs)
    )


class LayerSources(NamedTuple):
    """What some values are computed from: the nearest layers, and the op types and the values on the way to them."""

    layers: list[Node]
    operators: set[str]
    values: set[str]


def trace_layers(graph: GraphView, names: Sequence[str]) -> LayerSources:
    """Returns the nearest layers from which the values are computed, and what lies between."""
    sources = LayerSources([], set(), set())
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in sources.values:
            continue
        sources.values.add(name)
        node = graph.producer(name)
        if node is None:
            continue
        if node.op in LAYER_OPS:
            sources.layers.append(node)
            pending += node.inputs[2:] if node.op == "mlx.linear" else ()  # what the product is added to
            continue
        sources.operators.add(node.op_type)
        inputs = node.inputs[:1] if is_op_type(node, *_FIRST_INPUT_OPS) else node.inputs
        pending += [value for value in inputs if value]
    return sources
