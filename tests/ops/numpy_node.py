"""One operator of ONNX's own domain against NumPy: the same node on device values, traced, and on the host."""

import numpy as np
from onnxruntime_node import agree, found

from mlx_transmuter.ops import OPERATORS, form


def run(op_type, inputs, attrs=None, outputs=("y",), *, opset=23):
    """The node's outputs; asserts that they are the same with all inputs known on the host."""
    attrs = attrs or {}
    inputs = [None if x is None else np.asarray(x) for x in inputs]
    results = found(op_type, inputs, attrs, outputs, "ai.onnx", opset)
    hosted = found(op_type, inputs, attrs, outputs, "ai.onnx", opset, host=range(len(inputs)))
    for one, other in zip(results, hosted, strict=True):
        np.testing.assert_array_equal(one, other)
    return results


def same(op_type, inputs, truth, attrs=None, *, opset=23, tolerance=0.0):
    """Asserts that the node gives `truth`: of its shape and type, and within tolerance times its spread."""
    agree(np.asarray(truth), run(op_type, inputs, attrs, opset=opset)[0], tolerance)


def function(op_type, opset=23):
    """The function declared for the operator at that opset."""
    name = form(op_type, opset)
    assert name is not None
    return OPERATORS[name].function
