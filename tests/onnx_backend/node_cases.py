"""ONNX's own node cases, each treated like a model: read, saved as a folder, loaded, and called on MLX.

Each case runs twice: with its inputs on the device (except for those that determine a shape), and with all of them known
on the host while the graph is traced.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node as node_module
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.model import PROGRAM_FILE, load_module
from mlx_transmuter.program import Node, Program, save_program, weights
from mlx_transmuter.program.weights import StoredWeight

# The shape of a value is known whatever its elements are, so the inputs of these need not be on the host.
_SHAPES = ("Shape-", "Size-", "SequenceLength-", "OptionalHasElement-")
_SMALL_INTEGERS = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}


def load(modules: Iterable[str] | None = None) -> list[TestCase]:
    """Returns the cases of some of onnx's modules, which are named after operators, or of all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases overflow or divide by zero in NumPy on purpose
        if modules is None:
            return list(load_model_tests(kind="node"))
        for name in modules:
            importlib.import_module(f"{node_module.__name__}.{name}")
    return [case for case in node_module._NodeTestCases if case.name]


def operator(case: TestCase) -> str:
    """Returns the operator of the first node of a case."""
    assert case.model is not None
    return case.model.graph.node[0].op_type


def plain_name(name: str) -> str:
    """Returns the name of a case without the suffix of one whose operator is expanded into its function."""
    return re.sub(r"_expanded.*$", "", name)


def run(case: TestCase, folder: Path) -> None:
    """Runs a case in a folder. Raises AssertionError where a result differs, and the errors of conversion and module."""
    assert case.model is not None
    assert case.data_sets is not None
    program = read_onnx(case.model)
    weights.save(folder, [StoredWeight.of_array(name, data.to_device()) for name, data in program.tensors.items()])
    save_program(program, folder / PROGRAM_FILE)
    module = load_module(folder)
    shape_values = _shape_determining_values(module.program)
    for inputs, expected in case.data_sets:
        for hosted in (False, True):
            values = {
                value.name: _as_input(array, hosted or value.name in shape_values)
                for value, array in zip(program.inputs, inputs, strict=True)
            }
            results = module(**values)
            for value, reference in zip(program.outputs, expected, strict=True):
                result, known = results[value.name], _array(reference)
                if operator(case) in ("Cast", "CastLike"):
                    result, known = _without_undefined(result, inputs[0], reference)
                _check(result, known, case, value.name)


def _shape_determining_values(program: Program) -> set[str]:
    """Returns the values on which an input depends that must be known while the graph is traced."""
    names: set[str] = set()

    def visit(nodes: list[Node]) -> None:
        for node in reversed(nodes):
            for branch in node.subprograms():
                visit(branch.nodes)
            operator = ops.OPERATORS[node.op]
            for i, name in enumerate(node.inputs):
                if i in operator.host_inputs if i < len(operator.input_names) else operator.host_variadic_inputs:
                    names.add(name)
            if not names.isdisjoint(node.outputs) and not node.op.startswith(_SHAPES):
                names.update(node.all_inputs())

    visit(program.nodes)
    return names


def _without_undefined(result: Any, source: Any, reference: Any) -> tuple[Any, Any]:
    """Returns a cast's result and its reference, without the elements for which ONNX leaves the result undefined.

    Those are the floats outside an integer type: what stands there in a case depends on ml_dtypes' version.
    """
    known = _array(reference)
    info = _integer_range(reference)
    values = np.asarray(_array(source)) if info else np.zeros(0)
    if info is None or not (np.issubdtype(values.dtype, np.floating) or values.dtype.kind == "V"):
        return result, known
    whole = np.trunc(values.astype(np.float64))
    defined = (info[0] <= whole) & (whole <= info[1])
    assert defined.any()
    return ops.to_host(result)[defined] if isinstance(result, mx.array) else result[defined], known[defined]


def _integer_range(reference: Any) -> tuple[int, int] | None:
    """Returns the least and the largest element of a case's value, or None where it has no integers."""
    array = numpy_helper.to_array(reference) if isinstance(reference, TensorProto) else np.asarray(reference)
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}.get(array.dtype.name)
    if bits is None:
        if array.dtype.kind not in "iu":
            return None
        bits = 8 * array.dtype.itemsize
    return (0, 2**bits - 1) if array.dtype.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _array(value: Any) -> Any:
    """Returns a case's value as NumPy arrays, with integers of 2 and 4 bits one per byte, as the reader has them."""
    if isinstance(value, list):
        return [_array(item) for item in value]
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    if value is None:
        return None
    array = np.asarray(value)
    return array.astype(_SMALL_INTEGERS.get(array.dtype.name, array.dtype))


def _as_input(value: Any, hosted: bool) -> Any:
    array = _array(value)
    if isinstance(array, list):
        return [_as_input(item, hosted) for item in array]
    if hosted or array is None or ops.ELEMENT_TYPES[ops.ELEMENT_TYPE_CODES.get(array.dtype.name, 8)][1] is None:
        return array
    return ops.to_device(array)


def _check(result: Any, reference: Any, case: TestCase, name: str) -> None:
    if isinstance(reference, list):
        assert isinstance(result, list), f"{name}: {type(result).__name__}, expected a sequence"
        assert len(result) == len(reference), f"{name}: {len(result)} elements, expected {len(reference)}"
        for one, other in zip(result, reference, strict=True):
            _check(one, other, case, name)
        return
    if reference is None:
        assert result is None, f"{name}: {result}, expected an empty optional"
        return
    # The result must have the type that a device has for the expected one, and equal integers.
    expected = ops.to_device(reference)
    actual = result if isinstance(result, mx.array) else ops.to_device(result)
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    if not mx.issubdtype(expected.dtype, mx.inexact):
        np.testing.assert_array_equal(ops.to_host(actual), ops.to_host(expected))
        return
    rtol = max(case.rtol, 2**-6) if expected.dtype == mx.bfloat16 else case.rtol  # as onnx's own runner has it
    exact = reference.astype(np.float32) if expected.dtype == mx.bfloat16 else reference
    np.testing.assert_allclose(ops.to_host(actual), exact, rtol=rtol, atol=case.atol)
