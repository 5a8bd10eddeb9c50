"""com.microsoft's mixtures of experts in one operator become a router, a layer for each projection, and a sum.

The weights then stand in layers, in MLX's own packing, and what is computed from weights alone is computed once, at
conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import name_arrays
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    LAYER_BITS,
    BlockQuantizedWeight,
    build_layer_arrays,
    read_zero_points,
    unpack_bits,
)
from mlx_transmuter.program import Node

_QUANTIZED_MOE = "com.microsoft.QMoE"
_MOE_OPS = ("com.microsoft.MoE", _QUANTIZED_MOE)
# The projections by their number in the operator's input names: fc1 and fc3 read the tokens, fc2 their product.
_INPUT_PROJECTIONS, _OUTPUT_PROJECTION = (1, 3), 2


class ExpertStack(NamedTuple):
    """The layer of one projection of all experts: its path, options and arrays ("weight", … -> tensor), the attributes
    of a product with it, and the float type of this product.
    """

    path: str
    options: dict[str, Any]
    arrays: dict[str, LazyTensor]
    product_attrs: dict[str, int]
    output_dtype: str


def expand_contrib_moe(graph: GraphView) -> Iterator[MatchOutcome]:
    """com.microsoft's MoE and QMoE → mlx.router, mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    for node in graph.nodes:
        if not is_op_type(node, *_MOE_OPS):
            continue
        inputs = ops.bind_inputs(node)
        dtype = graph.shape_probe.dtype(inputs["x"]) if graph.shape_probe else None
        reason = _unsupported_reason(node)
        if dtype is None or reason is not None:
            yield SkippedMatch(node, reason or "the type of its input is unknown, as the graph can't be probed")
            continue
        stacks: dict[int, ExpertStack] = {}
        for number in (*_INPUT_PROJECTIONS, _OUTPUT_PROJECTION):
            if f"fc{number}_experts_weights" not in inputs:
                continue
            stack = _make_stack(graph, node, number)
            if isinstance(stack, str):
                yield SkippedMatch(node, stack)
                break
            stacks[number] = stack
        else:
            yield _replace_moe(node, inputs, stacks, dtype)


def _unsupported_reason(node: Node) -> str | None:
    """Why the operator's routing or packing has no layers that compute it, or None."""
    if node.attrs.get("use_sparse_mixer"):
        return "its router is a sparse mixer; expected the k best of a softmax"
    quantization = node.attrs.get("quant_type", "int")
    return f"its weights are quantized as {quantization!r}; expected 'int'" if quantization != "int" else None


def _replace_moe(node: Node, inputs: Mapping[str, str], stacks: dict[int, ExpertStack], dtype: str) -> Replacement:
    builder, attrs = NodeBuilder(node.outputs[0], node_name=node.name), node.attrs
    router_weights = [inputs["router_weights"]] if "router_weights" in inputs else []
    # Without weights of their own, QMoE's scores always add up to 1, as in onnxruntime on a CPU.
    always_normalizes = is_op_type(node, _QUANTIZED_MOE) and not router_weights
    indices, scores = builder.add_multi_output_node(
        "mlx.router",
        (inputs["router_probs"], *router_weights),
        ("indices", "scores"),
        k=attrs.get("k", 1),
        normalize=int(always_normalizes or bool(attrs.get("normalize_routing_weights"))),
    )
    rows, experts, order = builder.add_multi_output_node(
        "mlx.dispatch", (inputs["x"], indices), ("rows", "experts", "order")
    )

    def add_projection(number: int, x: str) -> str:
        stack = stacks[number]
        product = builder.add_node("mlx.switch_linear", (x, stack.path, experts), f"fc{number}", **stack.product_attrs)
        return product if stack.output_dtype == dtype else builder.add_cast(product, dtype, f"fc{number}.typed")

    projected = tuple(add_projection(number, rows) for number in _INPUT_PROJECTIONS if number in stacks)
    activated = builder.add_node("mlx.expert_activation", projected, "inner", **_activation_attrs(attrs))
    total = builder.add_node("mlx.combine", (add_projection(_OUTPUT_PROJECTION, activated), order, scores), "sum")
    typed, sizes = builder.add_cast(total, dtype, "typed"), builder.add_node("Shape-1", (inputs["x"],), "sizes")
    builder.nodes.append(Node("Reshape-5", (typed, sizes), node.outputs, {}, node.name))
    return Replacement(
        node,
        tuple(builder.nodes),
        layers={stack.path: stack.options for stack in stacks.values()},
        tensors={
            name: array for stack in stacks.values() for name, array in name_arrays(stack.path, stack.arrays).items()
        },
    )


