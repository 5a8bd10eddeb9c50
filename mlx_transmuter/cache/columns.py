"""Where tokens and columns stand, and which columns each token of a call sees: the arithmetic of a CacheIndex."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.error import INT32_MAX


def left_padded(lanes: Sequence[Sequence[int]], seq: int) -> mx.array:
    """Positions int32 [lanes, seq]: each lane's sequences from 0, one after another, at its end, and -1 before them."""
    pos = np.full((len(lanes), seq), -1, np.int32)
    for lane, lens in zip(pos, lanes, strict=True):
        count = sum(lens)
        if count:
            lane[seq - count :] = np.concatenate([np.arange(n) for n in lens])
    return mx.array(pos)


def runs(rows: int, stride: int) -> mx.array:
    """The table int32 [rows, stride] of one run of slots per row, one run after another."""
    return mx.array(np.arange(rows * stride, dtype=np.int32).reshape(rows, stride))


def head_slots(slots: mx.array, n: int, block: int) -> mx.array:
    """slots int32 [rows, k] as the slots of each head, [rows · n, k], row by row then head; see CacheIndex.heads."""
    head = (mx.arange(slots.shape[0] * n, dtype=mx.int32) % n)[:, None]
    slots = mx.repeat(slots, n, axis=0)
    inside = (slots >= 0) & (slots < INT32_MAX // (n * block) * block)
    return mx.where(inside, (slots // block * n + head) * block + slots % block, -1)


def stands(columns: mx.array, every: int) -> mx.array:
    """The position each column stands at: its own, or the last one of its block of `every` positions."""
    return columns if every == 1 else columns * every + (every - 1)


def own_columns(at: mx.array, every: int) -> mx.array:
    """The column that stands at each position of at, -1 where none does (inside a block, or padding)."""
    return at if every == 1 else mx.where((at >= 0) & (at % every == every - 1), at // every, -1)


def sees(places: mx.array, at: mx.array, window: int | None) -> mx.array:
    """Whether tokens at positions `at` see columns standing at `places`, both broadcast; neither sees or shows padding."""
    seen = (places >= 0) & (places <= at)
    return seen if window is None else seen & (places > at - min(window, INT32_MAX))


def whole_mask(at: mx.array, window: int | None, packed: bool) -> mx.array:
    """Which tokens of its lane each token sees, [batch, seq, seq]. Packed sequences differ in where they start."""
    mask = sees(at[:, None, :], at[:, :, None], window)
    if packed:
        start = mx.arange(at.shape[1], dtype=mx.int32) - at
        mask = mask & (start[:, None, :] == start[:, :, None])
    return mask


def draft_mask(context: int, at: mx.array, allowed: mx.array, window: int | None) -> mx.array:
    """What draft tokens see, [batch, seq, context + seq]: the columns before the call, and the tokens `allowed` says."""
    first = mx.where(at >= 0, at, INT32_MAX).min(axis=1)[:, None, None]
    places = mx.arange(context, dtype=mx.int32)
    before = sees(places, at[:, :, None], window) & (places < first)
    return mx.concatenate([before, sees(at[:, None, :], at[:, :, None], window) & allowed], axis=2)


def chosen_mask(columns: mx.array, context: int, every: int, at: mx.array, window: int | None) -> mx.array:
    """Which of its chosen columns, int32 [batch, seq, k], each token sees; one outside the context is not seen."""
    places = stands(mx.clip(columns, 0, context - 1), every)
    return sees(places, at[:, :, None], window) & (columns >= 0) & (columns < context)


def chosen_tokens_mask(columns: mx.array, mask: mx.array) -> mx.array:
    """As chosen_mask where a column is a token of the lane: mask is whole_mask's."""
    seq = mask.shape[2]
    seen = mx.take_along_axis(mask, mx.clip(columns, 0, seq - 1), axis=2)
    return seen & (columns >= 0) & (columns < seq)


def closing_tokens(columns: mx.array, at: mx.array, every: int) -> tuple[mx.array, mx.array]:
    """The token that closes each block, int32 [batch, n], of lanes padded on the left, and whether the lane has it."""
    seq = at.shape[1]
    token = stands(columns, every) + (seq - 1 - at[:, -1:])
    return mx.clip(token, 0, seq - 1), token < seq
