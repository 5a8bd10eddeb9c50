"""The Module: an `mlx.nn.Module` that runs a Program, with every value either on the host or on the device.

A value on the host is a numpy array known while the graph is walked (a shape, an axis, a constant, and what is computed
from them); a value on the device is an `mx.array`, known when the step runs. A node whose inputs are all on the host
runs at once and leaves nothing in a compiled step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.program import Node, Program, ProgramError

# A node with more elements than this on the host side runs on the device, where it costs a step little.
MAX_HOST_ELEMENTS = 2**16
# The most bytes that a value may have: with what it is made of it must fit in this machine's memory. MLX counts sizes
# modulo 2^64 and ends the process where it gets no memory, so a size is checked before anything of it is computed.
MAX_VALUE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
# No exporter nests scopes deeper.
MAX_SCOPE_DEPTH = 64


class ProgramModule(nn.Module):
    """An ONNX graph as an `mlx.nn.Module`.

    Its parameters are the graph's weights under the names of the exporter's scopes
    (`model.layers.0.self_attn.q_proj.weight`) and its projections are `nn.Linear`, so `nn.quantize`, `tree_flatten` and
    the like work on it. Calling it with the graph's inputs by name gives a dict of its outputs by name.
    """

    def __init__(self, program: Program, weights: dict[str, mx.array]):
        """`weights`: name -> array for each of `program.weights`. Raises ProgramError where the two differ."""
        super().__init__()
        program.validate(is_known_operator=ops.OPERATORS.__contains__)
        _check_weight_names(program)
        _check_weights(program, weights)
        self._program = program
        owned = {
            name: path
            for name in program.weights
            if (path := name.rpartition(".")[0]) in program.layers and name.rpartition(".")[2]
        }
        leaves: dict[str, Any] = {name: weights[name] for name in program.weights if name not in owned}
        leaves |= {path: _make_layer(path, options, program) for path, options in program.layers.items()}
        for name, path in owned.items():
            leaves[path][name[len(path) + 1 :]] = weights[name]
        _attach_leaves(self, leaves)
        self._leaf_locations = {name: _find_leaf(self, name) for name in (*leaves, *owned)}
        self._last_reads_by_node = _find_last_reads(program)

    @property
    def program(self) -> Program:
        """The program that the module runs."""
        return self._program

    def weights(self) -> dict[str, mx.array]:
        """The arrays of the program's weights by name, as they are now."""
        return {
            name: owner[key] for name, (owner, key) in self._leaf_locations.items() if name in self._program.weights
        }

    def __call__(self, **inputs: mx.array | np.ndarray) -> dict[str, mx.array]:
        """The outputs of the graph by name. A numpy input is a value on the host, an `mx.array` one on the device.

        Raises ProgramError for an input missing or unknown, OperatorError where a node cannot run.
        """
        return self._call(inputs, eager=False)

    def call_eagerly(self, **inputs: mx.array | np.ndarray) -> dict[str, mx.array]:
        """The same outputs, also where shapes depend on values on the device, which are then computed on the way: for
        a graph as its exporter meant it, not for a step that is compiled.
        """
        return self._call(inputs, eager=True)

    def _call(self, inputs: dict[str, mx.array | np.ndarray], eager: bool) -> dict[str, mx.array]:
        names = {value.name for value in self._program.inputs}
        if missing := sorted(names - inputs.keys()):
            raise ProgramError(
                "the call of the module", f"no input {', '.join(missing)}", "every input of the graph", "give it"
            )
        if unknown := sorted(inputs.keys() - names):
            raise ProgramError(
                "the call of the module", f"an input {', '.join(unknown)}", f"only {', '.join(sorted(names))}"
            )
        values: dict[str, Any] = {name: owner[key] for name, (owner, key) in self._leaf_locations.items()}
        walk = _ProgramWalk(values | inputs, set(values), self._last_reads_by_node, eager)
        walk.run(self._program)
        return {value.name: walk.device_value(value.name) for value in self._program.outputs}


