"""Opened: a mixture in one operator becomes its router, its stacks of experts and their sum.

The weights then stand in layers, in MLX's own packing, and what is computed of them is computed once, at conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    LAYER_BITS,
    BlockQuantizedWeight,
    build_layer_arrays,
    unpack_bits,
)
from mlx_transmuter.program import Node


class ExpertStack(NamedTuple):
    """The layer in place of a projection: its path, options and arrays, the columns that fill its last group, and the
    float type of its weights or scales.
    """

    path: str
    options: dict[str, Any]
    arrays: dict[str, LazyTensor]
    padding_columns: int
    output_dtype: str


def expand_contrib_moe(graph: GraphView) -> Iterator[MatchOutcome]:
    """com.microsoft's MoE and QMoE → mlx.router, mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    for node in graph.nodes:
        few = is_op_type(node, "com.microsoft.QMoE")
        if not few and not is_op_type(node, "com.microsoft.MoE"):
            continue
        given = dict(zip(ops.OPERATORS[node.op].input_names, node.inputs, strict=False))
        dtype = graph.shape_probe.dtype(given["x"]) if graph.shape_probe else None
        if dtype is None or node.attrs.get("use_sparse_mixer") or node.attrs.get("quant_type", "int") != "int":
            yield SkippedMatch(node, "it routes or packs as no stack does")
            continue
        numbers = [n for n in (1, 3, 2) if given.get(f"fc{n}_experts_weights")]
        stacks = [_quantized_stack(graph, node, given, n) if few else _float_stack(graph, given, n) for n in numbers]
        made = [one for one in stacks if isinstance(one, ExpertStack)]
        if len(made) < len(stacks):
            yield SkippedMatch(node, next(one for one in stacks if isinstance(one, str)))
        else:
            yield _replace_moe(node, given, dict(zip(numbers, made, strict=True)), dtype, few)


def _replace_moe(
    node: Node, inputs_by_name: dict[str, str], stacks: dict[int, ExpertStack], dtype: str, is_quantized: bool
) -> Replacement:
    output, attrs, nodes = node.outputs[0], node.attrs, []

    def add(op: str, *inputs: str, into: tuple[str, ...], **options: Any) -> str:
        nodes.append(Node(op, inputs, into, options, node.name))
        return into[0]

    def product(number: int, x: str) -> str:
        stack, result = stacks[number], f"{output}.fc{number}"
        pad = {"pad": stack.padding_columns} if stack.padding_columns else {}
        add("mlx.switch_linear", x, stack.path, experts, into=(result,), **pad)
        if stack.output_dtype == dtype:
            return result
        return add("Cast-9", result, into=(f"{result}.typed",), to=ops.ELEMENT_TYPE_CODES[dtype])

    indices, scores, rows, experts, order = (
        f"{output}.{part}" for part in ("indices", "scores", "rows", "experts", "order")
    )
    weights = [inputs_by_name["router_weights"]] if inputs_by_name.get("router_weights") else []
    # Without weights of their own, QMoE's scores always add up to 1, as in onnxruntime on a CPU.
    normalize = int(bool(attrs.get("normalize_routing_weights")) or (is_quantized and not weights))
    routed = {"k": attrs.get("k", 1), "normalize": normalize}
    add("mlx.router", inputs_by_name["router_probs"], *weights, into=(indices, scores), **routed)
    add("mlx.dispatch", inputs_by_name["x"], indices, into=(rows, experts, order))
    gates = [product(number, rows) for number in (1, 3) if number in stacks]
    kinds = {
        "kind": attrs.get("activation_type", "relu"),
        "fusion": attrs.get("swiglu_fusion", 0),
        "limit": attrs.get("swiglu_limit"),
        "alpha": attrs.get("activation_alpha", 1.0),
        "beta": attrs.get("activation_beta", 0.0),
        "after": attrs.get("swiglu_limit_after_activation", 0),
    }
    kinds = {name: value for name, value in kinds.items() if value is not None}
    inner = add("mlx.expert_activation", *gates, into=(f"{output}.inner",), **kinds)
    total = add("mlx.combine", product(2, inner), order, scores, into=(f"{output}.sum",))
    typed = add("Cast-9", total, into=(f"{output}.typed",), to=ops.ELEMENT_TYPE_CODES[dtype])
    sizes = add("Shape-1", inputs_by_name["x"], into=(f"{output}.sizes",))
    add("Reshape-5", typed, sizes, into=node.outputs)
    arrays = {name: array for stack in stacks.values() for name, array in stack.arrays.items()}
    return Replacement(node, tuple(nodes), layers={one.path: one.options for one in stacks.values()}, arrays=arrays)