def _activation_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of mlx.expert_activation, from those of the mixture."""
    activation = {
        "kind": attrs.get("activation_type", "relu"),
        "fusion": attrs.get("swiglu_fusion", 0),
        "limit": attrs.get("swiglu_limit"),
        "alpha": attrs.get("activation_alpha", 1.0),
        "beta": attrs.get("activation_beta", 0.0),
        "after": attrs.get("swiglu_limit_after_activation", 0),
    }
    return {name: value for name, value in activation.items() if value is not None}


def _make_stack(graph: GraphView, node: Node, number: int) -> ExpertStack | str:
    """The layer of the projection fc1, fc2 or fc3, or why there is none."""
    inputs = ops.bind_inputs(node)
    parts = ("experts_weights", "scales", "zero_points", "experts_bias")
    names = {part: inputs[f"fc{number}_{part}"] for part in parts if f"fc{number}_{part}" in inputs}
    arrays = {part: graph.weight(name) for part, name in names.items()}
    constants = {part: array for part, array in arrays.items() if array is not None}
    if len(constants) < len(arrays):
        return "the weights of its experts are no constants"
    path = layer_path(graph, *names.values())
    if is_op_type(node, _QUANTIZED_MOE):
        bits = node.attrs.get(f"fc{number}_expert_weight_bits") or node.attrs.get("expert_weight_bits", 4)
        return _quantized_stack(path, constants, node.attrs, bits)
    weight = constants["experts_weights"]
    if weight.dtype not in LAYER_FLOAT_TYPES:
        return f"the weights of its experts are {weight.dtype}; expected a float type"
    bias = {"bias": constants["experts_bias"]} if "experts_bias" in constants else {}
    options = {"kind": "SwitchLinear", "bias": bool(bias)}
    return ExpertStack(path, options, {"weight": weight} | bias, {}, weight.dtype)


def _quantized_stack(
    path: str, arrays: dict[str, LazyTensor], attrs: Mapping[str, Any], bits: int
) -> ExpertStack | str:
    """The layer of weights in few bits, uint8 [experts, out, in · bits / 8]."""
    packed, scales, zeros = (arrays.get(part) for part in ("experts_weights", "scales", "zero_points"))
    if packed is None or scales is None:
        return "the scales of its experts are missing"
    if bits not in LAYER_BITS or attrs.get("weights_prepacked", -1) == 1 or packed.dtype != "uint8":
        return f"its experts are {packed.dtype} of {bits} bits; expected 2, 4 or 8, as the specification packs them"
    experts, out, _ = packed.shape
    rows, columns = experts * out, packed.shape[2] * 8 // bits
    block_size = attrs.get("block_size") or columns
    blocks = columns // block_size

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if zeros is not None and len(zeros.shape) == 2:  # one for each row, packed along the rows of an expert
            zero_points = unpack_bits(zeros.read(), bits, out).reshape(rows, 1)
        else:
            zero_points = read_zero_points(zeros, rows, blocks, bits)
        values = unpack_bits(packed.read().reshape(rows, -1), bits, columns)
        return values, scales.read().reshape(rows, blocks), zero_points

    weight = BlockQuantizedWeight(rows, columns, block_size, bits, scales.dtype, read)
    flat_arrays, options = build_layer_arrays(weight)
    stacked = {part: array.reshape((experts, out, *array.shape[1:])) for part, array in flat_arrays.items()}
    bias = {"bias": arrays["experts_bias"]} if "experts_bias" in arrays else {}
    options |= {"kind": "QuantizedSwitchLinear" if weight.group_size else "SwitchLinear", "bias": bool(bias)}
    return ExpertStack(path, options, stacked | bias, weight.node_attrs, weight.output_dtype)
