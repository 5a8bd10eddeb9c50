"""Mixtures of experts of com.microsoft: MoE, and QMoE over weights in 2, 4 or 8 bits."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.functional.block_quantization import dequantize_blocks, to_mlx_affine, unpack_bits
from mlx_transmuter.ops.mlx.switch_linear import (
    combine_expert_outputs,
    dispatch_to_experts,
    expert_matmul,
    quantized_expert_matmul,
)
from mlx_transmuter.ops.onnx.activation import gelu, swish
from mlx_transmuter.ops.registry import OperatorError, op

# One projection of rows and the experts of each, as mlx.dispatch gives them.
ProjectionFunction = Callable[[mx.array, mx.array], mx.array]


def _dense_projection(weights: mx.array, bias: mx.array | None) -> ProjectionFunction:
    """weights [experts, out, in], bias [experts, out]."""
    return lambda x, experts: expert_matmul(x, weights, experts, bias)


def _route_tokens(
    router_probs: mx.array, router_weights: mx.array | None, k: int, normalize: bool
) -> tuple[mx.array, mx.array]:
    """Each token's experts, int32 [tokens, k], and their weights: of equal experts the last, as in onnxruntime."""
    probabilities = mx.softmax(router_probs.astype(mx.float32), axis=-1)
    ranked = router_probs if router_weights is not None else probabilities
    experts = mx.argsort(ranked, axis=-1)[:, -k:].astype(mx.int32)
    given = probabilities if router_weights is None else router_weights.astype(mx.float32)
    weights = mx.take_along_axis(given, experts, axis=-1)
    if normalize:
        total = mx.sum(weights, axis=-1, keepdims=True)
        weights = weights / mx.where(total == 0, 1.0, total)
    return experts, weights


_MOE_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": lambda x: mx.maximum(x, 0),
    "relu2": lambda x: mx.square(mx.maximum(x, 0)),
    "gelu": lambda x: gelu(x, approximate="tanh"),
    "silu": swish,
    "identity": lambda x: x,
}


class SwigluParameters(NamedTuple):
    """gate · sigmoid(alpha · gate) · (up + beta), the gate (or what it gates, where after) and up clamped by limit."""

    limit: float | None
    alpha: float
    beta: float
    clamp_after_activation: bool

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        if self.limit is None:
            return swish(gate, alpha=self.alpha) * (up + self.beta)
        gate = gate if self.clamp_after_activation else mx.minimum(gate, self.limit)
        gated = swish(gate, alpha=self.alpha)
        gated = mx.minimum(gated, self.limit) if self.clamp_after_activation else gated
        return gated * (mx.clip(up, -self.limit, self.limit) + self.beta)


def _apply_expert_activation(
    kind: str, fc1_output: mx.array, fc3_output: mx.array | None, fusion: int, swiglu: SwigluParameters
) -> mx.array:
    """What goes into the second projection. third is that of separate gates; fused ones lie in first."""
    if kind not in ("swiglu", "geglu"):
        if kind not in _MOE_ACTIVATIONS:
            raise OperatorError(f"the activation {kind!r}", ", ".join([*_MOE_ACTIVATIONS, "swiglu", "geglu"]))
        return (
            _MOE_ACTIVATIONS[kind](fc1_output)
            if fc3_output is None
            else _MOE_ACTIVATIONS[kind](fc1_output) * fc3_output
        )
    if fusion == 1:
        gate, up = fc1_output[..., 0::2], fc1_output[..., 1::2]
    elif fusion == 2:
        gate, up = mx.split(fc1_output, 2, axis=-1)
    elif fc3_output is not None:
        gate, up = fc1_output, fc3_output
    else:
        raise OperatorError(f"{kind} without its gates", "swiglu_fusion 1 or 2, or a third projection")
    if kind == "geglu":
        return gelu(gate, approximate="tanh") * up
    return swiglu(gate, up)


@op("mlx.router")
def route_tokens(router_probs, router_weights=None, *, k: int, normalize: int = 0):
    """The k best experts of each token by router_probs [tokens, experts], logits: their indices, int32 [tokens, k], and
    their scores, float32. com.microsoft MoE-1 and QMoE-1, without the experts.

    router_weights: [tokens, experts], the scores in place of softmax(router_probs). normalize: whether they are made to
    add up to 1.
    """
    return _route_tokens(router_probs, router_weights, k, bool(normalize))


@op("mlx.expert_activation")
def expert_activation(
    fc1_output,
    fc3_output=None,
    *,
    kind: str,
    fusion: int = 0,
    limit: float | None = None,
    alpha=1.0,
    beta=0.0,
    after: int = 0,
):
    """What com.microsoft MoE-1 computes of its first projection [..., inner], and of its third, before the second.

    kind: its activation_type; fusion: 1 where swiglu's halves are interleaved in first, 2 where one stands after the
    other; limit, alpha, beta, after: swiglu_limit, activation_alpha, activation_beta, swiglu_limit_after_activation.
    """
    return _apply_expert_activation(
        kind, fc1_output, fc3_output, fusion, SwigluParameters(limit, alpha, beta, bool(after))
    )


