"""Routing: what weighs a mixture's experts and adds them up, tried on experts that are random numbers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from converters.match import Graph
from converters.mixtures import Mixture
from converters.observe import Observation
from converters.parts import behind, computed
from mlx_transmuter import ops
from mlx_transmuter.program import Node

# How many nodes are tried as the sum of a mixture, from the first that all experts reach on; and of the values that
# lead there, as its indices and as its scores, the last ones first.
_SUMS, _INDICES, _SCORES = 12, 3, 5
# The most nodes of a router and a sum, for each expert.
_MOST = 60
# How many numbers the experts may give in a trial, if a smaller one has fewer.
_NUMBERS = 2**24


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


def routing(graph: Graph, seen: Observation, order: dict[int, int], mixture: Mixture) -> Routing | str:
    """How the mixture is routed; or why it stays as it is."""
    rows = [math.prod(shape[:-1]) for shape in seen.shapes(mixture.x) or ()]
    width = (seen.shapes(mixture.outputs[0]) or [()])[0][-1:]
    fits = [i for i, count in enumerate(rows) if count * mixture.count * math.prod(width) <= _NUMBERS]
    trial = seen.seen[max(fits, key=lambda i: rows[i]) if fits else rows.index(min(rows))]
    tried = False
    for root, reached in _reached(graph, order, mixture):
        shapes = seen.shapes(root.outputs[0]) or []
        if [math.prod(shape[:-1]) for shape in shapes] != rows or any(shape[-1:] != width for shape in shapes):
            continue
        indices, scores = _choices(graph, seen, order, mixture, root, reached, rows)
        for index in indices[:_INDICES]:
            for score in scores[:_SCORES]:
                if seen.shapes(index)[0][-1] != seen.shapes(score)[0][-1]:  # type: ignore[index]
                    continue
                cuts = {*mixture.outputs, index, score}
                found = behind(graph, trial, order, root.outputs[0], cuts, _MOST * mixture.count)
                if found is None:
                    continue
                tried = True
                if _adds_up(graph, trial, mixture, *found, root.outputs[0], index, score):
                    return Routing(root, index, score)
    if not tried:
        return f"{mixture.count} alike experts that no router's indices and scores alone add up"
    return f"the sum of {mixture.count} alike experts is none by a router's indices and scores"


def _reached(graph: Graph, order: dict[int, int], mixture: Mixture) -> Iterator[tuple[Node, dict[str, int]]]:
    """The first nodes that all experts reach; and of each value since the experts, which of them reach it, in bits."""
    reached = {name: 1 << i for i, name in enumerate(mixture.outputs)}
    every, count = (1 << len(reached)) - 1, 0
    start = min(order[id(graph.producer(name))] for name in reached)
    for node in graph.nodes[start:]:
        if any(name in reached for name in node.outputs):
            continue
        mask = 0
        for name in node.reads():
            mask |= reached.get(name, 0)
        if mask:
            reached.update((name, mask) for name in node.outputs)
        if mask == every:
            yield node, reached
            count += 1
            if count == _SUMS:
                return


def _choices(
    graph: Graph,
    seen: Observation,
    order: dict[int, int],
    mixture: Mixture,
    root: Node,
    reached: dict[str, int],
    rows: list[int],
) -> tuple[list[str], list[str]]:
    """The values [rows, k] on which the part of each expert in the sum hangs, the last ones first: integers and
    floats.
    """
    given, every = set(mixture.outputs), (1 << len(mixture.outputs)) - 1
    left = [(-order[id(root)], root)]
    waiting = {id(root)}
    parts: dict[str, int] = {}  # of a value beside the experts, whose part hangs on it
    names = []
    while left and len(waiting) < _MOST * mixture.count:
        node = heapq.heappop(left)[1]
        names += node.outputs
        own = max(reached.get(name, 0) for name in node.outputs)
        mask = own
        for name in () if own else node.outputs:
            mask |= parts.get(name, 0)
        for name in node.reads():
            if name not in reached:
                parts[name] = parts.get(name, 0) | mask
            maker = graph.producer(name)
            if name in given or name == mixture.x or maker is None or id(maker) in waiting:
                continue
            if not any(one in graph.program.layers for one in maker.inputs):
                waiting.add(id(maker))
                heapq.heappush(left, (-order[id(maker)], maker))
    names = [name for name in names if parts.get(name) == every and _is_choice(seen, mixture, name, rows)]
    floats = [name for name in names if "float" in (seen.dtype(name) or "")]
    return [name for name in names if "int" in (seen.dtype(name) or "")], floats


def _is_choice(seen: Observation, mixture: Mixture, name: str, rows: list[int]) -> bool:
    """Whether the value on the device is [..., k] for as many rows, with k at most the number of experts."""
    shapes = seen.shapes(name)
    if shapes is None or seen.dtype(name) is None or not len(shapes[0]) > 1 or shapes[0][-1] > mixture.count:
        return False
    return all(math.prod(s[:-1]) == n and s[-1] == shapes[0][-1] for s, n in zip(shapes, rows, strict=True))


def _adds_up(
    graph: Graph,
    trial: dict[str, Any],
    mixture: Mixture,
    nodes: list[Node],
    shapes: dict[str, np.ndarray],
    output: str,
    index: str,
    score: str,
) -> bool:
    """Whether the nodes give the sum of the experts by indices and scores, until each expert was chosen at each place.

    Small whole numbers: no order of summation and no float type rounds them.
    """
    draw = np.random.default_rng(0)
    chosen_by, k = tuple(trial[index].shape), trial[index].shape[-1]
    rows, count = math.prod(chosen_by[:-1]), mixture.count
    width = trial[mixture.outputs[0]].shape[-1]
    for start in range(0, count, rows):
        indices = _drawn(draw, start, rows, count, k)
        scores = draw.integers(1, 3, (rows, k))
        given = draw.integers(-2, 3, (count, rows, width), np.int8)
        wanted = np.einsum("rk,krw->rw", scores, given[indices.T, np.arange(rows)])
        parts = [given] if mixture.at_once else given
        values: dict[str, Any] = {
            name: _like(trial[name], part) for name, part in zip(mixture.outputs, parts, strict=True)
        }
        values |= {index: _like(trial[index], indices), score: _like(trial[score], scores)}
        found = computed(graph, nodes, values | shapes, output)
        if found is None or not np.array_equal(ops.to_host(found).reshape(wanted.shape), wanted):
            return False
    return True


def _drawn(draw: np.random.Generator, start: int, rows: int, count: int, k: int) -> np.ndarray:
    """Distinct experts [rows, k]: in each row, at one place after the other, the expert whose turn it is, from `start`
    on.
    """
    row = np.arange(rows)
    ranks = draw.random((rows, count))
    ranks[row, (start + row) % count] = -1
    indices = np.argsort(ranks, axis=1)[:, :k]
    first, other = indices[:, 0].copy(), indices[row, row % k].copy()
    indices[:, 0] = other
    indices[row, row % k] = first
    return indices


def _like(value: mx.array, array: np.ndarray) -> mx.array:
    """The numbers in the shape and the type of a value."""
    return mx.array(array).reshape(value.shape).astype(value.dtype)
