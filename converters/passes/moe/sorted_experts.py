"""Rows that are sorted by expert and split by the experts' counts go through a stack of the experts.

The counts are known only when the step runs, and no compiled step can have parts of such sizes. Which expert each row
has follows from the counts; a stack takes sorted rows anyway, so the rest of the mixture stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.linear_product import LinearProduct
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, stack_tensors
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.linear import match_weight_product
from mlx_transmuter.ops import ELEMENT_TYPE_CODES
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
    biases = [graph.program.tensors[product.bias] for product, _ in products if product.bias]
    path = f"{layer_path(graph, products[0][0].matrix)}.experts"
    arrays = {f"{path}.weight": stack_tensors([weight for _, weight in products])}
    if biases:
        arrays[f"{path}.bias"] = stack_tensors(biases)
    output = concat.outputs[0]
    name = {part: f"{output}.{part}" for part in ("ends", "sizes", "count", "place", "column", "row", "past", "number")}
    constants = {f"{output}.{i}": np.array(i, np.int64) for i in (0, 1)}
    constants |= {f"{output}.axis{i}": np.array([i], np.int64) for i in (0, 1)}
    zero, one, first, second = constants
    nodes = (
        # A row's expert is how many experts end before it.
        Node("CumSum-11", (counts, zero), (name["ends"],)),
        Node("Shape-1", (rows,), (name["sizes"],)),
        Node("Gather-1", (name["sizes"], zero), (name["count"],), {"axis": 0}),
        Node("Range-11", (zero, name["count"], one), (name["place"],)),
        Node("Unsqueeze-13", (name["place"], second), (name["column"],)),
        Node("Unsqueeze-13", (name["ends"], first), (name["row"],)),
        Node("GreaterOrEqual-12", (name["column"], name["row"]), (name["past"],)),
        Node("Cast-9", (name["past"],), (name["number"],), {"to": ELEMENT_TYPE_CODES["int32"]}),
        Node("ReduceSum-13", (name["number"], second), (f"{output}.experts",), {"keepdims": 0}),
        Node("Unsqueeze-13", (rows, second), (f"{output}.rows",)),
        Node(
            "mlx.switch_linear", (f"{output}.rows", path, f"{output}.experts"), (f"{output}.products",), {}, split.name
        ),
        Node("Squeeze-13", (f"{output}.products", second), concat.outputs),
    )
    layers = {path: {"kind": "SwitchLinear", "bias": bool(biases)}}
    return Replacement(concat, nodes, layers=layers, arrays=arrays, constants=constants)
