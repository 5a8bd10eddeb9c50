"""Grouped: rows that are split among experts by how many each of them has go through a stack of the experts.

A router may sort its tokens by expert and split them by the experts' counts, which are known only when the step runs:
no compiled step can have parts of such sizes. Which expert each row has follows from the counts, and as sorted rows are
what a stack takes anyway, nothing else of the mixture needs to be understood.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, stack_tensors
from mlx_transmuter.converters.passes.layers.linear import layer_names, match_linear_product
from mlx_transmuter.ops import ELEMENT_TYPE_CODES
from mlx_transmuter.program import Node


def stack_sorted_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Concat of the products of each part of Split(rows, counts), with counts of the step → mlx.switch_linear."""
    for node in graph.nodes:
        counts = node.inputs[1] if is_op_type(node, "Split") and len(node.inputs) > 1 else ""
        if not counts or graph.constant(counts) is not None or node.attrs.get("axis", 0) != 0:
            continue
        readers = [reader for name in node.outputs if (reader := graph.only_consumer(name)) is not None]
        found = [one for reader in readers if (one := match_linear_product(graph, reader)) is not None]
        if not found:
            continue
        joined = graph.only_consumer(readers[0].outputs[0])
        outputs = tuple(reader.outputs[0] for reader in readers)
        if joined is None or not is_op_type(joined, "Concat") or joined.attrs["axis"] != 0 or joined.inputs != outputs:
            yield SkippedMatch(node, "its parts are no products that are joined again as they were split")
        elif len({(matrix.dtype, matrix.shape, bool(bias)) for _, matrix, bias in found}) != 1:
            yield SkippedMatch(node, "the matrices of its parts are not alike")
        else:
            yield _replace_with_stack(graph, node, joined, found)


def _replace_with_stack(
    graph: GraphView, split: Node, concat: Node, products: list[tuple[str, LazyTensor, str]]
) -> Replacement:
    rows, counts = split.inputs[:2]
    matrices = [matrix for _, matrix, _ in products]
    path = f"{layer_names(graph, products[0][0])[0]}.experts"
    arrays = {f"{path}.weight": stack_tensors(matrices)}
    if products[0][2]:
        arrays[f"{path}.bias"] = stack_tensors([graph.program.tensors[name] for _, _, name in products])
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
    layers = {path: {"kind": "SwitchLinear", "bias": bool(products[0][2])}}
    return Replacement(concat, nodes, layers=layers, arrays=arrays, constants=constants)
