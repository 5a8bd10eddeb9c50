"""Functions of one array, elementwise: exponentials, trigonometry, and the activations of neural networks."""

import math

import mlx.core as mx

from mlx_transmuter.ops.functional.exponential import scaled_sigmoid
from mlx_transmuter.ops.registry import OperatorError, op


@op("Exp-6")
def exp(x):
    """e to the power of x. ONNX Exp-6, 13."""
    return mx.exp(x)


@op("Log-6")
def log(x):
    """The natural logarithm of x. ONNX Log-6, 13."""
    return mx.log(x)


@op("Erf-9")
def erf(x):
    """The error function of x. ONNX Erf-9, 13."""
    return mx.erf(x)


@op("Sin-7")
def sin(x):
    """The sine of x in radians. ONNX Sin-7, 22."""
    return mx.sin(x)


@op("Cos-7")
def cos(x):
    """The cosine of x in radians. ONNX Cos-7, 22."""
    return mx.cos(x)


@op("Tan-7")
def tan(x):
    """The tangent of x in radians. ONNX Tan-7, 22."""
    return mx.tan(x)


@op("Asin-7")
def asin(x):
    """The arc sine of x, in radians. ONNX Asin-7, 22."""
    return mx.arcsin(x)


@op("Acos-7")
def acos(x):
    """The arc cosine of x, in radians. ONNX Acos-7, 22."""
    return mx.arccos(x)


@op("Atan-7")
def atan(x):
    """The arc tangent of x, in radians. ONNX Atan-7, 22."""
    return mx.arctan(x)


@op("Sinh-9")
def sinh(x):
    """The hyperbolic sine of x. ONNX Sinh-9, 22."""
    return mx.sinh(x)


@op("Cosh-9")
def cosh(x):
    """The hyperbolic cosine of x. ONNX Cosh-9, 22."""
    return mx.cosh(x)


@op("Tanh-6")
def tanh(x):
    """The hyperbolic tangent of x. ONNX Tanh-6, 13."""
    return mx.tanh(x)


@op("Asinh-9")
def asinh(x):
    """The inverse hyperbolic sine of x. ONNX Asinh-9, 22."""
    return mx.arcsinh(x)


@op("Acosh-9")
def acosh(x):
    """The inverse hyperbolic cosine of x. ONNX Acosh-9, 22."""
    return mx.arccosh(x)


@op("Atanh-9")
def atanh(x):
    """The inverse hyperbolic tangent of x. ONNX Atanh-9, 22."""
    return mx.arctanh(x)


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


@op("SwiGLU-28")
def swiglu(gate, x, *, alpha=1.0):
    """gate * sigmoid(alpha * gate) * x. ONNX SwiGLU-28."""
    return swish(gate, alpha=alpha) * x


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
