"""Positions: a graph that takes positions from the length of its cache gets them as an input, so that it runs over a buffer.

Such a graph (Gemma's) computes `arange(past, past + seq)` from the shape of its cache and uses it twice: to rotate keys and
queries, where it means positions, and to build the causal mask, where it means columns. Over a buffer with free columns the two
differ. The rewrite gives the first use an input of its own, `position_ids`, and leaves the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from converters.match import Answer, Become, Declined, Graph, is_kind
from mlx_transmuter import ops
from mlx_transmuter.module import Module, host_values
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import Signature, SignatureError, declared_mode

NAME = "position_ids"
# What a value goes through without changing what it means, and where it shows what it meant.
_CARRIES = ("Unsqueeze", "Squeeze", "Cast", "Reshape", "Expand", "Identity", "Transpose", "Add", "Concat")
_COLUMNS = ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal", "Sub", "And", "Where")
_POSITIONS = ("MatMul", "Mul", "Einsum", "Sin", "Cos", "Gather", "RotaryEmbedding", "com.microsoft.RotaryEmbedding")


def positions(graph: Graph) -> Iterator[Answer]:
    """arange(past, past + seq) of shape [1, seq], where it rotates or embeds → the input position_ids [batch, seq]."""
    program = graph.program
    try:
        signature = Signature.of(program)
    except SignatureError:
        return  # no decoder, so there is nothing to give positions to
    if signature.positions or not signature.entries or declared_mode(program, signature) != "grow" or signature.branch:
        return
    wanted = None
    for past, seq in ((7, 3), (11, 5)):
        values = _values(graph, signature, past, seq)
        found = {
            name
            for name, value in values.items()
            if value.shape == (1, seq) and value.dtype.kind == "i" and np.array_equal(value[0], np.arange(past, past + seq))
        }
        wanted = found if wanted is None else wanted & found
    replaced: dict[int, Node] = {}
    for name in sorted(wanted or ()):
        for reader in graph.consumers(name):
            if any(out in (wanted or ()) for out in reader.outputs):
                continue  # the same positions once more, under another name
            use = "positions" if is_kind(reader, "Shape") else _use(graph, reader, name)
            if use == "positions":
                now = replaced.get(id(reader), reader)
                inputs = tuple(NAME if one == name else one for one in now.inputs)
                replaced[id(reader)] = replace(now, inputs=inputs)
            elif use is None:
                yield Declined(reader, f"the use of positions by {reader.op} is not known")
    if not any(not is_kind(node, "Shape") for node in replaced.values()):
        return
    value = Value(NAME, "int64", ("batch_size", "sequence_length"))
    for node in graph.nodes:
        if id(node) in replaced:
            yield Become(node, (replaced[id(node)],), inputs=(value,))


def _values(graph: Graph, signature: Signature, past: int, seq: int) -> dict[str, np.ndarray]:
    """The values on the host of a step of 2 rows; nothing is computed on the device, and no weight is read."""
    program = graph.program
    module = Module(program, {n: mx.zeros(w.shape, ops.device_dtype(w.dtype)) for n, w in program.weights.items()})
    inputs: dict[str, mx.array | np.ndarray] = {
        entry.past: mx.zeros(entry.sizes(2, past), ops.device_dtype(entry.dtype)) for entry in signature.entries
    }
    if signature.embeds:
        shape = program.input(signature.tokens).shape  # type: ignore[union-attr]
        inputs[signature.tokens] = mx.zeros((2, seq, shape[-1] if shape and isinstance(shape[-1], int) else 1))
    else:
        inputs[signature.tokens] = mx.zeros((2, seq), mx.int32)
    if signature.mask:
        inputs[signature.mask] = mx.ones((2, past + seq), ops.device_dtype(program.input(signature.mask).dtype))  # type: ignore[union-attr]
    if signature.keep:
        inputs[signature.keep] = np.zeros([1] * len(program.input(signature.keep).shape or ()), np.int64)  # type: ignore[union-attr]
    if signature.given:
        return {}
    return host_values(module, **inputs)


def _use(graph: Graph, node: Node, name: str, depth: int = 8) -> str | None:
    """What the value means where `node` reads it: "positions", "columns", or None where that cannot be told."""
    if any(is_kind(node, kind) for kind in _COLUMNS):
        return "columns"
    if any(is_kind(node, kind) for kind in _POSITIONS):
        return "positions"
    if not depth or not any(is_kind(node, kind) for kind in _CARRIES):
        return None
    uses = {
        _use(graph, reader, node.outputs[0], depth - 1)
        for reader in graph.consumers(node.outputs[0])
        if not is_kind(reader, "Shape")
    }
    return uses.pop() if len(uses) == 1 else None
