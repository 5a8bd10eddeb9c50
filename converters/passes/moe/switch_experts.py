"""Chosen: of a mixture's experts only those run that the router chose, out of weights that hold all of them.

Exporters unroll a mixture into its experts, or multiply all of them at once; what they write around them to weigh and
to add up has many spellings. So it isn't recognised by its nodes: it is computed, on experts that are random numbers,
and compared with what a mixture is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, stack_tensors
from mlx_transmuter.converters.passes.moe.find_experts import (
    LAST_AXIS,
    ExpertProjection,
    Mixture,
    find_mixtures,
    normalize_last_axis,
)
from mlx_transmuter.converters.passes.moe.find_routing import Routing, find_routing
from mlx_transmuter.program import Node

# What gives its first input's elements in their order.
_RESHAPE_OPS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
_SWITCH_KINDS = {"Linear": "SwitchLinear", "QuantizedLinear": "QuantizedSwitchLinear"}


def make_switch_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Σ scores · expert(x) over the experts of a router's indices → mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    seen = graph.shape_probe
    if seen is None:
        return
    for mixture in find_mixtures(graph, seen):
        found = find_routing(graph, seen, mixture)
        for part in mixture.without_shared_expert() if isinstance(found, str) else ():
            if isinstance(one := find_routing(graph, seen, part), Routing):
                mixture, found = part, one
                break
        if isinstance(found, str):
            yield SkippedMatch(mixture.experts[0].projections[-1].node, found)
            continue
        sources = _reshape_sources(graph, seen, mixture.x)
        shapes = {name: seen.shapes(name) for name in sources}
        after = graph.only_consumer(found.output)
        if after is not None and is_op_type(after, "Reshape") and seen.shapes(after.outputs[0]) in shapes.values():
            found = replace(found, root=after)
        wanted = seen.shapes(found.output) or [()]
        like = next((name for name, shape in shapes.items() if shape == wanted), "")
        if not like and len(wanted[0]) != 2:
            yield SkippedMatch(found.root, "the sum has another shape than what the experts read")
        else:
            yield _replace_mixture(graph, seen, mixture, found, sources[-1], like if len(wanted[0]) != 2 else "")


def _reshape_sources(graph: GraphView, probe: ShapeProbe, x: str) -> list[str]:
    """x, and what it is the same rows of in another shape, up to the first."""
    found = [x]
    while (node := graph.producer(found[-1])) is not None and is_op_type(node, *_RESHAPE_OPS):
        before, after = probe.shapes(node.inputs[0]), probe.shapes(x)
        if before is None or after is None or [one[-1:] for one in before] != [one[-1:] for one in after]:
            break
        found.append(node.inputs[0])
    return found


def _replace_mixture(
    graph: GraphView, probe: ShapeProbe, mixture: Mixture, routing: Routing, x: str, shape_source: str
) -> Replacement:
    """x: the rows. like: the value of the sum's shape, "" for [tokens, dim]."""
    output, place = routing.output, routing.root.name
    rows, experts, sorted_by = (f"{output}.{part}" for part in ("rows", "experts", "order"))
    nodes = [Node("mlx.dispatch", (x, routing.indices), (rows, experts, sorted_by), {}, place)]
    names: dict[str, str] = {}
    layers, arrays = {}, {}
    for i, step in enumerate(mixture.experts[0].steps):
        node = step.node if isinstance(step, ExpertProjection) else step
        outputs = tuple(f"{output}.{i}.{j}" if name else "" for j, name in enumerate(node.outputs))
        if isinstance(step, ExpertProjection):
            path, options, made = _stack_layers(graph, mixture, i, arrays)
            layers[path], arrays = options, arrays | made
            first = names.get(step.x, rows)
            nodes.append(Node("mlx.switch_linear", (first, path, experts), outputs, node.attrs, node.name))
        else:
            node = normalize_last_axis(graph, probe, node) if is_op_type(node, "Split", "Slice") else node
            assert node is not None
            inputs = tuple(names.get(name, name) for name in node.inputs)
            nodes.append(Node(node.op, inputs, outputs, node.attrs, node.name))
        names |= dict(zip(node.outputs, outputs, strict=True))
    given = names[mixture.outputs[0]]
    nodes += _combine_nodes(probe, mixture, routing, shape_source, (given, sorted_by, routing.scores))
    return Replacement(
        routing.root, tuple(nodes), layers=layers, arrays=arrays, constants={LAST_AXIS: np.array([-1], np.int64)}
    )


