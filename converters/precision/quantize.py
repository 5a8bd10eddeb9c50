"""Quantization in a conversion: linear layers and embeddings of a float program become MLX's quantized ones.

Some rows of a weight at a time are read, quantized and checked when it is saved: no more of it is in memory in floats.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.operator_sets import LAYER_OPS, QUANTIZED_FILE_OPS
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, shared_readers
from mlx_transmuter.converters.precision.recipes import recipe_bits
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Node, Program, WeightInfo
from mlx_transmuter.program.layer_arrays import array_name

QUANTIZED_LAYER_KINDS = {
    "Linear": "QuantizedLinear",
    "Embedding": "QuantizedEmbedding",
    "SwitchLinear": "QuantizedSwitchLinear",
}


def check_not_quantized(graph: Program, path: Path) -> None:
    """Raises ConvertError for a graph that is quantized already."""
    for node in graph.all_nodes():
        if is_op_type(node, *QUANTIZED_FILE_OPS):
            raise ConvertError(
                path, f"a file that is quantized already ({node})", "a float one to quantize",
                "convert it as it is, or choose the model's fp32 or fp16 file",
            )  # fmt: skip


def quantize_layers(program: Program, quantization: Quantization, path: Path) -> tuple[Program, dict[str, str]]:
    """Returns the program with its layers quantized, and the reason of each layer that stays in float, by its path.

    A table that serves as embedding and as head is one layer and stays one. Scales and biases are float16 where the
    weight is, else float32: in bfloat16 they would move an 8-bit weight by up to two steps. Raises ConvertError where
    no layer can be quantized.
    """
    layers, arrays = dict(program.layers), dict(program.tensors)
    unquantized: dict[str, str] = {}
    recipe = recipe_bits(program, quantization, path)
    for layer, options in program.layers.items():
        weight = arrays[array_name(layer, "weight")]
        columns = weight.shape[-1]
        if columns % quantization.group_size:
            unquantized[layer] = f"its {columns} columns are no multiple of {quantization.group_size}"
            continue
        bits = recipe.get(layer, quantization.bits)
        kind = QUANTIZED_LAYER_KINDS[options["kind"]]
        layers[layer] = {"kind": kind, "bits": bits, "group_size": quantization.group_size}
        layers[layer] |= {"bias": options["bias"]} if "bias" in options else {}
        arrays |= _quantized_arrays(layer, weight, bits, quantization.group_size, path)
    if len(unquantized) == len(program.layers):
        raise ConvertError(
            path, f"no layer that can be quantized in groups of {quantization.group_size}",
            "a linear layer or an embedding",
            next(iter(unquantized.values()), ""),
        )  # fmt: skip
    program = replace(
        program,
        nodes=_cast_layer_outputs(program, layers),
        layers=layers,
        tensors=arrays,
        weights={name: WeightInfo(tensor.dtype, tensor.shape) for name, tensor in arrays.items()},
    )
    return program, unquantized


def _cast_layer_outputs(program: Program, layers: dict[str, dict]) -> list[Node]:
    """Returns the nodes, with a cast after each layer whose scales are of another type than the weight that it had."""
    nodes = []
    for node in program.nodes:
        layer = node.inputs[1] if node.op in LAYER_OPS else ""
        dtype = program.weights[array_name(layer, "weight")].dtype if layer else ""
        if dtype != "bfloat16" or layers[layer] == program.layers[layer]:
            nodes.append(node)
            continue
        wide = f"{node.outputs[0]}.wide"
        nodes.append(replace(node, outputs=(wide,)))
        nodes.append(Node("Cast-9", (wide,), node.outputs, {"to": ops.ELEMENT_TYPE_CODES[dtype]}, node.name))
    return nodes


def _quantized_arrays(layer: str, weight: LazyTensor, bits: int, group_size: int, path: Path) -> dict[str, LazyTensor]:
    """Returns the arrays of a quantized layer, by the names of its weights, quantized when they are read.

    The weight is uint32 [..., rows, columns · bits / 32]; scales and biases are [..., rows, columns / group_size].
    """
    dtype = "float16" if weight.dtype == "float16" else "float32"
    *rows, columns = weight.shape

    def quantize_rows(rows: np.ndarray) -> tuple[mx.array, ...]:
        floats = ops.to_device(rows).astype(ops.device_dtype(dtype))
        quantized = mx.quantize(floats, group_size=group_size, bits=bits)
        if not is_within_rounding_bound(floats, *quantized, bits):
            raise ConvertError(
                path,
                f"the weight {layer}.weight, which {bits} bits in groups of {group_size} cannot represent",
                "finite weights",
                "quantize to more bits, or convert the model in floats",
            )
        return quantized

    def quantize() -> tuple[mx.array, ...]:
        parts = zip(*map(quantize_rows, weight.rows()), strict=True)
        return tuple(mx.concatenate(list(part)).reshape(*rows, -1) for part in parts)

    read_weight, read_scales, read_biases = shared_readers(quantize, 3)
    return {
        array_name(layer, "weight"): LazyTensor("uint32", (*rows, columns * bits // 32), read_weight),
        array_name(layer, "scales"): LazyTensor(dtype, (*rows, columns // group_size), read_scales),
        array_name(layer, "biases"): LazyTensor(dtype, (*rows, columns // group_size), read_biases),
    }


def is_within_rounding_bound(floats: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> bool:
    """Returns whether each quantized weight is as near to its float as MLX's affine quantization puts it.

    A group's step is |scale|. MLX moves the step so that 0 and the group's largest weight are whole numbers of steps,
    which may leave the other end of the group outside its 2^bits values, by one step at most. So a weight with the
    lowest or highest value is within one step of its float, any other within half a step, and what rounding scale and
    bias to their type adds.
    """
    group, levels = floats.shape[-1] // scales.shape[-1], 2**bits - 1
    scale, bias = (mx.repeat(part.astype(mx.float32), group, axis=-1) for part in (scales, biases))
    dequantized = mx.dequantize(
        weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits
    )
    value = mx.round((dequantized - bias) / scale)
    steps = mx.where((value == 0) | (value == levels), 1.0, 0.5)
    scale, eps, tiny = mx.abs(scale), float(mx.finfo(scales.dtype).eps), float(mx.finfo(scales.dtype).smallest_normal)
    rounding = eps * (levels * mx.maximum(scale, tiny) + mx.maximum(mx.abs(bias), tiny))
    errors = mx.abs(dequantized - floats.astype(mx.float32))
    return bool(mx.all(errors <= steps * scale + rounding).item())