def _run_experts(
    x, routes, first: ProjectionFunction, second: ProjectionFunction, third: ProjectionFunction | None, activate
) -> mx.array:
    """The experts' results for x [..., hidden], added up by their weights."""
    chosen, weights = routes
    rows, experts, order = dispatch_to_experts(x, chosen)
    inner = activate(first(rows, experts), None if third is None else third(rows, experts))
    results = second(inner, experts).astype(mx.float32)
    return combine_expert_outputs(results, order, weights).astype(x.dtype).reshape(x.shape)


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
    """The k best experts of each token by softmax(router_probs), their results added up by those probabilities.

    x: [batch, seq, hidden] or [tokens, hidden]; router_probs: [tokens, experts], logits; fc1: [experts, inner (2 inner
    where gates are fused in), hidden]; fc2: [experts, hidden, inner]; fc3, a gate's other half: as fc1; biases:
    [experts, out]. Shazeer et al. 2017; com.microsoft MoE-1.
    """
    if use_sparse_mixer:
        raise OperatorError("use_sparse_mixer", "routing by softmax: onnxruntime has the other on CUDA only")
    swiglu = SwigluParameters(swiglu_limit, activation_alpha, activation_beta, bool(swiglu_limit_after_activation))
    third = None if fc3_experts_weights is None else _dense_projection(fc3_experts_weights, fc3_experts_bias)
    return _run_experts(
        x,
        _route_tokens(router_probs, None, k, bool(normalize_routing_weights)),
        _dense_projection(fc1_experts_weights, fc1_experts_bias),
        _dense_projection(fc2_experts_weights, fc2_experts_bias),
        third,
        lambda a, b: _apply_expert_activation(activation_type, a, b, swiglu_fusion, swiglu),
    )


def _quantized_projection(packed, scales, zero_points, bias, bits: int, block_size: int | None) -> ProjectionFunction:
    """packed: uint8 [experts, out, in · bits / 8]; scales: [experts, out], or [experts, out, in / block_size].

    zero_points, packed as the weights: [experts, out · bits / 8], or in blocks [experts, out, blocks · bits / 8].
    """
    experts, rows, width = packed.shape
    size = width * 8 // bits
    block = block_size or size
    if zero_points is not None and zero_points.ndim == 2:
        zero_points = unpack_bits(zero_points, bits, rows).astype(mx.float32)
    flat, scales = packed.reshape(experts * rows, size // block, -1), scales.reshape(experts * rows, size // block)
    zero_points = None if zero_points is None else zero_points.reshape(experts * rows, -1)
    held = to_mlx_affine(flat, scales, zero_points, bits, block)
    if held is None:
        block_of = mx.arange(size, dtype=mx.int32) // block
        weights = dequantize_blocks(flat, scales, zero_points, bits, block_of).astype(scales.dtype)
        return _dense_projection(weights.reshape(experts, rows, size), bias)
    w, scale, biases = (part.reshape(experts, rows, -1) for part in held[:3])
    few = (w, scale, biases, held[3], bits, "affine")
    return lambda x, chosen: quantized_expert_matmul(x, few, chosen, bias).astype(x.dtype)


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
    absent; router_weights: [tokens, experts], what the experts that router_probs choose count for, in place of its
    softmax. Without router_weights the weights of the chosen experts always add up to 1, as in onnxruntime on a CPU.
    accuracy_level lets an implementation round the activations; this one never does. com.microsoft QMoE-1.
    """
    bits = [
        given or expert_weight_bits
        for given in (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)
    ]
    if quant_type != "int" or use_sparse_mixer or weights_prepacked == 1 or not set(bits) <= {2, 4, 8}:
        raise OperatorError(
            f"{quant_type!r} of {bits} bits, weights_prepacked {weights_prepacked}, a sparse mixer {use_sparse_mixer}",
            "integers of 2, 4 or 8 bits, as the specification packs them, and routing by softmax",
        )
    swiglu = SwigluParameters(swiglu_limit, activation_alpha, activation_beta, bool(swiglu_limit_after_activation))
    third = None
    if fc3_experts_weights is not None:
        third = _quantized_projection(
            fc3_experts_weights, fc3_scales, fc3_zero_points, fc3_experts_bias, bits[2], block_size
        )
    return _run_experts(
        x,
        _route_tokens(router_probs, router_weights, k, bool(normalize_routing_weights) or router_weights is None),
        _quantized_projection(fc1_experts_weights, fc1_scales, fc1_zero_points, fc1_experts_bias, bits[0], block_size),
        _quantized_projection(fc2_experts_weights, fc2_scales, fc2_zero_points, fc2_experts_bias, bits[1], block_size),
        third,
        lambda a, b: _apply_expert_activation(activation_type, a, b, swiglu_fusion, swiglu),
    )


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
    [experts], added for choosing alone. A group counts for the sum of its group_topk best; topk_group groups take part.
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
    best = mx.sort(groups, axis=-1)[..., -min(group_topk, experts // n_group) :]
    taken = _top_k_mask(mx.sum(best, axis=-1), topk_group)
    open_ = mx.where(taken[..., None], groups, -mx.inf).reshape(tokens, experts)
    chosen = _top_k_mask(open_, top_k) & mx.repeat(taken, experts // n_group, axis=-1)
    return mx.where(chosen, mx.log(mx.maximum(scores, 1e-20)), router_sentinel).astype(logits.dtype)


def _top_k_mask(x: mx.array, count: int) -> mx.array:
    """Which count elements of each row of x are the largest, the first of equal ones: bool, as x."""
    places = mx.argsort(-x, axis=-1)[..., :count]
    return mx.put_along_axis(mx.zeros(x.shape, dtype=mx.bool_), places, mx.array(True), axis=-1)
