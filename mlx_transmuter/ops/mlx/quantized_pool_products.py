"""The two products of attention with keys and values in 8 or 4 bits, without dequantizing them.

keys and values are QuantizedPools whose rows an index read: uint32 [n, context, width], of n pairs (row, head).
"""

import mlx.core as mx

from mlx_transmuter.cache import QuantizedPool
from mlx_transmuter.ops.functional.kernels import quantized_matmul

# In a step of more tokens, dequantizing pays: each key is used so often that MLX's fused attention, which never stores
# the scores, is faster.
MAX_TOKENS_WITHOUT_DEQUANTIZING = 8


def quantized_scores(q: mx.array, keys: QuantizedPool) -> mx.array:
    """q [n, queries, dim] · keys [n, context, dim] transposed: [n, queries, context], in q's type."""
    dtype, quantized_format = q.dtype, keys.format
    words, scales, biases = quantized_format.matmul_operands(keys.rows)
    # Zeros meet the padding of the keys' last group, which may have any value.
    if padding := scales.shape[-1] * quantized_format.group_size - quantized_format.dim:
        q = mx.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, padding)])
    group_size, bits = quantized_format.group_size, quantized_format.bits
    scores = quantized_matmul(q, words, scales, biases, transpose=True, group_size=group_size, bits=bits)
    return scores.astype(dtype)


def quantized_weighted_sum(weights: mx.array, values: QuantizedPool) -> mx.array:
    """weights [n, queries, context] · values [n, context, dim]: [n, queries, dim], in the weights' type."""
    quantized_format = values.format
    words, scales, biases = quantized_format.matmul_operands(values.rows)
    group_size, bits = quantized_format.group_size, quantized_format.bits
    padded = quantized_matmul(weights, words, scales, biases, transpose=False, group_size=group_size, bits=bits)
    return padded[..., : quantized_format.dim].astype(weights.dtype)
