"""Normalizations of com.microsoft, with the residual sums and embeddings that they are fused with."""

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import take_rows
from mlx_transmuter.ops.functional.norms import inverse_rms, rms_norm, standardize
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.onnx.activation import swish
from mlx_transmuter.ops.registry import OperatorError, op


@op("SimplifiedLayerNormalization-1", "com.microsoft.SimplifiedLayerNormalization-1")
def simplified_layer_normalization(
    x, scale, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int = 1
):
    """x over its root mean square on the axes from axis on, times scale; and the inverse of that root, float32.

    Exporters leave it in the default domain. The result has scale's type. onnxruntime SimplifiedLayerNormalization-1.
    """
    if scale.dtype == x.dtype:
        normed = rms_norm(x, scale, epsilon, axis=axis)
    else:
        normed = rms_norm(x, scale, epsilon, axis=axis, compute_dtype=mx.float32).astype(scale.dtype)
    return normed if outputs == 1 else (normed, inverse_rms(x, epsilon, axis=axis))


@op("com.microsoft.SkipLayerNormalization-1")
def skip_layer_normalization(x, skip, gamma, beta=None, bias=None, *, epsilon: float = 1e-12, outputs: int = 1):
    """Layer normalization, over the last axis, of the sum x + skip + bias; mean and inverse deviation; and that sum.

    x: [batch, seq, hidden] or [tokens, hidden]; skip: x's shape, or broadcast over the batch; gamma, beta, bias:
    [hidden]. com.microsoft SkipLayerNormalization-1.
    """
    total = _add_skip_and_bias(x, skip, bias)
    normed = mx.fast.layer_norm(total, gamma, beta, epsilon)
    if outputs == 1:
        return normed
    _, mean, inverse_deviation = standardize(total, (-1,), epsilon)
    return normed, mean, inverse_deviation, total


@op("com.microsoft.SkipSimplifiedLayerNormalization-1")
def skip_simplified_layer_normalization(x, skip, gamma, bias=None, *, epsilon: float = 1e-12, outputs: int = 1):
    """Root mean square normalization of the sum x + skip + bias; mean (0) and inverse root; and that sum.

    Shapes as in SkipLayerNormalization. com.microsoft SkipSimplifiedLayerNormalization-1.
    """
    total = _add_skip_and_bias(x, skip, bias)
    normed = rms_norm(total, gamma, epsilon, compute_dtype=total.dtype)
    if outputs == 1:
        return normed
    inverse = inverse_rms(total, epsilon)
    return normed, mx.zeros_like(inverse), inverse, total


def _add_skip_and_bias(x: mx.array, skip: mx.array, bias: mx.array | None) -> mx.array:
    total = x + skip
    return total if bias is None else total + bias


@op("com.microsoft.EmbedLayerNormalization-1")
def embed_layer_normalization(
    input_ids: Indices,
    segment_ids: Indices,
    word_embedding,
    position_embedding,
    segment_embedding,
    gamma,
    beta,
    mask=None,
    position_ids: Indices = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    outputs: int = 1,
):
    """Layer normalization of the sum of word, position and segment embeddings; the tokens a row of mask; and that sum.

    input_ids, segment_ids, mask: int32 [batch, seq]; position_ids: [batch or 1, seq], the token's index where absent;
    embeddings: [rows, hidden]. Without a mask the counts are 0. com.microsoft EmbedLayerNormalization-1.
    """
    seq = input_ids.shape[1]
    positions = position_embedding[None, :seq] if position_ids is None else take_rows(position_embedding, position_ids)
    segments = None
    if segment_ids is not None and segment_embedding is not None:
        segments = take_rows(segment_embedding, segment_ids)
    return normalize_embedding_sum(
        words=take_rows(word_embedding, input_ids),
        positions=positions,
        segments=segments,
        gamma=gamma,
        beta=beta,
        mask=mask,
        epsilon=epsilon,
    )[:outputs]


