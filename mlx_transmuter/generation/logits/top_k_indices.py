"""The indices of the k best of many scores, found among the best blocks, so that a vocabulary is read once and never
sorted."""

from __future__ import annotations

import mlx.core as mx


def top_k_indices(scores: mx.array, k: int) -> mx.array:
    """Returns the indices int32 [rows, k] of the k best of each row of scores [rows, n], in no order; k is at most n.

    A partition of a whole vocabulary moves all of it (and on Metal sorts it). The k blocks with the greatest maxima
    hold k scores that no other block exceeds, so one pass for the maxima and partitions of few numbers suffice. Which
    of equal scores are taken is unspecified, as in torch.topk.
    """
    block = _block_size(scores.shape[-1], k)
    if block == 1:
        return mx.argpartition(-scores, k - 1, axis=-1)[:, :k].astype(mx.int32)
    blocked = scores.shape[-1] // block * block
    blocks = scores[:, :blocked].reshape(scores.shape[0], -1, block)
    best = mx.argpartition(-mx.max(blocks, axis=-1), k - 1, axis=-1)[:, :k, None].astype(mx.int32)
    indices = (best * block + mx.arange(block, dtype=mx.int32)).reshape(scores.shape[0], -1)
    values = mx.take_along_axis(blocks, best, axis=1).reshape(indices.shape)
    if blocked < scores.shape[-1]:  # the scores after the last block are candidates too
        rest = mx.broadcast_to(mx.arange(blocked, scores.shape[-1], dtype=mx.int32), scores[:, blocked:].shape)
        indices = mx.concatenate([indices, rest], axis=-1)
        values = mx.concatenate([values, scores[:, blocked:]], axis=-1)
    return mx.take_along_axis(indices, mx.argpartition(-values, k - 1, axis=-1)[:, :k], axis=-1)


def kth_best_score(scores: mx.array, k: int) -> mx.array:
    """Returns the k-th best score of each row, [rows, 1]; the lowest of a row of fewer than k."""
    if k == 1:
        return mx.max(scores, axis=-1, keepdims=True)
    indices = top_k_indices(scores, min(k, scores.shape[-1]))
    return mx.min(mx.take_along_axis(scores, indices, axis=-1), axis=-1, keepdims=True)


def top_k_mask(scores: mx.array, k: int) -> mx.array:
    """Returns a bool array like scores that marks exactly k tokens of the best scores of each row."""
    indices = top_k_indices(scores, min(k, scores.shape[-1]))
    return mx.put_along_axis(mx.zeros(scores.shape, dtype=mx.bool_), indices, mx.array(True), axis=-1)


def _block_size(size: int, k: int) -> int:
    """Returns a power of two that makes about as many blocks as there are scores in the chosen ones; 1 where blocks
    save nothing."""
    block = 1 << ((size // k).bit_length() // 2)
    return block if 4 * block * k <= size else 1
