"""com.microsoft SparseAttention: grouped heads that see blocks of their past, as Phi-3-small lays them out."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.contrib.kv_buffers import first_columns, write_to_buffer
from mlx_transmuter.ops.functional.attention import attend, following_positions
from mlx_transmuter.ops.functional.heads import merge_heads, split_qkv_heads
from mlx_transmuter.ops.functional.indexing import clip_indices, index_array, take
from mlx_transmuter.ops.functional.rotary import rotate_at_positions
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import HostArray, op


@op("com.microsoft.SparseAttention-1")
def sparse_attention(
    query,
    key,
    value,
    past_key,
    past_value,
    block_row_indices: HostArray,
    block_col_indices: HostArray,
    total_sequence_length,
    key_total_sequence_lengths: Indices,
    cos_cache=None,
    sin_cache=None,
    *,
    kv_num_heads: int,
    num_heads: int,
    sparse_block_size: int,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
):
    """Causal attention over the buffers, each head over the blocks of its layout; and the buffers with the new tokens.

    query, key, value: [batch, seq, heads · dim], or packed in query; past_key, past_value: [batch, kv heads, capacity,
    dim]; key_total_sequence_lengths: int32 [batch], the tokens that a row holds after the step. Layout l is the CSR
    matrix of block_row_indices [layouts, blocks + 1] and block_col_indices [layouts, size]: which blocks of keys a
    block of queries sees; head h has layout h mod layouts. Abdin et al. 2024; com.microsoft SparseAttention-1.
    """
    q, k, v = split_qkv_heads(query, key, value, num_heads, kv_num_heads)
    batch, _, seq, dim = q.shape
    capacity = past_key.shape[2]
    total = clip_indices(key_total_sequence_lengths, 0, capacity).reshape(batch)
    start = first_columns(Indices.between(mx.maximum(total - seq, 0), 0, max(capacity - seq, 0)), seq, capacity)
    positions = following_positions(start, seq)
    if do_rotary:
        q, k = rotate_at_positions((q, k), cos_cache, sin_cache, positions, interleaved=rotary_interleaved)
    k, v = write_to_buffer(past_key, k, start, capacity), write_to_buffer(past_value, v, start, capacity)

    layouts = _dense_layouts(block_row_indices, block_col_indices, -(-capacity // sparse_block_size))
    block = index_array(positions) // sparse_block_size
    visible = take(mx.array(layouts), block, axis=1).swapaxes(0, 1)  # [batch, layouts, seq, blocks]
    visible = mx.repeat(visible, sparse_block_size, axis=-1)[..., :capacity]
    visible = mx.tile(visible, (1, num_heads // layouts.shape[0], 1, 1))
    columns = shared_arange(capacity)
    visible = visible & (columns <= index_array(positions)[:, None, :, None])
    return merge_heads(attend(q, k, v, scale or 1 / math.sqrt(dim), visibility=visible)), k, v


def _dense_layouts(rows: np.ndarray, columns: np.ndarray, blocks: int) -> np.ndarray:
    """Returns the layouts as bool [layouts, blocks, blocks], of as many blocks as the buffers have."""
    dense = np.zeros((rows.shape[0], blocks, blocks), dtype=bool)
    for layout in range(rows.shape[0]):
        for row in range(min(rows.shape[1] - 1, blocks)):
            row_columns = columns[layout, rows[layout, row] : rows[layout, row + 1]]
            dense[layout, row, row_columns[row_columns < blocks]] = True
    return dense
