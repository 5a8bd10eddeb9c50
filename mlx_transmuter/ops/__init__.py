"""The operators: each is one pure function over `mx.array`s whose signature declares everything (see registry)."""

# The imports declare the operators.
from mlx_transmuter.ops import contrib, mlx, onnx  # noqa: F401
from mlx_transmuter.ops.mlx.layers import make_layer
from mlx_transmuter.ops.registry import (
    OPERATORS,
    REQUIRED,
    HostArray,
    NNLayer,
    Operator,
    OperatorError,
    bind_inputs,
    op,
    resolve_operator,
)
from mlx_transmuter.ops.types import (
    ELEMENT_TYPE_CODES,
    ELEMENT_TYPE_NAMES,
    ELEMENT_TYPES,
    device_dtype,
    to_device,
    to_host,
)

__all__ = [
    "ELEMENT_TYPES",
    "ELEMENT_TYPE_CODES",
    "ELEMENT_TYPE_NAMES",
    "OPERATORS",
    "REQUIRED",
    "HostArray",
    "NNLayer",
    "Operator",
    "OperatorError",
    "bind_inputs",
    "device_dtype",
    "make_layer",
    "op",
    "resolve_operator",
    "to_device",
    "to_host",
]
