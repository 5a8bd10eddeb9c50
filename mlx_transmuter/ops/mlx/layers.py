"""The `mlx.nn` layers of a program, which MLX's own tools (`nn.quantize`, `tree_flatten`) find in its module."""

from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_transmuter.ops.functional.block_quantization import pad_columns
from mlx_transmuter.ops.functional.indexing import clip_indices
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.mlx.switch_linear import QuantizedSwitchLinear, SwitchLinear
from mlx_transmuter.ops.registry import NNLayer, OperatorError, op


def make_layer(kind: str, **options) -> nn.Module:
    """Returns a layer of that kind, whose arrays `load_weights` fills. Raises OperatorError for another kind.

    The kinds and their options: "Linear" (bias), "Embedding", "QuantizedLinear" (bias, bits, group_size),
    "QuantizedEmbedding" (bits, group_size); of a mixture's experts "SwitchLinear" (bias), "QuantizedSwitchLinear"
    (bias, bits, group_size).
    """
    bias = bool(options.get("bias", False))
    if kind == "Linear":
        return nn.Linear(1, 1, bias=bias)
    if kind == "Embedding":
        return nn.Embedding(1, 1)
    if kind == "SwitchLinear":
        return SwitchLinear(1, 1, 1, bias=bias)
    if kind in ("QuantizedLinear", "QuantizedEmbedding", "QuantizedSwitchLinear"):
        bits, group_size = int(options["bits"]), int(options["group_size"])
        if bits < 1 or group_size < 1:  # MLX divides by them before it checks them
            raise OperatorError(f"{bits} bits in groups of {group_size}", "bits and groups that MLX has")
        if kind == "QuantizedLinear":
            return nn.QuantizedLinear(group_size, 1, bias=bias, group_size=group_size, bits=bits)
        if kind == "QuantizedSwitchLinear":
            return QuantizedSwitchLinear(1, group_size, 1, bias=bias, group_size=group_size, bits=bits)
        return nn.QuantizedEmbedding(1, group_size, group_size=group_size, bits=bits)
    raise OperatorError(f"a layer of kind {kind!r}", "Linear, Embedding, SwitchLinear, or one of them quantized")


@op("mlx.linear", rowwise=True)
def linear(x, layer: NNLayer, residual=None, *, pad: int = 0):
    """x [..., in] through the layer: [..., out]. MatMul with a constant matrix, and the Add of a bias after it.

    residual: [..., out], added to the product. pad: columns of zeros after x's own, for a quantized layer whose last
    group is not full.
    """
    x = pad_columns(x, pad)
    bias = layer.get("bias")
    if type(layer) is nn.Linear:
        transposed = _transposed_weight(layer.weight, x)
    elif type(layer) is nn.QuantizedLinear and _prefers_dequantized(x, layer):
        transposed = _dequantized_weight(layer)
    else:
        return _add_residual(_quantized_product(layer, x), residual)
    if bias is not None:
        return _add_residual(mx.addmm(bias, x, transposed), residual)
    # With mixed types addmm would compute the product in the type of the sum.
    if residual is None or not (residual.dtype == x.dtype == transposed.dtype):
        return _add_residual(x @ transposed, residual)
    return _add_matmul(residual, x, transposed)


@op("mlx.embedding")
def embedding(ids: Indices, table: NNLayer):
    """The rows ids, int32 [...], of the table [rows, dim]: [..., dim]. Gather on axis 0 of a weight."""
    rows = table["weight"].shape[0]
    return table(clip_indices(ids, -rows, rows - 1))


@op("mlx.as_linear", rowwise=True)
def as_linear(x, table: NNLayer):
    """x [..., dim] times the transposed table [rows, dim]: [..., rows]. The head of a model with tied embeddings."""
    if type(table) is nn.Embedding:
        return x @ _transposed_weight(table.weight, x)
    if type(table) is nn.QuantizedEmbedding and _prefers_dequantized(x, table):
        return x @ _dequantized_weight(table)
    return _quantized_product(table, x)


def _add_residual(product: mx.array, residual: mx.array | None) -> mx.array:
    return product if residual is None else product + residual


def _add_matmul(residual: mx.array, x: mx.array, transposed: mx.array) -> mx.array:
    """Returns residual [..., out] + x [..., in] @ transposed [in, out] or [1, in, out], as one operation.

    The batch axes are flattened first: otherwise each row of a batch would read the whole matrix on the CPU.
    """
    if x.ndim < 3 or transposed.ndim == 3 or not x.size:
        return mx.addmm(residual, x, transposed)
    y = mx.addmm(mx.flatten(residual, 0, -2), mx.flatten(x, 0, -2), transposed)
    return mx.unflatten(y, 0, x.shape[:-1])


def _transposed_weight(matrix: mx.array, x: mx.array) -> mx.array:
    """Returns matrix [out, in] transposed, as the right side of a product with x [..., in].

    The view is evaluated here, so that a compiled step has it as a constant and does not transpose at each call. For
    an x of one row, [1, seq, in], it is [1, in, out]: a product of two stacks needs no reshapes around it.
    """
    transposed = matrix.T[None] if x.ndim == 3 and x.shape[0] == 1 else matrix.T
    with suppress(ValueError):  # which MLX raises where the weights are arguments of a traced function, as in training
        mx.eval(transposed)
    return transposed


def _prefers_dequantized(x: mx.array, layer: Any) -> bool:
    """Returns whether a product of floats with the dequantized weight is faster: it is 4 to 20 × on the CPU from 3
    rows on.
    """
    return mx.default_device() == mx.cpu and x.size > 2 * x.shape[-1] and layer.weight.size > 0


def _quantized_product(layer: Any, x: mx.array) -> mx.array:
    """Returns x times a quantized layer's transposed weight, plus its bias."""
    weight = layer.get("weight")  # a layer that a user put there may have none
    if weight is not None and not (x.size and weight.size):  # of no elements MLX's kernel divides by zero
        return mx.zeros((*x.shape[:-1], weight.shape[0]), x.dtype)
    return layer.as_linear(x) if type(layer) is nn.QuantizedEmbedding else layer(x)


def _dequantized_weight(layer: Any) -> mx.array:
    """Returns the weight of a quantized layer as floats [in, out]."""
    weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode)
    return weight.T
