"""MLX's kernels behind a check of sizes: of no rows, heads or experts some divide by zero, which ends the process."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import OperatorError


def fused_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None
) -> mx.array:
    """Returns mx.fast's attention of q [batch, heads, seq, dim] over k and v [batch, kv heads, context, dim].

    Raises OperatorError unless the heads of the queries are a multiple of those of the keys.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if not kv_heads or heads % kv_heads:
        raise OperatorError(f"{heads} heads over {kv_heads} of keys", "a multiple of those of the keys")
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def quantized_matmul(
    x: mx.array,
    words: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    transpose: bool,
    group_size: int,
    bits: int,
) -> mx.array:
    """Returns x [..., rows, in] times a quantized matrix, or the transposed one; of no elements it is zeros.

    words: uint32 [..., out, in · bits / 32] to be transposed, or [..., in, out · bits / 32].
    """
    if not (x.size and words.size):
        width = words.shape[-2] if transpose else words.shape[-1] * 32 // bits
        batch = np.broadcast_shapes(x.shape[:-2], words.shape[:-2])
        return mx.zeros((*batch, *x.shape[-2:-1], width), x.dtype)
    return mx.quantized_matmul(x, words, scales, biases, transpose=transpose, group_size=group_size, bits=bits)
