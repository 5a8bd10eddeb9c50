"""Linear layers of a mixture of experts, stacked: each row is multiplied by the weights of its own expert alone.

The rows and their experts are what `mlx.dispatch` gives: [tokens, 1, 1, in] with experts [tokens, k], or [choices, 1,
in], sorted by expert, with experts [choices].
"""

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_transmuter.ops.functional.block_quantization import pad_columns
from mlx_transmuter.ops.functional.indexing import AnyIndices, clip_indices, index_array, take
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import NNLayer, OperatorError, op


class SwitchLinear(nn.Module):
    """One linear layer of each expert: weight [experts, out, in], and bias [experts, out] where it has one."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    def __call__(self, x: mx.array, experts: AnyIndices) -> mx.array:
        """Returns the outputs [..., out] of the rows x [..., in], each through its own expert."""
        return expert_matmul(x, self.weight, experts, self.get("bias"))

    def to_quantized(self, group_size: int = 64, bits: int = 4, mode: str = "affine", **_: Any) -> nn.Module:
        """Returns the quantized layer with which `nn.quantize` replaces this one."""
        experts, outputs, inputs = self.weight.shape
        layer = QuantizedSwitchLinear(
            experts, inputs, outputs, bias="bias" in self, group_size=group_size, bits=bits, mode=mode
        )
        arrays = mx.quantize(self.weight, group_size, bits, mode=mode)
        layer.update(dict(zip(("weight", "scales", "biases"), arrays, strict=False)))
        if "bias" in self:
            layer.bias = self.bias
        return layer


class QuantizedSwitchLinear(nn.Module):
    """A quantized SwitchLinear: weight uint32 [experts, out, in · bits / 32], scales and biases [experts, out, in /
    group_size], and bias [experts, out] where it has one.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        group_size: int = 64,
        bits: int = 4,
        mode: str = "affine",
    ):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight = mx.zeros((experts, outputs, inputs * bits // 32), mx.uint32)
        self.scales = mx.zeros((experts, outputs, inputs // group_size))
        self.biases = mx.zeros((experts, outputs, inputs // group_size))
        if bias:
            self.bias = mx.zeros((experts, outputs))
        self.freeze()

    def __call__(self, x: mx.array, experts: AnyIndices) -> mx.array:
        """Returns the outputs [..., out] of the rows x [..., in], each through its own expert."""
        weight = QuantizedWeight(self.weight, self.scales, self.get("biases"), self.group_size, self.bits, self.mode)
        return quantized_expert_matmul(x, weight, experts, self.get("bias"))


class QuantizedWeight(NamedTuple):
    """The quantized weights of all experts, as mx.gather_qmm takes them."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"


def expert_matmul(x: mx.array, weight: mx.array, experts: AnyIndices, bias: mx.array | None = None) -> mx.array:
    """Returns the rows x times the transposed weight [experts, out, in] of their experts, plus its bias [experts, out].

    x: [..., 1, in]; experts: the expert of each row, int32, sorted if it has one axis.
    """
    _check_experts(weight)
    experts = _clip_experts(experts, weight.shape[0])
    weight_indices, dtype = index_array(experts), mx.result_type(x, weight)
    # On the CPU gather_mm takes float32 only.
    if mx.default_device() == mx.cpu and not x.dtype == weight.dtype == mx.float32:
        if weight_indices.size < weight.shape[0]:  # cast the weights of these experts only
            weight = take(weight, experts.reshape(-1))
            weight_indices = mx.arange(weight.shape[0], dtype=mx.int32).reshape(experts.shape)
        x, weight = x.astype(mx.float32), weight.astype(mx.float32)
    y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=weight_indices, sorted_indices=experts.ndim == 1)
    return _add_expert_bias(y.astype(dtype), experts, bias)


def quantized_expert_matmul(
    x: mx.array, quantized_weight: QuantizedWeight, experts: AnyIndices, bias: mx.array | None = None
) -> mx.array:
    """Returns what `expert_matmul` does, of quantized weights."""
    weight, scales, biases, group_size, bits, mode = quantized_weight
    _check_experts(weight)
    experts = _clip_experts(experts, weight.shape[0])
    # On the CPU, from two rows per expert on, a product with dequantized weights is faster.
    if mx.default_device() == mx.cpu and experts.array.size > 2 * weight.shape[0]:
        return expert_matmul(x, mx.dequantize(weight, scales, biases, group_size, bits, mode), experts, bias)
    y = mx.gather_qmm(
        x,
        weight,
        scales,
        biases,
        rhs_indices=index_array(experts),
        transpose=True,
        group_size=group_size,
        bits=bits,
        mode=mode,
        sorted_indices=experts.ndim == 1,
    )
    return _add_expert_bias(y, experts, bias)


def _check_experts(weight: mx.array) -> None:
    """Raises OperatorError for weights [experts, out, in] without elements, of which MLX's kernels divide by zero."""
    if not weight.size:
        raise OperatorError(f"weights of experts {list(weight.shape)}", "sizes of at least 1")


def _clip_experts(experts: AnyIndices, count: int) -> Indices:
    """Returns the experts as indices on the device from 0 to count - 1, the experts that there are."""
    return Indices.between(clip_indices(experts, 0, count - 1), 0, count - 1)


def _add_expert_bias(y: mx.array, experts: Indices, bias: mx.array | None) -> mx.array:
    """Returns y plus the bias [experts, out] of each row's expert."""
    return y if bias is None else y + take(bias, experts)[..., None, :]


@op("mlx.switch_linear")
def switch_linear(x, layer: NNLayer, experts: Indices, *, pad: int = 0):
    """The rows that `mlx.dispatch` gives, or [choices, in], sorted by expert, each through the layer of its expert.

    pad: columns of zeros after x's own, for a quantized layer whose last group is not full.
    """
    x = pad_columns(x, pad)
    if x.ndim == 2:
        return layer(x.reshape(-1, 1, x.shape[-1]), experts).squeeze(1)
    return layer(x, experts)