def _float_stack(graph: GraphView, inputs_by_name: dict[str, str], number: int) -> ExpertStack | str:
    """The layer of weights [experts, out, in]."""
    name, bias = inputs_by_name[f"fc{number}_experts_weights"], inputs_by_name.get(f"fc{number}_experts_bias", "")
    weight = graph.weight(name)
    if weight is None or weight.dtype not in LAYER_FLOAT_TYPES or (bias and graph.weight(bias) is None):
        return "its experts are no constants in floats"
    path = layer_path(graph, name, bias)
    arrays = {f"{path}.weight": weight} | ({f"{path}.bias": graph.program.tensors[bias]} if bias else {})
    return ExpertStack(path, {"kind": "SwitchLinear", "bias": bool(bias)}, arrays, 0, weight.dtype)


def _quantized_stack(graph: GraphView, node: Node, inputs_by_name: dict[str, str], number: int) -> ExpertStack | str:
    """The layer of weights in few bits, uint8 [experts, out, in · bits / 8]."""
    bits = node.attrs.get(f"fc{number}_expert_weight_bits") or node.attrs.get("expert_weight_bits", 4)
    name, bias = inputs_by_name[f"fc{number}_experts_weights"], inputs_by_name.get(f"fc{number}_experts_bias", "")
    names = [
        name,
        inputs_by_name.get(f"fc{number}_scales", ""),
        inputs_by_name.get(f"fc{number}_zero_points", ""),
        bias,
    ]
    packed, scales, zeros = (graph.program.tensors.get(one) for one in names[:3])
    if packed is None or scales is None or any(one and graph.weight(one) is None for one in names):
        return "its experts are no constants"
    if bits not in LAYER_BITS or node.attrs.get("weights_prepacked", -1) == 1 or packed.dtype != "uint8":
        return f"its experts are {packed.dtype} of {bits} bits; wanted 2, 4 or 8, as the specification packs them"
    experts, rows, width = packed.shape
    columns = width * 8 // bits
    block = node.attrs.get("block_size") or columns
    count = columns // block

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = scales.read().reshape(experts * rows, count)
        if zeros is None:
            zero = np.full(scale.shape, 1 << (bits - 1), np.float32)
        elif len(zeros.shape) == 2:
            zero = unpack_bits(zeros.read(), bits, rows).reshape(experts * rows, 1)
        else:
            zero = unpack_bits(zeros.read().reshape(experts * rows, -1), bits, count)
        return unpack_bits(packed.read().reshape(experts * rows, -1), bits, columns), scale, zero

    made = BlockQuantizedWeight(experts * rows, columns, block, bits, scales.dtype, read)
    path = layer_path(graph, name, *[one for one in names[1:] if one])
    flat, options = build_layer_arrays(path, made)
    arrays = {key: _split_experts(one, experts) for key, one in flat.items()}
    if bias:
        arrays[f"{path}.bias"] = graph.program.tensors[bias]
    options |= {"kind": "QuantizedSwitchLinear" if made.group_size else "SwitchLinear", "bias": bool(bias)}
    return ExpertStack(
        path,
        options,
        arrays,
        made.padding_columns if made.group_size else 0,
        made.scale_dtype if made.group_size else made.file_dtype,
    )


def _split_experts(tensor: LazyTensor, experts: int) -> LazyTensor:
    shape = (experts, tensor.shape[0] // experts, *tensor.shape[1:])
    return LazyTensor(tensor.dtype, shape, lambda: tensor.read().reshape(shape))
