"""Mixtures of experts of com.microsoft: MoE, and QMoE over weights in 2, 4 or 8 bits."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.block_quantization import dequantize_blocks, to_mlx_affine, unpack_bits
from mlx_transmuter.ops.functional.indexing import put_along_axis
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.mlx.moe import combine_expert_outputs, dispatch_to_experts, expert_activation, route_tokens
from mlx_transmuter.ops.mlx.switch_linear import QuantizedWeight, expert_matmul, quantized_expert_matmul
from mlx_transmuter.ops.registry import OperatorError, op

# A projection of rows by the experts of each, both as mlx.dispatch gives them.
Projection = Callable[[mx.array, Indices], mx.array]


def _dense_projection(weights: mx.array, bias: mx.array | None) -> Projection:
    """Returns the projection by weights [experts, out, in] and bias [experts, out]."""
    return lambda x, experts: expert_matmul(x, weights, experts, bias)


class Experts(NamedTuple):
    """The three projections of the experts (the third one optional), and the activation between them."""

    fc1: Projection
    fc2: Projection
    fc3: Projection | None
    activation: Callable[[mx.array, mx.array | None], mx.array]

    def __call__(self, x: mx.array, indices: Indices, scores: mx.array) -> mx.array:
        """Returns the sums, in x's shape and type, of the experts' outputs for x [..., hidden], weighted by scores.

        indices, scores: [tokens, k], each token's experts and their weights.
        """
        rows, experts, order = dispatch_to_experts(x, indices.array)
        experts = Indices(experts, indices.range)
        inner = self.activation(self.fc1(rows, experts), None if self.fc3 is None else self.fc3(rows, experts))
        outputs = self.fc2(inner, experts).astype(mx.float32)
        return combine_expert_outputs(outputs, order, scores).astype(x.dtype).reshape(x.shape)


@op("com.microsoft.MoE-1")
def moe(
    x,
    router_probs,
    fc1_experts_weights,
    fc1_experts_bias,
    fc2_experts_weights,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_experts_bias=None,
    *,
    k: int = 1,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
):
    """The outputs of the k best experts of each token by softmax(router_probs), summed with those probabilities.

    x: [batch, seq, hidden] or [tokens, hidden]; router_probs: [tokens, experts], logits; fc1: [experts, inner (2 inner
    where gates are fused in), hidden]; fc2: [experts, hidden, inner]; fc3, a gate's other half: as fc1; biases:
    [experts, out]. Shazeer et al. 2017; com.microsoft MoE-1.
    """
    if use_sparse_mixer:
        raise OperatorError("use_sparse_mixer", "routing by softmax: onnxruntime has the other on CUDA only")
    activation = partial(
        expert_activation,
        kind=activation_type,
        fusion=swiglu_fusion,
        limit=swiglu_limit,
        alpha=activation_alpha,
        beta=activation_beta,
        after=swiglu_limit_after_activation,
    )
    experts = Experts(
        _dense_projection(fc1_experts_weights, fc1_experts_bias),
        _dense_projection(fc2_experts_weights, fc2_experts_bias),
        None if fc3_experts_weights is None else _dense_projection(fc3_experts_weights, fc3_experts_bias),
        activation,
    )
    return experts(x, *_route_tokens(router_probs, k=k, normalize=normalize_routing_weights))


def _route_tokens(router_probs, router_weights=None, **options) -> tuple[Indices, mx.array]:
    """Returns what `route_tokens` does, the experts with their range."""
    experts, scores = route_tokens(router_probs, router_weights, **options)
    return Indices.between(experts, 0, router_probs.shape[-1] - 1), scores


def _quantized_projection(packed, scales, zero_points, bias, bits: int, block_size: int | None) -> Projection:
    """Returns the projection by quantized weights.

    packed: uint8 [experts, out, in · bits / 8]; scales: [experts, out], or [experts, out, in / block_size].

    zero_points, packed as the weights: [experts, out · bits / 8], or in blocks [experts, out, blocks · bits / 8].
    """
    experts, rows, width = packed.shape
    size = width * 8 // bits
    block = block_size or size
    if zero_points is not None and zero_points.ndim == 2:
        zero_points = unpack_bits(zero_points, bits, rows).astype(mx.float32)
    flat, scales = packed.reshape(experts * rows, size // block, -1), scales.reshape(experts * rows, size // block)
    zero_points = None if zero_points is None else zero_points.reshape(experts * rows, -1)
    affine = to_mlx_affine(flat, scales, zero_points, bits, block)
    if affine is None:
        weights = dequantize_blocks(flat, scales, zero_points, bits, np.arange(size) // block).astype(scales.dtype)
        return _dense_projection(weights.reshape(experts, rows, size), bias)
    *arrays, group_size = affine
    affine_weight, scales, biases = (array.reshape(experts, rows, -1) for array in arrays)
    weight = QuantizedWeight(affine_weight, scales, biases, group_size, bits)
    return lambda x, experts: quantized_expert_matmul(x, weight, experts, bias).astype(x.dtype)


@op("com.microsoft.QMoE-1")
def q_moe(
    x,
    router_probs,
    fc1_experts_weights,
    fc1_scales,
    fc1_experts_bias,
    fc2_experts_weights,
    fc2_scales=None,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_scales=None,
    fc3_experts_bias=None,
    fc1_zero_points=None,
    fc2_zero_points=None,
    fc3_zero_points=None,
    router_weights=None,
    fc1_global_scale=None,
    fc2_global_scale=None,
    fc1_act_scale=None,
    fc2_act_scale=None,
    fc1_act_block_scale=None,
    fc2_act_block_scale=None,
    *,
    k: int = 1,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
):
    """MoE over weights in expert_weight_bits bits, fc1 uint8 [experts, inner, hidden · bits / 8], fc2 and fc3 likewise.

    scales: [experts, out], or [experts, out, in / block_size]; zero points, packed like the weights, 2^(bits - 1) where
    absent; router_weights: [tokens, experts], the scores of the experts that router_probs choose, in place of its
    softmax. Without router_weights the scores of the chosen experts always sum to 1, as in onnxruntime on a CPU.
    accuracy_level lets an implementation round the activations; this one never does. com.microsoft QMoE-1.
    """
    bits = [
        own_bits or expert_weight_bits
        for own_bits in (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)
    ]
    if quant_type != "int" or use_sparse_mixer or weights_prepacked == 1 or not set(bits) <= {2, 4, 8}:
        raise OperatorError(
            f"{quant_type!r} of {bits} bits, weights_prepacked {weights_prepacked}, a sparse mixer {use_sparse_mixer}",
            "integers of 2, 4 or 8 bits, as the specification packs them, and routing by softmax",
        )
    activation = partial(
        expert_activation,
        kind=activation_type,
        fusion=swiglu_fusion,
        limit=swiglu_limit,
        alpha=activation_alpha,
        beta=activation_beta,
        after=swiglu_limit_after_activation,
    )
    fc3 = None
    if fc3_experts_weights is not None:
        fc3 = _quantized_projection(
            fc3_experts_weights, fc3_scales, fc3_zero_points, fc3_experts_bias, bits[2], block_size
        )
    experts = Experts(
        _quantized_projection(fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias, bits[0], block_size),
        _quantized_projection(fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias, bits[1], block_size),
        fc3,
        activation,
    )
    normalize = bool(normalize_routing_weights) or router_weights is None
    return experts(x, *_route_tokens(router_probs, router_weights, k=k, normalize=normalize))


@op("com.microsoft.MoEGroupRouter-1")
def moe_group_router(
    logits,
    expert_bias,
    projection_weight=None,
    *,
    top_k: int,
    group_topk: int = 2,
    n_group: int = 1,
    outputs: int = 1,
    router_sentinel: float = -10000.0,
    topk_group: int = 1,
):
    """The logits of MoE: log sigmoid(logits) of the experts chosen in the best groups, router_sentinel of the others.

    logits: [..., experts], or activations [tokens, width] with projection_weight [experts, width]; expert_bias:
    [experts], added for the choice only. A group's score is the sum of its group_topk best; the topk_group best groups
    take part.
    The second and third outputs are the scores with the bias and without it. DeepSeek-AI 2024 (V3); com.microsoft
    MoEGroupRouter-1.
    """
    wide = logits.astype(mx.float32)
    if projection_weight is not None:
        wide = wide @ projection_weight.astype(mx.float32).T
    scores = mx.sigmoid(wide.reshape(-1, wide.shape[-1]))
    biased = scores + expert_bias
    if outputs > 1:
        return None, biased, scores
    tokens, experts = biased.shape
    groups = biased.reshape(tokens, n_group, experts // n_group)
    best_scores = mx.sort(groups, axis=-1)[..., -min(group_topk, experts // n_group) :]
    is_group_chosen = _top_k_mask(mx.sum(best_scores, axis=-1), topk_group)
    candidates = mx.where(is_group_chosen[..., None], groups, -mx.inf).reshape(tokens, experts)
    is_chosen = _top_k_mask(candidates, top_k) & mx.repeat(is_group_chosen, experts // n_group, axis=-1)
    return mx.where(is_chosen, mx.log(mx.maximum(scores, 1e-20)), router_sentinel).astype(logits.dtype)


def _top_k_mask(x: mx.array, count: int) -> mx.array:
    """Returns which `count` elements of each row of x are the largest, the first of equal ones: bool, in x's shape."""
    places = Indices.between(mx.argsort(-x, axis=-1)[..., :count], 0, x.shape[-1] - 1)
    return put_along_axis(mx.zeros(x.shape, dtype=mx.bool_), places, mx.array(True), axis=-1)
