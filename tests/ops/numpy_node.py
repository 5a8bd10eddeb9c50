"""One operator of ONNX's own domain against NumPy: the same node on device values, traced, and on the host."""

import numpy as np
from onnxruntime_node import assert_outputs_close, module_outputs

from mlx_transmuter.ops import OPERATORS, resolve_operator


def run_node(op_type, inputs, attrs=None, outputs=("y",), *, opset=23):
    """Returns the node's outputs; asserts that they are the same with all inputs known on the host."""
    attrs = attrs or {}
    inputs = [None if x is None else np.asarray(x) for x in inputs]
    results = module_outputs(op_type, inputs, attrs, outputs, "ai.onnx", opset=opset)
    hosted = module_outputs(op_type, inputs, attrs, outputs, "ai.onnx", opset=opset, host_inputs=range(len(inputs)))
    for on_device, on_host in zip(results, hosted, strict=True):
        np.testing.assert_array_equal(on_device, on_host)
    return results


def assert_node_gives(op_type, inputs, expected, attrs=None, *, opset=23, tolerance=0.0):
    """Asserts that the node's output has the shape, type and values of `expected`, within tolerance times its range."""
    assert_outputs_close(np.asarray(expected), run_node(op_type, inputs, attrs, opset=opset)[0], tolerance)


def operator_function(op_type, opset=23):
    """Returns the function declared for the operator at that opset."""
    name = resolve_operator(op_type, opset)
    assert name is not None
    return OPERATORS[name].function
