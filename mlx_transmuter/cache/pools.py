"""Pools: the owner of a cache's arrays, which gives them to one step at a time so that writes stay in place; and how
rows of a pool are written and read.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.arguments import as_int32
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import in_range

_TAKE_AND_PUT_HINT = (
    "Keep no reference to the pools that a step takes. "
    "Wrong: old = pools.take(); new = step(old, x); pools.put(new)   (old still refers to the old pools)   "
    "Right: new = step(pools.take(), x); pools.put(new); pools.evaluate()"
)


class Pools:
    """The arrays of a cache, whose axis 0 counts pool rows, given away for good to each step that writes them.

    MLX writes into an array's memory only when nothing else refers to the array at evaluation and no read of it is
    unfinished; otherwise it copies the whole pool. So `take` gives the arrays away, `put` takes the arrays that the
    step returned, and `evaluate` computes them. Between `take` and `put`, and after a step that failed there, the owner
    is empty: the old arrays may be partly overwritten, and every use raises CacheError. `put` raises it too when
    something still refers to an old array.

        logits, new = step(pools.take(), tokens)
        pools.put(new)
        pools.evaluate(logits)

    arrays: the pools at first.
    """

    def __init__(self, arrays: Iterable[mx.array]):
        self._arrays: list[mx.array] | None = list(arrays)
        self._taken_refs: list[weakref.ref[mx.array]] = []
        self._shapes_and_dtypes = [(array.shape, array.dtype) for array in self._arrays]
        self._has_pending_evaluation = False

    def __len__(self) -> int:
        return len(self._shapes_and_dtypes)

    @property
    def is_taken(self) -> bool:
        """Whether a step has the pools, or had them and failed."""
        return self._arrays is None

    @property
    def arrays(self) -> list[mx.array]:
        """The pools, to read. Delete the references, and evaluate what was read, before the next take."""
        return list(self._owned_arrays("arrays"))

    def take(self) -> list[mx.array]:
        """Returns the pools and gives them away: pass them straight to the step that writes them, under no name."""
        arrays = self._owned_arrays("take")
        self._arrays = None
        self._taken_refs = [weakref.ref(array) for array in arrays]
        return arrays

    def put(self, new: Sequence[mx.array]) -> None:
        """Stores the pools that a step returned and empties `new`, if it is a list, so that only the owner refers to
        them.

        Raises CacheError when the pools were not taken, when something still refers to an old array, or when shapes or
        dtypes differ.
        """
        if self._arrays is not None:
            raise CacheError("Pools.put", "pools that were not taken", "a take before each put", _TAKE_AND_PUT_HINT)
        found = [(array.shape, array.dtype) for array in new]
        if found != self._shapes_and_dtypes:
            expected = f"{_describe_shapes(self._shapes_and_dtypes)}, as they were taken"
            raise CacheError("Pools.put", _describe_shapes(found), expected)
        if referenced := self._referenced_old_pools(new):
            expected = "no reference to them after the step"
            raise CacheError("Pools.put", f"references to the old pools {referenced}", expected, _TAKE_AND_PUT_HINT)
        self._arrays = list(new)
        if isinstance(new, list):
            new.clear()

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step: of `arrays` and of the pools. wait=False returns while it runs.

        A write that meets an unfinished read copies the pool, so an evaluation first waits for those.
        """
        pools = self._owned_arrays("evaluate")
        self._finish_reads()
        self._has_pending_evaluation = not wait
        try:
            (mx.eval if wait else mx.async_eval)(*arrays, *pools)
        except BaseException:
            self._arrays = None
            raise

    def drop(self) -> None:
        """Releases the pools' memory, also after a step that failed; from then on the owner is empty."""
        self._arrays, self._taken_refs = None, []

    def copy_pool_rows(
        self, source_pool_rows: Sequence[int] | np.ndarray, target_pool_rows: Sequence[int] | np.ndarray
    ) -> None:
        """Copies rows of every pool, by their numbers on axis 0. Reads end before the writes, which stay in place."""
        arrays = self._owned_arrays("copy_pool_rows")
        if not len(source_pool_rows) and not len(target_pool_rows):
            return
        source = as_int32("Pools.copy_pool_rows: source_pool_rows", source_pool_rows, ["n"])
        target = as_int32("Pools.copy_pool_rows: target_pool_rows", target_pool_rows, source.shape)
        mx.eval(source, target, *arrays)
        for i in range(len(arrays)):
            rows = mx.take(arrays[i], source, axis=0)
            mx.eval(rows)
            self._finish_reads()
            arrays[i] = write_pool_rows(arrays[i], target, rows)
            mx.eval(arrays[i])

    def _finish_reads(self) -> None:
        """Waits until nothing reads the pools any more, before they are written.

        A GPU holds what a command buffer read until its completion was handled, which may be later than an evaluation
        returns.
        """
        if self._has_pending_evaluation or mx.default_device() != mx.cpu:
            mx.synchronize()
        self._has_pending_evaluation = False

    def _owned_arrays(self, method: str) -> list[mx.array]:
        if self._arrays is None:
            do = f"{_TAKE_AND_PUT_HINT}   After a step that failed: make new pools."
            raise CacheError(
                f"Pools.{method}", "pools that were given away", "the pools of the last step, put back", do
            )
        return self._arrays

    def _referenced_old_pools(self, new: Sequence[mx.array]) -> list[int]:
        """The numbers of the old arrays that something still refers to, those aside that the step returned."""
        old = [reference() for reference in self._taken_refs]
        return [i for i, array in enumerate(old) if array is not None and not any(array is other for other in new)]


