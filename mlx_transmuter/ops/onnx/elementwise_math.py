"""Exponentials, logarithms, trigonometric and hyperbolic functions, and the error function, by element."""

import mlx.core as mx

from mlx_transmuter.ops.registry import op


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
