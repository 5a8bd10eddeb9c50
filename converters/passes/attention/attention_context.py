"""What a match of attention reads: the graph, its shapes, and the values that are parts of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_transmuter.converters.graph.constant_factors import strip_constant_factors
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import BROADCAST_OPS
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView, find_cache_views


class UnsupportedAttention(Exception):
    """Attention that cannot run over pools; the message is the reason that the conversion records."""


@dataclass(frozen=True)
class AttentionContext:
    """A graph with its shape probe. pasts, presents: value -> the keys or values of a layer that it holds."""

    graph: GraphView
    probe: ShapeProbe
    pasts: dict[str, CachePairView]
    presents: dict[str, CachePairView]

    @staticmethod
    def of_graph(graph: GraphView, probe: ShapeProbe) -> AttentionContext:
        """Returns the context of a graph that has its cache as pasts and presents."""
        return AttentionContext(graph, probe, *find_cache_views(graph, probe.signature))

    def cached_value(self, name: str) -> tuple[CachePairView, float] | None:
        """Returns the present that the value is, for shared heads repeated, and the constant factor on it; or None."""
        factor = 1.0
        while name not in self.presents:
            name, more = strip_constant_factors(self.graph, name)
            factor *= more
            node = self.graph.producer(name)
            if name in self.presents or node is None or not is_op_type(node, *BROADCAST_OPS):
                break
            name = node.inputs[0]
        return (self.presents[name], factor) if name in self.presents else None

    def appended_tokens(self, view: CachePairView) -> str:
        """Returns the value with the keys or values of this step's tokens, which the graph appends to the past.

        Raises UnsupportedAttention where the present is anything else than that.
        """
        present = next(name for name, other in self.presents.items() if other == view)
        node = self.graph.producer(present, "Concat")
        order = view.axis_order
        if (
            node is None
            or len(node.inputs) != 2
            or self.pasts.get(node.inputs[0]) != view
            or node.attrs.get("axis", 0) % len(order) != order[2]
        ):
            raise UnsupportedAttention(f"{present!r} is not the past with this step's keys or values appended")
        check_axes(view)
        return node.inputs[1]


def check_axes(view: CachePairView) -> None:
    """Raises UnsupportedAttention for keys or values without an axis each for rows, heads, positions and head size."""
    if len(view.axis_order) != 4:
        raise UnsupportedAttention(f"{view.pair.past!r} has no four axes of rows, heads, positions and head size")