class _ProgramWalk:
    """One walk over a program: the values so far, and the device copies of those on the host."""

    def __init__(self, values: dict[str, Any], known: set[str], last_reads: dict[int, list[str]], eager: bool = False):
        self.values = values
        self.known_names = known  # device values that depend on no input, which the host can therefore have too
        self.device_copies: dict[str, mx.array] = {}
        self.last_reads = last_reads
        self.eager = eager  # whether the host may wait for any value of the device

    def run(self, program: Program) -> None:
        self.values.update(program.constants)
        for node in program.nodes:
            for name, result in zip(node.outputs, self.run_node(node), strict=False):
                if name:
                    self.values[name] = result
            for name in self.last_reads.get(id(node), ()):
                self.values.pop(name, None)
                self.device_copies.pop(name, None)

    def run_node(self, node: Node) -> tuple[Any, ...]:
        operator = ops.OPERATORS[node.op]
        try:
            operator.check_input_count(node)
            if unknown := node.attrs.keys() - operator.attribute_defaults.keys():
                raise ops.OperatorError(
                    f"the attribute {', '.join(sorted(unknown))}", "an attribute that the operator has"
                )
            reads = list(node.all_inputs())
            known = all(name in self.known_names or isinstance(self.values[name], np.ndarray) for name in reads)
            attrs = {
                name: self.subprogram_function(value, known) if isinstance(value, Program) else value
                for name, value in node.attrs.items()
            }
            if operator.takes_output_count:
                attrs["outputs"] = len(node.outputs)
            hosted = all(isinstance(self.values[name], np.ndarray) for name in reads)
            if hosted and sum(self.values[name].size for name in reads) <= MAX_HOST_ELEMENTS:
                with mx.stream(mx.cpu):
                    results = _check_results(
                        _as_tuple(operator.function(*self.arguments(operator, node), **attrs)), node
                    )
                    if sum(r.size for r in results if isinstance(r, mx.array)) <= MAX_HOST_ELEMENTS:
                        return tuple(
                            ops.to_host(r) if isinstance(r, mx.array) and _fits_numpy(r) else r for r in results
                        )
            results = _check_results(_as_tuple(operator.function(*self.arguments(operator, node), **attrs)), node)
        except ops.OperatorError as error:
            if error.node:
                raise
            raise ops.OperatorError(error.found, error.expected, error.do, str(node)) from None
        except Exception as error:  # numpy, MLX and Python raise what they like of a node that asks the impossible
            raise ops.OperatorError(f"{type(error).__name__}: {error}", node=str(node)) from error
        if known:
            self.known_names.update(name for name in node.outputs if name)
        return results

    def arguments(self, operator: ops.Operator, node: Node) -> Iterator[Any]:
        for i, name in enumerate(node.inputs):
            host = i in operator.host_inputs if i < len(operator.input_names) else operator.host_variadic_inputs
            parameter = operator.input_name(i)
            if not name:
                yield None
            else:
                known = i in operator.host_if_known_inputs and isinstance(self.values[name], np.ndarray)
                yield (
                    self.values[name]
                    if known
                    else self.host_value(name, parameter)
                    if host
                    else self.device_value(name)
                )

    def host_value(self, name: str, parameter: str) -> np.ndarray:
        """The value as numpy. Raises OperatorError for one that is known only when the step runs."""
        value = self.values[name]
        if isinstance(value, mx.array):
            if name not in self.known_names and not self.eager:
                raise ops.OperatorError(
                    f"{parameter} ({name!r}) depending on values that are known only when the step runs",
                    f"a {parameter} that follows from shapes and constants",
                    "export the model so that its shapes follow from the shapes of its inputs",
                )
            value = self.values[name] = ops.to_host(value)
        return value

    def device_value(self, name: str) -> Any:
        """The value as an `mx.array`; layers and sequences as they are."""
        value = self.values[name]
        if not isinstance(value, np.ndarray):
            return value
        if name not in self.device_copies:
            self.device_copies[name] = ops.to_device(value)
        return self.device_copies[name]

    def subprogram_function(self, program: Program, known: bool):
        """The branch as a function of its inputs that gives a list of its outputs, over the values around it.

        known: whether everything that its node reads is known, and with it what the node gives the branch.
        """

        def call(*inputs: Any) -> list[Any]:
            names = [value.name for value in program.inputs]
            walk = _ProgramWalk(
                self.values | dict(zip(names, inputs, strict=True)),
                self.known_names | set(names if known else ()),
                {},
                self.eager,
            )
            walk.device_copies = {name: copy for name, copy in self.device_copies.items() if name not in names}
            walk.run(program)
            return [walk.values[value.name] for value in program.outputs]

        return call


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _check_results(results: tuple[Any, ...], node: Node) -> tuple[Any, ...]:
    """The results of a node, all of them there and none too large to compute."""
    if any(node.outputs[len(results) :]):
        raise ops.OperatorError(f"{len(results)} results", f"one for each output of {', '.join(node.outputs)}")
    for result in results:
        if isinstance(result, mx.array) and math.prod(result.shape) * result.itemsize > MAX_VALUE_BYTES:
            raise ops.OperatorError(f"a result of shape {list(result.shape)}", f"at most {MAX_VALUE_BYTES} bytes")
    return results


def _fits_numpy(array: mx.array) -> bool:
    # numpy has no bfloat16: such a value stays an mx.array, so that no type is lost on the way through the host.
    return array.dtype != mx.bfloat16


