"""The cache's one error, and the argument checks that raise it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.errors import TransmuterError

INT32_MAX = 2**31 - 1


class CacheError(TransmuterError):
    """Something that the cache cannot do; `where` names the call and its argument."""


def check_integer(where: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """value as a Python int between least and most (None: no bound), else CacheError."""
    expected = f"an integer of at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
    try:
        number = operator.index(value)
    except TypeError:
        raise CacheError(where, repr(value), expected) from None
    if isinstance(value, bool) or number < minimum or (maximum is not None and number > maximum):
        raise CacheError(where, repr(value), expected)
    return number


def check_lengths(where: str, lens: Any, maximum: int) -> list[int]:
    """lens, one number of tokens per lane or sequence, as ints between 0 and most, else CacheError."""
    try:
        values = list(lens.tolist() if hasattr(lens, "tolist") else lens)
    except TypeError:
        raise CacheError(where, repr(lens), "a list of lengths") from None
    return [check_integer(f"{where}[{i}]", n, 0, maximum) for i, n in enumerate(values)]


def check_pairs(where: str, values: Any) -> list[tuple[Any, Any]]:
    """values as a list of pairs, else CacheError."""
    try:
        return [(first, second) for first, second in values]
    except (TypeError, ValueError):
        raise CacheError(where, repr(values), "pairs (m, blocks)") from None


def check_every_sizes(where: str, sizes: Any) -> list[int]:
    """sizes, the numbers of positions of blocks, as ints of at least 2 and each once, else CacheError."""
    try:
        sizes = [check_integer(where, m, 2) for m in sizes]
    except TypeError:
        raise CacheError(where, repr(sizes), "a list of block sizes") from None
    if len(set(sizes)) != len(sizes):
        raise CacheError(where, f"sizes {sizes}", "each size once")
    return sizes


def as_int32(where: str, values: Any, shape: Sequence[int | str]) -> mx.array:
    """values (lists, numpy or MLX) as an int32 array of the given shape, else CacheError; a name in shape is any size.

    Numbers that int32 can't hold become its nearest, which addresses nothing just as they do.
    """
    if not isinstance(values, mx.array):
        host = _as_numpy(where, values)
        if host.size and host.dtype.kind not in "iu":
            raise CacheError(where, f"{host.dtype} values", "integers")
        if host.dtype.kind in "iu" and host.dtype.itemsize >= 4:
            host = np.clip(host, max(-(2**31), np.iinfo(host.dtype).min), INT32_MAX)
        values = mx.array(host.astype(np.int32))
    elif not mx.issubdtype(values.dtype, mx.integer):
        raise CacheError(where, f"{values.dtype} values", "integers")
    elif values.dtype in (mx.uint32, mx.uint64):
        values = mx.minimum(values, mx.array(INT32_MAX, values.dtype))
    elif values.dtype == mx.int64:
        values = mx.clip(values, -(2**31), INT32_MAX)
    _check_shape(where, values, shape)
    return values if values.dtype == mx.int32 else values.astype(mx.int32)


def as_bool(where: str, values: Any, shape: Sequence[int | str]) -> mx.array:
    """values (lists, numpy or MLX) as a boolean array of the given shape, else CacheError."""
    if not isinstance(values, mx.array):
        host = _as_numpy(where, values)
        if host.dtype != np.bool_:
            raise CacheError(where, f"{host.dtype} values", "booleans")
        values = mx.array(host)
    elif values.dtype != mx.bool_:
        raise CacheError(where, f"{values.dtype} values", "booleans")
    _check_shape(where, values, shape)
    return values


def _as_numpy(where: str, values: Any) -> np.ndarray:
    try:
        host = np.asarray(values)
    except ValueError:
        raise CacheError(where, "rows of different lengths", "a rectangular array") from None
    if host.dtype == object:
        raise CacheError(where, "values of no one type", "an array of numbers")
    return host


def _check_shape(where: str, values: mx.array, shape: Sequence[int | str]) -> None:
    fits = values.ndim == len(shape) and all(
        have > 0 and (have == want or isinstance(want, str)) for have, want in zip(values.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise CacheError(where, f"shape {list(values.shape)}", f"shape [{wanted}], no axis empty")
