"""Float matrix products of com.microsoft, with transposes, scales, biases and activations fused in."""

import mlx.core as mx

from mlx_transmuter.ops.contrib.activation import apply_fused_activation
from mlx_transmuter.ops.onnx.activation import gelu
from mlx_transmuter.ops.onnx.linear_algebra import gemm
from mlx_transmuter.ops.registry import op


@op("com.microsoft.FusedMatMul-1")
def fused_mat_mul(
    a, b, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
):
    """alpha · a' · b' as numpy.matmul, ' being the transposes that the attributes name.

    transBatchA moves axis 0 of a behind its batch axes, [m, ..., k] → [..., m, k]; transA then swaps the last two.
    com.microsoft FusedMatMul-1.
    """
    product = _transpose_operand(a, transA, transBatchA) @ _transpose_operand(b, transB, transBatchB)
    return product if alpha == 1 else alpha * product


def _transpose_operand(x: mx.array, last: int, batch: int) -> mx.array:
    if batch and x.ndim > 2:
        x = mx.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if last and x.ndim > 1 else x


@op("com.microsoft.TransposeMatMul-1")
def transpose_mat_mul(a, b, *, alpha: float = 1.0, transA: int = 0, transB: int = 0):
    """FusedMatMul by its older name. com.microsoft TransposeMatMul-1."""
    return fused_mat_mul(a, b, alpha=alpha, transA=transA, transB=transB)


@op("com.microsoft.FusedMatMulActivation-1")
def fused_mat_mul_activation(
    a,
    b,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_axis: int = 0,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
):
    """FusedMatMul and an activation. com.microsoft FusedMatMulActivation-1."""
    product = fused_mat_mul(
        a, b, alpha=alpha, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB
    )
    return apply_fused_activation(
        activation, product, _activation_parameters(activation, activation_alpha, activation_beta, activation_gamma)
    )


def _activation_parameters(
    kind: str | None, alpha: float | None, beta: float | None, gamma: float | None
) -> list[float | None]:
    return [alpha, gamma] if kind == "Selu" else [alpha, beta]


@op("com.microsoft.FusedGemm-1")
def fused_gemm(
    a,
    b,
    c=None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
):
    """Gemm and an activation. com.microsoft FusedGemm-1."""
    y = gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return apply_fused_activation(
        activation, y, _activation_parameters(activation, activation_alpha, activation_beta, activation_gamma)
    )


@op("com.microsoft.GemmFastGelu-1")
def gemm_fast_gelu(x, w, bias=None):
    """The tanh approximation of gelu of x · w + bias. com.microsoft GemmFastGelu-1."""
    product = x @ w
    return gelu(product if bias is None else product + bias, approximate="tanh")
