"""Routing: what weighs a mixture's experts and adds them up, tried on experts that are random numbers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.subgraph import Subgraph
from mlx_transmuter.converters.passes.moe.find_experts import Mixture
from mlx_transmuter.program import Node

# How many nodes are tried as the sum of a mixture, from the first that all experts reach on; and of the values that
# lead there, as its indices and as its scores, the last ones first.
_MAX_SUMS, _MAX_INDICES, _MAX_SCORES = 12, 3, 5
# The most nodes of a router and a sum, for each expert.
_MAX_NODES_PER_EXPERT = 60
# How many numbers the experts may give in a trial, if a smaller one has fewer.
_MAX_TRIAL_ELEMENTS = 2**24


@dataclass(frozen=True)
class Routing:
    """The sum of a mixture, [..., dim] with as many rows as x: Σ scores[..., j] · expert indices[..., j] (x).

    root: the node that gives it.
    """

    root: Node
    indices: str
    scores: str

    @property
    def output(self) -> str:
        return self.root.outputs[0]


def find_routing(graph: GraphView, probe: ShapeProbe, mixture: Mixture) -> Routing | str:
    """How the mixture is routed; or why it stays as it is."""
    rows = [math.prod(shape[:-1]) for shape in probe.shapes(mixture.x) or ()]
    width = (probe.shapes(mixture.outputs[0]) or [()])[0][-1:]
    fits = [i for i, count in enumerate(rows) if count * mixture.expert_count * math.prod(width) <= _MAX_TRIAL_ELEMENTS]
    trial = probe.step_values[max(fits, key=lambda i: rows[i]) if fits else rows.index(min(rows))]
    tried = False
    for root, reached in _nodes_reached_by_all(graph, mixture):
        shapes = probe.shapes(root.outputs[0]) or []
        if [math.prod(shape[:-1]) for shape in shapes] != rows or any(shape[-1:] != width for shape in shapes):
            continue
        indices, scores = _router_candidates(graph, probe, mixture, root, reached, rows)
        for index in indices[:_MAX_INDICES]:
            for score in scores[:_MAX_SCORES]:
                if probe.shapes(index)[0][-1] != probe.shapes(score)[0][-1]:  # type: ignore[index]
                    continue
                cuts = {*mixture.outputs, index, score}
                max_nodes = _MAX_NODES_PER_EXPERT * mixture.expert_count
                subgraph = Subgraph.collect(graph, trial, root.outputs[0], cuts, max_nodes)
                if subgraph is None:
                    continue
                tried = True
                if _is_weighted_sum(subgraph, trial, mixture, index, score):
                    return Routing(root, index, score)
    if not tried:
        return f"{mixture.expert_count} alike experts that no router's indices and scores alone add up"
    return f"the sum of {mixture.expert_count} alike experts is none by a router's indices and scores"


def _nodes_reached_by_all(graph: GraphView, mixture: Mixture) -> Iterator[tuple[Node, dict[str, int]]]:
    """The first nodes that all experts reach; and of each value since the experts, which of them reach it, in bits."""
    reached = {name: 1 << i for i, name in enumerate(mixture.outputs)}
    every, count = (1 << len(reached)) - 1, 0
    start = min(graph.position(node) for name in reached if (node := graph.producer(name)))
    for node in graph.nodes[start:]:
        if any(name in reached for name in node.outputs):
            continue
        mask = 0
        for name in node.all_inputs():
            mask |= reached.get(name, 0)
        if mask:
            reached.update((name, mask) for name in node.outputs)
        if mask == every:
            yield node, reached
            count += 1
            if count == _MAX_SUMS:
                return


def _router_candidates(
    graph: GraphView,
    probe: ShapeProbe,
    mixture: Mixture,
    root: Node,
    expert_bits: dict[str, int],
    row_counts: list[int],
) -> tuple[list[str], list[str]]:
    """The values [rows, k] on which the part of each expert in the sum hangs, the last ones first: integers and
    floats.
    """
    given, every = set(mixture.outputs), (1 << len(mixture.outputs)) - 1
    left = [(-graph.position(root), root)]
    waiting = {id(root)}
    parts: dict[str, int] = {}  # of a value beside the experts, whose part hangs on it
    names = []
    while left and len(waiting) < _MAX_NODES_PER_EXPERT * mixture.expert_count:
        node = heapq.heappop(left)[1]
        names += node.outputs
        own = max(expert_bits.get(name, 0) for name in node.outputs)
        mask = own
        for name in () if own else node.outputs:
            mask |= parts.get(name, 0)
        for name in node.all_inputs():
            if name not in expert_bits:
                parts[name] = parts.get(name, 0) | mask
            maker = graph.producer(name)
            if name in given or name == mixture.x or maker is None or id(maker) in waiting:
                continue
            if not any(one in graph.program.layers for one in maker.inputs):
                waiting.add(id(maker))
                heapq.heappush(left, (-graph.position(maker), maker))
    names = [name for name in names if parts.get(name) == every and _has_choice_shape(probe, mixture, name, row_counts)]
    floats = [name for name in names if "float" in (probe.dtype(name) or "")]
    return [name for name in names if "int" in (probe.dtype(name) or "")], floats


def _has_choice_shape(probe: ShapeProbe, mixture: Mixture, name: str, row_counts: list[int]) -> bool:
    """Whether the value on the device is [..., k] for as many rows, with k at most the number of experts."""
    shapes = probe.shapes(name)
    if shapes is None or probe.dtype(name) is None or not len(shapes[0]) > 1 or shapes[0][-1] > mixture.expert_count:
        return False
    return all(math.prod(s[:-1]) == n and s[-1] == shapes[0][-1] for s, n in zip(shapes, row_counts, strict=True))


def _is_weighted_sum(subgraph: Subgraph, trial: dict[str, Any], mixture: Mixture, index: str, score: str) -> bool:
    """Whether the nodes give the sum of the experts by indices and scores, until each expert was chosen at each place.

    Small whole numbers: no order of summation and no float type rounds them.
    """
    draw = np.random.default_rng(0)
    chosen_by, k = tuple(trial[index].shape), trial[index].shape[-1]
    rows, count = math.prod(chosen_by[:-1]), mixture.expert_count
    width = trial[mixture.outputs[0]].shape[-1]
    for start in range(0, count, rows):
        indices = _draw_expert_indices(draw, start, rows, count, k)
        scores = draw.integers(1, 3, (rows, k))
        given = draw.integers(-2, 3, (count, rows, width), np.int8)
        wanted = np.einsum("rk,krw->rw", scores, given[indices.T, np.arange(rows)])
        parts = [given] if mixture.is_stacked else given
        values: dict[str, Any] = {
            name: _with_shape_and_type(trial[name], part) for name, part in zip(mixture.outputs, parts, strict=True)
        }
        values |= {
            index: _with_shape_and_type(trial[index], indices),
            score: _with_shape_and_type(trial[score], scores),
        }
        found = subgraph.evaluate(values)
        if found is None or not np.array_equal(ops.to_host(found).reshape(wanted.shape), wanted):
            return False
    return True


def _draw_expert_indices(
    generator: np.random.Generator, start: int, rows: int, expert_count: int, k: int
) -> np.ndarray:
    """Distinct experts [rows, k]: in each row, at one place after the other, the expert whose turn it is, from `start`
    on.
    """
    row = np.arange(rows)
    ranks = generator.random((rows, expert_count))
    ranks[row, (start + row) % expert_count] = -1
    indices = np.argsort(ranks, axis=1)[:, :k]
    first, other = indices[:, 0].copy(), indices[row, row % k].copy()
    indices[:, 0] = other
    indices[row, row % k] = first
    return indices


def _with_shape_and_type(value: mx.array, array: np.ndarray) -> mx.array:
    """The numbers in the shape and the type of a value."""
    return mx.array(array).reshape(value.shape).astype(value.dtype)
