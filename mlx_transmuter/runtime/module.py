"""ProgramModule: an `mlx.nn.Module` that runs a Program (see program_walk.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.ops.indices import IntegerRange
from mlx_transmuter.program import Program, ProgramError
from mlx_transmuter.program.position_limit import PositionLimit, find_position_limit
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.program_walk import ProgramWalk, find_last_reads
from mlx_transmuter.runtime.weight_tree import attach_weights


class ProgramModule(nn.Module):
    """An ONNX graph as an `mlx.nn.Module`.

    Its parameters are the graph's weights under the names of the exporter's scopes
    (`model.layers.0.self_attn.q_proj.weight`) and its projections are `nn.Linear`, so `nn.quantize`, `tree_flatten` and
    the like work on it. It is called with the graph's inputs by name and returns a dict of its outputs by name.

    is_compilable: whether a call may be traced by mx.compile.
    """

    is_compilable = True

    def __init__(self, program: Program, weights: dict[str, mx.array]):
        """`weights`: name -> array for each of `program.weights`. Raises ProgramError where the two differ."""
        super().__init__()
        program.validate(is_known_operator=ops.OPERATORS.__contains__)
        self._program = program
        self._leaf_locations = attach_weights(self, program, weights)
        self._last_reads_by_node = find_last_reads(program)

    @property
    def program(self) -> Program:
        """The program that the module runs."""
        return self._program

    @cached_property
    def position_limit(self) -> PositionLimit | None:
        """Where the first table ends that positions index; None without one. Raises SignatureError for no decoder."""
        return find_position_limit(self._program, DecoderSignature.from_program(self._program))

    def weights(self) -> dict[str, mx.array]:
        """Returns the arrays of the program's weights by name, as they are now."""
        return {name: location.leaf for name, location in self._leaf_locations.items() if name in self._program.weights}

    def __call__(self, **inputs: mx.array | np.ndarray) -> dict[str, mx.array]:
        """Returns the outputs of the graph by name. A numpy input is a value on the host, an `mx.array` one on the
        device.

        Raises ProgramError for an input missing or unknown, OperatorError where a node cannot run.
        """
        return self._call(inputs, eager=False)

    def call_with_ranges(
        self, inputs: Mapping[str, mx.array | np.ndarray], ranges: Mapping[str, IntegerRange]
    ) -> dict[str, mx.array]:
        """Returns the same outputs, for inputs of which the caller knows in what range their integers are: indices that
        are thereby in range are not clipped.
        """
        return self._call(dict(inputs), eager=False, ranges=ranges)

    def call_eagerly(self, **inputs: mx.array | np.ndarray) -> dict[str, mx.array]:
        """Returns the same outputs, also where shapes depend on values on the device, which are then computed on the
        way: for a graph as its exporter meant it, not for a step that is compiled.
        """
        return self._call(inputs, eager=True)

    def _call(
        self,
        inputs: dict[str, mx.array | np.ndarray],
        eager: bool,
        ranges: Mapping[str, IntegerRange] | None = None,
    ) -> dict[str, mx.array]:
        where, names = "the call of the module", {value.name for value in self._program.inputs}
        if missing := sorted(names - inputs.keys()):
            raise ProgramError(where, f"no input {', '.join(missing)}", "every input of the graph", "give it")
        if unknown := sorted(inputs.keys() - names):
            raise ProgramError(where, f"an input {', '.join(unknown)}", f"only {', '.join(sorted(names))}")
        walk = self._make_walk(inputs, eager, ranges)
        walk.run(self._program)
        return {value.name: walk.device_value(value.name) for value in self._program.outputs}

    def _make_walk(
        self, inputs: dict[str, mx.array | np.ndarray], eager: bool, ranges: Mapping[str, IntegerRange] | None
    ) -> ProgramWalk:
        leaves = self._leaves()
        return ProgramWalk(leaves | inputs, set(leaves), self._last_reads_by_node, eager, ranges=ranges)

    def _leaves(self) -> dict[str, Any]:
        """Returns the weights and layers by name, as they are now."""
        return {name: location.leaf for name, location in self._leaf_locations.items()}


def trace_values(
    module: ProgramModule, earlier_values: Mapping[str, Any] | None = None, /, **inputs: mx.array | np.ndarray
) -> dict[str, Any]:
    """Returns every value of a walk of the module with these inputs: numpy arrays on the host, else unevaluated
    `mx.array`s.

    earlier_values: values of an earlier walk with like inputs; the nodes that computed them aren't walked again.
    """
    program, earlier_values = module.program, earlier_values or {}
    leaves = module._leaves()
    computed = {name for node in program.nodes for name in node.outputs if name}
    values = leaves | {name: earlier_values[name] for name in computed if name in earlier_values}
    walk = ProgramWalk(values | inputs, input_independent_names=set(leaves), last_reads={})
    remaining_nodes = [
        node for node in program.nodes if not all(name in earlier_values for name in node.outputs if name)
    ]
    walk.run(replace(program, nodes=remaining_nodes))
    return walk.values
