"""The softmax of scores and what it weighs, with com.microsoft's masks, caps and sinks: every attention's core."""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import OperatorError


@lru_cache(maxsize=128)
def shared_arange(count: int) -> mx.array:
    """0, 1, …, count - 1 in int32: the same array each time.

    mx.compile joins operations whose inputs are the same arrays, so that all layers of a step share the positions,
    angles and masks that they count out from here; two aranges are two arrays to it.
    """
    return mx.array(np.arange(count, dtype=np.int32))


def lowest_addable_score(dtype: mx.Dtype) -> float:
    """The most negative score that a score can still be added to: a row that sees nothing then gives no NaN."""
    return mx.finfo(dtype).min / 2


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    bias: mx.array | None = None,
    visibility: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q · kᵀ · scale + bias, over what is visible) · v.

    q: [batch, heads, seq, dim]; k, v: [batch, kv heads, context, dim or v dim]; bias: added to the scores, broadcast to
    [batch, heads, seq, context]; visible: bool, likewise; softcap c: scores become c · tanh(score / c) before the bias;
    sinks [heads]: a score of no column in each softmax. Vaswani et al. 2017, Ainslie et al. 2023 (grouped heads).
    """
    if softcap:
        return weighted_values(attention_weights_and_scores(q, k, scale, bias, visibility, softcap, sinks)[0], v)
    mask = visibility
    if bias is not None:
        # The bias may itself hold the smallest numbers; kept where adding a score cannot make them infinite.
        mask = mx.maximum(bias.astype(q.dtype), lowest_addable_score(q.dtype))
        mask = (
            mask if visibility is None else mx.where(visibility, mask, mx.array(lowest_addable_score(q.dtype), q.dtype))
        )
    if mask is not None:
        mask = _expand_to_4d(mask)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def attention_weights_and_scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    bias: mx.array | None = None,
    visibility: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The weights that `attend` gives the columns, and their scores: float32 [batch, heads, seq, context] both."""
    batch, heads, seq, dim = q.shape
    kv_heads = k.shape[1]
    grouped = (q * scale).reshape(batch, kv_heads, heads // kv_heads, seq, dim)
    found = (grouped @ k[:, :, None].swapaxes(-1, -2)).reshape(batch, heads, seq, k.shape[2]).astype(mx.float32)
    if softcap:
        found = mx.tanh(found / softcap) * softcap
    if bias is not None:
        found = found + mx.maximum(bias.astype(mx.float32), lowest_addable_score(mx.float32))
    seen = found if visibility is None else mx.where(visibility, found, lowest_addable_score(mx.float32))
    if sinks is None:
        return mx.softmax(seen, axis=-1, precise=True), seen
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads, 1, 1), (batch, heads, seq, 1))
    return mx.softmax(mx.concatenate([seen, column], axis=-1), axis=-1, precise=True)[..., :-1], seen


def weighted_values(weights: mx.array, v: mx.array) -> mx.array:
    """weights [batch, heads, seq, context] · v [batch, kv heads, context, dim], in v's type."""
    batch, heads, seq, context = weights.shape
    kv_heads = v.shape[1]
    grouped = weights.astype(v.dtype).reshape(batch, kv_heads, heads // kv_heads, seq, context)
    return (grouped @ v[:, :, None]).reshape(batch, heads, seq, v.shape[-1])


def _expand_to_4d(mask: mx.array) -> mx.array:
    return mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape) if mask.ndim < 4 else mask


def padding_mask_bias(
    mask: mx.array, batch: int, seq: int, context: int, hidden_value: float, dtype: mx.Dtype
) -> mx.array:
    """What a mask of onnxruntime's forms adds to the scores: 0 to see, value to hide; [batch, 1, seq or 1, context].

    mask int32: [batch] ends of the rows, [2 · batch] ends then starts, [batch, context], [batch, seq, context], or
    [batch, 1, most, most], of which the step's rows and columns are read.
    """
    columns = shared_arange(context)
    if mask.ndim == 1 and mask.size in (batch, 2 * batch):
        seen = columns[None] < mask[:batch, None]
        if mask.size == 2 * batch:
            seen = seen & (columns[None] >= mask[batch:, None])
        seen = seen[:, None, None]
    elif mask.ndim == 2 and mask.shape == (batch, context):
        seen = mask[:, None, None] > 0
    elif mask.ndim == 3 and mask.shape == (batch, seq, context):
        seen = mask[:, None] > 0
    elif mask.ndim == 4 and mask.shape[2] >= context <= mask.shape[3]:
        seen = mask[:, :, context - seq : context, :context] > 0
    else:
        raise OperatorError(
            f"a mask of shape {list(mask.shape)}",
            f"[{batch}], [{2 * batch}], [{batch}, {context}], [{batch}, {seq}, {context}] or [{batch}, 1, most, most]",
        )
    return mx.where(seen, mx.array(0, dtype), mx.array(hidden_value, dtype))


def causal_mask(seq: int, context: int) -> mx.array:
    """Which columns each of the last seq tokens of context sees: bool [seq, context]."""
    return shared_arange(context)[None] <= (shared_arange(seq) + (context - seq))[:, None]


def add_biases(a: mx.array | None, b: mx.array | None) -> mx.array | None:
    """a + b, where None adds nothing."""
    return b if a is None else a if b is None else a + b
