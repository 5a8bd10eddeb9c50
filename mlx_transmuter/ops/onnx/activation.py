"""Activations of neural networks, by element."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.functional.exponential import scaled_sigmoid
from mlx_transmuter.ops.onnx.elementwise_math import tanh
from mlx_transmuter.ops.registry import OperatorError, op


@op("Sigmoid-6")
def sigmoid(x):
    """1 / (1 + exp(-x)). ONNX Sigmoid-6, 13."""
    return mx.sigmoid(x)


@op("Relu-6")
def relu(x):
    """max(x, 0). ONNX Relu-6, 13, 14."""
    return mx.maximum(x, 0)


@op("LeakyRelu-6")
def leaky_relu(x, *, alpha=0.01):
    """x, or alpha * x where x is negative. ONNX LeakyRelu-6, 16."""
    return mx.where(x < 0, alpha * x, x)


@op("PRelu-9")
def p_relu(x, slope):
    """x, or slope * x where x is negative; slope broadcasts to x. ONNX PRelu-9, 16."""
    return mx.where(x < 0, slope * x, x)


@op("ThresholdedRelu-10")
def thresholded_relu(x, *, alpha=1.0):
    """x where it is above alpha, else 0. ONNX ThresholdedRelu-10, 22."""
    return mx.where(x > alpha, x, mx.zeros_like(x))


@op("Elu-6")
def elu(x, *, alpha=1.0):
    """x, or alpha * (exp(x) - 1) where x is negative. ONNX Elu-6, 22."""
    return mx.where(x < 0, alpha * mx.expm1(x), x)


@op("Celu-12")
def celu(x, *, alpha=1.0):
    """max(x, 0) + min(0, alpha * (exp(x / alpha) - 1)). ONNX Celu-12, 28."""
    return mx.maximum(x, 0) + mx.minimum(alpha * mx.expm1(x / alpha), 0)


@op("Selu-6")
def selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    """gamma * x, or gamma * alpha * (exp(x) - 1) where x is not positive. ONNX Selu-6, 22."""
    return gamma * mx.where(x > 0, x, alpha * mx.expm1(x))


@op("Gelu-20")
def gelu(x, *, approximate="none"):
    """x * Phi(x) by the error function, or by tanh with approximate="tanh". ONNX Gelu-20."""
    if approximate == "tanh":
        return scaled_sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x), x)  # (1 + tanh u) / 2 = sigmoid(2u)
    if approximate == "none":
        return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))
    raise OperatorError(f"the approximation {approximate!r}", "none or tanh")


@op("Swish-24")
def swish(x, *, alpha=1.0):
    """x * sigmoid(alpha * x). ONNX Swish-24."""
    return scaled_sigmoid(x if alpha == 1 else alpha * x, x)


def swish_gate(
    gate: mx.array,
    up: mx.array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    limit_after_activation: bool = False,
    rounding_dtype: mx.Dtype | None = None,
) -> mx.array:
    """Returns swish(gate, alpha) · (up + beta). Shazeer 2020.

    limit: up is clipped to ±limit, and the gate to at most limit, or its activation where limit_after_activation.
    rounding_dtype: the activation is rounded to this type before the product.
    """
    if limit is not None:
        up = mx.clip(up, -limit, limit)
        gate = gate if limit_after_activation else mx.minimum(gate, limit)
    activated = swish(gate, alpha=alpha)
    if limit is not None and limit_after_activation:
        activated = mx.minimum(activated, limit)
    if rounding_dtype is not None:
        activated = activated.astype(rounding_dtype).astype(gate.dtype)
    return activated * (up + beta if beta else up)


@op("SwiGLU-28")
def swiglu(gate, x, *, alpha=1.0):
    """gate * sigmoid(alpha * gate) * x. ONNX SwiGLU-28."""
    return swish_gate(gate, x, alpha=alpha)


@op("Softplus-1")
def softplus(x):
    """log(1 + exp(x)). ONNX Softplus-1, 22."""
    return mx.logaddexp(x, 0)


@op("Softsign-1")
def softsign(x):
    """x / (1 + |x|). ONNX Softsign-1, 22."""
    return x / (1 + mx.abs(x))


@op("Mish-18")
def mish(x):
    """x * tanh(softplus(x)). ONNX Mish-18, 22."""
    return x * mx.tanh(mx.logaddexp(x, 0))


@op("HardSigmoid-6")
def hard_sigmoid(x, *, alpha=0.2, beta=0.5):
    """alpha * x + beta within [0, 1]. ONNX HardSigmoid-6, 22."""
    return mx.clip(alpha * x + beta, 0, 1)


@op("HardSwish-14")
def hard_swish(x):
    """x * max(0, min(1, x / 6 + 1 / 2)). ONNX HardSwish-14, 22."""
    return x * mx.clip(x / 6 + 0.5, 0, 1)


@op("Shrink-9")
def shrink(x, *, bias=0.0, lambd=0.5):
    """x - bias above lambd, x + bias below -lambd, else 0. ONNX Shrink-9."""
    shrunk = mx.where(x > lambd, x - bias, mx.where(x < -lambd, x + bias, 0))
    return shrunk.astype(x.dtype)


class ParametricActivation(NamedTuple):
    """An activation and the names of its parameters, in the order in which other operators list their values."""

    function: Callable[..., mx.array]
    parameters: tuple[str, ...] = ()

    def bind(self, values: Sequence[float | None]) -> Callable[[mx.array], mx.array]:
        """Returns the activation with the values of its parameters; None, or a missing one, is the default."""
        bound = {name: value for name, value in zip(self.parameters, values, strict=False) if value is not None}
        return partial(self.function, **bound)


# The activations that recurrent and fused operators name, by the names of their operators.
ACTIVATIONS_BY_OP_TYPE: dict[str, ParametricActivation] = {
    "Elu": ParametricActivation(elu, ("alpha",)),
    "HardSigmoid": ParametricActivation(hard_sigmoid, ("alpha", "beta")),
    "LeakyRelu": ParametricActivation(leaky_relu, ("alpha",)),
    "Relu": ParametricActivation(relu),
    "Selu": ParametricActivation(selu, ("alpha", "gamma")),
    "Sigmoid": ParametricActivation(sigmoid),
    "Softplus": ParametricActivation(softplus),
    "Softsign": ParametricActivation(softsign),
    "Tanh": ParametricActivation(tanh),
    "ThresholdedRelu": ParametricActivation(thresholded_relu, ("alpha",)),
}
