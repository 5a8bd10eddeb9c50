"""The experts of a mixture, stacked: each token goes through those alone that its router chose.

Rows stand by token, [tokens, 1, 1, dim] and [tokens, k, 1, dim] after a product, with the experts of each, [tokens, k];
or, where there are many, one for each choice, [choices, 1, dim], sorted by their expert, [choices]. A product then
reads each expert's weights once, in order, and not once per token.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_transmuter.ops.registry import NNLayer, op

# So many choices are sorted, as in mlx_lm: for fewer, sorting costs more than it saves.
MIN_SORTED_CHOICES = 64


class SwitchLinear(nn.Module):
    """The weights [experts, out, in] of one linear layer of each expert, and their biases [experts, out] if it has
    them.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Rows [..., in] through the expert of each: [..., out]."""
        return expert_matmul(x, self.weight, experts, self.get("bias"))

    def to_quantized(self, group_size: int = 64, bits: int = 4, mode: str = "affine", **_: Any) -> nn.Module:
        """The layer in few bits: what `nn.quantize` puts in its place."""
        experts, outputs, inputs = self.weight.shape
        made = QuantizedSwitchLinear(experts, inputs, outputs, "bias" in self, group_size, bits, mode)
        parts = mx.quantize(self.weight, group_size, bits, mode=mode)
        made.update(dict(zip(("weight", "scales", "biases"), parts, strict=False)))
        if "bias" in self:
            made.bias = self.bias
        return made


class QuantizedSwitchLinear(nn.Module):
    """A SwitchLinear in few bits: weights uint32 [experts, out, in · bits / 32], scales and biases [experts, out, in /
    group_size].
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
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

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Rows [..., in] through the expert of each: [..., out]."""
        few = (self.weight, self.scales, self.get("biases"), self.group_size, self.bits, self.mode)
        return quantized_expert_matmul(x, few, experts, self.get("bias"))


# weight, scales, biases, group size, bits, mode: as mx.gather_qmm takes them.
QuantizedWeight = tuple[mx.array, mx.array, mx.array | None, int, int, str]


def expert_matmul(x: mx.array, weight: mx.array, experts: mx.array, bias: mx.array | None = None) -> mx.array:
    """Rows x times the transposed weight [experts, out, in] of the expert of each, plus its bias [experts, out]."""
    at, kind = experts, mx.result_type(x, weight)
    if mx.default_device() == mx.cpu and not x.dtype == weight.dtype == mx.float32:  # its gather_mm has float32 alone
        if experts.size < weight.shape[0]:  # so that only these are cast
            weight = mx.take(weight, experts.reshape(-1), axis=0)
            at = mx.arange(experts.size, dtype=mx.int32).reshape(experts.shape)
        x, weight = x.astype(mx.float32), weight.astype(mx.float32)
    y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=at, sorted_indices=experts.ndim == 1).astype(kind)
    return _add_expert_bias(y, experts, bias)


def quantized_expert_matmul(
    x: mx.array, quantized_weight: QuantizedWeight, experts: mx.array, bias: mx.array | None = None
) -> mx.array:
    """As `product`, of weights in few bits."""
    weight, scales, biases, group_size, bits, mode = quantized_weight
    if mx.default_device() == mx.cpu and experts.size > 2 * weight.shape[0]:  # where a product of floats is faster
        return expert_matmul(x, mx.dequantize(weight, scales, biases, group_size, bits, mode), experts, bias)
    y = mx.gather_qmm(
        x,
        weight,
        scales,
        biases,
        rhs_indices=experts,
        transpose=True,
        group_size=group_size,
        bits=bits,
        mode=mode,
        sorted_indices=experts.ndim == 1,
    )
    return _add_expert_bias(y, experts, bias)


def _add_expert_bias(y: mx.array, experts: mx.array, bias: mx.array | None) -> mx.array:
    return y if bias is None else y + mx.take(bias, experts, axis=0)[..., None, :]


@op("mlx.dispatch")
def dispatch_to_experts(x, indices):
    """The rows of tokens x [..., dim] for the experts that each chose, indices int32 [..., k]: the rows, the experts of
    each, and the order, int32 [choices], in which sorted rows stand ([0] where they stand by token). Shazeer et al.
    2017; transformers' MixtralSparseMoeBlock.
    """
    x, k = x.reshape(-1, 1, x.shape[-1]), indices.shape[-1]  # an axis that is put in later would have another stride
    if indices.size < MIN_SORTED_CHOICES:
        return x[:, None], indices.reshape(-1, k), mx.zeros((0,), mx.int32)
    flat = indices.reshape(-1)
    order = mx.argsort(flat).astype(mx.int32)
    return x[order // k], flat[order], order


@op("mlx.switch_linear")
def switch_linear(x, layer: NNLayer, experts, *, pad: int = 0):
    """The rows that `mlx.dispatch` gives, or [choices, in], sorted by expert, through the layer of the expert of each.

    pad: columns of zeros after x's own, for a quantised layer whose last group is not full.
    """
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) if pad else x
    if x.ndim == 2:
        return layer(x.reshape(-1, 1, x.shape[-1]), experts).squeeze(1)
    return layer(x, experts)


@op("mlx.combine")
def combine_expert_outputs(expert_outputs, order, scores):
    """What the experts gave for the rows of `mlx.dispatch`, added up by the scores [..., k] of the choices:
    [tokens, dim].
    """
    k = scores.shape[-1]
    expert_outputs = expert_outputs[mx.argsort(order)] if order.size else expert_outputs
    return mx.sum(expert_outputs.reshape(-1, k, expert_outputs.shape[-1]) * scores.reshape(-1, k, 1), axis=1)
