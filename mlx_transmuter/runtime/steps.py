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
from mlx_transmuter.cache import CacheIndex, PoolSpec, QuantizedFormat, QuantizedPool
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.program.cache_pairs import CachePair
from mlx_transmuter.program.signature import CacheMode, DecoderSignature
from mlx_transmuter.runtime.buckets import StepColumns
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.step_inputs import StepInputs


class DecoderError(TransmuterError):
    """A step or a session that the decoder cannot run."""

    def __init__(self, found: str, expected: str, do: str = ""):
        super().__init__("", found, expected, do)


@dataclass(frozen=True)
class DecoderGraph:
    """What a step runs.

    step_inputs: makes the module's inputs. pool_specs: what a slot of each pool holds. row_by_row: whether the graph
    takes one row. max_window: the largest window of its attention; None where it has none.
    """

    module: ProgramModule
    step_inputs: StepInputs
    pool_specs: tuple[PoolSpec, ...]
    row_by_row: bool = False
    max_window: int | None = None

    @property
    def signature(self) -> DecoderSignature:
        """The signature of the module's program."""
        return self.step_inputs.signature


def pool_spec(pair: CachePair, bits: int | None, group_size: int) -> PoolSpec:
    """What a slot holds of the entry."""
    dtype = ops.device_dtype(pair.dtype)
    if bits is None:
        return PoolSpec(pair.heads, pair.head_dim, dtype)
    packing = QuantizedFormat.choose(bits, group_size, pair.head_dim, dtype)
    return PoolSpec(pair.heads, packing.width, mx.uint32, packing)


def check_new_tokens(
    rows: int, lengths: np.ndarray, max_lengths: np.ndarray, tokens: Any, counts: Sequence[int]
) -> np.ndarray:
    """`counts` as int32 [rows]. Raises DecoderError for those that don't fit the tokens, or pass the rows' totals."""
    shape, new = tokens.shape, np.asarray(counts, np.int32)
    if shape[0] != rows or new.shape != (rows,) or min(counts) < 0 or max(counts) > shape[1]:
        found = f"tokens {list(shape)} and counts {list(counts)}"
        raise DecoderError(found, f"{rows} rows, and from 0 to all of a row's tokens real")
    if (lengths + new > max_lengths).any():
        raise DecoderError(f"rows of {(lengths + new).tolist()} tokens", f"at most {max_lengths.tolist()}")
    return new


def check_draft(
    signature: DecoderSignature,
    supports: Collection[str],
    lengths: np.ndarray,
    max_lengths: np.ndarray,
    tokens: Any,
    depths: Any,
) -> np.ndarray:
    """How many tokens each row has with its deepest guess, int32 [rows]. Raises DecoderError for a decoder that takes
    no drafts, depths of another shape than the tokens', and guesses that pass the rows' totals."""
    found = None
    if signature.state_pairs:
        found = f"a draft for a graph with states ({signature.state_pairs[0].past})"
        expected = "a cache of positions, from which guesses can be dropped"
    elif "drafts" not in supports:
        found, expected = "a draft for a graph whose attention isn't over pools", "one that the conversion rewrote"
    if found:
        raise DecoderError(found, expected, "run plain steps")
    last = lengths + depths.max(axis=1) + 1
    if depths.shape != tuple(tokens.shape) or (last > max_lengths).any():
        raise DecoderError(f"guesses up to {last.tolist()} tokens", f"at most {max_lengths.tolist()}")
    return last


def make_pooled_step(
    graph: DecoderGraph, seq: int, columns: StepColumns, block: int, paged: bool
) -> Callable[..., Any]:
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
            index = (index if columns.is_ring else index.limit_context(columns.context)).with_positions(pos)
        index = _ring_index(graph, index) if columns.is_ring else index
        local = None if near is None else _ring_index(graph, CacheIndex.make(pos, near))
        ends = mx.maximum(counts - 1, 0)
        place = place if positions is None else positions
        logits, pools, states = _run_over_pools(graph, pools, tokens, index, block, ends[:, None], place, given, local)
        logits = logits[:, 0] if graph.signature.selects_logits else gather_logits(logits, ends)
        return logits, pools, _update_states(graph, given, states, counts)

    return run


def make_draft_step(graph: DecoderGraph, seq: int, columns: StepColumns, block: int) -> Callable[..., Any]:
    """The step of a draft: (pools, tokens, places, table, near, slots, sees, given) → (logits [rows, seq, vocab],
    pools'). table, near: as of `pooled`, over pages.
    """

    def run(pools, tokens, places, table, near, slots, sees, given):
        index = CacheIndex.make(places, table)
        index = (_ring_index(graph, index) if columns.is_ring else index).draft(slots, sees)
        local = None if near is None else _ring_index(graph, CacheIndex.make(places, near)).draft(slots, sees)
        ends = mx.broadcast_to(mx.arange(seq, dtype=mx.int32), tokens.shape)
        return _run_over_pools(graph, pools, tokens, index, block, ends, mx.maximum(places, 0), given, local)[:2]

    return run