def _combine_nodes(
    probe: ShapeProbe, mixture: Mixture, routing: Routing, shape_source: str, inputs: tuple[str, str, str]
) -> Iterator[Node]:
    """The sum in the type and the shape that it had."""
    output, place = routing.output, routing.root.name
    trial = probe.step_values[0]
    natural, kind = mx.result_type(trial[mixture.outputs[0]], trial[routing.scores]), trial[output].dtype
    names = [output]
    if shape_source:
        names.insert(0, f"{output}.flat")
    if natural != kind:
        names.insert(0, f"{output}.wide")
    yield Node("mlx.combine", inputs, (names[0],), {}, place)
    if natural != kind:
        code = ops.ELEMENT_TYPE_CODES[str(kind).removeprefix("mlx.core.")]
        yield Node("Cast-9", (names[0],), (names[1],), {"to": code}, place)
    if shape_source:
        sizes = f"{output}.sizes"
        yield Node("Shape-1", (shape_source,), (sizes,), {}, place)
        yield Node("Reshape-5", (names[-2], sizes), (output,), {}, place)


def _stack_layers(
    graph: GraphView, mixture: Mixture, step_index: int, new_arrays: dict[str, LazyTensor]
) -> tuple[str, dict, dict[str, LazyTensor]]:
    """The layer of all experts in place of the step `at` of each: its path, its options and its arrays."""
    steps = [expert.steps[step_index] for expert in mixture.experts]
    first = steps[0]
    assert isinstance(first, ExpertProjection)
    if first.weight:
        path = _unused_path(graph, new_arrays, f"{first.weight}.layer", (first.weight, first.bias))
        weight = graph.program.tensors[first.weight]
        experts, _, outputs = weight.shape
        arrays = {f"{path}.weight": weight.transpose((0, 2, 1))}
        if first.bias:
            bias = graph.program.tensors[first.bias]
            arrays[f"{path}.bias"] = bias.reshape((experts, outputs))
        return path, {"kind": "SwitchLinear", "bias": bool(first.bias)}, arrays
    paths = [step.path for step in steps if isinstance(step, ExpertProjection)]
    options = graph.program.layers[paths[0]]
    path = _unused_path(graph, new_arrays, _stack_path(paths))
    start = len(paths[0]) + 1
    parts = [name[start:] for name in graph.program.tensors if name.startswith(f"{paths[0]}.")]
    arrays = {
        f"{path}.{part}": stack_tensors([graph.program.tensors[f"{one}.{part}"] for one in paths]) for part in parts
    }
    return path, {**options, "kind": _SWITCH_KINDS[options["kind"]]}, arrays


def _stack_path(paths: list[str]) -> str:
    """The path without the expert's number: `experts.0.up_proj` and `experts.1.up_proj` make `experts.up_proj`."""
    parts = [path.split(".") for path in paths]
    if len({len(one) for one in parts}) == 1:
        apart = [i for i, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
        if len(apart) == 1 and all(one[apart[0]].isdigit() for one in parts):
            return ".".join(word for i, word in enumerate(parts[0]) if i != apart[0])
    return f"{paths[0].removesuffix('.layer')}_experts"


def _unused_path(
    graph: GraphView, new_arrays: dict[str, LazyTensor], path: str, replaced_arrays: tuple[str, ...] = ()
) -> str:
    """The path, or one like it under which nothing stands but what goes (`own`)."""
    others = [name for name in (*graph.program.tensors, *new_arrays) if name not in replaced_arrays]
    while any(name == path or name.startswith(f"{path}.") for name in others):
        path += "_experts"
    return path
