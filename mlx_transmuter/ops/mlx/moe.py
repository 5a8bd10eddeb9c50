"""Mixtures of experts: the choice of each token's experts, the rows for them, and the sum of their outputs.

The rows are either by token, [tokens, 1, 1, dim] and [tokens, k, 1, dim] after a product, with experts [tokens, k]; or,
from MIN_SORTED_CHOICES on, one per choice, [choices, 1, dim], sorted by expert, with experts [choices]. A product then
reads the weights of each expert once, in order, and not once per token.
"""

from collections.abc import Callable

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import take, take_along_axis
from mlx_transmuter.ops.indices import Indices, IntegerRange
from mlx_transmuter.ops.integer_ranges import NodeCall
from mlx_transmuter.ops.mlx.fused import ACTIVATIONS_BY_NAME
from mlx_transmuter.ops.onnx.activation import relu, swish_gate
from mlx_transmuter.ops.registry import OperatorError, op

# The fewest choices that are sorted, as in mlx_lm: for fewer, sorting costs more than it saves.
MIN_SORTED_CHOICES = 64


def _range_of_routing(call: NodeCall) -> list[IntegerRange | None]:
    return [IntegerRange(0, max(call.arguments[0].shape[-1] - 1, 0))]


@op("mlx.router", integer_range=_range_of_routing)
def route_tokens(router_probs, router_weights=None, *, k: int, normalize: int = 0):
    """The k best experts of each token by router_probs [tokens, experts], logits: their indices, int32 [tokens, k], and
    their scores, float32. com.microsoft MoE-1 and QMoE-1, without the experts.

    router_weights: [tokens, experts], the scores in place of softmax(router_probs). normalize: whether the scores of a
    token are scaled to sum to 1. Of equal experts the last one counts as better, as in onnxruntime.
    """
    probabilities = mx.softmax(router_probs.astype(mx.float32), axis=-1)
    ranked = router_probs if router_weights is not None else probabilities
    experts = mx.argsort(ranked, axis=-1)[:, -k:].astype(mx.int32)
    scores = probabilities if router_weights is None else router_weights.astype(mx.float32)
    scores = take_along_axis(scores, Indices.between(experts, 0, ranked.shape[-1] - 1), axis=-1)
    if normalize:
        total = mx.sum(scores, axis=-1, keepdims=True)
        scores = scores / mx.where(total == 0, 1.0, total)
    return experts, scores


def _range_of_dispatch(call: NodeCall) -> list[IntegerRange | None]:
    return [None, call.ranges[1], IntegerRange(0, max(call.arguments[1].size - 1, 0))]


@op("mlx.dispatch", integer_range=_range_of_dispatch)
def dispatch_to_experts(x, indices):
    """The rows of tokens x [..., dim] for the experts of each, indices int32 [..., k]: the rows, their experts, and the
    order of sorted rows, int32 [choices] ([0] where the rows are by token). Shazeer et al. 2017; transformers'
    MixtralSparseMoeBlock.
    """
    # The axis of size 1 is made by this reshape: one inserted later would have another stride.
    x, k = x.reshape(-1, 1, x.shape[-1]), indices.shape[-1]
    if indices.size < MIN_SORTED_CHOICES:
        return x[:, None], indices.reshape(-1, k), mx.zeros((0,), mx.int32)
    flat = indices.reshape(-1)
    order = mx.argsort(flat).astype(mx.int32)
    # Each token has k choices, but a graph may have been given rows and choices of different tokens.
    rows = take(x, Indices.between(order // k, 0, flat.size // k - 1))
    return rows, take(flat, Indices.between(order, 0, flat.size - 1)), order


def _squared_relu(x: mx.array) -> mx.array:
    return mx.square(relu(x))


def _identity(x: mx.array) -> mx.array:
    return x


# The activations of com.microsoft's MoE by their activation_type; its gelu is the tanh approximation.
MOE_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": relu,
    "relu2": _squared_relu,
    "gelu": ACTIVATIONS_BY_NAME["gelu_tanh"],
    "silu": ACTIVATIONS_BY_NAME["silu"],
    "identity": _identity,
}


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
    """The input of an expert's second projection, by com.microsoft MoE-1, from its first [..., inner] and its third.
    `after`, if not 0: the limit of the gate applies after its activation (swiglu_limit_after_activation).

    kind: its activation_type; fusion: 1 where fc1_output has the gate and the value interleaved, 2 where the value
    comes after the gate; limit, alpha, beta: swiglu_limit, activation_alpha, activation_beta.
    """
    if kind not in ("swiglu", "geglu"):
        if kind not in MOE_ACTIVATIONS:
            raise OperatorError(f"the activation {kind!r}", ", ".join([*MOE_ACTIVATIONS, "swiglu", "geglu"]))
        activated = MOE_ACTIVATIONS[kind](fc1_output)
        return activated if fc3_output is None else activated * fc3_output
    gate, up = _split_gate(kind, fc1_output, fc3_output, fusion)
    if kind == "geglu":
        return ACTIVATIONS_BY_NAME["gelu_tanh"](gate) * up
    return swish_gate(gate, up, alpha=alpha, beta=beta, limit=limit, limit_after_activation=bool(after))


def _split_gate(kind: str, fc1_output: mx.array, fc3_output: mx.array | None, fusion: int) -> tuple[mx.array, mx.array]:
    """Returns the gate and what it multiplies."""
    if fusion == 1:
        return fc1_output[..., 0::2], fc1_output[..., 1::2]
    if fusion == 2:
        gate, up = mx.split(fc1_output, 2, axis=-1)
        return gate, up
    if fc3_output is not None:
        return fc1_output, fc3_output
    raise OperatorError(f"{kind} without its gates", "swiglu_fusion 1 or 2, or a third projection")


@op("mlx.combine")
def combine_expert_outputs(expert_outputs, order, scores):
    """The sums [tokens, dim] of the experts' outputs for the rows of `mlx.dispatch`, weighted by scores [..., k]."""
    k = scores.shape[-1]
    if order.size:
        expert_outputs = take(expert_outputs, Indices.between(mx.argsort(order), 0, order.size - 1))
    return mx.sum(expert_outputs.reshape(-1, k, expert_outputs.shape[-1]) * scores.reshape(-1, k, 1), axis=1)
