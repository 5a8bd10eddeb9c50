"""Attention of com.microsoft over explicit masks: MultiHeadAttention, Attention, and `attend`, which the others share."""

import math

import mlx.core as mx

from mlx_transmuter.ops.attention import join_heads, split_heads
from mlx_transmuter.ops.registry import OperatorError, op


def lowest(dtype: mx.Dtype) -> float:
    """The most negative score that a score can still be added to: a row that sees nothing then gives no NaN."""
    return mx.finfo(dtype).min / 2


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    bias: mx.array | None = None,
    visible: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q · kᵀ · scale + bias, over what is visible) · v.

    q: [batch, heads, seq, dim]; k, v: [batch, kv heads, context, dim or v dim]; bias: added to the scores, broadcast to
    [batch, heads, seq, context]; visible: bool, likewise; softcap c: scores become c · tanh(score / c) before the bias;
    sinks [heads]: a score of no column in each softmax. Vaswani et al. 2017, Ainslie et al. 2023 (grouped heads).
    """
    mask = visible
    if bias is not None:
        # The bias may itself hold the smallest numbers; kept where adding a score cannot make them infinite.
        mask = mx.maximum(bias.astype(q.dtype), lowest(q.dtype))
        mask = mask if visible is None else mx.where(visible, mask, mx.array(lowest(q.dtype), q.dtype))
    if softcap:
        weights, _ = scores(q, k, scale, bias, visible, softcap, sinks)
        return _weighted(weights, v)
    if mask is not None:
        mask = _rank4(mask)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    bias: mx.array | None = None,
    visible: mx.array | None = None,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The weights that `attend` gives the columns, and the scores they come from: both [batch, heads, seq, context], float32."""
    batch, heads, seq, dim = q.shape
    kv_heads = k.shape[1]
    grouped = (q * scale).reshape(batch, kv_heads, heads // kv_heads, seq, dim)
    found = (grouped @ k[:, :, None].swapaxes(-1, -2)).reshape(batch, heads, seq, k.shape[2]).astype(mx.float32)
    if softcap:
        found = mx.tanh(found / softcap) * softcap
    if bias is not None:
        found = found + mx.maximum(bias.astype(mx.float32), lowest(mx.float32))
    seen = found if visible is None else mx.where(visible, found, lowest(mx.float32))
    if sinks is None:
        return mx.softmax(seen, axis=-1, precise=True), seen
    column = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads, 1, 1), (batch, heads, seq, 1))
    return mx.softmax(mx.concatenate([seen, column], axis=-1), axis=-1, precise=True)[..., :-1], seen


def _weighted(weights: mx.array, v: mx.array) -> mx.array:
    batch, heads, seq, context = weights.shape
    kv_heads = v.shape[1]
    grouped = weights.astype(v.dtype).reshape(batch, kv_heads, heads // kv_heads, seq, context)
    return (grouped @ v[:, :, None]).reshape(batch, heads, seq, v.shape[-1])


def _rank4(mask: mx.array) -> mx.array:
    return mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape) if mask.ndim < 4 else mask


def padding_bias(mask: mx.array, batch: int, seq: int, context: int, value: float, dtype: mx.Dtype) -> mx.array:
    """What onnxruntime adds to the scores for a mask of any of its forms: 0 to see, value to hide; [batch, 1, seq or 1, context].

    mask int32: [batch] ends of the rows, [2 · batch] ends then starts, [batch, context], [batch, seq, context], or
    [batch, 1, most, most], of which the step's rows and columns are read.
    """
    columns = mx.arange(context, dtype=mx.int32)
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
    return mx.where(seen, mx.array(0, dtype), mx.array(value, dtype))


def causal(seq: int, context: int) -> mx.array:
    """Which columns each of the last seq tokens of context sees: bool [seq, context]."""
    return mx.arange(context, dtype=mx.int32)[None] <= mx.arange(context - seq, context, dtype=mx.int32)[:, None]


def _sum(a: mx.array | None, b: mx.array | None) -> mx.array | None:
    return b if a is None else a if b is None else a + b


