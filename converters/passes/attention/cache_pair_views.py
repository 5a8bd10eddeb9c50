"""Past: where a graph's cache holds keys and values: a tensor for each, or one for both."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.program.signature import CachePair, DecoderSignature

_SELECTION_OPS = ("Gather", "Slice", "Squeeze", "Split", "Reshape", "Identity")


@dataclass(frozen=True)
class CachePairView:
    """The keys or the values of one layer: an entry of the cache, or one half of it (0, 1; None: all of it)."""

    pair: CachePair
    half: int | None = None

    @property
    def axis_order(self) -> list[int]:
        """The axes of the part in the order rows, heads, positions, size."""
        if self.half is None:
            return self.pair.axis_order
        axis = self.pair.key_value_axis
        return [one - (one > axis) for one in self.pair.axis_order if one != axis]  # type: ignore[operator]

    @property
    def head_dim(self) -> int:
        """The size of one head's vector."""
        return int(self.pair.shape[self.pair.axis_order[-1]])  # type: ignore[arg-type]


def find_cache_views(
    graph: GraphView, signature: DecoderSignature
) -> tuple[dict[str, CachePairView], dict[str, CachePairView]]:
    """The values that are a part of the past, and those that are a part of the present, by their names."""
    pasts = {entry.past: CachePairView(entry) for entry in signature.cache_pairs}
    presents = {entry.present: CachePairView(entry) for entry in signature.cache_pairs}
    for entry in signature.cache_pairs:
        stack = graph.producer(entry.present, "Concat")
        if entry.key_value_axis is None or stack is None or len(stack.inputs) != 2:
            continue
        halves = [_before_stacking(graph, name) for name in stack.inputs]
        presents |= {name: CachePairView(entry, half) for half, name in enumerate(halves)}
        for half, name in enumerate(halves):
            pasts |= {picked: CachePairView(entry, half) for picked in _find_past_half(graph, name, entry)}
    return pasts, presents


def find_appended_value(
    graph: GraphView, pasts: dict[str, CachePairView], name: str, view: CachePairView
) -> str | None:
    """This step's keys or values in the value `name`, which is the part with them after it; None if it is not."""
    node = graph.producer(name, "Concat")
    if node is None or len(node.inputs) != 2 or pasts.get(node.inputs[0]) != view:
        return None
    order = view.axis_order
    return node.inputs[1] if node.attrs.get("axis", 0) % len(order) == order[2] else None


def _before_stacking(graph: GraphView, name: str) -> str:
    node = graph.producer(name)
    return (
        node.inputs[0] if node is not None and (is_op_type(node, "Unsqueeze") or is_op_type(node, "Reshape")) else name
    )


def _find_past_half(graph: GraphView, name: str, cache_pair: CachePair) -> list[str]:
    """The value, if there is one, that stands before the new columns in the present's half `name`: a half of the past.

    Which half it is the proof tells: with the other one, logits differ.
    """
    node = graph.producer(name)
    if node is None:
        return []
    if is_op_type(node, "Concat"):
        picked = [node.inputs[0]]
    else:  # an operator that brings its cache has two pasts, the keys' first, and the presents after its output
        picked = [
            one for one in node.inputs if one != cache_pair.past and _is_selected_from(graph, one, cache_pair.past)
        ]
        picked = picked[node.outputs.index(name) - 1 :][:1]
    return [one for one in picked if _is_selected_from(graph, one, cache_pair.past)]


def _is_selected_from(graph: GraphView, name: str, past: str) -> bool:
    while (node := graph.producer(name)) is not None and is_op_type(node, *_SELECTION_OPS):
        name = node.inputs[0]
    return name == past
