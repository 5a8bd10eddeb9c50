"""Pools: the owner of a cache's arrays, which gives them to one step at a time so that writes stay in place."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.errors import CacheError, as_int32, check_integer
from mlx_transmuter.cache.pool_storage import write_rows

_TAKE_AND_PUT_HINT = (
    "Wrong: old = pools.take(); new = step(old, x); pools.put(new)   (old is still held)   "
    "Right: new = step(pools.take(), x); pools.put(new); pools.evaluate()"
)


class Pools:
    """The arrays of a cache, axis 0 of each the slot, given away for good to each step that writes them.

    MLX writes into an array's memory only when nobody else holds the array at evaluation and no read of it is
    unfinished; else it copies the whole pool. So the arrays leave with `take`, what the step makes of them comes with
    `put`, and `evaluate` computes it. Between `take` and `put`, and after a step that failed there, the owner is
    empty: the old arrays may be half written over, and every use raises CacheError. `put` raises it too when somebody
    still holds an old array.

        logits, new = step(pools.take(), tokens)
        pools.put(new)
        pools.evaluate(logits)

    arrays: the pools as they are at first. slots: what axis 0 counts, by default its length in the first pool; pools
    that keep n rows for each slot (heads, see CacheIndex.heads) have n · slots.
    """

    def __init__(self, arrays: Iterable[mx.array], num_slots: int | None = None):
        self._arrays: list[mx.array] | None = list(arrays)
        self._taken_refs: list[weakref.ref[mx.array]] = []
        self._shapes_and_dtypes = [(a.shape, a.dtype) for a in self._arrays]
        first = self._shapes_and_dtypes[0][0][0] if self._shapes_and_dtypes else 0
        self.num_slots = first if num_slots is None else check_integer("Pools: slots", num_slots, 0)
        self._has_pending_evaluation = False

    def __len__(self) -> int:
        return len(self._shapes_and_dtypes)

    @property
    def is_taken(self) -> bool:
        """Whether the pools are with a step, or went with one that failed."""
        return self._arrays is None

    @property
    def arrays(self) -> list[mx.array]:
        """The pools, to read. Drop them, and evaluate what was read, before the next take."""
        return list(self._owned_arrays("arrays"))

    def take(self) -> list[mx.array]:
        """The pools, given away: hand them straight to the step that writes them and keep no name for them."""
        arrays = self._owned_arrays("take")
        self._arrays = None
        self._taken_refs = [weakref.ref(a) for a in arrays]
        return arrays

    def put(self, new: Sequence[mx.array]) -> None:
        """Stores what a step made of the pools and empties `new`, where it is a list: the owner alone holds them.

        Raises CacheError when the pools were not taken, when an old array is still held, or when shapes or dtypes
        differ.
        """
        if self._arrays is not None:
            raise CacheError("Pools.put", "pools that nobody took", "a take before each put", _TAKE_AND_PUT_HINT)
        kinds = [(a.shape, a.dtype) for a in new]
        if kinds != self._shapes_and_dtypes:
            raise CacheError(
                "Pools.put",
                _describe_shapes(kinds),
                f"{_describe_shapes(self._shapes_and_dtypes)}, as they were given away",
            )
        held = [i for i, old in enumerate(self._taken_refs) if old() is not None and not any(old() is a for a in new)]
        if held:
            raise CacheError(
                "Pools.put", f"old pools {held} held elsewhere", "no name for them after the step", _TAKE_AND_PUT_HINT
            )
        self._arrays = list(new)
        if isinstance(new, list):
            new.clear()

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step: `arrays` with the pools. wait=False returns while it runs.

        A write that meets an unfinished read copies the pool, so an evaluation first waits for one still running.
        """
        pools = self._owned_arrays("evaluate")
        if self._has_pending_evaluation:
            mx.synchronize()
        self._has_pending_evaluation = not wait
        try:
            (mx.eval if wait else mx.async_eval)(*arrays, *pools)
        except BaseException:
            self._arrays = None
            raise

    def drop(self) -> None:
        """Gives the pools' memory back, also after a step that failed; from then on they are given away."""
        self._arrays, self._taken_refs = None, []

    def grow(self, num_slots: int) -> None:
        """More slots, empty ones after those there are; each pool is copied once, one at a time.

        Pools of n rows a slot get n for each new one, at the end: right where their blocks (see CacheIndex.heads) are
        whole both before and after. Raises CacheError for fewer slots than there are, or a pool of other than n ·
        slots.
        """
        arrays = self._owned_arrays("grow")
        num_slots = check_integer("Pools.grow", num_slots, self.num_slots)
        if any(a.shape[0] % max(1, self.num_slots) for a in arrays) or (num_slots and not self.num_slots):
            raise CacheError(
                "Pools.grow",
                _describe_shapes(self._shapes_and_dtypes),
                f"a multiple of {self.num_slots} slots on axis 0",
            )
        for i in range(len(arrays)):
            shape, dtype = self._shapes_and_dtypes[i]
            more = (shape[0] // max(1, self.num_slots) * (num_slots - self.num_slots), *shape[1:])
            arrays[i] = mx.concatenate([arrays[i], mx.zeros(more, dtype)])
            mx.eval(arrays[i])
        self._shapes_and_dtypes = [(a.shape, a.dtype) for a in arrays]
        self.num_slots = num_slots

    def copy_rows(self, source_rows: Sequence[int] | np.ndarray, target_rows: Sequence[int] | np.ndarray) -> None:
        """Copies rows of every pool, by their numbers on axis 0. Reads end before the writes, which stay in place."""
        arrays = self._owned_arrays("copy")
        if not len(source_rows) and not len(target_rows):
            return
        source = as_int32("Pools.copy: sources", source_rows, ["n"])
        target = as_int32("Pools.copy: targets", target_rows, source.shape)
        mx.eval(source, target, *arrays)
        for i in range(len(arrays)):
            rows = mx.take(arrays[i], source, axis=0)
            mx.eval(rows)
            arrays[i] = write_rows(arrays[i], target, rows)
            mx.eval(arrays[i])

    def _owned_arrays(self, what: str) -> list[mx.array]:
        if self._arrays is None:
            do = f"{_TAKE_AND_PUT_HINT}   After a step that failed: make new pools."
            raise CacheError(f"Pools.{what}", "pools that were given away", "the pools of the last step, put back", do)
        return self._arrays


def _describe_shapes(kinds: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in kinds)
