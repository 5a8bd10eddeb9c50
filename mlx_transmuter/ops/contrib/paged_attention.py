"""com.microsoft PagedAttention: the tokens of several sequences one after another, with keys and values in pages."""

import math

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.functional.attention import attend
from mlx_transmuter.ops.functional.heads import split_qkv_heads
from mlx_transmuter.ops.functional.indexing import element, index_array, put_along_axis, take
from mlx_transmuter.ops.functional.norms import rms_norm
from mlx_transmuter.ops.functional.rotary import rotate_at_positions
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op


@op("com.microsoft.PagedAttention-1")
def paged_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    cumulative_sequence_length: Indices,
    past_seqlens: Indices,
    block_table: Indices,
    cos_cache=None,
    sin_cache=None,
    slot_mapping: Indices = None,
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
    cumulative, past, table = (index_array(x) for x in (cumulative_sequence_length, past_seqlens, block_table))
    batch, max_pages = table.shape
    if cumulative.shape != (batch + 1,) or past.shape != (batch,):
        found = f"{list(past.shape)} pasts and {list(cumulative.shape)} ends for a table of {batch} sequences"
        raise OperatorError(found, "a past for each, and an end more")
    # Each token is a row of its own: q, k and v are [tokens, heads, 1, dim].
    key, value = (None if x is None else x[:, None] for x in (key, value))
    q, k, v = split_qkv_heads(query[:, None], key, value, num_heads, kv_num_heads)
    dim = q.shape[-1]
    order = shared_arange(tokens)
    row = mx.minimum(mx.sum(order[:, None] >= cumulative[None, 1:], axis=1).astype(mx.int32), batch - 1)
    of_row = Indices.between(row, 0, batch - 1)
    position = take(past, of_row) + order - take(cumulative, of_row)

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
        column = position // page
        block = take(table.reshape(-1), row * max_pages + mx.clip(column, 0, max_pages - 1))
        is_mapped = (column >= 0) & (column < max_pages) & (block >= 0) & (block < key_cache.shape[0])
        slots = mx.where(is_mapped, block * page + position % page, -1)
    else:
        slots = index_array(slot_mapping)
    key_cache, value_cache = _store_at_slots(key_cache, k, slots), _store_at_slots(value_cache, v, slots)

    # The context is the pages of all sequences one after another, of which each token sees those of its own sequence:
    # one product, without a copy of the pages per token.
    pages = mx.maximum(table.reshape(-1), 0)
    columns = shared_arange(max_pages * page)
    newest = position if is_causal else take(past + cumulative[1:] - cumulative[:-1], of_row) - 1
    visible = columns <= newest[:, None]
    if local_window_size > 0:
        visible = visible & (columns > position[:, None] - local_window_size)
    owned = row[:, None] == shared_arange(batch)
    mapped = mx.repeat(table >= 0, page, axis=1)
    visible = (visible[:, None] & owned[..., None] & mapped[None]).reshape(tokens, -1)

    def context(cache: mx.array) -> mx.array:
        """Returns the pages of all sequences: [1, kv heads, batch · max pages · page, dim]."""
        return take(cache, pages).reshape(-1, kv_num_heads, dim).swapaxes(0, 1)[None]

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

    A token whose slot is none of the cache's, as -1, is not stored. As MLX cannot leave out one store of many, it
    writes the first stored token once more, or what slot 0 holds if no token is stored.
    """
    flat = cache.reshape(-1, *cache.shape[2:])
    rows = rows.squeeze(2).astype(cache.dtype)
    is_stored = (slots >= 0) & (slots < flat.shape[0])
    first, any_stored = Indices.between(mx.argmax(is_stored), 0, slots.size - 1), mx.any(is_stored)
    target = mx.where(is_stored, slots, mx.where(any_stored, take(slots, first), 0))
    repeated = mx.where(any_stored, take(rows, first), element(flat, 0))
    values = mx.where(is_stored[:, None, None], rows, repeated[None])
    places = Indices.between(mx.broadcast_to(target[:, None, None], values.shape), 0, flat.shape[0] - 1)
    return put_along_axis(flat, places, values, axis=0).reshape(cache.shape)
