"""com.microsoft PagedAttention: the tokens of several sequences one after another, with keys and values in pages."""

import math

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.functional.attention import attend
from mlx_transmuter.ops.functional.heads import split_qkv_heads
from mlx_transmuter.ops.functional.norms import rms_norm
from mlx_transmuter.ops.functional.rotary import rotate_at_positions
from mlx_transmuter.ops.registry import OperatorError, op


@op("com.microsoft.PagedAttention-1")
def paged_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    cumulative_sequence_length,
    past_seqlens,
    block_table,
    cos_cache=None,
    sin_cache=None,
    slot_mapping=None,
    head_sink=None,
    q_norm_weight=None,
    k_norm_weight=None,
    k_scale=None,
    v_scale=None,
    attention_metadata=None,
    *,
    kv_num_heads: int,
    num_heads: int,
    do_rotary: int = 0,
    is_causal: int = 1,
    k_cache_dtype: str = "",
    k_quant_type: str = "NONE",
    kv_cache_layout: str = "SEPARATE",
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    v_cache_dtype: str = "",
    v_head_size: int = 0,
    v_quant_type: str = "NONE",
):
    """Attention of each token over its sequence's pages, [tokens, heads · dim]; and the caches with the new tokens.

    query, key, value: [tokens, heads · dim], or packed in query; caches: [pages, page, kv heads, dim];
    cumulative_sequence_length: int32 [batch + 1], where each sequence's tokens begin and the last's end; past_seqlens:
    int32 [batch]; block_table: int32 [batch, pages], each sequence's pages in order, -1 for none; slot_mapping: int32
    [tokens], where each token is written, -1 for nowhere, after its past where absent; head_sink: [heads]. Kwon et al.
    2023; com.microsoft PagedAttention-1.
    """
    if (
        kv_cache_layout != "SEPARATE"
        or {k_quant_type, v_quant_type} != {"NONE"}
        or k_scale is not None
        or v_scale is not None
    ):
        raise OperatorError(
            f"a cache of layout {kv_cache_layout!r}, quantized {k_quant_type!r} and {v_quant_type!r}",
            "keys and values apart, in floats",
        )
    tokens = query.shape[0]
    tokens = query.shape[0]
    # Each token is a row of its own: q, k and v are [tokens, heads, 1, dim].
    key, value = (None if x is None else x[:, None] for x in (key, value))
    q, k, v = split_qkv_heads(query[:, None], key, value, num_heads, kv_num_heads)
    dim = q.shape[-1]
    order = shared_arange(tokens)
    row = mx.sum(order[:, None] >= cumulative_sequence_length[None, 1:], axis=1).astype(mx.int32)
    row = mx.minimum(row, past_seqlens.size - 1)
    position = mx.take(past_seqlens, row) + order - mx.take(cumulative_sequence_length, row)

    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, qk_norm_epsilon, compute_dtype=q.dtype)
        k = rms_norm(k, k_norm_weight, qk_norm_epsilon, compute_dtype=k.dtype)
    if do_rotary:
        q, k = rotate_at_positions(
            (q, k),
            cos_cache,
            sin_cache,
            position[:, None],
            interleaved=rotary_interleaved,
            offset=rotary_offset,
        )

    page = key_cache.shape[1]
    if slot_mapping is None:
        block = mx.take(block_table.reshape(-1), row * block_table.shape[1] + position // page)
        slot_mapping = mx.where(block < 0, -1, block * page + position % page)
    key_cache, value_cache = _store_at_slots(key_cache, k, slot_mapping), _store_at_slots(value_cache, v, slot_mapping)

    # The context is the pages of all sequences one after another, of which each token sees those of its own sequence:
    # one product, without a copy of the pages per token.
    batch, max_pages = block_table.shape
    pages = mx.maximum(block_table.reshape(-1), 0)
    columns = shared_arange(max_pages * page)
    newest = (
        position
        if is_causal
        else mx.take(past_seqlens + cumulative_sequence_length[1:] - cumulative_sequence_length[:-1], row) - 1
    )
    visible = columns <= newest[:, None]
    if local_window_size > 0:
        visible = visible & (columns > position[:, None] - local_window_size)
    owned = row[:, None] == shared_arange(batch)
    mapped = mx.repeat(block_table >= 0, page, axis=1)
    visible = (visible[:, None] & owned[..., None] & mapped[None]).reshape(tokens, -1)

    def context(cache: mx.array) -> mx.array:
        """Returns the pages of all sequences: [1, kv heads, batch · max pages · page, dim]."""
        return mx.take(cache, pages, axis=0).reshape(-1, kv_num_heads, dim).swapaxes(0, 1)[None]

    y = attend(
        q.squeeze(2).swapaxes(0, 1)[None],
        context(key_cache).astype(q.dtype),
        context(value_cache).astype(q.dtype),
        scale or 1 / math.sqrt(dim),
        visibility=visible[None, None],
        softcap=softcap,
        sinks=head_sink,
    )
    return y[0].swapaxes(0, 1).reshape(tokens, -1), key_cache, value_cache


def _store_at_slots(cache: mx.array, rows: mx.array, slots: mx.array) -> mx.array:
    """Returns the cache [pages, page, heads, dim] with rows [tokens, heads, 1, dim] at the slots [tokens].

    A token with slot -1 is not stored. As MLX cannot leave out one store of many, it writes the first stored token once
    more, or what slot 0 holds if no token is stored.
    """
    flat = cache.reshape(-1, *cache.shape[2:])
    rows = rows.squeeze(2).astype(cache.dtype)
    is_stored = slots >= 0
    first, any_stored = mx.argmax(is_stored), mx.any(is_stored)
    target = mx.where(is_stored, slots, mx.where(any_stored, slots[first], 0))
    repeated = mx.where(any_stored, rows[first], flat[0])
    values = mx.where(is_stored[:, None, None], rows, repeated[None])
    places = mx.broadcast_to(target[:, None, None], values.shape)
    return mx.put_along_axis(flat, places, values, axis=0).reshape(cache.shape)
