"""Attention written out: scores, their cap, weights and weighted values, with com.microsoft's masks and sinks."""

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.functional.indexing import index_array
from mlx_transmuter.ops.functional.kernels import fused_attention
from mlx_transmuter.ops.indices import Indices, IntegerRange
from mlx_transmuter.ops.registry import OperatorError


def following_positions(first: Indices, count: int) -> Indices:
    """Returns for each position of first [n] that one and the count - 1 after it: [n, count]."""
    known = first.range and IntegerRange(first.range.low, first.range.high + count - 1)
    if known is not None and known.high >= 2**31:
        known = None
    return Indices(index_array(first)[:, None] + shared_arange(count)[None], known)


def lowest_addable_score(dtype: mx.Dtype) -> float:
    """Returns the lowest score to which a score can still be added: a row that sees nothing then gives no NaN.

    MLX's kernels on Metal multiply a mask by log₂ e as well, which leaves half of the lowest number finite.
    """
    return mx.finfo(dtype).min / 2


def finite_mask(mask: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns an additive mask in the type of the scores, without infinities and numbers that would become some."""
    lowest = lowest_addable_score(dtype)
    if mask.dtype != mx.float32:
        mask = mask.astype(mx.float32)  # the lowest number of one half type is no number of the other
    return mx.maximum(mask, lowest).astype(dtype)


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    *,
    bias: mx.array | None = None,
    visibility: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Returns softmax(q · kᵀ · scale + bias, over the visible columns) · v, [batch, heads, seq, v dim].

    q: [batch, heads, seq, dim]; k, v: [batch, kv heads, context, dim or v dim]; bias: added to the scores, broadcast to
    [batch, heads, seq, context]; visibility: bool, likewise; softcap c: scores become c · tanh(score / c) before the
    bias; sinks [heads]: a score in each softmax that belongs to no column. Vaswani et al. 2017, Ainslie et al. 2023
    (grouped heads).
    """
    check_equal_lengths(k, v)
    if softcap:
        weights, _ = attention_weights_and_scores(
            q, k, scale, bias=bias, visibility=visibility, softcap=softcap, sinks=sinks
        )
        return weighted_values(weights, v)
    mask = visibility
    if bias is not None:
        # The bias may hold the lowest numbers of its type: raised so far that adding a score gives no infinity.
        lowest = lowest_addable_score(q.dtype)
        mask = finite_mask(bias, q.dtype)
        mask = mask if visibility is None else mx.where(visibility, mask, mx.array(lowest, q.dtype))
    if mask is not None:
        mask = _expand_to_4d(mask)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    return fused_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def check_equal_lengths(k: mx.array, v: mx.array) -> None:
    """Raises OperatorError for keys and values [batch, heads, length, dim] of different lengths: MLX's attention kernel
    would read past the shorter ones.
    """
    if k.shape[:3] != v.shape[:3]:
        raise OperatorError(f"keys {list(k.shape)} and values {list(v.shape)}", "a value for each key")


def attention_weights_and_scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    *,
    bias: mx.array | None = None,
    visibility: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Returns the weights that `attend` gives the columns, and their scores: float32 [batch, heads, seq, context]."""
    batch, heads, seq, _ = q.shape
    scores = cap_scores(attention_scores(q * scale, k).astype(mx.float32), softcap)
    if bias is not None:
        scores = scores + finite_mask(bias, mx.float32)
    if visibility is not None:
        scores = mx.where(visibility, scores, lowest_addable_score(mx.float32))
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True), scores
    sink_scores = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads, 1, 1), (batch, heads, seq, 1))
    weights = mx.softmax(mx.concatenate([scores, sink_scores], axis=-1), axis=-1, precise=True)
    return weights[..., :-1], scores


def attention_scores(q: mx.array, k: mx.array) -> mx.array:
    """Returns q [batch, heads, seq, dim] · kᵀ, k [batch, kv heads, context, dim]: [batch, heads, seq, context]."""
    batch, heads, seq, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, seq, dim)
    return (grouped @ k[:, :, None].swapaxes(-1, -2)).reshape(batch, heads, seq, k.shape[2])


def cap_scores(scores: mx.array, softcap: float) -> mx.array:
    """Returns softcap · tanh(scores / softcap), or the scores where softcap is 0."""
    return mx.tanh(scores * (1 / softcap)) * softcap if softcap else scores


def weighted_values(weights: mx.array, v: mx.array) -> mx.array:
    """Returns weights [batch, heads, seq, context] · v [batch, kv heads, context, dim], in v's type."""
    batch, heads, seq, context = weights.shape
    kv_heads = v.shape[1]
    grouped = weights.astype(v.dtype).reshape(batch, kv_heads, heads // kv_heads, seq, context)
    return (grouped @ v[:, :, None]).reshape(batch, heads, seq, v.shape[-1])


def _expand_to_4d(mask: mx.array) -> mx.array:
    return mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape) if mask.ndim < 4 else mask


def padding_mask_bias(
    mask: mx.array, batch: int, seq: int, context: int, hidden_value: float, dtype: mx.Dtype
) -> mx.array:
    """Returns what one of onnxruntime's masks adds to the scores: [batch, 1, seq or 1, context].

    That is 0 for a visible column and hidden_value for another. mask, int32, by its shape: [batch], the end of each
    row; [2 · batch], the ends, then the starts; [batch, context]; [batch, seq, context]; or [batch, 1, size, size], of
    which the step's rows and columns are read. Raises OperatorError for another shape.
    """
    columns = shared_arange(context)
    if mask.ndim == 1 and mask.size in (batch, 2 * batch):
        visible = columns[None] < mask[:batch, None]
        if mask.size == 2 * batch:
            visible = visible & (columns[None] >= mask[batch:, None])
        visible = visible[:, None, None]
    elif mask.ndim == 2 and mask.shape == (batch, context):
        visible = mask[:, None, None] > 0
    elif mask.ndim == 3 and mask.shape == (batch, seq, context):
        visible = mask[:, None] > 0
    elif mask.ndim == 4 and mask.shape[2] >= context <= mask.shape[3]:
        visible = mask[:, :, context - seq : context, :context] > 0
    else:
        raise OperatorError(
            f"a mask of shape {list(mask.shape)}",
            f"[{batch}], [{2 * batch}], [{batch}, {context}], [{batch}, {seq}, {context}] or [{batch}, 1, size, size]",
        )
    return mx.where(visible, mx.array(0, dtype), mx.array(hidden_value, dtype))


def causal_mask(seq: int, context: int) -> mx.array:
    """Returns which columns each of the last seq tokens of the context sees: bool [seq, context]."""
    return shared_arange(context)[None] <= (shared_arange(seq) + (context - seq))[:, None]


def add_biases(a: mx.array | None, b: mx.array | None) -> mx.array | None:
    """Returns a + b, where None adds nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
