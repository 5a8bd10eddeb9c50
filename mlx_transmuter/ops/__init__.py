"""The operators: each is one pure function over `mx.array`s whose signature declares everything (see registry)."""

# The imports declare the operators.
from mlx_transmuter.ops import (  # noqa: F401
    activation,
    arithmetic,
    attention,
    cached,
    casting,
    chance,
    comparison,
    control,
    convolution,
    creation,
    experts,
    fused,
    gathering,
    heads,
    layers,
    linear_attention,
    losses,
    microsoft,
    ngrams,
    normalization,
    ordering,
    pooling,
    products,
    quantization,
    recurrent,
    reduction,
    regions,
    resizing,
    sampling,
    sequences,
    shaping,
    slicing,
    spectral,
)
from mlx_transmuter.ops.layers import layer
from mlx_transmuter.ops.registry import OPERATORS, REQUIRED, Host, Layer, Operator, OperatorError, form, op
from mlx_transmuter.ops.types import CODES, NAMES, TYPES, device_dtype, to_device, to_host

__all__ = [
    "CODES",
    "NAMES",
    "OPERATORS",
    "REQUIRED",
    "TYPES",
    "Host",
    "Layer",
    "Operator",
    "OperatorError",
    "device_dtype",
    "form",
    "layer",
    "op",
    "to_device",
    "to_host",
]
