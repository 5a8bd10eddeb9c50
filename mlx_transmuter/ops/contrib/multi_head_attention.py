"""Attention of com.microsoft with as many heads of keys as of queries: MultiHeadAttention, Attention."""

import math

import mlx.core as mx

from mlx_transmuter.ops.contrib.kv_buffers import attend_over_buffers
from mlx_transmuter.ops.functional.attention import (
    add_biases,
    attend,
    attention_weights_and_scores,
    causal_mask,
    padding_mask_bias,
    weighted_values,
)
from mlx_transmuter.ops.functional.heads import merge_heads, split_heads
from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op


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
    past_sequence_length: Indices = None,
    cache_indirection: Indices = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
    outputs: int = 1,
):
    """Attention of query over past and key; the present keys and values; and the scores that the softmax gets.

    query: [batch, seq, hidden], or packed with key and value [batch, seq, heads, 3, dim]; key, value: [batch, length,
    hidden], packed together [batch, length, heads, 2, dim], or as a finished cache [batch, heads, length, dim]; bias:
    [3 hidden] of the projections; key_padding_mask: see padding_mask_bias; attention_bias: [batch or 1, heads or 1,
    seq, context]; past_key, past_value: [batch, heads, past, dim], or with past_sequence_length buffers: see
    attend_over_buffers. com.microsoft MultiHeadAttention-1.
    """
    q, k, v = project_qkv_heads(query, key, value, bias, num_heads)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    if past_sequence_length is not None and past_key is not None and past_value is not None:
        return attend_over_buffers(
            q,
            k,
            v,
            past_key,
            past_value,
            past_length=Indices.of(past_sequence_length),
            cache_indirection=None if cache_indirection is None else Indices.of(cache_indirection),
            mask=key_padding_mask,
            attention_bias=attention_bias,
            mask_filter_value=mask_filter_value,
            scale=scale,
            unidirectional=bool(unidirectional),
        )[:outputs]
    if past_key is not None and past_value is not None:
        k, v = mx.concatenate([past_key, k], axis=2), mx.concatenate([past_value, v], axis=2)
    batch, _, seq, _ = q.shape
    context = k.shape[2]
    added = attention_bias
    if key_padding_mask is not None:
        added = add_biases(added, padding_mask_bias(key_padding_mask, batch, seq, context, mask_filter_value, q.dtype))
    visible = causal_mask(seq, context) if unidirectional else None
    if outputs < 4:
        return merge_heads(attend(q, k, v, scale, bias=added, visibility=visible)), k, v
    weights, scores = attention_weights_and_scores(q, k, scale, bias=added, visibility=visible)
    return merge_heads(weighted_values(weights, v)), k, v, scores.astype(q.dtype)


def project_qkv_heads(query, key, value, bias, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """Returns q, k and v as [batch, heads, length, dim], with the bias added to those that are projections."""
    if query.ndim == 5:
        q, k, v = (element(query, i, -2).transpose(0, 2, 1, 3) for i in range(3))
    else:
        q = split_heads(query, heads)
        if key is None:
            raise OperatorError(
                f"no key for a query of shape {list(query.shape)}", "a key, or a packed query of rank 5"
            )
        if key.ndim == 5:
            k, v = (element(key, i, -2).transpose(0, 2, 1, 3) for i in range(2))
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


@op("com.microsoft.DecoderMaskedMultiHeadAttention-1")
def decoder_masked_multi_head_attention(
    query,
    key=None,
    value=None,
    mask_index=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length: Indices = None,
    beam_width=None,
    cache_indirection: Indices = None,
    bias=None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    output_qk: int = 0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    outputs: int = 1,
):
    """MultiHeadAttention of one new token per row; query may have key and value after it, [batch, 1, 3 · hidden].

    com.microsoft DecoderMaskedMultiHeadAttention-1.
    """
    if key is None:
        query, key, value = mx.split(query, 3, axis=-1)
    if cache_indirection is not None and cache_indirection.shape[1] == 1:
        cache_indirection = None
    return multi_head_attention(
        query,
        key,
        value,
        bias,
        mask_index,
        attention_bias,
        past_key,
        past_value,
        past_sequence_length if past_present_share_buffer else None,
        cache_indirection,
        num_heads=num_heads,
        mask_filter_value=mask_filter_value,
        scale=scale,
        outputs=outputs,
    )


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

    mask_index: see padding_mask_bias; past: [2, batch, heads, past, dim]; attention_bias: [batch or 1, heads or 1, seq,
    context]; the present: [2, batch, heads, past + seq, dim]. com.microsoft Attention-1.
    """
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise cuda_only_error()
    packed_qkv = x @ weights
    return attend_packed_qkv(
        packed_qkv if bias is None else packed_qkv + bias,
        heads=num_heads,
        mask_index=mask_index,
        past=past,
        attention_bias=attention_bias,
        qkv_sizes=qkv_hidden_sizes,
        mask_filter_value=mask_filter_value,
        scale=scale,
        unidirectional=bool(unidirectional),
    )


def cuda_only_error() -> OperatorError:
    """Returns the error for attributes that onnxruntime supports on CUDA only."""
    return OperatorError(
        "do_rotary or past_present_share_buffer", "neither: onnxruntime has them on CUDA only", "export it for the CPU"
    )


def attend_packed_qkv(
    packed_qkv: mx.array,
    *,
    heads: int,
    mask_index: mx.array | None,
    past: mx.array | None,
    mask_filter_value: float,
    scale: float,
    unidirectional: bool,
    attention_bias: mx.array | None = None,
    qkv_sizes: list[int] | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Returns the output and the present of com.microsoft's Attention from its projections [batch, seq, q + k + v].

    qkv_sizes: the widths of q, k and v, equal by default; scale: 0 for 1 / √dim; the other arguments as in Attention.
    """
    q_size, k_size, v_size = qkv_sizes or [packed_qkv.shape[-1] // 3] * 3
    q = split_heads(packed_qkv[..., :q_size], heads)
    k = split_heads(packed_qkv[..., q_size : q_size + k_size], heads)
    v = split_heads(packed_qkv[..., q_size + k_size : q_size + k_size + v_size], heads)
    if past is not None:
        past_k, past_v = element(past, 0), element(past, 1)
        k, v = mx.concatenate([past_k, k], axis=2), mx.concatenate([past_v, v], axis=2)
    batch, _, seq, dim = q.shape
    context = k.shape[2]
    added = attention_bias
    if mask_index is not None:
        added = add_biases(added, padding_mask_bias(mask_index, batch, seq, context, mask_filter_value, q.dtype))
    visible = causal_mask(seq, context) if unidirectional else None
    output = merge_heads(attend(q, k, v, scale or 1 / math.sqrt(dim), bias=added, visibility=visible))
    return output, mx.stack([k, v]) if k.shape == v.shape else None