def _check_weight_names(program: Program) -> None:
    """Raises ProgramError unless each weight and layer has its own place: no name is a path into another's value."""
    owned = {name for name in program.weights if name.rpartition(".")[0] in program.layers}
    leaves = program.layers.keys() | (program.weights.keys() - owned)
    for name in (*program.weights, *program.layers):
        *path, last = name.split(".")
        hidden = any(not part or part.startswith("_") for part in (*path, last))
        if (
            hidden
            or len(path) >= MAX_SCOPE_DEPTH
            or any(".".join(path[:i]) in leaves for i in range(1, len(path) + (name not in owned)))
        ):
            raise ProgramError(
                "the weights", f"the name {name[:200]!r}", "dotted paths, none inside another and none hidden"
            )


def _make_layer(path: str, options: dict[str, Any], program: Program) -> nn.Module:
    """The layer at `path`. Raises ProgramError for an unknown one, or one whose arrays are not all weights."""
    try:
        layer = ops.make_layer(**options)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise ProgramError(f"the layer {path!r}", f"{options} ({error})", "a layer of mlx.nn and its options") from None
    wanted = {f"{path}.{key}" for key in layer.parameters()}
    found = {name for name in program.weights if name.rpartition(".")[0] == path}
    if found != wanted:
        raise ProgramError(f"the layer {path!r}", f"the weights {sorted(found)}", f"{sorted(wanted)}")
    return layer


def _check_weights(program: Program, weights: dict[str, mx.array]) -> None:
    if missing := sorted(program.weights.keys() - weights.keys()):
        raise ProgramError(
            "the weights", f"none named {missing[0]!r} ({len(missing)} missing)", "every weight of the program"
        )
    for name, weight in program.weights.items():
        try:
            dtype = ops.device_dtype(weight.dtype)
        except ops.OperatorError as error:
            raise ProgramError(f"the weight {name!r}", error.found, error.expected) from None
        found = weights[name]
        if tuple(found.shape) != weight.shape or found.dtype != dtype or math.prod(weight.shape) != found.size:
            raise ProgramError(
                f"the weight {name!r}", f"{found.dtype} {list(found.shape)}", f"{dtype} {list(weight.shape)}"
            )


def _attach_leaves(root: nn.Module, leaves: dict[str, Any]) -> None:
    """Hangs the leaves under `root` by their dotted names: numbered children as lists, as in MLX's own models."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = leaf

    def hang(node: Any) -> Any:
        if not isinstance(node, dict) or isinstance(node, nn.Module):
            return node
        if node and all(str(i) in node for i in range(len(node))):
            return [hang(node[str(i)]) for i in range(len(node))]
        child = nn.Module()
        for key, value in node.items():
            child[key] = hang(value)
        return child

    for key, value in tree.items():
        root[key] = hang(value)


def _find_leaf(root: nn.Module, name: str) -> tuple[Any, Any]:
    """The container and the key under which the leaf `name` hangs, so that a layer swapped by MLX's tools is found."""
    *path, last = name.split(".")
    owner: Any = root
    for part in path:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    return owner, int(last) if isinstance(owner, list) else last


def trace_values(
    module: ProgramModule, earlier_values: Mapping[str, Any] | None = None, /, **inputs: mx.array | np.ndarray
) -> dict[str, Any]:
    """Every value of a walk of the module with these inputs: numpy arrays on the host, unevaluated `mx.array`s else.

    before: values of an earlier walk with like inputs; nodes that gave them aren't walked again.
    """
    program, earlier_values = module.program, earlier_values or {}
    values: dict[str, Any] = {name: owner[key] for name, (owner, key) in module._leaf_locations.items()}
    given = {name for node in program.nodes for name in node.outputs if name}
    values |= {name: earlier_values[name] for name in given if name in earlier_values}
    walk = _ProgramWalk(values | inputs, known=set(module._leaf_locations), last_reads={})
    left = [node for node in program.nodes if not all(name in earlier_values for name in node.outputs if name)]
    walk.run(replace(program, nodes=left))
    return walk.values


def evaluate_node(node: Node, values: dict[str, Any]) -> tuple[Any, ...]:
    """What the node gives for values known now, by name: numpy arrays where they are small, else `mx.array`s."""
    return _ProgramWalk(dict(values), set(values), {}).run_node(node)


def _find_last_reads(program: Program) -> dict[int, list[str]]:
    """id(node) -> the values that no later node reads, so that a walk drops them (an eager walk frees their memory)."""
    kept = {value.name for value in program.outputs}
    found: dict[int, list[str]] = {}
    for node in reversed(program.nodes):
        last = [name for name in dict.fromkeys((*node.all_inputs(), *node.outputs)) if name and name not in kept]
        kept.update(last)
        found[id(node)] = last
    return found
