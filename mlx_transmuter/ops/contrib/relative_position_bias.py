"""Relative position biases of com.microsoft: T5's buckets of distances, and WavLM's gate."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.heads import split_heads
from mlx_transmuter.ops.functional.indexing import take
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("com.microsoft.RelativePositionBias-1")
def relative_position_bias(
    bias_table, query_length: HostArray, key_length: HostArray, *, max_distance: int, is_bidirectional: int = 0
):
    """The bias [1, heads, queries, keys] of each distance, by T5's buckets.

    bias_table is declared [buckets, heads] and lies in memory head by head, as onnxruntime's fusion writes it. Raffel
    et al. 2020; com.microsoft RelativePositionBias-1.
    """
    buckets, heads = bias_table.shape
    queries, keys = int(query_length.item()), int(key_length.item())
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    if is_bidirectional:
        buckets //= 2
        first, distance = np.where(distance > 0, buckets, 0), np.abs(distance)
    else:
        first, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    # float32, as the graphs compute it: at the edges of buckets a longer float can fall on the other side.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    far = np.minimum(exact + (ratio * np.float32(buckets - exact)).astype(np.int32), buckets - 1)
    bucket = first + np.where(distance < exact, distance, far)
    return take(bias_table.reshape(heads, -1), bucket, axis=1)[None]


@op("com.microsoft.GatedRelativePositionBias-1")
def gated_relative_position_bias(query, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads: int):
    """rel_pos [1, heads, seq, seq] times a gate of each query and head: [batch, heads, seq, seq].

    query: [batch, seq, heads · dim]; query_bias: [heads · dim]; weight [dim, 2 · n] and bias [2 · n] give the gates u
    and r by the sums of their halves; eco_a: [1, heads, 1, 1]. Chen et al. 2022 (WavLM); com.microsoft
    GatedRelativePositionBias-1.
    """
    if token_offset is not None:
        raise OperatorError("packed tokens", "a query of [batch, seq, hidden]", "export it without packing")
    heads = split_heads(query + query_bias, num_heads)
    gates = heads @ weight + bias
    gates = mx.sigmoid(mx.sum(gates.reshape(*gates.shape[:-1], 2, -1), axis=-1))
    u, r = gates[..., :1], gates[..., 1:]
    return (u * (r * eco_a - 1.0) + 2.0) * rel_pos