def write_pool_rows(
    pool: mx.array, pool_rows: mx.array, values: mx.array, spare_pool_row: int | None = None
) -> mx.array:
    """Returns pool [size, ...] with values [n, ...] at pool_rows int32 [n]; a number outside the pool writes nothing,
    or at the spare row.

    Every other row keeps its bits. The write costs the n rows and takes the pool's memory when nothing else refers to
    the pool at evaluation. Two values for one row leave each element of one of the two (of 8-byte elements, each half).

    MLX drops no write, and an index out of range is undefined, so a dropped value needs a row that it does not change.
    Writing a row's old value back would copy the pool: that read of the old pool is unfinished when the write wants its
    memory. So without a spare row the values are written as unsigned words, by minimum and then by maximum: a written
    row goes to 0 and then up to its bits; a dropped one meets the neutral element both times and may go to any row.
    """
    if pool.size == 0 or values.size == 0:
        return pool
    inside = in_range(pool_rows, pool.shape[0])
    if spare_pool_row is not None:
        flat_shape = (values.shape[0], math.prod(pool.shape[1:]))
        target = mx.broadcast_to(mx.where(inside, pool_rows, spare_pool_row)[:, None], flat_shape)
        flat_pool = pool.reshape(pool.shape[0], flat_shape[1])
        return mx.put_along_axis(flat_pool, target, values.reshape(flat_shape), axis=0).reshape(pool.shape)
    flat_pool = pool.reshape(pool.shape[0], -1)
    word = _word_dtype(flat_pool.shape[1] * flat_pool.dtype.size)
    zero, top = mx.array(0, word), mx.array(2 ** (8 * word.size) - 1, word)
    target, inside = mx.where(inside, pool_rows, 0), inside[:, None]
    words = flat_pool.view(word).at[target].minimum(mx.where(inside, zero, top))
    words = words.at[target].maximum(mx.where(inside, values.reshape(values.shape[0], -1).view(word), zero))
    return words.view(pool.dtype).reshape(pool.shape)


def read_pool_rows(pool: mx.array, pool_rows: mx.array, mask: mx.array) -> mx.array:
    """Returns pool [size, ...] at pool_rows int32 [...], zero where mask (bool, as pool_rows) is false or the row is
    outside the pool."""
    if pool.size == 0:
        return mx.zeros(pool_rows.shape + pool.shape[1:], pool.dtype)
    mask = mask & in_range(pool_rows, pool.shape[0])
    return zero_masked(mx.take(pool, mx.where(mask, pool_rows, 0), axis=0), mask)


def view_contiguous(pool: mx.array, rows: int, contiguous_stride: int, context: int) -> mx.array:
    """Returns pool rows r · contiguous_stride to r · contiguous_stride + context - 1 of each of `rows` sequences,
    [rows, context, ...]: a view of the pool."""
    inner = pool.shape[1:]
    sizes = [math.prod(inner[axis:]) for axis in range(len(inner) + 1)]
    return mx.as_strided(pool, (rows, context, *inner), (contiguous_stride * sizes[0], *sizes))


def zero_masked(values: mx.array, mask: mx.array) -> mx.array:
    """Returns values [*mask, ...] where mask is true and zero elsewhere, also for NaN, which a product would keep."""
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return mx.where(mask, values, mx.array(0, values.dtype))


def _word_dtype(nbytes: int) -> mx.Dtype:
    """The widest unsigned integer of at most 4 bytes that divides a row of that many bytes."""
    if nbytes % 4 == 0:
        return mx.uint32
    return mx.uint16 if nbytes % 2 == 0 else mx.uint8


def _describe_shapes(shapes_and_dtypes: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in shapes_and_dtypes)
