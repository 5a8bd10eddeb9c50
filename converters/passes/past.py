"""Past: where a graph's cache holds keys and values: a tensor for each, or one for both."""

from __future__ import annotations

from dataclasses import dataclass

from converters.match import Graph, is_kind
from mlx_transmuter.signature import Entry, Signature

_PICKS = ("Gather", "Slice", "Squeeze", "Split", "Reshape", "Identity")


@dataclass(frozen=True)
class Part:
    """The keys or the values of one layer: an entry of the cache, or one half of it (0, 1; None: all of it)."""

    entry: Entry
    half: int | None = None

    @property
    def order(self) -> list[int]:
        """The axes of the part in the order rows, heads, positions, size."""
        if self.half is None:
            return self.entry.order
        axis = self.entry.stack
        return [one - (one > axis) for one in self.entry.order if one != axis]  # type: ignore[operator]

    @property
    def size(self) -> int:
        """The size of one head's vector."""
        return int(self.entry.shape[self.entry.order[-1]])  # type: ignore[arg-type]


def parts(graph: Graph, signature: Signature) -> tuple[dict[str, Part], dict[str, Part]]:
    """The values that are a part of the past, and those that are a part of the present, by their names."""
    pasts = {entry.past: Part(entry) for entry in signature.entries}
    presents = {entry.present: Part(entry) for entry in signature.entries}
    for entry in signature.entries:
        stack = graph.producer(entry.present, "Concat")
        if entry.stack is None or stack is None or len(stack.inputs) != 2:
            continue
        halves = [_unstacked(graph, name) for name in stack.inputs]
        presents |= {name: Part(entry, half) for half, name in enumerate(halves)}
        for half, name in enumerate(halves):
            pasts |= {picked: Part(entry, half) for picked in _picked(graph, name, entry)}
    return pasts, presents


def fresh(graph: Graph, pasts: dict[str, Part], name: str, part: Part) -> str | None:
    """This step's keys or values in the value `name`, which is the part with them after it; None if it is not."""
    node = graph.producer(name, "Concat")
    if node is None or len(node.inputs) != 2 or pasts.get(node.inputs[0]) != part:
        return None
    order = part.order
    return node.inputs[1] if node.attrs.get("axis", 0) % len(order) == order[2] else None


def _unstacked(graph: Graph, name: str) -> str:
    node = graph.producer(name)
    return node.inputs[0] if node is not None and (is_kind(node, "Unsqueeze") or is_kind(node, "Reshape")) else name


def _picked(graph: Graph, name: str, entry: Entry) -> list[str]:
    """The value, if there is one, that stands before the new columns in the present's half `name`: a half of the past.

    Which half it is the proof tells: with the other one, logits differ.
    """
    node = graph.producer(name)
    if node is None:
        return []
    if is_kind(node, "Concat"):
        picked = [node.inputs[0]]
    else:  # an operator that brings its cache has two pasts, the keys' first, and the presents after its output
        picked = [one for one in node.inputs if one != entry.past and _comes_from(graph, one, entry.past)]
        picked = picked[node.outputs.index(name) - 1 :][:1]
    return [one for one in picked if _comes_from(graph, one, entry.past)]


def _comes_from(graph: Graph, name: str, past: str) -> bool:
    while (node := graph.producer(name)) is not None and any(is_kind(node, kind) for kind in _PICKS):
        name = node.inputs[0]
    return name == past
