"""The lowest of many keys whose masses add up to a limit: the search of top_p and typical_p."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# On a CPU, more keys than these are halved before they are sorted.
MOST_SORTED_ON_CPU = 1024


class MassCut(NamedTuple):
    """Where the running sum of masses passes a limit: the number of keys before it, int32 [rows, 1], and the key there,
    [rows, 1]; the last key where none passes it."""

    rank: mx.array
    key: mx.array


def find_mass_cut(
    keys: mx.array, masses: mx.array, limit: float, *, includes_limit: bool, most_sorted: int | None = None
) -> MassCut:
    """Returns where the masses of the keys of each row, from the lowest key up, add up to more than the limit, or to
    the limit where includes_limit is false.

    keys, masses: [rows, n]; masses are not negative. Keys are sorted in parts: the lower half of them tells, by its
    mass, in which half the cut is, and the half that has it is searched on, until most_sorted keys are left. So a CPU
    moves 2 n keys in place of n log n. On a GPU, where a partition is a sort, all keys are sorted.
    """
    if most_sorted is None:
        most_sorted = MOST_SORTED_ON_CPU if mx.default_device() == mx.cpu else keys.shape[-1]
    is_before = mx.less_equal if includes_limit else mx.less
    rows = keys.shape[0]
    rank, mass_below = mx.zeros((rows, 1), mx.int32), mx.zeros((rows, 1), masses.dtype)
    while keys.shape[-1] > max(most_sorted, 1):
        half = keys.shape[-1] // 2
        keys, masses = _reorder(mx.argpartition(keys, half, axis=-1), keys, masses)
        mass_of_half = mass_below + mx.sum(masses[:, :half], axis=-1, keepdims=True)
        is_upper = is_before(mass_of_half, limit)
        # Of an odd number, the lower half ends with the first key of the upper one, which the cut does not pass.
        size = keys.shape[-1] - half
        keys = mx.where(is_upper, keys[:, half:], keys[:, :size])
        masses = mx.where(is_upper, masses[:, half:], masses[:, :size])
        mass_below = mx.where(is_upper, mass_of_half, mass_below)
        rank = rank + mx.where(is_upper, half, 0)
    keys, masses = _reorder(mx.argsort(keys, axis=-1), keys, masses)
    is_below = is_before(mass_below + mx.cumsum(masses, axis=-1), limit)
    place = mx.sum(is_below, axis=-1, keepdims=True).astype(mx.int32)
    return MassCut(rank + place, mx.take_along_axis(keys, mx.minimum(place, keys.shape[-1] - 1), axis=-1))


def _reorder(order: mx.array, *arrays: mx.array) -> list[mx.array]:
    return [mx.take_along_axis(array, order, axis=-1) for array in arrays]
