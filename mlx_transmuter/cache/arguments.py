"""Checks of arguments, each of which raises CacheError: integers, lengths, sizes of entries and arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import INT32_MAX

INT32_MIN = -(2**31)


def check_integer(where: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Returns value as an int. Raises CacheError unless it is one between minimum and maximum (None: no bound)."""
    expected = f"an integer of at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
    try:
        number = operator.index(value)
    except TypeError:
        raise CacheError(where, repr(value), expected) from None
    if isinstance(value, bool) or number < minimum or (maximum is not None and number > maximum):
        raise CacheError(where, repr(value), expected)
    return number


def check_lengths(where: str, lens: Any, maximum: int) -> list[int]:
    """Returns lens, the numbers of tokens of rows or sequences, as ints. Raises CacheError unless each is between 0 and
    maximum."""
    try:
        values = list(lens.tolist() if hasattr(lens, "tolist") else lens)
    except TypeError:
        raise CacheError(where, repr(lens), "a list of lengths") from None
    return [check_integer(f"{where}[{i}]", length, 0, maximum) for i, length in enumerate(values)]


def check_packed_lengths(where: str, lens: Any, seq: int) -> list[list[int]]:
    """Returns lens, for each row the lengths of its sequences, as ints. Raises CacheError for no row, and for a row of
    more than seq tokens."""
    expected = "the lengths of each row's sequences"
    if not hasattr(lens, "__iter__"):
        raise CacheError(where, repr(lens), expected)
    rows = [check_lengths(f"{where}[{row}]", row_lengths, seq) for row, row_lengths in enumerate(lens)]
    if not rows:
        raise CacheError(where, "no rows", expected)
    for row, row_lengths in enumerate(rows):
        if sum(row_lengths) > seq:
            raise CacheError(f"{where}[{row}]", f"{sum(row_lengths)} tokens", f"at most seq = {seq}")
    return rows


def check_pairs(where: str, values: Any) -> list[tuple[Any, Any]]:
    """Returns values as a list of pairs. Raises CacheError for anything else."""
    try:
        return [(first, second) for first, second in values]
    except (TypeError, ValueError):
        raise CacheError(where, repr(values), "pairs (m, slots)") from None


def check_every_sizes(where: str, sizes: Any) -> list[int]:
    """Returns sizes, the numbers of positions of an entry, as ints. Raises CacheError unless each is at least 2 and
    occurs once."""
    try:
        sizes = [check_integer(where, size, 2) for size in sizes]
    except TypeError:
        raise CacheError(where, repr(sizes), "a list of the positions of an entry") from None
    if len(set(sizes)) != len(sizes):
        raise CacheError(where, f"sizes {sizes}", "each size once")
    return sizes


def check_token_ids(where: str, tokens: Any) -> list[int | None]:
    """Returns tokens, a list or an array of token ids, as ints. Raises CacheError for anything else."""
    try:
        ids = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        return [check_integer(f"{where}: tokens", token, 0) for token in ids]
    except TypeError:
        raise CacheError(f"{where}: tokens", repr(tokens), "token ids") from None


def as_int32(where: str, values: Any, shape: Sequence[int | str]) -> mx.array:
    """Returns values (lists, numpy or MLX) as an int32 array of the given shape, in which a name stands for any size.

    A number outside int32 becomes the nearest int32, which addresses nothing either. Raises CacheError for another
    shape, an empty axis, or values that are not integers.
    """
    if not isinstance(values, mx.array):
        values = _host_int32(where, values)
    elif not mx.issubdtype(values.dtype, mx.integer):
        raise CacheError(where, f"{values.dtype} values", "integers")
    elif values.dtype in (mx.uint32, mx.uint64):
        values = mx.minimum(values, mx.array(INT32_MAX, values.dtype))
    elif values.dtype == mx.int64:
        values = mx.clip(values, INT32_MIN, INT32_MAX)
    _check_shape(where, values, shape)
    return values if values.dtype == mx.int32 else values.astype(mx.int32)


def as_bool(where: str, values: Any, shape: Sequence[int | str]) -> mx.array:
    """Returns values (lists, numpy or MLX) as a boolean array of the given shape. Errors as in as_int32."""
    if not isinstance(values, mx.array):
        host = _as_numpy(where, values)
        if host.dtype != np.bool_:
            raise CacheError(where, f"{host.dtype} values", "booleans")
        values = mx.array(host)
    elif values.dtype != mx.bool_:
        raise CacheError(where, f"{values.dtype} values", "booleans")
    _check_shape(where, values, shape)
    return values


def _host_int32(where: str, values: Any) -> mx.array:
    host = _as_numpy(where, values)
    if host.size and host.dtype.kind not in "iu":
        raise CacheError(where, f"{host.dtype} values", "integers")
    if host.dtype.kind in "iu" and host.dtype.itemsize >= 4:
        host = np.clip(host, max(INT32_MIN, np.iinfo(host.dtype).min), INT32_MAX)
    return mx.array(host.astype(np.int32))


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
        size > 0 and (size == expected or isinstance(expected, str))
        for size, expected in zip(values.shape, shape, strict=True)
    )
    if not fits:
        expected_shape = ", ".join(map(str, shape))
        raise CacheError(where, f"shape {list(values.shape)}", f"shape [{expected_shape}], no axis empty")
