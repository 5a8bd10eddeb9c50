"""Views of cache pairs: where a graph holds the keys and the values of a layer, in a tensor each or in one for both."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.program.signature import CachePair, DecoderSignature

_SELECTION_OPS = ("Gather", "Slice", "Squeeze", "Split", "Reshape", "Identity")


@dataclass(frozen=True)
class CachePairView:
    """The keys or the values of one layer: a whole cache pair (half: None), or its first or second half (0, 1)."""

    pair: CachePair
    half: int | None = None

    @property
    def axis_order(self) -> list[int]:
        """The axes of the view in the order rows, heads, positions, head size."""
        if self.half is None:
            return self.pair.axis_order
        axis = self.pair.key_value_axis
        return [other - (other > axis) for other in self.pair.axis_order if other != axis]  # type: ignore[operator]

    @property
    def head_dim(self) -> int:
        """The size of one head's vector."""
        return int(self.pair.shape[self.pair.axis_order[-1]])  # type: ignore[arg-type]


def find_cache_views(
    graph: GraphView, signature: DecoderSignature
) -> tuple[dict[str, CachePairView], dict[str, CachePairView]]:
    """Returns the values that are a past or half of one, and those that are a present or half of one, by name."""
    pasts = {pair.past: CachePairView(pair) for pair in signature.cache_pairs}
    presents = {pair.present: CachePairView(pair) for pair in signature.cache_pairs}
    for pair in signature.cache_pairs:
        stack = graph.producer(pair.present, "Concat")
        if pair.key_value_axis is None or stack is None or len(stack.inputs) != 2:
            continue
        halves = [_before_stacking(graph, name) for name in stack.inputs]
        presents |= {name: CachePairView(pair, half) for half, name in enumerate(halves)}
        for half, name in enumerate(halves):
            pasts |= {past_half: CachePairView(pair, half) for past_half in _find_past_half(graph, name, pair)}
    return pasts, presents


def _before_stacking(graph: GraphView, name: str) -> str:
    node = graph.producer(name, "Unsqueeze", "Reshape")
    return name if node is None else node.inputs[0]


def _find_past_half(graph: GraphView, name: str, pair: CachePair) -> list[str]:
    """Returns the half of the past that the half `name` of the present continues, or [].

    Which half it is shows only in the proof: logits differ with the other one.
    """
    node = graph.producer(name)
    if node is None:
        return []
    if is_op_type(node, "Concat"):
        candidates = [node.inputs[0]]
    else:  # an operator with a cache of its own has two pasts, keys first, and its presents after its first output
        selected = [past for past in node.inputs if past != pair.past and _is_selected_from(graph, past, pair.past)]
        candidates = selected[node.outputs.index(name) - 1 :][:1]
    return [past for past in candidates if _is_selected_from(graph, past, pair.past)]


def _is_selected_from(graph: GraphView, name: str, past: str) -> bool:
    while (node := graph.producer(name, *_SELECTION_OPS)) is not None:
        name = node.inputs[0]
    return name == past
