"""Weights in blocks of few bits: a converted decoder gives onnxruntime's logits, from quantized layers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from toy_products import with_floats, with_product

from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    BlockQuantizedWeight,
    build_layer_arrays,
    unpack_bits,
)
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import Program

IDS = [3, 1, 15, 7, 2]
ROWS = toy.DIM


def pack_bits(values: np.ndarray, bits: int, block: int) -> np.ndarray:
    """The values [rows, columns] packed as MatMulNBits reads them: uint8 [rows, blocks, block · bits / 8]."""
    rows, columns = values.shape
    blocks = -(-columns // block)
    padded = np.zeros((rows, blocks * block), np.uint8)
    padded[:, :columns] = values
    flags = (padded[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(flags.reshape(rows, -1), axis=1, bitorder="little").reshape(rows, blocks, block * bits // 8)


def toy_with_matmul_nbits(
    columns: int, block: int, bits: int, zeros: str, order: str = "", bias: bool = False, seed: int = 0
):
    """A MatMulNBits of `columns` inputs and 8 outputs: the toy with it, its weight in floats, and its bias or None."""
    draw = np.random.default_rng(seed)
    blocks = -(-columns // block)
    values = draw.integers(0, 2**bits, (ROWS, columns)).astype(np.uint8)
    scales = draw.uniform(0.5, 1.5, (ROWS, blocks)).astype(np.float32) / 2**bits
    zero = np.full((ROWS, blocks), 2.0 ** (bits - 1))
    arrays = {"w.weight": pack_bits(values, bits, block), "w.scales": scales.reshape(-1)}
    inputs = ["wide", "w.weight", "w.scales", "", "", ""]
    if zeros == "packed":
        zero = draw.integers(0, 2**bits, (ROWS, blocks)).astype(np.uint8)
        per_byte = 8 // bits
        arrays["w.zeros"] = pack_bits(zero, bits, -(-blocks // per_byte) * per_byte).reshape(-1)
        inputs[3] = "w.zeros"
    elif zeros == "floats":
        zero = draw.uniform(0, 2**bits, (ROWS, blocks)).astype(np.float32)
        arrays["w.zeros"] = zero
        inputs[3] = "w.zeros"
    index = np.arange(columns) // block
    if order:
        if order == "shuffled":  # each block keeps its size
            index = draw.permutation(index)
        elif order == "uneven":
            index = draw.integers(0, blocks, columns)
        arrays["w.order"] = index.astype(np.int32)
        inputs[4] = "w.order"
    offset = draw.normal(size=ROWS).astype(np.float32) if bias else None
    if offset is not None:
        arrays["w.bias"] = offset
        inputs[5] = "w.bias"
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(
        "MatMulNBits", inputs, ["narrow"], "/model/down/MatMul", domain="com.microsoft",
        K=columns, N=ROWS, bits=bits, block_size=block,
    )  # fmt: skip
    weight = (values.astype(np.float32) - zero[:, index]) * scales[:, index]
    return with_product([node], arrays, columns, seed), weight.T, offset


def converted(model: onnx.ModelProto, tmp_path: Path) -> tuple[np.ndarray, Program]:
    folder = convert(toy.write(tmp_path / "source", model), "model.onnx", tmp_path / "out", progress=False)
    return toy.converted_logits(folder, IDS), load_folder(folder).decoder.program


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() <= 1e-4 * np.ptp(expected)


CASES = [
    *((columns, block, bits, "packed", "") for columns, block in ((256, 32), (128, 64), (256, 128), (512, 256)) for bits in (2, 4, 8)),
    *((128, 32, bits, zeros, "") for bits in (2, 4, 8) for zeros in ("", "floats")),
    # Columns that do not fill the last block: groups of another size, or zeros after them.
    (96, 64, 4, "packed", ""), (96, 128, 8, "packed", ""), (48, 32, 4, "packed", ""), (40, 64, 8, "", ""), (130, 128, 4, "packed", ""),
    (200, 256, 2, "floats", ""), (7, 32, 4, "packed", ""),
    # Columns whose blocks aren't in order, as GPTQ's are.
    (128, 32, 4, "packed", "in order"), (128, 32, 4, "packed", "shuffled"), (256, 128, 8, "", "shuffled"), (80, 32, 4, "packed", "shuffled"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "block", "bits", "zeros", "order"), CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_become_a_quantized_layer_with_the_logits_of_onnxruntime(
    columns, block, bits, zeros, order, bias, tmp_path
):
    model, weight, offset = toy_with_matmul_nbits(columns, block, bits, zeros, order, bias)
    logits, program = converted(model, tmp_path)
    assert [layer["kind"] for path, layer in program.layers.items() if path == "w"] == ["QuantizedLinear"]
    assert program.layers["w"]["bias"] == bias
    assert not [node for node in program.nodes if "MatMulNBits" in node.op]
    assert_close(logits, toy.onnxruntime_logits(with_floats(weight, columns, offset), IDS))
    if not (order or bits == 2 or zeros == "floats"):  # what onnxruntime has kernels for on a CPU
        assert_close(logits, toy.onnxruntime_logits(model, IDS))


@pytest.mark.parametrize(
    ("columns", "block", "order"), [(64, 16, ""), (40, 16, ""), (128, 32, "uneven"), (64, 16, "shuffled")]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_mlx_has_no_groups_for_become_floats_and_are_recorded(columns, block, order, bits, tmp_path):
    model, weight, _ = toy_with_matmul_nbits(columns, block, bits, "packed", order)
    logits, program = converted(model, tmp_path)
    assert_close(logits, toy.onnxruntime_logits(with_floats(weight, columns), IDS))
    assert program.layers["w.layer"] == {"kind": "Linear", "bias": False}
    assert not [node for node in program.nodes if "MatMulNBits" in node.op]
    (record,) = [record for record in program.metadata["rewrites"] if record["name"] == "lower_matmul_nbits"]
    (reason,) = record["declined"]
    assert f"blocks of {block}" in reason
    assert "its weight is in float32 now" in reason


def test_the_bias_of_an_add_goes_into_the_layer(tmp_path):
    model, weight, _ = toy_with_matmul_nbits(64, 32, 4, "packed")
    toy.node(model, "narrow").output[0] = "raw"
    at = next(i for i, node in enumerate(model.graph.node) if "raw" in node.output) + 1
    offset = np.arange(ROWS, dtype=np.float32)
    model.graph.node.insert(at, helper.make_node("Add", ["raw", "w.offset"], ["narrow"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(offset, "w.offset"))
    logits, program = converted(model, tmp_path)
    assert [layer["bias"] for layer in program.layers.values() if layer["kind"] == "QuantizedLinear"] == [True]
    assert_close(logits, toy.onnxruntime_logits(with_floats(weight, 64, offset), IDS))


@settings(max_examples=60)
@given(
    st.integers(1, 300), st.sampled_from([16, 32, 64, 128, 256, 48, 96]), st.sampled_from([2, 4, 8]), st.integers(0, 9),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)  # fmt: skip
def test_the_arrays_of_a_layer_hold_the_numbers_of_the_file(columns, block, bits, seed, dtype):
    """mx.dequantize gives (q - zero) · scale for each weight; columns that fill the last group meet zeros of x."""
    draw = np.random.default_rng(seed)
    blocks = -(-columns // block)
    values = draw.integers(0, 2**bits, (3, columns)).astype(np.uint8)
    scales = draw.uniform(0.01, 0.1, (3, blocks)).astype(np.float16).astype(np.float32)
    zeros = draw.integers(0, 2**bits, (3, blocks)).astype(np.float32)
    weight = BlockQuantizedWeight(3, columns, block, bits, dtype, lambda: (values, scales, zeros))
    arrays, options = build_layer_arrays(weight)
    index = np.arange(columns) // block
    expected = (values - zeros[:, index]) * scales[:, index]
    read = {name: tensor.to_device() for name, tensor in arrays.items()}
    assert {name: tuple(array.shape) for name, array in read.items()} == {
        name: tensor.shape for name, tensor in arrays.items()
    }
    if weight.group_size is None:
        assert read["weight"].dtype == getattr(mx, dtype)
        dequantized = read["weight"]
    else:
        dequantized = mx.dequantize(*(read[name] for name in ("weight", "scales", "biases")), **options)
        assert read["scales"].dtype == (mx.float16 if dtype == "float16" else mx.float32)
    digits = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2 if weight.group_size is None else 1e-6}[dtype]
    error = np.abs(np.array(dequantized.astype(mx.float32))[:, :columns] - expected)
    assert error.max() <= digits * 2**bits * 0.1
    assert weight.group_size is None or (columns + weight.padding_columns) % weight.group_size == 0


def test_unpacking_reverses_the_packing_of_a_file():
    draw = np.random.default_rng(0)
    for bits in (2, 4, 8):
        values = draw.integers(0, 2**bits, (3, 96)).astype(np.uint8)
        np.testing.assert_array_equal(unpack_bits(pack_bits(values, bits, 32).reshape(3, -1), bits, 96), values)
