"""Nodes with the values that they read, recorded while decoders and the tests of operators run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.program import Node, Program
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.program_walk import ProgramWalk

MOST_PER_OPERATOR = 12
_MOST_ELEMENTS = 4096


@dataclass(frozen=True)
class RecordedNode:
    """A node with one array for each of its inputs, None for one that it leaves out."""

    node: Node
    arrays: list[np.ndarray | None]


class Recorder:
    """Keeps the nodes that walks run, a few of each operator."""

    def __init__(self) -> None:
        self.nodes: list[RecordedNode] = []
        self._counts: Counter[str] = Counter()
        self._known: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keeps the nodes that any walk runs in the block."""
        run_node = ProgramWalk.run_node

        def recorded(walk: ProgramWalk, node: Node) -> tuple[Any, ...]:
            self._add(node, [walk.values.get(name) if name else None for name in node.inputs])
            return run_node(walk, node)

        with mock.patch.object(ProgramWalk, "run_node", recorded):
            yield

    def _add(self, node: Node, values: list[Any]) -> None:
        if self._counts[node.op] >= MOST_PER_OPERATOR or any(isinstance(a, Program) for a in node.attrs.values()):
            return
        if not all(value is None or isinstance(value, (np.ndarray, mx.array)) for value in values):
            return
        if any(value is not None and (value.size > _MOST_ELEMENTS or value.dtype == mx.bfloat16) for value in values):
            return
        try:
            arrays = [ops.to_host(value) if isinstance(value, mx.array) else value for value in values]
        except Exception:  # while a step is traced, arrays have no elements
            return
        if any(array is not None and array.dtype.kind not in "iufb" for array in arrays):
            return
        shapes = [None if array is None else (array.shape, array.dtype.name) for array in arrays]
        label = f"{node.op} {shapes} {sorted(node.attrs)}"
        if label not in self._known:
            self._known.add(label)
            self._counts[node.op] += 1
            self.nodes.append(RecordedNode(node, arrays))


def record_decoders(recorder: Recorder, programs: Iterable[Program]) -> None:
    """Records a step of each decoder."""
    for program in programs:
        inputs = make_step_inputs(program, DecoderSignature.from_program(program), 2, 4, 3)
        arrays = {name: ops.to_device(tensor.read()) for name, tensor in program.tensors.items()}
        with recorder.recording():
            ProgramModule(program, arrays).call_eagerly(**inputs)


def record_tests(recorder: Recorder, arguments: list[str]) -> None:
    """Records what the tests of operators run."""
    with recorder.recording():
        pytest.main([*arguments, "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal"])


def save(nodes: list[RecordedNode], file: Path) -> None:
    """Writes the nodes into one .npz without objects."""
    arrays: dict[str, np.ndarray] = {}
    facts = []

    def number(array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        arrays[f"a{len(arrays)}"] = array
        return len(arrays) - 1

    for one in nodes:
        node = one.node
        attrs = {k: {"array": number(v)} if isinstance(v, np.ndarray) else v for k, v in node.attrs.items()}
        facts.append([node.op, len(node.outputs), attrs, [number(array) for array in one.arrays]])
    np.savez(file, facts=np.array(json.dumps(facts)), **arrays)


def load(file: Path) -> list[RecordedNode]:
    """Returns the nodes of a file."""
    nodes = []
    with np.load(file, allow_pickle=False) as saved:
        for op, outputs, attrs, numbers in json.loads(str(saved["facts"])):
            attrs = {k: saved[f"a{v['array']}"] if isinstance(v, dict) else v for k, v in attrs.items()}
            arrays = [None if n is None else saved[f"a{n}"] for n in numbers]
            names = tuple("" if n is None else f"in{i}" for i, n in enumerate(numbers))
            node = Node(op, names, tuple(f"out{i}" for i in range(outputs)), attrs, "recorded")
            nodes.append(RecordedNode(node, arrays))
    return nodes
