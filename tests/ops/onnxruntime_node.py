"""One operator against onnxruntime: the same node run by its CPU provider and by a Module, eagerly and traced."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.ops import OPERATORS, resolve_operator, to_device, to_host
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.module import ProgramModule

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

CONTRIB_DOMAIN = "com.microsoft"


def onnxruntime_outputs(
    op_type, inputs, attrs, outputs, domain=CONTRIB_DOMAIN, *, opset=21, input_types=None, output_types=None
):
    """Returns onnxruntime's outputs, without graph optimization.

    inputs: arrays, or None for an absent one; outputs: names, "" for an absent one, whose result is None; input_types:
    number -> ONNX element type of the inputs whose type numpy lacks (int4); output_types: name -> element type of the
    outputs whose type onnxruntime cannot infer.
    """
    helper, names, values, feeds = onnx.helper, [], [], {}
    for i, array in enumerate(inputs):
        names.append("" if array is None else f"x{i}")
        if array is not None:
            kind = (input_types or {}).get(i) or helper.np_dtype_to_tensor_dtype(array.dtype)
            if (input_types or {}).get(
                i
            ):  # onnxruntime's Python takes no inputs of these types: they become initializers
                values.append(helper.make_tensor(f"x{i}", kind, array.shape, array.ravel()))
            else:
                values.append(helper.make_tensor_value_info(f"x{i}", kind, array.shape))
                feeds[f"x{i}"] = array
    output_infos = [
        helper.make_tensor_value_info(name, kind, None)
        if (kind := (output_types or {}).get(name))
        else onnx.ValueInfoProto(name=name)
        for name in outputs
        if name
    ]
    node = helper.make_node(op_type, names, list(outputs), domain="" if domain == "ai.onnx" else domain, **attrs)
    graph = helper.make_graph(
        [node],
        "node",
        [v for v in values if isinstance(v, onnx.ValueInfoProto)],
        output_infos,
        [v for v in values if isinstance(v, onnx.TensorProto)],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    results = iter(ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(None, feeds))
    return [next(results) if name else None for name in outputs]


def module_outputs(op_type, inputs, attrs, outputs, domain=CONTRIB_DOMAIN, *, opset=21, host_inputs=()):
    """Returns the module's outputs as numpy. The inputs of the numbers host_inputs are constants, others device values.

    The module is also traced like a compiled step, so that an operator that reads a device value fails.
    """
    kind = op_type if domain == "ai.onnx" else f"{domain}.{op_type}"
    name = resolve_operator(kind, opset if domain == "ai.onnx" else 1)
    assert name is not None, f"{kind} is not declared"
    host_inputs = set(host_inputs) | set(OPERATORS[name].host_inputs)
    names = tuple("" if array is None else f"x{i}" for i, array in enumerate(inputs))
    arrays = {names[i]: array for i, array in enumerate(inputs) if array is not None}
    constants = {names[i]: arrays[names[i]] for i in host_inputs if i < len(names) and names[i]}
    arguments = {key: to_device(array) for key, array in arrays.items() if key not in constants}
    program = Program(
        inputs=tuple(Value(key, "float32", None) for key in arguments),
        outputs=tuple(Value(key, "float32", None) for key in outputs if key),
        nodes=[Node(name, names, tuple(outputs), attrs)],
        constants=constants,
    )
    module = ProgramModule(program, {})
    results = module(**arguments)
    mx.enable_compile()
    try:  # traced but not run, as a run would build kernels
        traced = mx.compile(lambda values: module(**values))(arguments)
    finally:
        mx.disable_compile()
    for key, value in results.items():
        assert traced[key].shape == value.shape
        assert traced[key].dtype == value.dtype
    return [to_host(results[key]) if key else None for key in outputs]


def assert_matches_onnxruntime(
    op_type,
    inputs,
    attrs=None,
    outputs=("y",),
    *,
    tolerance=1e-5,
    domain=CONTRIB_DOMAIN,
    opset=21,
    host_inputs=(),
    input_types=None,
    output_types=None,
):
    """Asserts equal shapes and types, and values within tolerance times the largest magnitude (0: equal)."""
    attrs = attrs or {}
    expected = onnxruntime_outputs(
        op_type, inputs, attrs, outputs, domain, opset=opset, input_types=input_types, output_types=output_types
    )
    actual = module_outputs(op_type, inputs, attrs, outputs, domain, opset=opset, host_inputs=host_inputs)
    for name, a, b in zip(outputs, expected, actual, strict=True):
        if name:
            assert_outputs_close(a, b, tolerance, name)


def assert_outputs_close(expected, actual, tolerance, name="y"):
    """Asserts that actual has the shape, type and, within tolerance times the range, values of expected (0: equal)."""
    assert actual.shape == expected.shape, f"{name}: {actual.shape} for {expected.shape}"
    assert actual.dtype == expected.dtype or (actual.dtype, expected.dtype) in NARROWED_DTYPES, (
        f"{name}: {actual.dtype} for {expected.dtype}"
    )
    if not tolerance or expected.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, expected, err_msg=name)
        return
    spread = float(np.max(np.abs(expected.astype(np.float64)), initial=0.0))
    np.testing.assert_allclose(
        actual.astype(np.float64), expected.astype(np.float64), rtol=0, atol=tolerance * max(spread, 1e-6), err_msg=name
    )


NARROWED_DTYPES = {(np.dtype(np.int32), np.dtype(np.int64)), (np.dtype(np.float32), np.dtype(np.float64))}
