"""Quantization on the way: linear layers and embeddings of a float program become MLX's quantized ones.

Each weight is read, quantized and checked by itself when it is saved, so that no more than one is in memory in floats.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, shared_readers
from mlx_transmuter.converters.precision.recipes import recipe_bits
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Node, Program, WeightInfo

QUANTIZED_LAYER_KINDS = {
    "Linear": "QuantizedLinear",
    "Embedding": "QuantizedEmbedding",
    "SwitchLinear": "QuantizedSwitchLinear",
}
LAYER_OPS = ("mlx.linear", "mlx.embedding", "mlx.as_linear", "mlx.switch_linear")
# Operators whose weights are integers: a file that has them is quantized already.
INTEGER_WEIGHT_OPS = (
    *("MatMulInteger-", "ConvInteger-", "QLinear", "DequantizeLinear-", "com.microsoft.DequantizeLinear-"),
    *("com.microsoft.MatMulNBits-", "com.microsoft.MatMulBnb4-", "com.microsoft.GatherBlockQuantized-"),
    *("com.microsoft.DynamicQuantize", "com.microsoft.MatMulIntegerToFloat-", "com.microsoft.QAttention-"),
    *("com.microsoft.QMoE-", "com.microsoft.QGemm-"),
)


def check_not_quantized(graph: Program, path: Path) -> None:
    """Raises ConvertError for a graph that is quantized already."""
    for node in graph.all_nodes():
        if node.op.startswith(INTEGER_WEIGHT_OPS):
            raise ConvertError(
                path, f"a file that is quantized already ({node})", "a float one to quantize",
                "convert it as it is, or choose the model's fp32 or fp16 file",
            )  # fmt: skip


def quantize_layers(program: Program, quantization: Quantization, path: Path) -> tuple[Program, dict[str, str]]:
    """The program with its layers quantized, and why each layer that stays as it is does.

    A table that serves as embedding and as head is one layer and stays one. Scales and biases are float16 where the
    weight is, else float32: in bfloat16 they would move an 8-bit weight by up to two steps.
    """
    layers, arrays = dict(program.layers), dict(program.tensors)
    kept: dict[str, str] = {}
    bits_at = recipe_bits(program, quantization, path)
    for layer, options in program.layers.items():
        weight = arrays[f"{layer}.weight"]
        columns = weight.shape[-1]
        if columns % quantization.group_size:
            kept[layer] = f"its {columns} columns are no multiple of {quantization.group_size}"
            continue
        bits = bits_at.get(layer, quantization.bits)
        made = {"kind": QUANTIZED_LAYER_KINDS[options["kind"]], "bits": bits, "group_size": quantization.group_size}
        layers[layer] = made | ({"bias": options["bias"]} if "bias" in options else {})
        arrays |= _quantized_arrays(layer, weight, bits, quantization.group_size, path)
    if len(kept) == len(program.layers):
        raise ConvertError(
            path, f"no layer that can be quantized in groups of {quantization.group_size}",
            "a linear layer or an embedding",
            next(iter(kept.values()), ""),
        )  # fmt: skip
    program = replace(
        program,
        nodes=_cast_layer_outputs(program, layers),
        layers=layers,
        tensors=arrays,
        weights={name: WeightInfo(tensor.dtype, tensor.shape) for name, tensor in arrays.items()},
    )
    return program, kept


def _cast_layer_outputs(program: Program, layers: dict[str, dict]) -> list[Node]:
    """The nodes, with a cast after each layer whose scales are of another type than the weight that it had."""
    nodes = []
    for node in program.nodes:
        layer = node.inputs[1] if node.op in LAYER_OPS else ""
        dtype = program.weights[f"{layer}.weight"].dtype if layer else ""
        if dtype != "bfloat16" or layers[layer] == program.layers[layer]:
            nodes.append(node)
            continue
        wide = f"{node.outputs[0]}.wide"
        nodes.append(replace(node, outputs=(wide,)))
        nodes.append(Node("Cast-9", (wide,), node.outputs, {"to": ops.ELEMENT_TYPE_CODES[dtype]}, node.name))
    return nodes


def _quantized_arrays(layer: str, weight: LazyTensor, bits: int, group_size: int, path: Path) -> dict[str, LazyTensor]:
    """The weight uint32 [..., rows, columns · bits / 32], scales and biases [..., rows, columns / group] of a layer."""
    kind = "float16" if weight.dtype == "float16" else "float32"
    *rows, columns = weight.shape

    def make() -> tuple[mx.array, ...]:
        floats = weight.to_device().astype(ops.device_dtype(kind))
        made = mx.quantize(floats, group_size=group_size, bits=bits)
        if not is_within_rounding_bound(floats, *made, bits):
            found = f"the weight {layer}.weight, which {bits} bits in groups of {group_size} don't hold"
            raise ConvertError(path, found, "finite weights", "quantize to more bits, or convert the model in floats")
        return made

    weight_, scales, biases = shared_readers(make, 3)
    return {
        f"{layer}.weight": LazyTensor("uint32", (*rows, columns * bits // 32), weight_),
        f"{layer}.scales": LazyTensor(kind, (*rows, columns // group_size), scales),
        f"{layer}.biases": LazyTensor(kind, (*rows, columns // group_size), biases),
    }


def is_within_rounding_bound(floats: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> bool:
    """Whether each quantized weight is as near to its float as MLX's affine quantization puts it.

    A group's step is |scale|. MLX moves the step so that 0 and the group's largest weight are whole numbers of steps,
    which may leave the other end of the group outside its 2^bits values, by one step at most. So a weight with the
    lowest or highest value is within one step of its float, any other within half a step, and what rounding scale and
    bias to their type adds.
    """
    group, levels = floats.shape[-1] // scales.shape[-1], 2**bits - 1
    scale, bias = (mx.repeat(part.astype(mx.float32), group, axis=-1) for part in (scales, biases))
    held = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    value = mx.round((held - bias) / scale)
    steps = mx.where((value == 0) | (value == levels), 1.0, 0.5)
    scale, eps, tiny = mx.abs(scale), float(mx.finfo(scales.dtype).eps), float(mx.finfo(scales.dtype).smallest_normal)
    rounding = eps * (levels * mx.maximum(scale, tiny) + mx.maximum(mx.abs(bias), tiny))
    far = mx.abs(held - floats.astype(mx.float32))
    return bool(mx.all(far <= steps * scale + rounding).item())
