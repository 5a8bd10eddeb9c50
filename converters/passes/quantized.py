"""Quantized: weights in blocks of 2, 4 or 8 bits become MLX's quantised layers, without ever becoming floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from converters.blocks import BITS, Blocks, arrays_of, become, blocks_of, typed, unpacked
from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.passes.linear import layer_names
from converters.tensors import Tensor
from mlx_transmuter.ops.microsoft_blocks import GROUPS
from mlx_transmuter.program import Node


def quantized(graph: Graph) -> Iterator[Answer]:
    """MatMulNBits(x, W) [+ b] → mlx.linear with an nn.QuantizedLinear; GatherBlockQuantized(W, ids) → mlx.embedding
    with an nn.QuantizedEmbedding. A product whose blocks MLX has no groups of gets its weight in floats.
    """
    tables: dict[str, str] = {}  # the name of the weight of an embedding -> its layer's path
    for node in graph.nodes:
        if is_kind(node, "com.microsoft.GatherBlockQuantized"):
            answer = _embedding(graph, node)
            if isinstance(answer, Become):
                tables[_source(graph, node.inputs[0])] = next(iter(answer.layers))
            yield answer
    for node in graph.nodes:
        if is_kind(node, "com.microsoft.MatMulNBits"):
            if (table := tables.get(node.inputs[1])) and not any(node.inputs[4:]):
                yield Become(node, (Node("mlx.as_linear", (node.inputs[0], table), node.outputs, name=node.name),))
            else:
                yield from _linear(graph, node)


def _source(graph: Graph, name: str) -> str:
    """The weight that the value is, or is another shape of, as a head's is where its embedding reads it too."""
    node = graph.producer(name, "Reshape")
    return node.inputs[0] if node is not None and node.inputs[0] in graph.program.arrays else name


def _linear(graph: Graph, node: Node) -> Iterator[Answer]:
    inputs = [*node.inputs, *[""] * (6 - len(node.inputs))]
    name, scales, zeros, order, bias = inputs[1:6]
    rows, columns = int(node.attrs["N"]), int(node.attrs["K"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    own = [value for value in (scales, zeros, order, bias) if value]
    if problem := _problem(graph, bits, [name, *[value for value in own if value != order]]):
        yield Declined(node, problem)
        return
    if node.attrs.get("weight_prepacked", 0):
        yield Declined(node, "it is packed for another machine")
        return
    if bias and graph.program.arrays[bias].shape != (rows,):
        yield Declined(node, "its bias is no weight of rank 1")
        return
    made = _blocks(graph, (name, scales, zeros), rows, columns, block, bits)
    x = node.inputs[0]
    turn: np.ndarray | None = None
    if order:
        index = _order(graph, order, columns)
        if index is None:
            yield Declined(node, "the order of its columns is no constant")
            return
        made, turn = _ordered(made, index)
    if made.group is None:
        reason = f"MLX has no groups for its blocks of {block}{' in this order' if order else ''}"
        yield Declined(node, f"{reason}: its weight is in {made.dtype} now")
    # A layer in floats has no scales, so it cannot stand where the file's are.
    path, _, _ = layer_names(graph, name, *(own if made.group else ()))
    before: tuple[Node, ...] = ()
    extra: dict[str, Tensor] = {}
    if turn is not None:
        x, place = f"{node.outputs[0]}.ordered", f"{path}_order"
        before = (Node("Gather-1", (node.inputs[0], place), (x,), {"axis": -1}),)
        extra[place] = Tensor("int32", turn.shape, lambda: turn)
    found = become(graph, node, x, path, made, bias, alone=len(graph.consumers(name)) == 1)
    yield Become(found.root, (*before, *found.nodes), layers=found.layers, arrays=found.arrays | extra)


def _blocks(graph: Graph, names: tuple[str, str, str], rows: int, columns: int, block: int, bits: int) -> Blocks:
    """The weight of these names (values, scales, zero points) as com.microsoft packs it."""
    packed, scales, zeros = (graph.program.arrays.get(name) for name in names)
    assert packed is not None
    assert scales is not None
    count = blocks_of(columns, block)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = scales.read().reshape(rows, count)
        if zeros is None:
            zero = np.full((rows, count), 1 << (bits - 1), np.float32)
        elif zeros.dtype == "uint8":
            zero = unpacked(zeros.read().reshape(rows, -1), bits, count)
        else:
            zero = zeros.read().reshape(rows, count)
        return unpacked(packed.read().reshape(rows, -1), bits, columns), scale, zero

    return Blocks(rows, columns, block, bits, scales.dtype, read)


def _ordered(made: Blocks, index: np.ndarray) -> tuple[Blocks, np.ndarray | None]:
    """The weight whose columns are of the blocks `index`, and the order in which it takes its input (None: as they
    come). Columns that are whole blocks in another order are put in the blocks' order; others get the scale of
    their block each.
    """
    sizes = np.bincount(index, minlength=blocks_of(made.columns, made.block))
    turn = np.argsort(index, kind="stable").astype(np.int32)
    if np.array_equal(index, np.arange(made.columns) // made.block):
        return made, None
    whole = len(sizes) == blocks_of(made.columns, made.block) and (sizes[:-1] == made.block).all()

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, scales, zeros = made.read()
        return (values[:, turn], scales, zeros) if whole else (values, scales[:, index], zeros[:, index])

    block = made.block if whole else 1
    turned = Blocks(made.rows, made.columns, block, made.bits, made.dtype, read)
    return turned, (turn if whole else None)


def _order(graph: Graph, name: str, columns: int) -> np.ndarray | None:
    """Each column's block, int [columns], or None where it is no constant."""
    tensor, constant = graph.weight(name), graph.constant(name)
    index = tensor.read() if tensor is not None else constant
    return None if index is None or index.size < columns else index.reshape(-1)[:columns].astype(np.int64)


def _embedding(graph: Graph, node: Node) -> Answer:
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    names = [_source(graph, name) if name else "" for name in (node.inputs[0], *node.inputs[2:4])]
    name, scales, zeros = [*names, ""][:3]
    table = graph.weight(name)
    if table is None or table.dtype != "uint8" or len(table.shape) < 2:
        return Declined(node, f"the table is {table.dtype if table else 'no weight'}; wanted packed bytes")
    rows, columns = table.shape[0], table.size // table.shape[0] * 8 // bits
    if problem := _problem(graph, bits, [name, scales, *([zeros] if zeros else [])]):
        return Declined(node, problem)
    if not any(block % size == 0 and columns % size == 0 for size in GROUPS):
        return Declined(node, f"its blocks are of {block}; MLX has groups of 32, 64 and 128, so it stays as it is")
    if node.attrs.get("gather_axis", 0) != 0 or node.attrs.get("quantize_axis", 1) % 2 != 1:
        return Declined(node, "it gathers or quantises along another axis")
    if graph.program.arrays[scales].size != rows * blocks_of(columns, block):
        return Declined(node, "its table is not packed")
    made = _blocks(graph, (name, scales, zeros), rows, columns, block, bits)
    path, _, _ = layer_names(graph, name, *[value for value in (scales, zeros) if value])
    arrays, options = arrays_of(path, made)
    nodes = typed(Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name), made)
    return Become(node, nodes, layers={path: {"kind": "QuantizedEmbedding", **options}}, arrays=arrays)


def _problem(graph: Graph, bits: int, names: list[str]) -> str | None:
    """Why the weight of these names stays in the file's form, or None."""
    if bits not in BITS:
        return f"it has {bits} bits; wanted 2, 4 or 8"
    return "its weight is no constant" if any(graph.weight(name) is None for name in names) else None
