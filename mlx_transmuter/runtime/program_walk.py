"""The walk over a program: every node is computed in turn, on the host or on the device.

A value on the host is a numpy array known while the graph is walked (a shape, an axis, a constant, and what is computed
from them); a value on the device is an `mx.array`, known when the step runs. A node whose inputs are all on the host
runs at once and leaves nothing in a compiled step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.ops.indices import Indices, IntegerRange, range_of_array
from mlx_transmuter.ops.integer_ranges import NodeCall, ranges_of_results
from mlx_transmuter.program import Node, Program

# A node with more elements than this on the host side runs on the device, where it costs a step little.
MAX_HOST_ELEMENTS = 2**16
# The most bytes of values on the host that a walk keeps at a time. No decoder comes near it: what a node computes on
# the host has at most MAX_HOST_ELEMENTS, but a small file may have many such nodes.
MAX_HOST_BYTES = 2**27
# The most bytes that a value may have: with what it is made of it must fit in this machine's memory. MLX counts sizes
# modulo 2^64 and ends the process where it gets no memory, so a size is checked before anything of it is computed.
MAX_VALUE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class ProgramWalk:
    """One walk over a program.

    values: the values so far, by name. input_independent_names: the device values that depend on no input, which the
    host can therefore have too. last_reads: see find_last_reads. eager: whether the host may wait for any value of the
    device. read_leaf: returns a weight or layer that is not among the values, for the first node that reads it; each
    node is then evaluated before the next, in branches too, so that a leaf is in memory from its first to its last
    read. ranges: the ranges that the caller knows the integers of values to be in; the walk adds those that follow.
    device_copies: the device copies of values on the host.
    """

    def __init__(
        self,
        values: dict[str, Any],
        input_independent_names: set[str],
        last_reads: dict[int, list[str]],
        eager: bool = False,
        read_leaf: Callable[[str], Any] | None = None,
        ranges: Mapping[str, IntegerRange] | None = None,
    ):
        self.values, self.input_independent_names = values, input_independent_names
        self.last_reads, self.eager, self.read_leaf = last_reads, eager, read_leaf
        self.ranges: dict[str, IntegerRange] = dict(ranges or {})
        self.device_copies: dict[str, mx.array] = {}
        self.host_bytes = 0  # of the values on the host that nodes computed

    def run(self, program: Program) -> None:
        """Computes every node of the program."""
        self.values.update(program.constants)
        for node in program.nodes:
            results = self.run_node(node)
            for name, result in zip(node.outputs, results, strict=False):
                if name:
                    self.values[name] = result
                    self.host_bytes += host_bytes(result)
            if self.host_bytes > MAX_HOST_BYTES:
                found = f"more than {MAX_HOST_BYTES} bytes of values that are known while the graph is traced"
                raise ops.OperatorError(found, "shapes, axes and masks", node=str(node))
            if self.read_leaf is not None:
                mx.eval([result for result in results if isinstance(result, mx.array | list)])
            for name in self.last_reads.get(id(node), ()):
                value = self.values.pop(name, None)
                self.host_bytes -= host_bytes(value) if name not in program.constants else 0
                self.device_copies.pop(name, None)

    def run_node(self, node: Node) -> tuple[Any, ...]:
        """Returns the node's outputs. Raises OperatorError, with the node in it, where it cannot run."""
        operator = ops.OPERATORS[node.op]
        try:
            operator.check_input_count(node)
            operator.check_attributes(node)
            reads = list(node.all_inputs())
            is_input_independent = all(
                name in self.input_independent_names or isinstance(self._value(name), np.ndarray) for name in reads
            )
            attributes = self._attributes(operator, node, is_input_independent)
            results = self._run_on_host(operator, node, reads, attributes)
            if results is None:
                arguments = list(self._arguments(operator, node))
                results = _run(operator, node, arguments, attributes)
                self._find_ranges(operator, node, NodeCall((), arguments, attributes, results))
                if is_input_independent:
                    self.input_independent_names.update(name for name in node.outputs if name)
            return results
        except ops.OperatorError as error:
            if error.node:
                raise
            raise ops.OperatorError(error.found, error.expected, error.do, str(node)) from None
        except Exception as error:  # numpy, MLX and Python raise what they like of a node that asks the impossible
            raise ops.OperatorError(f"{type(error).__name__}: {error}", node=str(node)) from error

    def _attributes(self, operator: ops.Operator, node: Node, is_input_independent: bool) -> dict[str, Any]:
        """Returns the keyword arguments of a node: its attributes, with branches as functions."""
        attributes = {
            name: self.subprogram_function(value, is_input_independent) if isinstance(value, Program) else value
            for name, value in node.attrs.items()
        }
        return attributes | ({"outputs": len(node.outputs)} if operator.takes_output_count else {})

    def _run_on_host(
        self, operator: ops.Operator, node: Node, reads: list[str], attributes: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Returns the results of a node whose inputs are all on the host as numpy arrays; None for what is too large
        for the host.
        """
        arrays = [value for name in reads if isinstance(value := self.values.get(name), np.ndarray)]
        # A leaf that is still to be read is none of the values, and none of the host.
        if len(arrays) < len(reads) or sum(array.size for array in arrays) > MAX_HOST_ELEMENTS:
            return None
        with mx.stream(mx.cpu):
            results = _run(operator, node, self._arguments(operator, node), attributes)
            if sum(result.size for result in results if isinstance(result, mx.array)) > MAX_HOST_ELEMENTS:
                return None
            arrays = [result for result in results if isinstance(result, mx.array)]
            # What numpy has no type for stays with MLX: computed now, it is a constant of the step and no operation of
            # each step on the stream of the CPU.
            mx.eval(arrays)
            return tuple(ops.to_host(r) if isinstance(r, mx.array) and _fits_numpy(r) else r for r in results)

    def _arguments(self, operator: ops.Operator, node: Node) -> Iterator[Any]:
        """Yields the node's inputs, each on the host or on the device as the operator declares it."""
        declared = len(operator.input_names)
        for number, name in enumerate(node.inputs):
            if not name:
                yield None
            elif number in operator.index_inputs:
                yield self._indices(name)
            elif number in operator.host_inputs or (operator.host_variadic_inputs and number >= declared):
                yield self.host_value(name, operator.input_name(number))
            else:
                yield self.device_value(name)

    def _value(self, name: str) -> Any:
        """Returns the value as it is, read now where it is a leaf that no node has read yet."""
        if self.read_leaf is not None and name not in self.values:
            self.values[name] = self.read_leaf(name)
        return self.values[name]

    def _indices(self, name: str) -> Indices:
        """Returns the value as indices, with their range; of a weight the range is that of its values."""
        value, known = self._value(name), self.range_of(name)
        if known is None and name in self.input_independent_names and value.size:
            with suppress(ValueError):  # which MLX raises where the weights are arguments of a traced function
                known = range_of_array(ops.to_host(value))
        return Indices(value, known)

    def range_of(self, name: str) -> IntegerRange | None:
        """Returns the range that the integers of a value are known to be in; None for no value, and no integers."""
        value = self.values.get(name)
        known = self.ranges.get(name)
        return range_of_array(value) if known is None and isinstance(value, (np.ndarray, mx.array)) else known

    def _find_ranges(self, operator: ops.Operator, node: Node, call: NodeCall) -> None:
        """Adds the ranges of the node's outputs."""
        if operator.range_rule is None:
            return
        call = call._replace(ranges=[self.range_of(name) for name in node.inputs])
        for name, known in zip(node.outputs, ranges_of_results(operator.range_rule, call), strict=False):
            if name and known is not None:
                self.ranges[name] = known

    def host_value(self, name: str, parameter: str) -> np.ndarray:
        """Returns the value as numpy. Raises OperatorError for one that is known only when the step runs."""
        value = self._value(name)
        if isinstance(value, mx.array):
            if name not in self.input_independent_names and not self.eager:
                raise ops.OperatorError(
                    f"{parameter} ({name!r}) depending on values that are known only when the step runs",
                    f"a {parameter} that follows from shapes and constants",
                    "export the model so that its shapes follow from the shapes of its inputs",
                )
            value = self.values[name] = ops.to_host(value)
        return value

    def device_value(self, name: str) -> Any:
        """Returns the value as an `mx.array`; layers and sequences as they are."""
        value = self._value(name)
        if not isinstance(value, np.ndarray):
            return value
        if name not in self.device_copies:
            self.device_copies[name] = ops.to_device(value)
        return self.device_copies[name]

    def subprogram_function(self, program: Program, is_input_independent: bool):
        """Returns a branch as a function of its inputs that returns a list of its outputs, over the values around it.

        is_input_independent: whether nothing that its node reads depends on an input of the program, nor then what the
        node passes to the branch.
        """

        def call(*inputs: Any) -> list[Any]:
            names = [value.name for value in program.inputs]
            walk = ProgramWalk(
                self.values | dict(zip(names, inputs, strict=True)),
                self.input_independent_names | set(names if is_input_independent else ()),
                {} if self.read_leaf is None else find_last_reads(program),
                self.eager,
                self.read_leaf,
                {name: known for name, known in self.ranges.items() if name not in names},
            )
            walk.device_copies = {name: copy for name, copy in self.device_copies.items() if name not in names}
            walk.run(program)
            return [walk._value(value.name) for value in program.outputs]

        return call


def host_bytes(value: Any) -> int:
    """Returns the bytes that a value takes on the host."""
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _run(
    operator: ops.Operator, node: Node, arguments: Iterable[Any], attributes: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Returns the operator's results, checked."""
    results = operator.function(*arguments, **attributes)
    return _check_results(results if isinstance(results, tuple) else (results,), node)


def _check_results(results: tuple[Any, ...], node: Node) -> tuple[Any, ...]:
    """Returns the results of a node. Raises OperatorError where one is missing or too large to compute."""
    if any(node.outputs[len(results) :]):
        raise ops.OperatorError(f"{len(results)} results", f"one for each output of {', '.join(node.outputs)}")
    for result in results:
        if isinstance(result, mx.array) and math.prod(result.shape) * result.itemsize > MAX_VALUE_BYTES:
            raise ops.OperatorError(f"a result of shape {list(result.shape)}", f"at most {MAX_VALUE_BYTES} bytes")
    return results


def _fits_numpy(array: mx.array) -> bool:
    # numpy has no bfloat16: such a value stays an mx.array, so that no type is lost on the way through the host.
    return array.dtype != mx.bfloat16


def evaluate_node(node: Node, values: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the node's outputs for values known now, by name: numpy arrays where they are small, else `mx.array`s."""
    return ProgramWalk(dict(values), set(values), {}).run_node(node)


def find_last_reads(program: Program) -> dict[int, list[str]]:
    """Returns id(node) -> the values that no later node reads, so that a walk drops them there."""
    read_later = {value.name for value in program.outputs}
    last_reads: dict[int, list[str]] = {}
    for node in reversed(program.nodes):
        names = dict.fromkeys((*node.all_inputs(), *node.outputs))
        last_reads[id(node)] = [name for name in names if name and name not in read_later]
        read_later.update(last_reads[id(node)])
    return last_reads
