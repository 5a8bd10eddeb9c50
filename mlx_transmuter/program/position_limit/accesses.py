"""Accesses: which operators read rows of a table by positions or lengths, how many they need and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mlx_transmuter.program.position_limit.bounds import Bounds
from mlx_transmuter.program.position_limit.lengths import ONE, ROW, STEP, Length
from mlx_transmuter.program.position_limit.node_bounds import NodeBounds
from mlx_transmuter.program.position_limit.shape_rules import LAST_END, is_from_end, slices_of


class Access(NamedTuple):
    """A node that needs `needed` rows of the value `table`, which has `available`; None is unknown."""

    table: str
    needed: Length | None
    available: Length | None


Accesses = Callable[[NodeBounds], Iterator[Access]]


def accesses_of(view: NodeBounds) -> Iterator[Access]:
    """Yields the accesses of a node."""
    find = _ACCESSES.get(view.node.op_type)
    try:
        yield from find(view) if find is not None else ()
    except (ArithmeticError, LookupError, TypeError, ValueError):  # a node that asks the impossible fails where it runs
        return


def _rows_of(view: NodeBounds, table: int, positions: Bounds, axis: int = 0) -> Access:
    needed = None if positions.high is None else positions.high.plus(ONE)
    return Access(view.node.inputs[table], needed, view.input(table).size(axis))


def _gather(view: NodeBounds) -> Iterator[Access]:
    (axis,) = view.integers("axis") or view.integers("gather_axis") or [0]
    yield _rows_of(view, 0, view.input(1), axis)


def _embedding(view: NodeBounds) -> Iterator[Access]:
    yield _rows_of(view, 1, view.input(0))


def _torch_embedding(view: NodeBounds) -> Iterator[Access]:
    yield _rows_of(view, 0, view.input(1))


def _slice(view: NodeBounds) -> Iterator[Access]:
    table = view.node.inputs[0]
    for axis, start, end, _ in slices_of(view) or ():
        size = view.input(0).size(axis)
        if end is not None and not is_from_end(end) and (end.as_constant or 0) < LAST_END:
            yield Access(table, end, size)
        if start is not None and is_from_end(start):
            yield Access(table, start.times(-1), size)


def _rotary_at(positions: int, table: int) -> Accesses:
    def find(view: NodeBounds) -> Iterator[Access]:
        given = view.input(positions)
        if given.shape == (ONE,) and given.high is not None:  # the position of the step's first token
            given = given._replace(high=given.high.plus(STEP).minus(ONE))
        if view.has_input(positions) and view.has_input(table):
            yield _rows_of(view, table, given)

    return find


def _attention_with_rotary(table: int, positions: int | None = None) -> Accesses:
    def find(view: NodeBounds) -> Iterator[Access]:
        if view.node.attrs.get("do_rotary") and view.has_input(table):
            is_given = positions is not None and view.has_input(positions)
            yield _rows_of(view, table, view.input(positions or 0) if is_given else Bounds(high=ROW.minus(ONE)))

    return find


def _sparse_attention(view: NodeBounds) -> Iterator[Access]:
    yield from _attention_with_rotary(9)(view)
    starts, size = view.input(5).size(-1), view.node.attrs.get("sparse_block_size")
    if starts is not None and isinstance(size, int):  # of each block of tokens, and the end
        yield Access(view.node.inputs[5], ROW, starts.minus(ONE).times(size))


def _embed_layer_norm(view: NodeBounds) -> Iterator[Access]:
    positions = view.input(8) if view.has_input(8) else Bounds(high=STEP.minus(ONE))
    yield _rows_of(view, 3, positions)


def _quantized_embed_layer_norm(view: NodeBounds) -> Iterator[Access]:
    yield _rows_of(view, 3, Bounds(high=STEP.minus(ONE)))


def _elementwise(view: NodeBounds) -> Iterator[Access]:
    """Of values that are computed together, a table of fixed size where another one has a row for each token."""
    known = [(name, x.shape) for name, x in zip(view.node.inputs, view.inputs, strict=True) if x.shape is not None]
    for name, shape in known:
        for axis in range(1, len(shape) + 1):
            size = shape[-axis]
            if size is None or size.as_constant in (None, 1):
                continue
            for _, other in known:
                needed = other[-axis] if axis <= len(other) else None
                if needed is not None and needed.tokens > 0:
                    yield Access(name, needed, size)


_ACCESSES: dict[str, Accesses] = {
    **dict.fromkeys(("Gather", "GatherElements", "com.microsoft.GatherBlockQuantized"), _gather),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where", "And", "Or"), _elementwise),
    **dict.fromkeys(("com.microsoft.RotaryEmbedding", "com.microsoft.MRotaryEmbedding"), _rotary_at(1, 2)),
    "RotaryEmbedding": _rotary_at(3, 1),
    "Slice": _slice,
    "mlx.embedding": _embedding,
    "com.microsoft.TorchEmbedding": _torch_embedding,
    "com.microsoft.GroupQueryAttention": _attention_with_rotary(7, 9),
    "com.microsoft.PagedAttention": _attention_with_rotary(8),
    "com.microsoft.SparseAttention": _sparse_attention,
    "com.microsoft.EmbedLayerNormalization": _embed_layer_norm,
    "com.microsoft.QEmbedLayerNormalization": _quantized_embed_layer_norm,
}
