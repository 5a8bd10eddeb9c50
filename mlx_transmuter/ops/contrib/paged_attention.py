"""com.microsoft PagedAttention: the tokens of several sequences one after another, over keys and values in pages."""

import math

import mlx.core as mx

from mlx_transmuter.ops.contrib.normalization import rms_norm
from mlx_transmuter.ops.contrib.rotary import gather_rotary_tables, rotate_pairs
from mlx_transmuter.ops.functional.attention import attend, shared_arange
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
    cumulative_sequence_ length: int32 [batch + 1], where each sequence's tokens begin and the last's end; past_seqlens:
    int32 [batch]; block_table: int32 [batch, most], each sequence's pages in order, -1 for none; slot_mapping: int32
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
            f"a cache of layout {kv_cache_layout!r}, quantised {k_quant_type!r} and {v_quant_type!r}",
            "keys and values apart, in floats",
        )
    tokens = query.shape[0]
    q, k, v = _split_token_heads(query, key, value, num_heads, kv_num_heads)
    dim = q.shape[-1]
    order = shared_arange(tokens)
    row = mx.sum(order[:, None] >= cumulative_sequence_length[None, 1:], axis=1).astype(mx.int32)
    row = mx.minimum(row, past_seqlens.size - 1)
    position = mx.take(past_seqlens, row) + order - mx.take(cumulative_sequence_length, row)

    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = rms_norm(q, q_norm_weight, qk_norm_epsilon), rms_norm(k, k_norm_weight, qk_norm_epsilon)
    if do_rotary:
        cos, sin = gather_rotary_tables(cos_cache, sin_cache, position[:, None])
        q, k = (_rotate_after_offset(x, cos, sin, rotary_offset, bool(rotary_interleaved)) for x in (q, k))

    page = key_cache.shape[1]
    if slot_mapping is None:
        held = mx.take(block_table.reshape(-1), row * block_table.shape[1] + position // page)
        slot_mapping = mx.where(held < 0, -1, held * page + position % page)
    key_cache, value_cache = _store_at_slots(key_cache, k, slot_mapping), _store_at_slots(value_cache, v, slot_mapping)

    # All sequences' pages side by side, of which each token sees those of its own: one product, and no copy a token.
    batch, most = block_table.shape
    pages = mx.maximum(block_table.reshape(-1), 0)
    columns = shared_arange(most * page)
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
        """[1, kv heads, batch · most · page, dim]."""
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


def _split_token_heads(query, key, value, heads: int, kv_heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """q, k and v as [tokens, heads, 1, dim]."""
    tokens = query.shape[0]
    if key is None:
        packed = query.reshape(tokens, heads + 2 * kv_heads, 1, -1)
        return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    return (
        query.reshape(tokens, heads, 1, -1),
        key.reshape(tokens, kv_heads, 1, -1),
        value.reshape(tokens, kv_heads, 1, -1),
    )


def _rotate_after_offset(x: mx.array, cos: mx.array, sin: mx.array, offset: int, interleaved: bool) -> mx.array:
    if not offset:
        return rotate_pairs(x, cos, sin, interleaved)
    return mx.concatenate([x[..., :offset], rotate_pairs(x[..., offset:], cos, sin, interleaved)], axis=-1)


def _store_at_slots(cache: mx.array, rows: mx.array, slots: mx.array) -> mx.array:
    """The cache [pages, page, heads, dim] with rows [tokens, heads, 1, dim] at the slots [tokens], -1 for nowhere.

    MLX has no dropped store: such a token repeats one that is kept, and where none is, what slot 0 holds.
    """
    flat = cache.reshape(-1, *cache.shape[2:])
    rows = rows.squeeze(2).astype(cache.dtype)
    kept = slots >= 0
    first = mx.argmax(kept)
    any_kept = mx.any(kept)
    target = mx.where(kept, slots, mx.where(any_kept, slots[first], 0))
    spare = mx.where(any_kept, rows[first], flat[0])
    values = mx.where(kept[:, None, None], rows, spare[None])
    places = mx.broadcast_to(target[:, None, None], values.shape)
    return mx.put_along_axis(flat, places, values, axis=0).reshape(cache.shape)
