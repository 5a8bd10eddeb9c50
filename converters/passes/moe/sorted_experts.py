"""Rows that are sorted by expert and split by the experts' counts go through a stack of the experts.

The counts are known only when the step runs, and no compiled step can have parts of such sizes. Which expert each row
has follows from the counts; a stack takes sorted rows anyway, so the rest of the mixture stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import name_arrays
from mlx_transmuter.converters.graph.linear_product import LinearProduct
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, stack_tensors
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.linear_layers import match_weight_product
from mlx_transmuter.program import Node

_WeightProduct = tuple[LinearProduct, LazyTensor]


def stack_sorted_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Concat of the products of each part of Split(rows, counts), with counts of the step → mlx.switch_linear."""
    for node in graph.nodes:
        counts = node.inputs[1] if is_op_type(node, "Split") and len(node.inputs) > 1 else ""
        if not counts or graph.constant(counts) is not None or node.attrs.get("axis", 0) != 0:
            continue
        readers = [reader for name in node.outputs if (reader := graph.only_consumer(name)) is not None]
        products = [match for reader in readers if (match := match_weight_product(graph, reader)) is not None]
        if not products:
            continue
        concat = graph.only_consumer(readers[0].outputs[0])
        outputs = tuple(reader.outputs[0] for reader in readers)
        if concat is None or not is_op_type(concat, "Concat") or concat.attrs["axis"] != 0 or concat.inputs != outputs:
            yield SkippedMatch(node, "its parts are not one product each, joined again in the order of the split")
        elif len({(weight.dtype, weight.shape, bool(product.bias)) for product, weight in products}) != 1:
            yield SkippedMatch(node, "the matrices of its parts differ in shape, type or bias")
        else:
            yield _replace_with_stack(graph, node, concat, products)


def _replace_with_stack(graph: GraphView, split: Node, concat: Node, products: list[_WeightProduct]) -> Replacement:
    rows, counts = split.inputs[:2]
    arrays = {"weight": stack_tensors([weight for _, weight in products])}
    biases = [graph.program.tensors[product.bias] for product, _ in products if product.bias]
    if biases:
        arrays["bias"] = stack_tensors(biases)
    path = f"{layer_path(graph, products[0][0].matrix)}.experts"
    builder = NodeBuilder(concat.outputs[0], node_name=split.name)
    first_axis, last_axis = builder.add_constant("axis0", [0]), builder.add_constant("axis1", [1])
    # The expert of a row is the number of experts whose rows end before it.
    ends = builder.add_node("CumSum-11", (counts, builder.add_constant("zero", 0)), "ends")
    column = builder.add_node("Unsqueeze-13", (builder.add_arange(rows, 0, "index"), last_axis), "column")
    row = builder.add_node("Unsqueeze-13", (ends, first_axis), "row")
    is_past = builder.add_node("GreaterOrEqual-12", (column, row), "is_past")
    numbers = builder.add_cast(is_past, "int32", "numbers")
    experts = builder.add_node("ReduceSum-13", (numbers, last_axis), "experts", keepdims=0)
    inputs = builder.add_node("Unsqueeze-13", (rows, last_axis), "rows")
    product = builder.add_node("mlx.switch_linear", (inputs, path, experts), "products")
    builder.nodes.append(Node("Squeeze-13", (product, last_axis), concat.outputs, {}, split.name))
    return Replacement(
        concat,
        tuple(builder.nodes),
        layers={path: {"kind": "SwitchLinear", "bias": bool(biases)}},
        tensors=name_arrays(path, arrays),
        constants=builder.constants,
    )
