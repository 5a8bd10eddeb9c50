"""Mixtures run only the experts that the router chose, out of layers that hold the weights of all experts.

Exporters unroll a mixture into its experts, or multiply all of them at once. Both become one switch layer per
projection; find_experts finds the experts, find_routing the router and the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import LayerView, name_arrays
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.operator_sets import RESHAPE_OPS, SLICING_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, stack_tensors
from mlx_transmuter.converters.passes.moe.find_experts import (
    LAST_AXIS,
    LayerProjection,
    Mixture,
    StackedProjection,
    find_mixtures,
    normalize_last_axis,
)
from mlx_transmuter.converters.passes.moe.find_routing import Routing, find_routing
from mlx_transmuter.program import Node

_SWITCH_KINDS = {"Linear": "SwitchLinear", "QuantizedLinear": "QuantizedSwitchLinear"}


class _RoutedMixture(NamedTuple):
    """A mixture and its routing. rows: the value whose rows the experts read. shape_source: the value with the shape of
    the sum, "" for [tokens, dim].
    """

    mixture: Mixture
    routing: Routing
    rows: str
    shape_source: str


class _SwitchLayer(NamedTuple):
    """The layer of all experts in place of one projection: its path, options and arrays ("weight", … -> tensor)."""

    path: str
    options: dict[str, object]
    arrays: dict[str, LazyTensor]


def make_switch_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Σ scores · expert(x) over the experts of a router's indices → mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    probe = graph.shape_probe
    if probe is None:
        return
    new_arrays: set[str] = set()  # of the mixtures before: two mixtures may stand in one scope
    for mixture in find_mixtures(graph, probe):
        routed = _find_routed_mixture(graph, probe, mixture)
        if isinstance(routed, SkippedMatch):
            yield routed
            continue
        replacement = _replace_mixture(graph, probe, routed, new_arrays)
        new_arrays |= replacement.tensors.keys()
        yield replacement


def _find_routed_mixture(graph: GraphView, probe: ShapeProbe, mixture: Mixture) -> _RoutedMixture | SkippedMatch:
    reasons = []
    for candidate in (mixture, *mixture.without_shared_expert()):
        routing = find_routing(graph, probe, candidate)
        if isinstance(routing, Routing):
            return _resolve_shapes(graph, probe, candidate, routing)
        reasons.append(routing)
    return SkippedMatch(mixture.experts[0].projections[-1].node, reasons[0])


def _resolve_shapes(
    graph: GraphView, probe: ShapeProbe, mixture: Mixture, routing: Routing
) -> _RoutedMixture | SkippedMatch:
    """The mixture with the rows that it reads and the shape of its sum, from before the reshapes around it."""
    sources = _reshape_sources(graph, probe, mixture.x)
    source_shapes = {name: probe.shapes(name) for name in sources}
    reader = graph.only_consumer(routing.output)
    reshape = reader if reader is not None and is_op_type(reader, "Reshape") else None
    if reshape is not None and probe.shapes(reshape.outputs[0]) in source_shapes.values():
        routing = replace(routing, root=reshape)
    shapes = probe.shapes(routing.output) or [()]
    if len(shapes[0]) == 2:
        return _RoutedMixture(mixture, routing, sources[-1], "")
    shape_source = next((name for name, source in source_shapes.items() if source == shapes), "")
    if not shape_source:
        return SkippedMatch(routing.root, "the sum has another shape than what the experts read")
    return _RoutedMixture(mixture, routing, sources[-1], shape_source)


def _reshape_sources(graph: GraphView, probe: ShapeProbe, x: str) -> list[str]:
    """x, and the values that have the same rows in another shape, back to the first one."""
    sources, widths = [x], [shape[-1:] for shape in probe.shapes(x) or []]
    while (node := graph.producer(sources[-1], *RESHAPE_OPS, "Flatten")) is not None:
        shapes = probe.shapes(node.inputs[0])
        if shapes is None or [shape[-1:] for shape in shapes] != widths:
            break
        sources.append(node.inputs[0])
    return sources


def _replace_mixture(
    graph: GraphView, probe: ShapeProbe, routed: _RoutedMixture, new_arrays: Collection[str]
) -> Replacement:
    """new_arrays: names of weights that are not in the graph yet, but will be."""
    mixture, routing = routed.mixture, routed.routing
    builder = NodeBuilder(routing.output, node_name=routing.root.name)
    rows, chosen, order = builder.add_multi_output_node(
        "mlx.dispatch", (routed.rows, routing.indices), ("rows", "experts", "order")
    )
    names: dict[str, str] = {}  # a value of the first expert -> that of the chosen experts
    layers: dict[str, dict[str, object]] = {}
    arrays: dict[str, LazyTensor] = {}
    for i, step in enumerate(mixture.experts[0].steps):
        if isinstance(step, Node):
            node = normalize_last_axis(graph, probe, step) if is_op_type(step, *SLICING_OPS) else step
            assert node is not None
            op, inputs = node.op, tuple(names.get(name, name) for name in node.inputs)
        else:
            layer = _make_switch_layer(graph, mixture, i, {*new_arrays, *arrays})
            layers[layer.path] = layer.options
            arrays |= name_arrays(layer.path, layer.arrays)
            node, op, inputs = step.node, "mlx.switch_linear", (names.get(step.x, rows), layer.path, chosen)
        outputs = tuple(f"{routing.output}.{i}.{j}" if name else "" for j, name in enumerate(node.outputs))
        builder.nodes.append(Node(op, inputs, outputs, node.attrs, node.name))
        names |= dict(zip(node.outputs, outputs, strict=True))
    total = _add_sum(builder, probe, routed, (names[mixture.outputs[0]], order, routing.scores))
    constants = {LAST_AXIS: np.array([-1], np.int64)}
    aliases = {routing.output: total}
    return Replacement(routing.root, tuple(builder.nodes), aliases, layers, arrays, constants)


def _add_sum(builder: NodeBuilder, probe: ShapeProbe, routed: _RoutedMixture, inputs: tuple[str, str, str]) -> str:
    """Adds the sum of the chosen experts, in the type and the shape of the graph's own. Returns its name.

    inputs: those of mlx.combine.
    """
    values, routing = probe.step_values[0], routed.routing
    total = builder.add_node("mlx.combine", inputs, "sum")
    dtype = values[routing.output].dtype
    if mx.result_type(values[routed.mixture.outputs[0]], values[routing.scores]) != dtype:
        total = builder.add_cast(total, str(dtype).removeprefix("mlx.core."), "typed")
    if routed.shape_source:
        sizes = builder.add_node("Shape-1", (routed.shape_source,), "sizes")
        total = builder.add_node("Reshape-5", (total, sizes), "shaped")
    return total


def _make_switch_layer(
    graph: GraphView, mixture: Mixture, step_index: int, new_arrays: Collection[str]
) -> _SwitchLayer:
    """The layer of all experts in place of the projection at that step of each.

    new_arrays: names of weights that are not in the graph yet, but will be.
    """
    view, tensors = LayerView(graph.program), graph.program.tensors
    projections = [expert.steps[step_index] for expert in mixture.experts]
    first = projections[0]
    if isinstance(first, StackedProjection):
        weight, bias = tensors[first.weight], tensors[first.bias] if first.bias else None
        arrays = {"weight": weight.transpose((0, 2, 1))}
        if bias is not None:
            arrays["bias"] = bias.reshape((bias.shape[0], bias.shape[2]))
        removed = (first.weight, first.bias)
        path = view.free_path(f"{first.weight}.layer", "_experts", removed=removed, added=new_arrays)
        return _SwitchLayer(path, {"kind": "SwitchLinear", "bias": bias is not None}, arrays)
    paths = [projection.path for projection in projections if isinstance(projection, LayerProjection)]
    path = view.free_path(_stack_path(paths), "_experts", added=new_arrays)
    options = graph.program.layers[paths[0]]
    layers = [view.arrays(path) for path in paths]
    arrays = {part: stack_tensors([layer[part] for layer in layers]) for part in layers[0]}
    return _SwitchLayer(path, {**options, "kind": _SWITCH_KINDS[options["kind"]]}, arrays)


def _stack_path(paths: list[str]) -> str:
    """The path without the expert's number: `experts.0.up_proj` and `experts.1.up_proj` make `experts.up_proj`."""
    split_paths = [path.split(".") for path in paths]
    if len({len(words) for words in split_paths}) == 1:
        columns = list(zip(*split_paths, strict=True))
        varying = [i for i, words in enumerate(columns) if len(set(words)) > 1]
        if len(varying) == 1 and all(word.isdigit() for word in columns[varying[0]]):
            return ".".join(word for i, word in enumerate(split_paths[0]) if i != varying[0])
    return f"{paths[0].removesuffix('.layer')}_experts"
