"""The best of many scores: those of the best blocks hold them, so that a vocabulary is read once and never sorted."""

from __future__ import annotations

import mlx.core as mx


def top_k_indices(scores: mx.array, count: int) -> mx.array:
    """int32 [rows, count]: where the count best of each row of scores [rows, n] are, in no order; count is at most n.

    A partition of a whole vocabulary moves all of it (and on Metal sorts it). The count blocks with the greatest maxima
    hold count scores that no other block exceeds: so one pass for the maxima, and partitions of few numbers. Which of
    equal scores come in is unspecified, as in torch.topk.
    """
    block = _block_size(scores.shape[-1], count)
    if block == 1:
        return mx.argpartition(-scores, count - 1, axis=-1)[:, :count].astype(mx.int32)
    whole = scores.shape[-1] // block * block
    blocks = scores[:, :whole].reshape(scores.shape[0], -1, block)
    best = mx.argpartition(-mx.max(blocks, axis=-1), count - 1, axis=-1)[:, :count, None].astype(mx.int32)
    places = (best * block + mx.arange(block, dtype=mx.int32)).reshape(scores.shape[0], -1)
    values = mx.take_along_axis(blocks, best, axis=1).reshape(places.shape)
    if whole < scores.shape[-1]:  # what no block holds competes by itself
        rest = mx.broadcast_to(mx.arange(whole, scores.shape[-1], dtype=mx.int32), scores[:, whole:].shape)
        places, values = mx.concatenate([places, rest], axis=-1), mx.concatenate([values, scores[:, whole:]], axis=-1)
    return mx.take_along_axis(places, mx.argpartition(-values, count - 1, axis=-1)[:, :count], axis=-1)


def _block_size(size: int, count: int) -> int:
    """The size of the blocks: a power of two, for about as many blocks as there are scores in the chosen ones; 1 where
    blocks save nothing."""
    block = 1 << ((size // count).bit_length() // 2)
    return block if 4 * block * count <= size else 1