@op("com.microsoft.MultiHeadAttention-1")
def multi_head_attention(
    query,
    key=None,
    value=None,
    bias=None,
    key_padding_mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    cache_indirection=None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
    outputs: int = 1,
):
    """Attention of query over past and key; the present keys and values; and the scores that the softmax gets.

    query: [batch, seq, hidden], or packed with key and value [batch, seq, heads, 3, dim]; key, value: [batch, length, hidden],
    packed together [batch, length, heads, 2, dim], or as a finished cache [batch, heads, length, dim]; bias: [3 hidden]
    of the projections; key_padding_mask: see padding_bias; attention_bias: [batch or 1, heads or 1, seq, context];
    past_key, past_value: [batch, heads, past, dim]. com.microsoft MultiHeadAttention-1.
    """
    if past_sequence_length is not None or cache_indirection is not None:
        raise OperatorError(
            "a past in a shared buffer", "a past as long as what it holds", "export it without buffer sharing"
        )
    q, k, v = _projections(query, key, value, bias, num_heads)
    if past_key is not None and past_value is not None:
        k, v = mx.concatenate([past_key, k], axis=2), mx.concatenate([past_value, v], axis=2)
    batch, _, seq, dim = q.shape
    context = k.shape[2]
    added = attention_bias
    if key_padding_mask is not None:
        added = _sum(added, padding_bias(key_padding_mask, batch, seq, context, mask_filter_value, q.dtype))
    visible = causal(seq, context) if unidirectional else None
    scale = scale or 1 / math.sqrt(dim)
    if outputs < 4:
        return join_heads(attend(q, k, v, scale, added, visible)), k, v
    weights, raw = scores(q, k, scale, added, visible)
    return join_heads(_weighted(weights, v)), k, v, raw.astype(q.dtype)


def _projections(query, key, value, bias, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """q, k and v as [batch, heads, length, dim], the bias added to those that are projections."""
    if query.ndim == 5:
        q, k, v = (query[..., i, :].transpose(0, 2, 1, 3) for i in range(3))
    else:
        q = split_heads(query, heads)
        if key is None:
            raise OperatorError(
                f"no key for a query of shape {list(query.shape)}", "a key, or a packed query of rank 5"
            )
        if key.ndim == 5:
            k, v = (key[..., i, :].transpose(0, 2, 1, 3) for i in range(2))
        elif value is None:
            raise OperatorError(f"no value for a key of shape {list(key.shape)}", "a value, or a packed key of rank 5")
        elif key.ndim == 4:
            k, v = key, value
        else:
            k, v = split_heads(key, heads), split_heads(value, heads)
    if bias is None:
        return q, k, v
    hidden = q.shape[1] * q.shape[3]
    q = q + bias[:hidden].reshape(1, heads, 1, -1)
    if key is None or key.ndim != 4:
        k = k + bias[hidden : 2 * hidden].reshape(1, heads, 1, -1)
        v = v + bias[2 * hidden :].reshape(1, heads, 1, -1)
    return q, k, v


@op("com.microsoft.Attention-1")
def attention(
    x,
    weights,
    bias=None,
    mask_index=None,
    past=None,
    attention_bias=None,
    past_sequence_length=None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    outputs: int = 1,
):
    """Self-attention with its projections: x [batch, seq, in] · weights [in, q + k + v] + bias; and the present.

    mask_index: see padding_bias; past: [2, batch, heads, past, dim]; attention_bias: [batch or 1, heads or 1, seq, context];
    the present: [2, batch, heads, past + seq, dim]. com.microsoft Attention-1.
    """
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise unshared()
    joined = x @ weights
    return attend_joined(
        joined if bias is None else joined + bias,
        mask_index,
        past,
        attention_bias,
        num_heads,
        qkv_hidden_sizes,
        mask_filter_value,
        scale,
        bool(unidirectional),
    )


def unshared() -> OperatorError:
    """The error for attributes that onnxruntime has on CUDA only."""
    return OperatorError(
        "do_rotary or past_present_share_buffer", "neither: onnxruntime has them on CUDA only", "export it for the CPU"
    )


def attend_joined(
    joined: mx.array,
    mask_index: mx.array | None,
    past: mx.array | None,
    attention_bias: mx.array | None,
    heads: int,
    sizes: list[int] | None,
    mask_filter_value: float,
    scale: float,
    unidirectional: bool,
) -> tuple[mx.array, mx.array | None]:
    """The part of Attention after the projection: joined [batch, seq, q + k + v] to the output and the present."""
    q_size, k_size, v_size = sizes or [joined.shape[-1] // 3] * 3
    q = split_heads(joined[..., :q_size], heads)
    k = split_heads(joined[..., q_size : q_size + k_size], heads)
    v = split_heads(joined[..., q_size + k_size : q_size + k_size + v_size], heads)
    if past is not None:
        k, v = mx.concatenate([past[0], k], axis=2), mx.concatenate([past[1], v], axis=2)
    batch, _, seq, dim = q.shape
    context = k.shape[2]
    added = attention_bias
    if mask_index is not None:
        added = _sum(added, padding_bias(mask_index, batch, seq, context, mask_filter_value, q.dtype))
    visible = causal(seq, context) if unidirectional else None
    output = join_heads(attend(q, k, v, scale or 1 / math.sqrt(dim), added, visible))
    return output, mx.stack([k, v]) if k.shape == v.shape else None
