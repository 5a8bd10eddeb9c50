"""ONNX's own quantisation operators against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import DOMAIN, check

INT4, UINT4 = 22, 21  # ONNX TensorProto.DataType
INTEGERS = [np.uint8, np.int8, np.uint16, np.int16, np.int32]


def integers(seed, dtype, *shape):
    info = np.iinfo(dtype)
    low, high = (info.min, info.max) if info.bits < 32 else (-5000, 5000)
    return np.random.default_rng(seed).integers(low, high, size=shape, endpoint=True).astype(dtype)


def scales(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).uniform(0.01, 0.2, size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "shape, attrs", [((), {}), ((3,), {"axis": 1}), ((4,), {"axis": -1}), ((2, 3, 2), {"axis": 2, "block_size": 2})]
)
def test_dequantize_linear(shape, attrs, dtype):
    x, scale = integers(1, dtype, 2, 3, 4), scales(2, *shape)
    check("DequantizeLinear", [x, scale], attrs, tolerance=1e-7, domain="ai.onnx")
    if dtype != np.int32:
        check("DequantizeLinear", [x, scale, integers(3, dtype, *shape)], attrs, tolerance=1e-7, domain="ai.onnx")
