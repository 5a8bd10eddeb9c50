"""Products of 8-bit integers of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, module_outputs
from random_inputs import floats, integers


def scales(seed, *shape):
    return np.random.default_rng(seed).uniform(0.01, 0.1, size=shape).astype(np.float32)


@pytest.mark.parametrize("b_type", [np.uint8, np.int8])
@pytest.mark.parametrize("columns", [(), (5,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("k", [12, 700])
def test_mat_mul_integer_to_float_and_dynamic_quantize_mat_mul(k, bias, columns, b_type):
    b, b_scale, b_zero = integers(2, b_type, k, 5), scales(3, *columns), integers(4, b_type, *columns)
    extra = [floats(5, 5)] if bias else []
    for a_type in (np.uint8, np.int8):
        a, a_scale, a_zero = integers(1, a_type, 2, 3, k), scales(6), integers(7, a_type)
        if not (a_type == np.int8 and b_type == np.uint8):  # onnxruntime has no such kernel
            assert_matches_onnxruntime(
                "MatMulIntegerToFloat", [a, b, a_scale, b_scale, a_zero, b_zero, *extra], tolerance=1e-6
            )
            assert_matches_onnxruntime("MatMulIntegerToFloat", [a, b, a_scale, b_scale], tolerance=1e-6)
    assert_matches_onnxruntime(
        "DynamicQuantizeMatMul", [floats(8, 2, 3, k), b, b_scale, b_zero, *extra], tolerance=1e-6
    )
    assert_matches_onnxruntime("DynamicQuantizeMatMul", [floats(8, 2, 3, k), b, b_scale], tolerance=1e-6)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("columns", [(), (5,)])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_q_gemm(trans_a, trans_b, columns, quantized):
    a = integers(1, np.uint8, *((12, 3) if trans_a else (3, 12)))
    b = integers(2, np.int8, *((5, 12) if trans_b else (12, 5)))
    inputs = [a, scales(3), integers(4, np.uint8), b, scales(5, *columns), integers(6, np.int8, *columns)]
    inputs += [integers(7, np.int16, 5).astype(np.int32)]
    inputs += [np.array(0.7, dtype=np.float32), integers(8, np.uint8)] if quantized else []
    assert_matches_onnxruntime("QGemm", inputs, {"transA": trans_a, "transB": trans_b, "alpha": 0.5}, tolerance=1e-6)


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("columns", [(), (72,)])
def test_q_attention(columns, unidirectional, past):
    x, weight = integers(1, np.uint8, 2, 4, 10), integers(2, np.int8, 10, 72)
    mask = np.array([4 + past, 3 + past], dtype=np.int32)
    inputs = [x, weight, floats(3, 72), np.array(0.01, dtype=np.float32), scales(4, *columns), mask]
    inputs += [integers(5, np.uint8), np.zeros(columns, dtype=np.int8), floats(6, 2, 2, 3, past, 8) if past else None]
    assert_matches_onnxruntime(
        "QAttention", inputs, {"num_heads": 3, "unidirectional": unidirectional}, ("y", "present")
    )


def test_mat_mul_integer_16():
    assert_matches_onnxruntime("MatMulInteger16", [integers(1, np.int16, 3, 40), integers(2, np.int16, 40, 5)])
    a, b = integers(1, np.uint16, 3, 40), integers(2, np.uint16, 40, 5)  # onnxruntime has no kernel of unsigned ones
    (actual,) = module_outputs("MatMulInteger16", [a, b], {}, ("y",))
    np.testing.assert_array_equal(actual, a.astype(np.uint32) @ b.astype(np.uint32))


def test_sums_and_products_of_integers():
    """Against numpy, as onnxruntime has no CPU kernel of them."""
    a, b = integers(1, np.int8, 2, 3, 4), integers(2, np.int8, 3, 1)
    (actual,) = module_outputs(
        "MulInteger", [a, np.array(3, dtype=np.int8), b, np.array(-5, dtype=np.int8)], {}, ("y",)
    )
    np.testing.assert_array_equal(actual, (a.astype(np.int32) - 3) * (b.astype(np.int32) + 5))
    for x in (a, a.view(np.uint8)):
        (actual,) = module_outputs("ReduceSumInteger", [x], {"axes": [0, -1], "keepdims": 0}, ("y",))
        np.testing.assert_array_equal(actual, x.astype(np.int64).sum(axis=(0, 2)))
        assert actual.dtype == (np.int32 if x.dtype == np.int8 else np.uint32)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("segments", [False, True])
def test_q_embed_layer_normalization(segments, mask):
    rng = np.random.default_rng(9)
    ids = [rng.integers(0, n, size=(2, 4)).astype(np.int32) for n in (9, 2)]
    tables = [integers(i, np.uint8, *shape) for i, shape in enumerate([(9, 8), (6, 8), (2, 8), (8,), (8,)])]
    inputs = [ids[0], ids[1], *tables, np.array([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=np.int32) if mask else None]
    inputs += [scales(20 + i) for i in range(5)] + [integers(30 + i, np.uint8) for i in range(5)]
    if not segments:
        for i in (1, 4, 10, 15):
            inputs[i] = None
    assert_matches_onnxruntime("QEmbedLayerNormalization", inputs, {"epsilon": 1e-3}, ("y", "mask_index"))
