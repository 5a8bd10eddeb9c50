"""Opened: a mixture in one operator becomes its router, its stacks of experts and their sum.

The weights then stand in layers, in MLX's own packing, and what is computed of them is computed once, at conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from converters.blocks import BITS, Blocks, arrays_of, unpacked
from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.passes.linear import layer_names
from converters.tensors import FLOATS, Tensor
from mlx_transmuter import ops
from mlx_transmuter.program import Node


class Stack(NamedTuple):
    """The layer in place of a projection: its path, options and arrays, the columns that fill its last group, and the
    float type of its weights or scales.
    """

    path: str
    options: dict[str, Any]
    arrays: dict[str, Tensor]
    pad: int
    dtype: str


def opened(graph: Graph) -> Iterator[Answer]:
    """com.microsoft's MoE and QMoE → mlx.router, mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    for node in graph.nodes:
        few = is_kind(node, "com.microsoft.QMoE")
        if not few and not is_kind(node, "com.microsoft.MoE"):
            continue
        given = dict(zip(ops.OPERATORS[node.op].inputs, node.inputs, strict=False))
        dtype = graph.observation.dtype(given["x"]) if graph.observation else None
        if dtype is None or node.attrs.get("use_sparse_mixer") or node.attrs.get("quant_type", "int") != "int":
            yield Declined(node, "it routes or packs as no stack does")
            continue
        numbers = [n for n in (1, 3, 2) if given.get(f"fc{n}_experts_weights")]
        stacks = [_quantized(graph, node, given, n) if few else _dense(graph, given, n) for n in numbers]
        made = [one for one in stacks if isinstance(one, Stack)]
        if len(made) < len(stacks):
            yield Declined(node, next(one for one in stacks if isinstance(one, str)))
        else:
            yield _become(node, given, dict(zip(numbers, made, strict=True)), dtype, few)


def _become(node: Node, given: dict[str, str], stacks: dict[int, Stack], dtype: str, few: bool) -> Become:
    output, attrs, nodes = node.outputs[0], node.attrs, []

    def add(op: str, *inputs: str, into: tuple[str, ...], **options: Any) -> str:
        nodes.append(Node(op, inputs, into, options, node.name))
        return into[0]

    def product(number: int, x: str) -> str:
        stack, result = stacks[number], f"{output}.fc{number}"
        pad = {"pad": stack.pad} if stack.pad else {}
        add("mlx.switch_linear", x, stack.path, experts, into=(result,), **pad)
        if stack.dtype == dtype:
            return result
        return add("Cast-9", result, into=(f"{result}.typed",), to=ops.CODES[dtype])

    indices, scores, rows, experts, order = (
        f"{output}.{part}" for part in ("indices", "scores", "rows", "experts", "order")
    )
    weights = [given["router_weights"]] if given.get("router_weights") else []
    # Without weights of their own, QMoE's scores always add up to 1, as in onnxruntime on a CPU.
    normalize = int(bool(attrs.get("normalize_routing_weights")) or (few and not weights))
    routed = {"k": attrs.get("k", 1), "normalize": normalize}
    add("mlx.router", given["router_probs"], *weights, into=(indices, scores), **routed)
    add("mlx.dispatch", given["x"], indices, into=(rows, experts, order))
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
    typed = add("Cast-9", total, into=(f"{output}.typed",), to=ops.CODES[dtype])
    sizes = add("Shape-1", given["x"], into=(f"{output}.sizes",))
    add("Reshape-5", typed, sizes, into=node.outputs)
    arrays = {name: array for stack in stacks.values() for name, array in stack.arrays.items()}
    return Become(node, tuple(nodes), layers={one.path: one.options for one in stacks.values()}, arrays=arrays)


def _dense(graph: Graph, given: dict[str, str], number: int) -> Stack | str:
    """The layer of weights [experts, out, in]."""
    name, bias = given[f"fc{number}_experts_weights"], given.get(f"fc{number}_experts_bias", "")
    weight = graph.weight(name)
    if weight is None or weight.dtype not in FLOATS or (bias and graph.weight(bias) is None):
        return "its experts are no constants in floats"
    path, weights, biases = layer_names(graph, name, bias)
    arrays = {weights: weight} | ({biases: graph.program.arrays[bias]} if bias else {})
    return Stack(path, {"kind": "SwitchLinear", "bias": bool(bias)}, arrays, 0, weight.dtype)


def _quantized(graph: Graph, node: Node, given: dict[str, str], number: int) -> Stack | str:
    """The layer of weights in few bits, uint8 [experts, out, in · bits / 8]."""
    bits = node.attrs.get(f"fc{number}_expert_weight_bits") or node.attrs.get("expert_weight_bits", 4)
    name, bias = given[f"fc{number}_experts_weights"], given.get(f"fc{number}_experts_bias", "")
    names = [name, given.get(f"fc{number}_scales", ""), given.get(f"fc{number}_zero_points", ""), bias]
    packed, scales, zeros = (graph.program.arrays.get(one) for one in names[:3])
    if packed is None or scales is None or any(one and graph.weight(one) is None for one in names):
        return "its experts are no constants"
    if bits not in BITS or node.attrs.get("weights_prepacked", -1) == 1 or packed.dtype != "uint8":
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
            zero = unpacked(zeros.read(), bits, rows).reshape(experts * rows, 1)
        else:
            zero = unpacked(zeros.read().reshape(experts * rows, -1), bits, count)
        return unpacked(packed.read().reshape(experts * rows, -1), bits, columns), scale, zero

    made = Blocks(experts * rows, columns, block, bits, scales.dtype, read)
    path, _, biases = layer_names(graph, name, *[one for one in names[1:] if one])
    flat, options = arrays_of(path, made)
    arrays = {key: _stacked(one, experts) for key, one in flat.items()}
    if bias:
        arrays[biases] = graph.program.arrays[bias]
    options |= {"kind": "QuantizedSwitchLinear" if made.group else "SwitchLinear", "bias": bool(bias)}
    return Stack(path, options, arrays, made.pad if made.group else 0, made.scales if made.group else made.dtype)


def _stacked(tensor: Tensor, experts: int) -> Tensor:
    shape = (experts, tensor.shape[0] // experts, *tensor.shape[1:])
    return Tensor(tensor.dtype, shape, lambda: tensor.read().reshape(shape))