def normalize_embedding_sum(
    *,
    words: mx.array,
    positions: mx.array,
    segments: mx.array | None,
    gamma: mx.array,
    beta: mx.array,
    mask: mx.array | None,
    epsilon: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the layer norm of the sum of embeddings, each row's count of 1s in the mask (0 without one), and the sum.

    words, segments: [batch, seq, hidden]; positions: [batch or 1, seq, hidden]; mask: [batch, seq].
    """
    total = words + positions
    total = total if segments is None else total + segments
    batch = words.shape[0]
    counts = mx.zeros((batch,), dtype=mx.int32) if mask is None else mx.sum(mask == 1, axis=1).astype(mx.int32)
    return mx.fast.layer_norm(total, gamma, beta, epsilon), counts, total


@op("com.microsoft.GatedRMSNorm-1")
def gated_rms_norm(x, scale, gate, *, activation: str = "silu", epsilon: float = 1e-5):
    """x over its root mean square in each run of dim, times scale [dim], times the activated gate, in float32 within.

    x, gate: [..., heads · dim]; activation: silu (or swish) or sigmoid. com.microsoft GatedRMSNorm-1.
    """
    if activation not in ("silu", "swish", "sigmoid"):
        raise OperatorError(f"the activation {activation!r}", "silu, swish or sigmoid")
    runs = x.reshape(*x.shape[:-1], -1, scale.size)
    normed = rms_norm(runs, scale, epsilon, compute_dtype=mx.float32).reshape(x.shape)
    z = gate.astype(mx.float32)
    return (normed * (mx.sigmoid(z) if activation == "sigmoid" else swish(z))).astype(x.dtype)


@op("com.microsoft.BranchwiseRMSNorm-1")
def branchwise_rms_norm(x, scale=None, *, epsilon: float = 1e-5, num_branches: int = 0):
    """Each branch of x over its root mean square, times scale, in float32 within.

    x: [..., branches, dim], or [..., branches · dim] with num_branches; scale: [branches, dim], flat or not, or [dim].
    com.microsoft BranchwiseRMSNorm-1.
    """
    branches = num_branches or x.shape[-2]
    by_branch = x.reshape(*x.shape[:-1], branches, -1) if num_branches else x
    normed = rms_norm(by_branch, None, epsilon, compute_dtype=mx.float32)
    if scale is not None:
        dim = by_branch.shape[-1]
        scale = scale.astype(mx.float32)
        normed = normed * (scale.reshape(dim) if scale.size == dim else scale.reshape(branches, dim))
    return normed.astype(x.dtype).reshape(x.shape)


@op("com.microsoft.GroupNorm-1")
def group_norm(x, gamma, beta, *, activation: int, groups: int, channels_last: int = 1, epsilon: float = 1e-5):
    """x over the mean and deviation of its groups of channels, times gamma plus beta [channels]; activation 1 is SiLU.

    x: [batch, *space, channels], or [batch, channels, *space] without channels_last. Wu & He 2018; com.microsoft
    GroupNorm-1.
    """
    rows = x if channels_last else mx.moveaxis(x, 1, -1)
    grouped = rows.reshape(rows.shape[0], -1, groups, rows.shape[-1] // groups)
    normed, _, _ = standardize(grouped, (1, 3), epsilon)
    y = normed.reshape(rows.shape) * gamma.astype(mx.float32) + beta.astype(mx.float32)
    y = (swish(y) if activation == 1 else y).astype(x.dtype)
    return y if channels_last else mx.moveaxis(y, -1, 1)


@op("com.microsoft.SkipGroupNorm-1")
def skip_group_norm(
    x,
    gamma,
    beta,
    skip,
    bias=None,
    *,
    activation: int,
    groups: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    outputs: int = 1,
):
    """GroupNorm of x + skip + bias; and that sum. skip: x's shape, [batch, 1, 1, channels] or [batch, channels].

    com.microsoft SkipGroupNorm-1.
    """
    space = x.ndim - 2
    if skip.ndim == 2:
        skip = skip.reshape(skip.shape[0], *((*(1,) * space, -1) if channels_last else (-1, *(1,) * space)))
    total = x + skip
    if bias is not None:
        total = total + (bias if channels_last else bias.reshape(-1, *(1,) * space))
    y = group_norm(
        total, gamma, beta, activation=activation, groups=groups, channels_last=channels_last, epsilon=epsilon
    )
    return y if outputs == 1 else (y, total)
