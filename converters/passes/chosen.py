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

from converters.match import Answer, Become, Declined, Graph
from converters.mixtures import LAST, Mixture, Projection, last_axis, mixtures
from converters.observe import Observation
from converters.parts import is_kind_of
from converters.routing import Routing, routing
from converters.tensors import Tensor, stacked
from mlx_transmuter import ops
from mlx_transmuter.program import Node

# What gives its first input's elements in their order.
_RESHAPED = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
_KINDS = {"Linear": "SwitchLinear", "QuantizedLinear": "QuantizedSwitchLinear"}


def chosen(graph: Graph) -> Iterator[Answer]:
    """Σ scores · expert(x) over the experts of a router's indices → mlx.dispatch, mlx.switch_linear, …, mlx.combine."""
    seen = graph.observation
    if seen is None:
        return
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    for mixture in mixtures(graph, seen, order):
        found = routing(graph, seen, order, mixture)
        for part in mixture.without_one() if isinstance(found, str) else ():
            if isinstance(one := routing(graph, seen, order, part), Routing):
                mixture, found = part, one
                break
        if isinstance(found, str):
            yield Declined(mixture.experts[0].projections[-1].node, found)
            continue
        sources = _sources(graph, seen, mixture.x)
        shapes = {name: seen.shapes(name) for name in sources}
        after = graph.only_consumer(found.output)
        if after is not None and is_kind_of(after, ("Reshape",)) and seen.shapes(after.outputs[0]) in shapes.values():
            found = replace(found, root=after)
        wanted = seen.shapes(found.output) or [()]
        like = next((name for name, shape in shapes.items() if shape == wanted), "")
        if not like and len(wanted[0]) != 2:
            yield Declined(found.root, "the sum has another shape than what the experts read")
        else:
            yield _become(graph, seen, mixture, found, sources[-1], like if len(wanted[0]) != 2 else "")


def _sources(graph: Graph, seen: Observation, x: str) -> list[str]:
    """x, and what it is the same rows of in another shape, up to the first."""
    found = [x]
    while (node := graph.producer(found[-1])) is not None and is_kind_of(node, _RESHAPED):
        before, after = seen.shapes(node.inputs[0]), seen.shapes(x)
        if before is None or after is None or [one[-1:] for one in before] != [one[-1:] for one in after]:
            break
        found.append(node.inputs[0])
    return found


def _become(graph: Graph, seen: Observation, mixture: Mixture, found: Routing, x: str, like: str) -> Become:
    """x: the rows. like: the value of the sum's shape, "" for [tokens, dim]."""
    output, place = found.output, found.root.name
    rows, experts, sorted_by = (f"{output}.{part}" for part in ("rows", "experts", "order"))
    nodes = [Node("mlx.dispatch", (x, found.indices), (rows, experts, sorted_by), {}, place)]
    names: dict[str, str] = {}
    layers, arrays = {}, {}
    for i, step in enumerate(mixture.experts[0].steps):
        node = step.node if isinstance(step, Projection) else step
        outputs = tuple(f"{output}.{i}.{j}" if name else "" for j, name in enumerate(node.outputs))
        if isinstance(step, Projection):
            path, options, made = _stacked(graph, mixture, i, arrays)
            layers[path], arrays = options, arrays | made
            first = names.get(step.x, rows)
            nodes.append(Node("mlx.switch_linear", (first, path, experts), outputs, node.attrs, node.name))
        else:
            node = last_axis(graph, seen, node) if is_kind_of(node, ("Split", "Slice")) else node
            assert node is not None
            inputs = tuple(names.get(name, name) for name in node.inputs)
            nodes.append(Node(node.op, inputs, outputs, node.attrs, node.name))
        names |= dict(zip(node.outputs, outputs, strict=True))
    given = names[mixture.outputs[0]]
    nodes += _summed(seen, mixture, found, like, (given, sorted_by, found.scores))
    return Become(found.root, tuple(nodes), layers=layers, arrays=arrays, constants={LAST: np.array([-1], np.int64)})


def _summed(
    seen: Observation, mixture: Mixture, found: Routing, like: str, inputs: tuple[str, str, str]
) -> Iterator[Node]:
    """The sum in the type and the shape that it had."""
    output, place = found.output, found.root.name
    trial = seen.seen[0]
    natural, kind = mx.result_type(trial[mixture.outputs[0]], trial[found.scores]), trial[output].dtype
    names = [output]
    if like:
        names.insert(0, f"{output}.flat")
    if natural != kind:
        names.insert(0, f"{output}.wide")
    yield Node("mlx.combine", inputs, (names[0],), {}, place)
    if natural != kind:
        code = ops.CODES[str(kind).removeprefix("mlx.core.")]
        yield Node("Cast-9", (names[0],), (names[1],), {"to": code}, place)
    if like:
        sizes = f"{output}.sizes"
        yield Node("Shape-1", (like,), (sizes,), {}, place)
        yield Node("Reshape-5", (names[-2], sizes), (output,), {}, place)


def _stacked(graph: Graph, mixture: Mixture, at: int, taken: dict[str, Tensor]) -> tuple[str, dict, dict[str, Tensor]]:
    """The layer of all experts in place of the step `at` of each: its path, its options and its arrays."""
    steps = [expert.steps[at] for expert in mixture.experts]
    first = steps[0]
    assert isinstance(first, Projection)
    if first.weight:
        path = _free(graph, taken, f"{first.weight}.layer", (first.weight, first.bias))
        weight = graph.program.arrays[first.weight]
        experts, _, outputs = weight.shape
        arrays = {f"{path}.weight": weight.swapped((0, 2, 1))}
        if first.bias:
            bias = graph.program.arrays[first.bias]
            flat, view = (experts, outputs), (bias, lambda a: a[:, None])
            arrays[f"{path}.bias"] = Tensor(bias.dtype, flat, lambda: bias.read().reshape(flat), (view,))
        return path, {"kind": "SwitchLinear", "bias": bool(first.bias)}, arrays
    paths = [step.path for step in steps if isinstance(step, Projection)]
    options = graph.program.layers[paths[0]]
    path = _free(graph, taken, _name(paths))
    start = len(paths[0]) + 1
    parts = [name[start:] for name in graph.program.arrays if name.startswith(f"{paths[0]}.")]
    arrays = {f"{path}.{part}": stacked([graph.program.arrays[f"{one}.{part}"] for one in paths]) for part in parts}
    return path, {**options, "kind": _KINDS[options["kind"]]}, arrays


def _name(paths: list[str]) -> str:
    """The path without the expert's number: `experts.0.up_proj` and `experts.1.up_proj` make `experts.up_proj`."""
    parts = [path.split(".") for path in paths]
    if len({len(one) for one in parts}) == 1:
        apart = [i for i, words in enumerate(zip(*parts, strict=True)) if len(set(words)) > 1]
        if len(apart) == 1 and all(one[apart[0]].isdigit() for one in parts):
            return ".".join(word for i, word in enumerate(parts[0]) if i != apart[0])
    return f"{paths[0].removesuffix('.layer')}_experts"


def _free(graph: Graph, taken: dict[str, Tensor], path: str, own: tuple[str, ...] = ()) -> str:
    """The path, or one like it under which nothing stands but what goes (`own`)."""
    others = [name for name in (*graph.program.arrays, *taken) if name not in own]
    while any(name == path or name.startswith(f"{path}.") for name in others):
        path += "_experts"
    return path
