"""Float matrix products of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import check


def floats(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("trans_a, trans_b", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_fused_mat_mul(trans_a, trans_b, batch):
    a = floats(1, *batch, *((6, 4) if trans_a else (4, 6)))
    b = floats(2, *batch, *((5, 6) if trans_b else (6, 5)))
    check("FusedMatMul", [a, b], {"transA": trans_a, "transB": trans_b, "alpha": 0.5})


@pytest.mark.parametrize("trans_a, trans_b", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("batch_a, batch_b", [(1, 0), (0, 1), (1, 1)])
def test_fused_mat_mul_of_batches_behind_the_rows(batch_a, batch_b, trans_a, trans_b):
    def operand(seed, rows, columns, last, behind):
        shape = (columns, rows) if last else (rows, columns)
        return floats(seed, *((shape[0], 2, 3, shape[1]) if behind else (2, 3, *shape)))

    a, b = operand(1, 4, 6, trans_a, batch_a), operand(2, 6, 5, trans_b, batch_b)
    check("FusedMatMul", [a, b], {"transA": trans_a, "transB": trans_b, "transBatchA": batch_a, "transBatchB": batch_b})
