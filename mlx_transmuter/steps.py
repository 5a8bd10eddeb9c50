"""The steps: a decoder's step as a pure function of arrays, for each way in which a graph keeps its cache.

Over pools a program reads and writes by an index; the others get their past as the graph wants it, exact or as a
buffer, and give back the keys and values of the step's tokens, which are written into the pools before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import CacheIndex, Kind, Layered, PackedPool, Packing
from mlx_transmuter.entries import Entry
from mlx_transmuter.module import Module
from mlx_transmuter.signature import ENDS, INDEX, LANES, Mode, Signature
from mlx_transmuter.sizes import Columns


class DecoderError(ValueError):
    """A step that the decoder cannot run: what was `found`, what was `expected`, what to `do`."""

    def __init__(self, found: str, expected: str, do: str = ""):
        self.found, self.expected, self.do = found, expected, do
        super().__init__(f"found {found}; expected {expected}" + (f". To mend it: {do}." if do else "."))


@dataclass(frozen=True)
class Graph:
    """What a step runs: the module, its signature, the most positions of a row (None: no limit), what a slot of each
    pool holds, whether the graph takes one row, and the largest window of its attention (None: there is none).
    """

    module: Module
    signature: Signature
    max_positions: int | None
    kinds: tuple[Kind, ...]
    alone: bool = False
    window: int | None = None


def kind(entry: Entry, bits: int | None, group_size: int) -> Kind:
    """What a slot holds of the entry."""
    dtype = ops.device_dtype(entry.dtype)
    if bits is None:
        return Kind(entry.heads, entry.dim, dtype)
    packing = Packing.of(bits, group_size, entry.dim, dtype)
    return Kind(entry.heads, packing.width, mx.uint32, packing)


def new_tokens(rows: int, lengths: np.ndarray, total: np.ndarray, tokens: Any, counts: Sequence[int]) -> np.ndarray:
    """`counts` as int32 [rows]. Raises DecoderError for those that don't fit the tokens, or pass the rows' totals."""
    shape, new = tokens.shape, np.asarray(counts, np.int32)
    if shape[0] != rows or new.shape != (rows,) or min(counts) < 0 or max(counts) > shape[1]:
        found = f"tokens {list(shape)} and counts {list(counts)}"
        raise DecoderError(found, f"{rows} rows, and from 0 to all of a row's tokens real")
    if (lengths + new > total).any():
        raise DecoderError(f"rows of {(lengths + new).tolist()} tokens", f"at most {total.tolist()}")
    return new


def new_guesses(
    signature: Signature, supports: Collection[str], lengths: np.ndarray, total: np.ndarray, tokens: Any, depths: Any
) -> np.ndarray:
    """How many tokens each row has with its deepest guess, int32 [rows]. Raises DecoderError for a decoder that takes
    no drafts, depths of another shape than the tokens', and guesses that pass the rows' totals."""
    found = None
    if signature.states:
        found = f"a draft for a graph with states ({signature.states[0].past})"
        expected = "a cache of positions, from which guesses can be dropped"
    elif "drafts" not in supports:
        found, expected = "a draft for a graph whose attention isn't over pools", "one that the conversion rewrote"
    if found:
        raise DecoderError(found, expected, "run plain steps")
    last = lengths + depths.max(axis=1) + 1
    if depths.shape != tuple(tokens.shape) or (last > total).any():
        raise DecoderError(f"guesses up to {last.tolist()} tokens", f"at most {total.tolist()}")
    return last


def pooled(graph: Graph, seq: int, columns: Columns, block: int, paged: bool) -> Callable[..., Any]:
    """A step over pools: (pools, tokens, lengths, counts, table, near, given, positions) → (logits, pools', states').

    table, near: the tables of `columns`, a ring's where so; None for runs that are read as they lie, or of no columns.
    """

    def run(pools, tokens, lengths, counts, table, near, given, positions):
        rows = tokens.shape[0]
        place = lengths[:, None] + mx.arange(seq, dtype=mx.int32)
        pos = mx.where(mx.arange(seq, dtype=mx.int32) < counts[:, None], place, -1)
        if paged:
            index = CacheIndex.make(pos, table)
        else:
            index = CacheIndex.rows(block, [0] * rows)
            index = (index if columns.ring else index.narrow(columns.context)).at(pos)
        index = _ring(graph, index) if columns.ring else index
        local = None if near is None else _ring(graph, CacheIndex.make(pos, near))
        ends = mx.maximum(counts - 1, 0)
        place = place if positions is None else positions
        logits, pools, states = _over_pools(graph, pools, tokens, index, block, ends[:, None], place, given, local)
        logits = logits[:, 0] if graph.signature.ends else logits_at(logits, ends)
        return logits, pools, _kept(graph, given, states, counts)

    return run


def drafted(graph: Graph, seq: int, columns: Columns, block: int) -> Callable[..., Any]:
    """The step of a draft: (pools, tokens, places, table, near, slots, sees, given) → (logits [rows, seq, vocab],
    pools'). table, near: as of `pooled`, over pages.
    """

    def run(pools, tokens, places, table, near, slots, sees, given):
        index = CacheIndex.make(places, table)
        index = (_ring(graph, index) if columns.ring else index).draft(slots, sees)
        local = None if near is None else _ring(graph, CacheIndex.make(places, near)).draft(slots, sees)
        ends = mx.broadcast_to(mx.arange(seq, dtype=mx.int32), tokens.shape)
        return _over_pools(graph, pools, tokens, index, block, ends, mx.maximum(places, 0), given, local)[:2]

    return run


def _ring(graph: Graph, index: CacheIndex) -> CacheIndex:
    assert graph.window is not None
    return index.ring().window(graph.window)


def packed(graph: Graph, seq: int, block: int) -> Callable[..., Any]:
    """A step of prompts, one after another in one lane: (pools, tokens, places, slots, ends) → (logits [k, vocab],
    pools').

    tokens, places (positions; -1: padding) and slots are int32 [1, seq], ends int32 [1, k]: the tokens whose logits are
    wanted.
    """
    signature, _ = CacheIndex.packed(seq, [[seq]]).walk()

    def run(pools, tokens, places, slots, ends):
        index = CacheIndex.from_walk(signature, [places]).keep(slots)
        logits, pools, _ = _over_pools(graph, pools, tokens, index, block, ends, mx.maximum(places, 0), {})
        return logits[0], pools

    return run


def lane(prompts: Sequence[Sequence[int]], table: np.ndarray, seq: int) -> tuple[np.ndarray, ...]:
    """What `packed` takes of prompts, one after another in a lane of seq tokens: tokens, places, slots, ends.

    table: the slots of each prompt's tokens. The end of an empty prompt is 0.
    """
    tokens, (places, slots) = np.zeros((1, seq), np.int32), np.full((2, 1, seq), -1, np.int32)
    ends, at = np.zeros((1, len(prompts)), np.int32), 0
    for row, prompt in enumerate(prompts):
        if count := len(prompt):
            here = slice(at, at + count)
            tokens[0, here], places[0, here], slots[0, here] = prompt, range(count), table[row, :count]
            at += count
            ends[0, row] = at - 1
    return tokens, places, slots, ends


def _over_pools(graph, pools, tokens, index, block, ends, place, given, local=None):
    """The program over the pools: the logits of the tokens `ends` [rows, k] (of all, where it can't choose), the pools'
    and the states'. local: the index of layers with a window, where they have one of their own.
    """
    signature, module = graph.signature, graph.module
    rows = pools[0].shape[0]
    feed: dict[str, Any] = dict(given)
    feed |= {
        signature.tokens: tokens,
        INDEX: index if local is None else Layered(index, local),
        LANES: lanes(signature, index, block, rows)
        if local is None
        else Layered(lanes(signature, index, block, rows), lanes(signature, local, block, rows)),
    }
    feed |= small_inputs(graph, None, place, *tokens.shape[:2])
    if signature.ends:
        feed[ENDS] = ends
    feed |= {
        entry.past: PackedPool(pool, kind.packing) if kind.packing else pool
        for entry, kind, pool in zip(signature.entries, graph.kinds, pools, strict=True)
    }
    given_back = module(**feed)
    after = [given_back[entry.present] for entry in signature.entries]
    pools = [pool.rows if isinstance(pool, PackedPool) else pool for pool in after]
    states = [given_back[state.present] for state in signature.states]
    return logits_of(graph, given_back), pools, states


def lanes(signature: Signature, index: CacheIndex, block: int, rows: int) -> CacheIndex:
    """The index over the pools of a program, each of so many rows, the last one spare; see CacheIndex.heads."""
    heads = signature.entries[0].heads
    if not signature.both:
        return index.heads(heads, block).spare(rows - 1)
    return index.heads(heads // 2, block).twice((rows - 1) // 2).spare(rows - 1)


def _kept(graph: Graph, given: Mapping[str, mx.array], states: list[mx.array], counts: mx.array) -> list[mx.array]:
    """The new states of the rows that had tokens, and the old ones of the others."""
    kept = []
    for state, new in zip(graph.signature.states, states, strict=True):
        shape = [1] * new.ndim
        shape[state.batch] = -1
        kept.append(mx.where((counts > 0).reshape(shape), new.astype(given[state.past].dtype), given[state.past]))
    return kept


def small_inputs(graph: Graph, mask: mx.array | None, place: mx.array, rows: int, seq: int) -> dict[str, Any]:
    """What the graph takes of a step beside tokens and cache: the mask, positions, how many logits it gives."""
    signature, program = graph.signature, graph.module.program
    feed: dict[str, Any] = {}
    if signature.mask and mask is not None:
        value = program.input(signature.mask)
        assert value is not None
        feed[signature.mask] = mask.astype(ops.device_dtype(value.dtype))
    if signature.positions:
        feed[signature.positions] = _positions(graph, place, rows, seq)
    if signature.keep:
        feed[signature.keep] = np.zeros(signature.keep_shape, np.int64)
    return feed


def called(graph: Graph, feed: Mapping[str, Any], rows: int) -> dict[str, mx.array]:
    """The graph's outputs; of one that takes one row at a time, those of all rows, each run by itself."""
    if not graph.alone:
        return graph.module(**feed)
    axes = {part.past: part.batch for part in graph.signature.carried}
    axes |= {graph.signature.positions: -2}
    results = {part.present: part.batch for part in graph.signature.carried} | {graph.signature.logits: 0}
    found = []
    for row in range(rows):
        one = {
            name: mx.take(value, mx.array([row]), axis=axes.get(name, 0)) if isinstance(value, mx.array) else value
            for name, value in feed.items()
        }
        found.append(graph.module(**one))
    return {name: mx.concatenate([one[name] for one in found], axis=axis) for name, axis in results.items()}


def _positions(graph: Graph, place: mx.array, rows: int, seq: int) -> mx.array:
    """place [rows, seq], or [axes, rows, seq], as the graph's position_ids."""
    if graph.max_positions:
        place = mx.minimum(place, graph.max_positions - 1)  # of padding; a table ends there
    axes = graph.signature.position_axes
    return mx.broadcast_to(place, (axes, rows, seq)) if axes and place.ndim == 2 else place


def logits_of(graph: Graph, given_back: Mapping[str, mx.array]) -> mx.array:
    """The logits [rows, tokens, vocab]. Raises DecoderError for others than the graph declares."""
    logits = given_back[graph.signature.logits]
    if logits.ndim != 3 or logits.shape[2] != graph.signature.vocab:
        raise DecoderError(
            f"logits of shape {list(logits.shape)}", f"[rows, tokens, {graph.signature.vocab}], as declared"
        )
    return logits


def logits_at(logits: mx.array, ends: mx.array) -> mx.array:
    """logits [rows, seq, vocab] at each row's token ends [rows]: [rows, vocab]. A graph may give its last one alone."""
    ends = mx.minimum(ends, logits.shape[1] - 1)
    at = mx.broadcast_to(ends[:, None, None], (logits.shape[0], 1, logits.shape[2]))
    return mx.take_along_axis(logits, at, axis=1)[:, 0]


def unrewritten(graph: Graph, mode: Mode, seq: int, context: int, block: int) -> Callable[..., Any]:
    """A step over past and present: (pools, tokens, lengths, counts, table, given, positions) → (logits, news,
    states').

    The news are the keys and values of the step's tokens, [rows · heads, seq, dim] for each entry of the cache.
    """
    signature = graph.signature
    cache = {"append": _append, "in_place": _in_place, "grow": _grow}[mode]

    def run(pools, tokens, lengths, counts, table, given, positions):
        rows = tokens.shape[0]
        entries = list(zip(signature.entries, graph.kinds, strict=True))
        past, mask, fresh = cache(pools, lengths, counts, table, seq, context, entries, block)
        feed: dict[str, Any] = dict(given)
        feed[signature.tokens] = tokens
        place = lengths[:, None] + mx.arange(seq, dtype=mx.int32) if positions is None else positions
        feed |= small_inputs(graph, mask, place, rows, seq)
        if signature.branch:
            feed[signature.branch] = np.array([context > 0])
        feed |= {entry.past: array for entry, array in zip(signature.entries, past, strict=True)}
        ends = mx.maximum(counts - 1, 0)
        if signature.ends:
            feed[ENDS] = ends[:, None]
        given_back = called(graph, feed, rows)
        logits = logits_at(logits_of(graph, given_back), ends)
        news = [
            fresh(given_back[entry.present].transpose(entry.order).reshape(rows * entry.heads, -1, entry.dim), entry)
            for entry in signature.entries
        ]
        return logits, news, _kept(graph, given, [given_back[state.present] for state in signature.states], counts)

    return run


def _append(pools, lengths, counts, table, seq, context, entries, block):
    """The past as a buffer with its free columns first, hidden by the mask; the new columns come back after it.

    The last column of the buffer is the newest position: exporters measure a window as a distance between columns.
    """
    columns = lengths[:, None] - context + mx.arange(context, dtype=mx.int32)
    index = CacheIndex.make(lengths[:, None] - 1, table).select(columns[:, None])
    past = [
        _read(index, pool, entry, kind, block, squeeze=True) for pool, (entry, kind) in zip(pools, entries, strict=True)
    ]
    real = mx.arange(seq, dtype=mx.int32) < counts[:, None]
    return past, mx.concatenate([columns >= 0, real], axis=1), lambda present, entry: present[:, context:]


def _in_place(pools, lengths, counts, table, seq, context, entries, block):
    """The past as a buffer into which the graph writes after as many rows as the mask counts, padding included."""
    index = CacheIndex.make(lengths[:, None] - 1, table)
    past = [_read(index, pool, entry, kind, block) for pool, (entry, kind) in zip(pools, entries, strict=True)]
    mask = mx.arange(context, dtype=mx.int32) < lengths[:, None] + seq

    def fresh(present, entry):
        places = lengths[:, None] + mx.arange(seq, dtype=mx.int32)
        places = mx.repeat(places, entry.heads, axis=0)[:, :, None]
        return mx.take_along_axis(present, mx.broadcast_to(places, (*places.shape[:2], entry.dim)), axis=1)

    return past, mask, fresh


def _grow(pools, lengths, counts, table, seq, context, entries, block):
    """The past at its exact length, the same for all rows: the graph takes the positions from it."""
    rows = table.shape[0]
    if context:
        index = CacheIndex.make(lengths[:, None] - 1, table)
        past = [_read(index, pool, entry, kind, block) for pool, (entry, kind) in zip(pools, entries, strict=True)]
    else:
        past = [mx.zeros(entry.sizes(rows, 0), ops.device_dtype(entry.dtype)) for entry, _ in entries]
    return past, mx.ones((rows, context + seq), mx.bool_), lambda present, entry: present[:, context:]


def _read(index: CacheIndex, pool: mx.array, entry: Entry, kind: Kind, block: int, squeeze: bool = False) -> mx.array:
    """What the index reads of the pool, in the shape of the graph's past."""
    seen = index.heads(entry.heads, block).read(pool)
    seen = kind.packing.unpack(seen) if kind.packing else seen
    seen = seen[:, 0] if squeeze else seen
    rows, length = seen.shape[0] // entry.heads, seen.shape[1]
    order = entry.order
    sizes = entry.sizes(rows, length)
    return seen.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in range(len(order))])


def write(kinds: Sequence[Kind], block: int) -> Callable[..., Any]:
    """The function that writes the news of a step: (pools, news, places, table) → pools'."""

    def run(pools, news, places, table):
        index = CacheIndex.make(places, table)
        return [
            index.heads(kind.heads, block)
            .spare(pool.shape[0] - 1)
            .store(kind.packing.pack(new) if kind.packing else new.astype(pool.dtype), pool)
            for pool, new, kind in zip(pools, news, kinds, strict=True)
        ]

    return run
