"""Operators of com.microsoft in bfloat16, which onnxruntime's CPU provider lacks: its float32 is the truth."""

import numpy as np
import pytest
from onnxruntime_node import assert_outputs_close, module_outputs, onnxruntime_outputs

ml_dtypes = pytest.importorskip("ml_dtypes")


def floats(seed, *shape):
    """Returns numbers that bfloat16 represents exactly, as float32."""
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def assert_matches_float32(op_type, inputs, attrs=None, domain="com.microsoft", tolerance=1e-2, outputs=("y",)):
    (expected, *_) = onnxruntime_outputs(op_type, inputs, attrs or {}, outputs, domain)
    narrow = [x.astype(ml_dtypes.bfloat16) if x is not None and x.dtype == np.float32 else x for x in inputs]
    (actual, *_) = module_outputs(op_type, narrow, attrs or {}, outputs, domain)
    assert_outputs_close(expected, actual, tolerance)


@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 64), (4, 16), (2, 32)])
@pytest.mark.parametrize("zero_points", [False, True])
def test_mat_mul_n_bits(zero_points, bits, block):
    """Zero point times scale needs more bits than bfloat16 has, so the products are computed in float32."""
    rng = np.random.default_rng(1)
    b = rng.integers(0, 256, size=(9, 256 // block, block * bits // 8)).astype(np.uint8)
    scales = floats(2, 9, 256 // block) / 2**bits
    zeros = rng.integers(0, 256, size=(9, -(-256 // block * bits // 8))).astype(np.uint8) if zero_points else None
    attrs = {"K": 256, "N": 9, "bits": bits, "block_size": block}
    assert_matches_float32("MatMulNBits", [floats(3, 2, 256), b, scales, zeros], attrs, tolerance=5e-3)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_group_query_attention(softcap):
    inputs = [
        floats(1, 2, 1, 64),
        floats(2, 2, 1, 32),
        floats(3, 2, 1, 32),
        floats(4, 2, 2, 8, 16),
        floats(5, 2, 2, 8, 16),
    ]
    inputs += [np.array([4, 7], dtype=np.int32), np.array(8, dtype=np.int32), floats(6, 8, 8), floats(7, 8, 8)]
    attrs = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "softcap": softcap}
    # onnxruntime reads the past wrongly where the present is not asked for.
    assert_matches_float32("GroupQueryAttention", inputs, attrs, tolerance=2e-2, outputs=("y", "key", "value"))


def test_norms_and_activations():
    x, skip, gamma = floats(1, 2, 3, 32), floats(2, 2, 3, 32), floats(3, 32)
    assert_matches_float32("SkipSimplifiedLayerNormalization", [x, skip, gamma], {"epsilon": 1e-3})
    assert_matches_float32("SkipLayerNormalization", [x, skip, gamma, gamma], {"epsilon": 1e-3})
    assert_matches_float32("SimplifiedLayerNormalization", [x, gamma], {"axis": -1}, domain="ai.onnx")
    assert_matches_float32("FastGelu", [x, gamma])
    assert_matches_float32("RotaryEmbedding", [x, np.array([2]), floats(4, 9, 4), floats(5, 9, 4)])