def _ring_index(graph: DecoderGraph, index: CacheIndex) -> CacheIndex:
    assert graph.max_window is not None
    return index.as_ring().window(graph.max_window)


def make_packed_prefill(graph: DecoderGraph, seq: int, block: int) -> Callable[..., Any]:
    """A step of prompts, one after another in one lane: (pools, tokens, places, slots, ends) → (logits [k, vocab],
    pools').

    tokens, places (positions; -1: padding) and slots are int32 [1, seq], ends int32 [1, k]: the tokens whose logits are
    wanted.
    """
    signature, _ = CacheIndex.packed(seq, [[seq]]).walk()

    def run(pools, tokens, places, slots, ends):
        index = CacheIndex.from_walk(signature, [places]).store_at(slots)
        logits, pools, _ = _run_over_pools(graph, pools, tokens, index, block, ends, mx.maximum(places, 0), {})
        return logits[0], pools

    return run


def pack_prompts(prompts: Sequence[Sequence[int]], table: np.ndarray, seq: int) -> tuple[np.ndarray, ...]:
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


def _run_over_pools(
    graph: DecoderGraph,
    pools: list[mx.array],
    tokens,
    index: CacheIndex,
    block: int,
    ends,
    place,
    given,
    local: CacheIndex | None = None,
):
    """The program over the pools: the logits of the tokens `ends` [rows, k] (of all, where it can't choose), the pools'
    and the states'. local: the index of layers with a window, where they have one of their own.
    """
    signature = graph.signature
    stored = [
        QuantizedPool(pool, kind.quantized_format) if kind.quantized_format else pool
        for kind, pool in zip(graph.pool_specs, pools, strict=True)
    ]
    cache = graph.step_inputs.pools(stored, index, block, window_index=local)
    feed = graph.step_inputs.feed(tokens=tokens, positions=place, past=cache, logit_indices=ends, extra_inputs=given)
    given_back = graph.module(**feed)
    after = [given_back[entry.present] for entry in signature.cache_pairs]
    pools = [pool.rows if isinstance(pool, QuantizedPool) else pool for pool in after]
    states = [given_back[state.present] for state in signature.state_pairs]
    return check_logits(graph, given_back), pools, states


def _update_states(
    graph: DecoderGraph, given: Mapping[str, mx.array], states: list[mx.array], counts: mx.array
) -> list[mx.array]:
    """The new states of the rows that had tokens, and the old ones of the others."""
    kept = []
    for state, new in zip(graph.signature.state_pairs, states, strict=True):
        shape = [1] * new.ndim
        shape[state.batch_axis] = -1
        kept.append(mx.where((counts > 0).reshape(shape), new.astype(given[state.past].dtype), given[state.past]))
    return kept


def call_graph(graph: DecoderGraph, feed: Mapping[str, Any], rows: int) -> dict[str, mx.array]:
    """The graph's outputs; of one that takes one row at a time, those of all rows, each run by itself."""
    if not graph.row_by_row:
        return graph.module(**feed)
    axes = {part.past: part.batch_axis for part in graph.signature.pairs}
    axes |= {graph.signature.positions_input: -2}
    results = {part.present: part.batch_axis for part in graph.signature.pairs} | {graph.signature.logits_output: 0}
    found = []
    for row in range(rows):
        one = {
            name: mx.take(value, mx.array([row]), axis=axes.get(name, 0)) if isinstance(value, mx.array) else value
            for name, value in feed.items()
        }
        found.append(graph.module(**one))
    return {name: mx.concatenate([one[name] for one in found], axis=axis) for name, axis in results.items()}


def check_logits(graph: DecoderGraph, given_back: Mapping[str, mx.array]) -> mx.array:
    """The logits [rows, tokens, vocab]. Raises DecoderError for others than the graph declares."""
    logits = given_back[graph.signature.logits_output]
    if logits.ndim != 3 or logits.shape[2] != graph.signature.vocab_size:
        raise DecoderError(
            f"logits of shape {list(logits.shape)}", f"[rows, tokens, {graph.signature.vocab_size}], as declared"
        )
    return logits


def gather_logits(logits: mx.array, ends: mx.array) -> mx.array:
    """logits [rows, seq, vocab] at each row's token ends [rows]: [rows, vocab]. A graph may give its last one alone."""
    ends = mx.minimum(ends, logits.shape[1] - 1)
    at = mx.broadcast_to(ends[:, None, None], (logits.shape[0], 1, logits.shape[2]))
    return mx.take_along_axis(logits, at, axis=1)[:, 0]


