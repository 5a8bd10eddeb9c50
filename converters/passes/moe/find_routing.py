"""Finds what routes a mixture: the indices and scores of its router, and the node that adds up the experts by them.

What exporters write around the experts to weigh and to add them up has many spellings. So a router is not recognized by
its nodes: candidates are tried on experts that are random numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.subgraph import Subgraph
from mlx_transmuter.converters.passes.moe.find_experts import Mixture
from mlx_transmuter.program import Node

# How many nodes are tried as the sum of a mixture, from the first one that all experts reach; and how many values are
# tried as its indices and as its scores, the last ones before the sum first.
_MAX_SUMS, _MAX_INDICES, _MAX_SCORES = 12, 3, 5
# The most nodes of a router and a sum, for each expert.
_MAX_NODES_PER_EXPERT = 60
# The most numbers that the experts may give in a trial, where a smaller step of the probe has fewer.
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


class _RouterCandidates(NamedTuple):
    """Values [..., k] that the part of each expert in a sum depends on, the last ones before the sum first."""

    indices: list[str]
    scores: list[str]


def find_routing(graph: GraphView, probe: ShapeProbe, mixture: Mixture) -> Routing | str:
    """How the mixture is routed, or why it stays as it is."""
    return _RoutingSearch(graph, probe, mixture).run()


@dataclass
class _RoutingSearch:
    """The search for the routing of one mixture."""

    graph: GraphView
    probe: ShapeProbe
    mixture: Mixture

    def run(self) -> Routing | str:
        has_candidates = False
        for root, expert_bits in self.nodes_reached_by_all():
            if not self.has_sum_shape(root):
                continue
            for indices, scores in self.candidate_pairs(root, expert_bits):
                boundary = {*self.mixture.outputs, indices, scores}
                subgraph = Subgraph.collect(self.graph, self.step_values, root.outputs[0], boundary, self.max_nodes)
                if subgraph is None:
                    continue
                has_candidates = True
                routing = Routing(root, indices, scores)
                if self.is_weighted_sum(subgraph, routing):
                    return routing
        count = self.mixture.expert_count
        if not has_candidates:
            return f"no router's indices and scores alone decide how its {count} experts are added up"
        return f"its {count} experts are not added up by a router's indices and scores"

    @property
    def max_nodes(self) -> int:
        return _MAX_NODES_PER_EXPERT * self.mixture.expert_count

    @cached_property
    def row_counts(self) -> list[int]:
        """The rows of x in each step of the probe."""
        return [math.prod(shape[:-1]) for shape in self.probe.shapes(self.mixture.x) or ()]

    @cached_property
    def width(self) -> tuple[int, ...]:
        """The last axis of the experts' outputs."""
        return (self.probe.shapes(self.mixture.outputs[0]) or [()])[0][-1:]

    @cached_property
    def step_values(self) -> dict[str, Any]:
        """The values of the step in which candidates are tried: the largest one of a moderate size."""
        rows, row_elements = self.row_counts, self.mixture.expert_count * math.prod(self.width)
        moderate = [step for step, count in enumerate(rows) if count * row_elements <= _MAX_TRIAL_ELEMENTS]
        step = max(moderate, key=lambda step: rows[step]) if moderate else rows.index(min(rows))
        return self.probe.step_values[step]

    def has_sum_shape(self, root: Node) -> bool:
        """Whether the node gives as many rows as x has, as wide as the experts' outputs."""
        shapes = self.probe.shapes(root.outputs[0]) or []
        return [math.prod(shape[:-1]) for shape in shapes] == self.row_counts and all(
            shape[-1:] == self.width for shape in shapes
        )

    def nodes_reached_by_all(self) -> Iterator[tuple[Node, dict[str, int]]]:
        """The first nodes that all experts' outputs reach; and for each value since these outputs, which of them reach
        it, in bits.
        """
        expert_bits = {name: 1 << i for i, name in enumerate(self.mixture.outputs)}
        all_bits, count = (1 << len(expert_bits)) - 1, 0
        producers = [self.graph.producer(name) for name in expert_bits]
        start = min(self.graph.position(node) for node in producers if node is not None)
        for node in self.graph.nodes[start:]:
            if any(name in expert_bits for name in node.outputs):
                continue
            bits = 0
            for name in node.all_inputs():
                bits |= expert_bits.get(name, 0)
            if bits:
                expert_bits.update((name, bits) for name in node.outputs)
            if bits == all_bits:
                yield node, expert_bits
                count += 1
                if count == _MAX_SUMS:
                    return

    def candidate_pairs(self, root: Node, expert_bits: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Pairs of indices and scores with one k, which the sum `root` may be computed by."""
        candidates = self.router_candidates(root, expert_bits)
        for indices in candidates.indices[:_MAX_INDICES]:
            for scores in candidates.scores[:_MAX_SCORES]:
                if self.step_values[indices].shape[-1] == self.step_values[scores].shape[-1]:
                    yield indices, scores

    def router_candidates(self, root: Node, expert_bits: dict[str, int]) -> _RouterCandidates:
        """The values that may be indices or scores: the part of each expert in the sum `root` depends on them."""
        graph, mixture = self.graph, self.mixture
        all_bits = (1 << len(mixture.outputs)) - 1
        queue = [(-graph.position(root), root)]  # the last node of the graph first
        queued = {id(root)}
        dependent_bits: dict[str, int] = {}  # a value beside the experts -> the experts whose part depends on it
        names = []
        while queue and len(queued) < self.max_nodes:
            node = heapq.heappop(queue)[1]
            names += node.outputs
            bits = own_bits = max(expert_bits.get(name, 0) for name in node.outputs)
            for name in () if own_bits else node.outputs:
                bits |= dependent_bits.get(name, 0)
            for name in node.all_inputs():
                if name not in expert_bits:
                    dependent_bits[name] = dependent_bits.get(name, 0) | bits
                producer = graph.producer(name)
                if name in mixture.outputs or name == mixture.x or producer is None or id(producer) in queued:
                    continue
                if not any(path in graph.program.layers for path in producer.inputs):
                    queued.add(id(producer))
                    heapq.heappush(queue, (-graph.position(producer), producer))
        names = [name for name in names if dependent_bits.get(name) == all_bits and self.has_choice_shape(name)]
        dtypes = {name: self.probe.dtype(name) or "" for name in names}
        return _RouterCandidates(
            [name for name in names if "int" in dtypes[name]], [name for name in names if "float" in dtypes[name]]
        )

    def has_choice_shape(self, name: str) -> bool:
        """Whether the value is on the device and [..., k], with the rows of x and k at most the number of experts."""
        shapes = self.probe.shapes(name)
        if shapes is None or self.probe.dtype(name) is None or len(shapes[0]) < 2:
            return False
        k = shapes[0][-1]
        if k > self.mixture.expert_count:
            return False
        return all(
            math.prod(shape[:-1]) == rows and shape[-1] == k
            for shape, rows in zip(shapes, self.row_counts, strict=True)
        )

    def is_weighted_sum(self, subgraph: Subgraph, routing: Routing) -> bool:
        """Whether the nodes give the sum of the experts by indices and scores, until each expert was chosen at each
        place.

        Small whole numbers: no order of summation and no float type rounds them.
        """
        generator, outputs, values = np.random.default_rng(0), self.mixture.outputs, self.step_values
        *leading, k = values[routing.indices].shape
        rows, count, width = math.prod(leading), self.mixture.expert_count, values[outputs[0]].shape[-1]
        for start in range(0, count, rows):
            indices = _draw_expert_indices(generator, start, (rows, count), k)
            scores = generator.integers(1, 3, (rows, k))
            experts = generator.integers(-2, 3, (count, rows, width), np.int8)
            expected = np.einsum("rk,krw->rw", scores, experts[indices.T, np.arange(rows)])
            drawn = dict(zip(outputs, [experts] if self.mixture.is_stacked else experts, strict=True))
            drawn |= {routing.indices: indices, routing.scores: scores}
            inputs = {name: _with_form_of(values[name], array) for name, array in drawn.items()}
            result = subgraph.evaluate(inputs)
            if result is None or not np.array_equal(ops.to_host(result).reshape(expected.shape), expected):
                return False
        return True


def _draw_expert_indices(generator: np.random.Generator, start: int, shape: tuple[int, int], k: int) -> np.ndarray:
    """Distinct experts [rows, k], of as many as shape [rows, experts] says.

    Each row has, at one place after the other, the expert whose turn it is, from `start` on.
    """
    row = np.arange(shape[0])
    ranks = generator.random(shape)
    ranks[row, (start + row) % shape[1]] = -1
    indices = np.argsort(ranks, axis=1)[:, :k]
    first, other = indices[:, 0].copy(), indices[row, row % k].copy()
    indices[:, 0] = other
    indices[row, row % k] = first
    return indices


def _with_form_of(value: mx.array, array: np.ndarray) -> mx.array:
    """The numbers in the shape and the type of a value."""
    return mx.array(array).reshape(value.shape).astype(value.dtype)
