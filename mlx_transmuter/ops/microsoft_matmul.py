"""Float matrix products of com.microsoft: transposes, scales and biases fused in."""

import mlx.core as mx

from mlx_transmuter.ops.registry import op


@op("com.microsoft.FusedMatMul-1", "com.microsoft.TransposeMatMul-1")
def fused_mat_mul(
    a, b, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
):
    """alpha · a' · b' as numpy.matmul, ' being the transposes asked for.

    transBatchA moves axis 0 of a behind its batch axes, [m, ..., k] → [..., m, k]; transA then swaps the last two.
    com.microsoft FusedMatMul-1.
    """
    product = _transposed(a, transA, transBatchA) @ _transposed(b, transB, transBatchB)
    return product if alpha == 1 else alpha * product


def _transposed(x: mx.array, last: int, batch: int) -> mx.array:
    if batch and x.ndim > 2:
        x = mx.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if last and x.ndim > 1 else x