def make_past_present_step(
    graph: DecoderGraph, mode: CacheMode, seq: int, context: int, block: int
) -> Callable[..., Any]:
    """A step over past and present: (pools, tokens, lengths, counts, table, given, positions) → (logits, news,
    states').

    The news are the keys and values of the step's tokens, [rows · heads, seq, dim] for each entry of the cache.
    """
    signature = graph.signature
    cache = {"append": _append_past, "in_place": _in_place_past, "grow": _growing_past}[mode]

    def run(pools, tokens, lengths, counts, table, given, positions):
        rows = tokens.shape[0]
        entries = list(zip(signature.cache_pairs, graph.pool_specs, strict=True))
        past, mask, fresh = cache(pools, lengths, counts, table, seq, context, entries, block)
        place = lengths[:, None] + mx.arange(seq, dtype=mx.int32) if positions is None else positions
        ends = mx.maximum(counts - 1, 0)
        feed = graph.step_inputs.feed(
            tokens=tokens,
            positions=place,
            past={entry.past: array for (entry, _), array in zip(entries, past, strict=True)},
            past_length=context,
            mask=mask,
            logit_indices=ends[:, None],
            extra_inputs=given,
        )
        given_back = call_graph(graph, feed, rows)
        logits = gather_logits(check_logits(graph, given_back), ends)
        news = [
            fresh(
                given_back[entry.present].transpose(entry.axis_order).reshape(rows * entry.heads, -1, entry.head_dim),
                entry,
            )
            for entry in signature.cache_pairs
        ]
        return (
            logits,
            news,
            _update_states(graph, given, [given_back[state.present] for state in signature.state_pairs], counts),
        )

    return run


def _append_past(pools, lengths, counts, table, seq, context, entries: Sequence[tuple[CachePair, PoolSpec]], block):
    """The past as a buffer with its free columns first, hidden by the mask; the new columns come back after it.

    The last column of the buffer is the newest position: exporters measure a window as a distance between columns.
    """
    columns = lengths[:, None] - context + mx.arange(context, dtype=mx.int32)
    index = CacheIndex.make(lengths[:, None] - 1, table).select(columns[:, None])
    past = [
        _read_past(index, pool, entry, kind, block, squeeze=True)
        for pool, (entry, kind) in zip(pools, entries, strict=True)
    ]
    real = mx.arange(seq, dtype=mx.int32) < counts[:, None]
    return past, mx.concatenate([columns >= 0, real], axis=1), lambda present, entry: present[:, context:]


def _in_place_past(pools, lengths, counts, table, seq, context, entries: Sequence[tuple[CachePair, PoolSpec]], block):
    """The past as a buffer into which the graph writes after as many rows as the mask counts, padding included."""
    index = CacheIndex.make(lengths[:, None] - 1, table)
    past = [_read_past(index, pool, entry, kind, block) for pool, (entry, kind) in zip(pools, entries, strict=True)]
    mask = mx.arange(context, dtype=mx.int32) < lengths[:, None] + seq

    def fresh(present, entry):
        places = lengths[:, None] + mx.arange(seq, dtype=mx.int32)
        places = mx.repeat(places, entry.heads, axis=0)[:, :, None]
        return mx.take_along_axis(present, mx.broadcast_to(places, (*places.shape[:2], entry.head_dim)), axis=1)

    return past, mask, fresh


def _growing_past(pools, lengths, counts, table, seq, context, entries: Sequence[tuple[CachePair, PoolSpec]], block):
    """The past at its exact length, the same for all rows: the graph takes the positions from it."""
    rows = table.shape[0]
    if context:
        index = CacheIndex.make(lengths[:, None] - 1, table)
        past = [_read_past(index, pool, entry, kind, block) for pool, (entry, kind) in zip(pools, entries, strict=True)]
    else:
        past = [mx.zeros(entry.shape_for(rows, 0), ops.device_dtype(entry.dtype)) for entry, _ in entries]
    return past, mx.ones((rows, context + seq), mx.bool_), lambda present, entry: present[:, context:]


def _read_past(
    index: CacheIndex, pool: mx.array, entry: CachePair, kind: PoolSpec, block: int, squeeze: bool = False
) -> mx.array:
    """What the index reads of the pool, in the shape of the graph's past."""
    seen = index.for_heads(entry.heads, block).read(pool)
    seen = kind.quantized_format.dequantize(seen) if kind.quantized_format else seen
    seen = seen[:, 0] if squeeze else seen
    rows, length = seen.shape[0] // entry.heads, seen.shape[1]
    order = entry.axis_order
    sizes = entry.shape_for(rows, length)
    return seen.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in range(len(order))])


def make_pool_write(pool_specs: Sequence[PoolSpec], block: int) -> Callable[..., Any]:
    """The function that writes the news of a step: (pools, news, places, table) → pools'."""

    def run(pools, news, places, table):
        index = CacheIndex.make(places, table)
        return [
            index.for_heads(kind.heads, block)
            .with_spare_row(pool.shape[0] - 1)
            .write(kind.quantized_format.quantize(new) if kind.quantized_format else new.astype(pool.dtype), pool)
            for pool, new, kind in zip(pools, news, pool_specs, strict=True)
        ]

    return run
