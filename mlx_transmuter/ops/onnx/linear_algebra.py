"""Matrix products."""

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import take_along_axis
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import op


def _exact_matmul(a: mx.array, b: mx.array) -> mx.array:
    if mx.issubdtype(a.dtype, mx.floating):
        return mx.matmul(a, b)
    if a.shape[-1] == 0:
        return mx.matmul(a.astype(mx.float32), b.astype(mx.float32)).astype(a.dtype)
    # MLX multiplies no integer matrices: the products are summed one axis at a time, exact to the last bit.
    rows = a[None] if a.ndim == 1 else a
    columns = b[:, None] if b.ndim == 1 else b
    product = mx.sum(rows[..., :, :, None] * columns[..., None, :, :], axis=-2).astype(a.dtype)
    product = product.squeeze(-2) if a.ndim == 1 else product
    return product.squeeze(-1) if b.ndim == 1 else product


@op("MatMul-1")
def matmul(a, b):
    """a [..., n, k] times b [..., k, m], as NumPy's matmul: [..., n, m]. ONNX MatMul-1, 9, 13."""
    if min(a.ndim, b.ndim) > 1 and a.shape[-1] == 1 == b.shape[-2]:
        return a * b  # such as positions by frequencies: exact where a product of matrices rounds its inputs (TF32)
    return _exact_matmul(a, b)


@op("Gemm-11")
def gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """alpha * a b + beta * c, of matrices, transposed first by transA and transB; c broadcasts. ONNX Gemm-11, 13."""
    a, b = (a.T if transA else a), (b.T if transB else b)
    product = _exact_matmul(a, b)
    product = product if alpha == 1 else (alpha * product).astype(product.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else (beta * c).astype(c.dtype))


@op("Einsum-12")
def einsum(*xs, equation):
    """The sum of products that the equation says, as NumPy's einsum. ONNX Einsum-12, 28."""
    return mx.einsum(equation.replace(" ", ""), *xs)


@op("Det-11")
def det(x):
    """The determinants of the square matrices x [..., n, n]: [...]. ONNX Det-11, 22."""
    # Elimination with row exchange, one column at a time: MLX's own LU runs on the CPU alone.
    n = x.shape[-1]
    rows, result = x, mx.ones(x.shape[:-2], x.dtype)
    for _ in range(n):
        best = mx.argmax(mx.abs(rows[..., 0]), axis=-1, keepdims=True)
        places = mx.broadcast_to(best[..., None], (*best.shape[:-1], 1, rows.shape[-1]))
        pivot_row = take_along_axis(rows, Indices.between(places, 0, rows.shape[-2] - 1), axis=-2)
        is_pivot = mx.arange(rows.shape[-2]) == best
        swapped = mx.where(is_pivot[..., None], rows[..., :1, :], rows)[..., 1:, :]
        pivot = pivot_row[..., 0, 0]
        result = result * mx.where(best[..., 0] == 0, pivot, -pivot)
        factor = swapped[..., :1] / mx.where(pivot == 0, 1, pivot)[..., None, None]
        rows = swapped[..., 1:] - factor * pivot_row[..., 1:]
    return result
