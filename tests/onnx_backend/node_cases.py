"""ONNX's own node cases, run as a model is: read, saved as a folder, loaded, and called on MLX.

Each case runs twice: with its inputs on the device (but for those that a shape follows from), and with all of them
known on the host while the graph is walked.
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
from mlx_transmuter.program import Node, Program, weights

# Shapes of values are known whatever their elements are, so what they are read from need not be on the host.
_SHAPES = ("Shape-", "Size-", "SequenceLength-", "OptionalHasElement-")
_SMALL_INTEGERS = {"int4": np.int8, "int2": np.int8, "uint4": np.uint8, "uint2": np.uint8}


def load(modules: Iterable[str] | None = None) -> list[TestCase]:
    """The cases of onnx's modules `modules`, which are named after operators, or of all of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # making a case, NumPy overflows and divides by zero on purpose
        if modules is None:
            return list(load_model_tests(kind="node"))
        for name in modules:
            importlib.import_module(f"{node_module.__name__}.{name}")
    return [case for case in node_module._NodeTestCases if case.name]


def operator(case: TestCase) -> str:
    """The operator that the case is about; for one expanded into its function, that of the case it was made from."""
    assert case.model is not None
    return case.model.graph.node[0].op_type


def plain_name(name: str) -> str:
    """The name of the case that an expanded one was made from."""
    return re.sub(r"_expanded.*$", "", name)


def run(case: TestCase, folder: Path) -> None:
    """Raises AssertionError where a result differs from what the case expects, and what conversion and module raise."""
    assert case.model is not None
    assert case.data_sets is not None
    program = read_onnx(case.model)
    weights.save(
        folder, [(name, 0, lambda data=data: ops.to_device(data.read())) for name, data in program.tensors.items()]
    )
    program.save(folder / PROGRAM_FILE)
    module = load_module(folder)
    shaping = _shaping(module.program)
    for inputs, expected in case.data_sets:
        for hosted in (False, True):
            values = {
                value.name: _given(array, hosted or value.name in shaping)
                for value, array in zip(program.inputs, inputs, strict=True)
            }
            results = module(**values)
            for value, wanted in zip(program.outputs, expected, strict=True):
                _check(results[value.name], _array(wanted), case, value.name)


def _shaping(program: Program) -> set[str]:
    """The values from which something follows that must be known while the graph is walked."""
    found: set[str] = set()

    def visit(nodes: list[Node]) -> None:
        for node in reversed(nodes):
            for branch in node.subprograms():
                visit(branch.nodes)
            operator = ops.OPERATORS[node.op]
            for i, name in enumerate(node.inputs):
                if i in operator.host_inputs if i < len(operator.input_names) else operator.host_variadic_inputs:
                    found.add(name)
            if not found.isdisjoint(node.outputs) and not node.op.startswith(_SHAPES):
                found.update(node.all_inputs())

    visit(program.nodes)
    return found


def _array(value: Any) -> Any:
    """A case's value as arrays: NumPy's own, with integers of odd width one a byte, as files of them are read."""
    if isinstance(value, list):
        return [_array(item) for item in value]
    if isinstance(value, TensorProto):
        value = numpy_helper.to_array(value)
    if value is None:
        return None
    array = np.asarray(value)
    return array.astype(_SMALL_INTEGERS.get(array.dtype.name, array.dtype))


def _given(value: Any, hosted: bool) -> Any:
    array = _array(value)
    if isinstance(array, list):
        return [_given(item, hosted) for item in array]
    if hosted or array is None or ops.ELEMENT_TYPES[ops.ELEMENT_TYPE_CODES.get(array.dtype.name, 8)][1] is None:
        return array
    return ops.to_device(array)


def _check(result: Any, wanted: Any, case: TestCase, name: str) -> None:
    if isinstance(wanted, list):
        assert isinstance(result, list), f"{name}: {type(result).__name__}, expected a sequence"
        assert len(result) == len(wanted), f"{name}: {len(result)} elements, expected {len(wanted)}"
        for one, other in zip(result, wanted, strict=True):
            _check(one, other, case, name)
        return
    if wanted is None:
        assert result is None, f"{name}: {result}, expected an empty optional"
        return
    # What a device holds of the expected type: the result must be of that type, and integers equal.
    held = ops.to_device(wanted)
    got = result if isinstance(result, mx.array) else ops.to_device(result)
    assert got.dtype == held.dtype, f"{name}: {got.dtype}, expected {held.dtype}"
    assert got.shape == held.shape, f"{name}: {got.shape}, expected {held.shape}"
    if not mx.issubdtype(held.dtype, mx.inexact):
        np.testing.assert_array_equal(ops.to_host(got), ops.to_host(held))
        return
    rtol = max(case.rtol, 2**-6) if held.dtype == mx.bfloat16 else case.rtol  # as onnx's own runner has it
    exact = wanted.astype(np.float32) if held.dtype == mx.bfloat16 else wanted
    np.testing.assert_allclose(ops.to_host(got), exact, rtol=rtol, atol=case.atol)
