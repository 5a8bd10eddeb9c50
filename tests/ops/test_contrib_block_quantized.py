"""MatMulNBits and GatherBlockQuantized against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import pack_bits

INT4, UINT4 = 22, 21  # ONNX TensorProto.DataType


def matmul_nbits_inputs(seed, n, k, block, bits, zero_points="none", dtype=np.float32, rows=3):
    """Returns the inputs of MatMulNBits: a, b, scales, zero_points."""
    rng = np.random.default_rng(seed)
    blocks = -(-k // block)
    b = rng.integers(0, 256, size=(n, blocks, block * bits // 8)).astype(np.uint8)
    scales = rng.uniform(0.5, 1.5, size=(n, blocks)).astype(dtype) / 2**bits
    zeros = {
        "none": None,
        "packed": rng.integers(0, 256, size=(n, -(-blocks * bits // 8))).astype(np.uint8),
        "float": rng.uniform(0, 2**bits, size=(n, blocks)).astype(dtype),
    }[zero_points]
    return [rng.normal(size=(2, rows, k)).astype(dtype), b, scales, zeros]


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", ["none", "packed", "float"])
def test_mat_mul_n_bits(zero_points, bits, block):
    k = 256 if block == 16 else 2 * block
    inputs = matmul_nbits_inputs(1, 10, k, block, bits, zero_points)
    attrs = {"K": k, "N": 10, "bits": bits, "block_size": block}
    if zero_points == "float" and bits == 8:  # onnxruntime's CPU provider has no such kernel
        (actual,) = module_outputs("MatMulNBits", inputs, attrs, ("y",))
        assert_outputs_close(reference_matmul_nbits(*inputs, np.arange(k) // block, bits), actual, 1e-5)
    else:
        assert_matches_onnxruntime("MatMulNBits", inputs, attrs)


def reference_matmul_nbits(a, b, scales, zeros, block_of, bits):
    """Returns a times the transpose of (values - zero points) · scales, as the schema defines it, in floats."""
    values = (b[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & (2**bits - 1)
    values = values.reshape(len(b), -1)[:, : a.shape[-1]]
    return (a @ ((values - zeros[:, block_of].astype(np.float64)) * scales[:, block_of]).T).astype(a.dtype)


@pytest.mark.parametrize("k", [40, 96, 200])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_incomplete_last_block(bits, k):
    inputs = matmul_nbits_inputs(2, 7, k, 64, bits, "packed")
    assert_matches_onnxruntime(
        "MatMulNBits", [*inputs, None, np.arange(7, dtype=np.float32)], {"K": k, "N": 7, "bits": bits, "block_size": 64}
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_flat_scales_and_zero_points(bits):
    a, b, scales, zeros = matmul_nbits_inputs(3, 6, 96, 32, bits, "packed")
    assert_matches_onnxruntime(
        "MatMulNBits", [a, b, scales.ravel(), zeros.ravel()], {"K": 96, "N": 6, "bits": bits, "block_size": 32}
    )


def test_g_idx_in_any_order():
    a, b, scales, zeros = matmul_nbits_inputs(4, 6, 96, 32, 4, "float")
    order = np.random.default_rng(4).permutation(np.arange(96) // 32).astype(np.int32)
    attrs = {"K": 96, "N": 6, "bits": 4, "block_size": 32}
    assert_matches_onnxruntime("MatMulNBits", [a, b, scales, None, order], attrs)
    # With zero points too, onnxruntime's CPU provider computes with 8 in their place: the schema is the truth.
    (actual,) = module_outputs("MatMulNBits", [a, b, scales, zeros, order], attrs, ("y",))
    assert_outputs_close(reference_matmul_nbits(a, b, scales, zeros, order, 4), actual, 1e-5)


@pytest.mark.parametrize("zero_points", ["none", "packed"])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (4, 128), (8, 64), (4, 16)])
def test_float16(bits, block, zero_points):
    inputs = matmul_nbits_inputs(5, 12, 256, block, bits, zero_points, dtype=np.float16)
    assert_matches_onnxruntime(
        "MatMulNBits", inputs, {"K": 256, "N": 12, "bits": bits, "block_size": block}, tolerance=1e-2
    )


def test_an_empty_weight():
    a, b, scales, _ = matmul_nbits_inputs(6, 5, 64, 32, 4)
    attrs = {"K": 64, "N": 5, "bits": 4, "block_size": 32}
    assert_matches_onnxruntime("MatMulNBits", [a, b[:0], scales], attrs)
    assert_matches_onnxruntime("MatMulNBits", [a, b[:0], scales, None, None, np.ones(5, dtype=np.float32)], attrs)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gather_from_packed_bytes(dtype, zero_points, bits):
    rng = np.random.default_rng(7)
    data = pack_bits(rng.integers(0, 2**bits, size=(9, 64)), bits)
    scales = rng.uniform(0.5, 1.5, size=(9, 4)).astype(dtype)
    zeros = pack_bits(rng.integers(0, 2**bits, size=(9, 4)), bits) if zero_points else None
    indices = np.array([[0, 8, -1], [3, 3, -9]])
    attrs = {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    assert_matches_onnxruntime("GatherBlockQuantized", [data, indices, scales, zeros], attrs, tolerance=1e-6)


@pytest.mark.parametrize("kind", [INT4, UINT4])
@pytest.mark.parametrize(("gather_axis", "quantize_axis"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("zero_points", [False, True])
def test_gather_from_4_bit_tensors(zero_points, gather_axis, quantize_axis, kind):
    rng = np.random.default_rng(8)
    low, high, dtype = (-8, 8, np.int8) if kind == INT4 else (0, 16, np.uint8)
    shape = [6, 4, 5]
    shape[quantize_axis] = 40
    blocks = [-(-n // 16) if i == quantize_axis else n for i, n in enumerate(shape)]
    inputs = [
        rng.integers(low, high, size=shape).astype(dtype),
        np.array([[1, 0], [-1, 3]]),
        rng.normal(size=blocks).astype(np.float32),
    ]
    inputs += [rng.integers(low, high, size=blocks).astype(dtype)] if zero_points else []
    attrs = {"block_size": 16, "gather_axis": gather_axis, "quantize_axis": quantize_axis}
    assert_matches_onnxruntime(
        "GatherBlockQuantized",
        inputs,
        attrs,
        tolerance=1e-6,
        input_types={0: kind, 3: kind} if zero_points else {0: kind},
    )


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("quant_type", [0, 1])
def test_mat_mul_bnb4(quant_type, block):
    rng, n, k = np.random.default_rng(9), 6, 80
    b = rng.integers(0, 256, size=n * k // 2).astype(np.uint8)
    absmax = rng.uniform(0.5, 1.5, size=-(-n * k // block)).astype(np.float32)
    attrs = {"K": k, "N": n, "block_size": block, "quant_type": quant_type}
    assert_matches_onnxruntime("MatMulBnb4", [rng.normal(size=(2, 3, k)).astype(np.float32), b, absmax], attrs)
    assert_matches_onnxruntime("MatMulBnb4", [np.eye(k, dtype=np.float32), b, absmax], attrs, tolerance=1e-7)
    # onnxruntime's CPU provider has no kernel for a weight that is not transposed: its own weight is the truth.
    (weight,) = onnxruntime_outputs("MatMulBnb4", [np.eye(k, dtype=np.float32), b, absmax], attrs, ("y",))
    a = rng.normal(size=(2, 3, n)).astype(np.float32)
    (actual,) = module_outputs("MatMulBnb4", [a, b, absmax], {**attrs, "transB": 0}, ("y",))
    assert_outputs_close(a @ weight.T, actual, 1e-6)
