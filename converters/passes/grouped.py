"""Grouped: rows that are split among experts by how many each of them has go through a stack of the experts.

A router may sort its tokens by expert and split them by the experts' counts, which are known only when the step runs:
no compiled step can have parts of such sizes. Which expert each row has follows from the counts, and as sorted rows are
what a stack takes anyway, nothing else of the mixture needs to be understood.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.passes.linear import layer_names, product
from converters.tensors import Tensor, stacked
from mlx_transmuter.ops import CODES
from mlx_transmuter.program import Node


def grouped(graph: Graph) -> Iterator[Answer]:
    """Concat of the products of each part of Split(rows, counts), with counts of the step → mlx.switch_linear."""
    for node in graph.nodes:
        counts = node.inputs[1] if is_kind(node, "Split") and len(node.inputs) > 1 else ""
        if not counts or graph.constant(counts) is not None or node.attrs.get("axis", 0) != 0:
            continue
        readers = [reader for name in node.outputs if (reader := graph.only_consumer(name)) is not None]
        found = [one for reader in readers if (one := product(graph, reader)) is not None]
        if not found:
            continue
        joined = graph.only_consumer(readers[0].outputs[0])
        outputs = tuple(reader.outputs[0] for reader in readers)
        if joined is None or not is_kind(joined, "Concat") or joined.attrs["axis"] != 0 or joined.inputs != outputs:
            yield Declined(node, "its parts are no products that are joined again as they were split")
        elif len({(matrix.dtype, matrix.shape, bool(bias)) for _, matrix, bias in found}) != 1:
            yield Declined(node, "the matrices of its parts are not alike")
        else:
            yield _stacked(graph, node, joined, found)


def _stacked(graph: Graph, split: Node, joined: Node, found: list[tuple[str, Tensor, str]]) -> Become:
    rows, counts = split.inputs[:2]
    matrices = [matrix for _, matrix, _ in found]
    path = f"{layer_names(graph, found[0][0])[0]}.experts"
    arrays = {f"{path}.weight": stacked(matrices)}
    if found[0][2]:
        arrays[f"{path}.bias"] = stacked([graph.program.arrays[name] for _, _, name in found])
    output = joined.outputs[0]
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
        Node("Cast-9", (name["past"],), (name["number"],), {"to": CODES["int32"]}),
        Node("ReduceSum-13", (name["number"], second), (f"{output}.experts",), {"keepdims": 0}),
        Node("Unsqueeze-13", (rows, second), (f"{output}.rows",)),
        Node(
            "mlx.switch_linear", (f"{output}.rows", path, f"{output}.experts"), (f"{output}.products",), {}, split.name
        ),
        Node("Squeeze-13", (f"{output}.products", second), joined.outputs),
    )
    layers = {path: {"kind": "SwitchLinear", "bias": bool(found[0][2])}}
    return Become(joined, nodes, layers=layers, arrays=arrays, constants=constants)
