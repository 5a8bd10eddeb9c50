"""Attention's two products with keys and values in 8 or 4 bits, which are multiplied as they lie packed.

`held` is a PackedPool whose rows are those that an index read: uint32 [lanes, context, width].
"""

import mlx.core as mx

from mlx_transmuter.cache import QuantizedPool

# From more tokens a step than this on, the keys and values are worth unpacking: each is used so often that MLX's fused
# attention, which never holds the scores, wins.
MAX_TOKENS_WITHOUT_DEQUANTIZING = 8


def quantized_scores(q: mx.array, keys: QuantizedPool) -> mx.array:
    """q [lanes, queries, dim] · keys [lanes, context, dim] transposed: [lanes, queries, context], in q's type."""
    words, scales, biases = keys.format.matmul_operands(keys.rows)
    packing = keys.format
    fill = scales.shape[-1] * packing.group_size - packing.dim  # the last group may be filled up, with anything
    wide = mx.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, fill)]) if fill else q
    found = mx.quantized_matmul(
        wide, words, scales, biases, transpose=True, group_size=packing.group_size, bits=packing.bits
    )
    return found.astype(q.dtype)


def quantized_weighted_sum(weights: mx.array, values: QuantizedPool) -> mx.array:
    """weights [lanes, queries, context] · values [lanes, context, dim]: [lanes, queries, dim], in the weights' type."""
    words, scales, biases = values.format.matmul_operands(values.rows)
    packing = values.format
    found = mx.quantized_matmul(
        weights, words, scales, biases, transpose=False, group_size=packing.group_size, bits=packing.bits
    )
    return found[..., : packing.dim].astype(weights.dtype)
