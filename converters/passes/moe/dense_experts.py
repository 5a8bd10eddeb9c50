"""Experts that each gather their own tokens run over all tokens instead, and each keeps its results for its own.

An exporter writes `choice, token = where(chosen by this expert)`, gathers those tokens, and scatters the expert's
output back. How many tokens an expert has is known only when the step runs, so no compiled step can have that form.
Here `token` becomes the indices of all tokens, `choice` the place of the expert among a token's choices, and the
scatter a Where on whether the token chose the expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.slices import slice_of
from mlx_transmuter.program import Node

_INDEX_PASSING_OPS = ("Unsqueeze", "Expand", "Cast", "Reshape", "Identity")


class _TokenSelection(NamedTuple):
    """The tokens that chose one expert: NonZero of its mask, and what reads the indices.

    mask: [choices, tokens] or [tokens, choices]; token_axis: which of its axes has the tokens. token_index,
    choice_index: the nodes that give the indices of each axis. scatters: the nodes that scatter to token_index.
    """

    nonzero: Node
    token_axis: int
    token_index: Node
    choice_index: Node
    scatters: list[Node]

    @property
    def mask(self) -> str:
        return self.nonzero.inputs[0]


def make_experts_dense(graph: GraphView) -> Iterator[MatchOutcome]:
    """Gather and scatter at the indices of NonZero(mask [choices, tokens] or [tokens, choices]) → Where(mask)."""
    for node in graph.nodes:
        if not is_op_type(node, "NonZero"):
            continue
        selection = _match_token_selection(graph, node)
        if selection is None:
            yield SkippedMatch(node, "its indices are not those of choices and of tokens, only the latter scattered to")
        else:
            yield from _replace_selection(graph, selection)


def _match_token_selection(graph: GraphView, node: Node) -> _TokenSelection | None:
    indices = _axis_indices(graph, node)
    scatters = [_find_scatters(graph, index.outputs[0]) for index in indices]
    if len(indices) != 2 or bool(scatters[0]) == bool(scatters[1]):
        return None
    axis = 0 if scatters[0] else 1
    return _TokenSelection(node, axis, indices[axis], indices[1 - axis], scatters[axis])


def _axis_indices(graph: GraphView, node: Node) -> list[Node]:
    """The nodes that give the indices of each axis: Squeeze(Split(Transpose(NonZero))), or of Slices."""
    transpose = graph.only_consumer(node.outputs[0])
    readers = graph.consumers(transpose.outputs[0]) if transpose and is_op_type(transpose, "Transpose") else []
    if len(readers) == 1 and is_op_type(readers[0], "Split") and readers[0].attrs.get("axis", 0) in (1, -1):
        columns = list(readers[0].outputs)
    else:
        slices = sorted((_sliced_column(graph, reader), reader.outputs[0]) for reader in readers)
        if [column for column, _ in slices] != list(range(len(slices))):
            return []
        columns = [output for _, output in slices]
    squeezes = [graph.only_consumer(name) for name in columns]
    return [squeeze for squeeze in squeezes if squeeze is not None and is_op_type(squeeze, "Squeeze")]


def _sliced_column(graph: GraphView, node: Node) -> int:
    """The only column that a Slice takes, -1 for another node."""
    part = slice_of(graph, None, node)
    is_one_column = part is not None and part.axis in (1, -1) and part.end == part.begin + 1 and part.step == 1
    return part.begin if part is not None and is_one_column else -1


def _find_scatters(graph: GraphView, index: str) -> list[Node]:
    """The nodes that scatter to the index on axis 0."""
    scatters = []
    for node in graph.consumers(index):
        if is_op_type(node, "ScatterElements", "ScatterND") and node.inputs[1] == index:
            if node.attrs.get("axis", 0) == 0 and node.attrs.get("reduction", "none") in ("none", "add"):
                scatters.append(node)
        elif is_op_type(node, *_INDEX_PASSING_OPS) and node.inputs[0] == index:
            scatters += _find_scatters(graph, node.outputs[0])
    return scatters


def _find_gathers(graph: GraphView, index: str) -> list[Node]:
    """The nodes that gather tokens at the index: Gather on any axis, or GatherND at [its size, 1]."""
    gathers = []
    for node in graph.consumers(index):
        if is_op_type(node, "Gather") and node.inputs[1] == index:
            gathers.append(node)
        elif is_op_type(node, "Unsqueeze") and graph.scalar(node.inputs[1]) in (1, -1):
            gathers += [
                reader
                for reader in graph.consumers(node.outputs[0])
                if is_op_type(reader, "GatherND")
                and reader.inputs[1] == node.outputs[0]
                and not reader.attrs.get("batch_dims", 0)
            ]
    return gathers


def _replace_selection(graph: GraphView, selection: _TokenSelection) -> Iterator[MatchOutcome]:
    """Replaces the indices, and the nodes that gather and scatter at them."""
    token, choice = selection.token_index, selection.choice_index
    tokens = NodeBuilder(f"{selection.nonzero.outputs[0]}.tokens", node_name=token.name)
    all_tokens = tokens.add_arange(selection.mask, selection.token_axis, "index")
    yield Replacement(token, tuple(tokens.nodes), {token.outputs[0]: all_tokens}, constants=tokens.constants)

    choices = NodeBuilder(f"{selection.nonzero.outputs[0]}.choices", node_name=choice.name)
    choice_axis = 1 - selection.token_axis
    mask = choices.add_cast(selection.mask, "int32", "mask")
    choice_index = choices.add_node("ArgMax-11", (mask,), "choice_index", axis=choice_axis, keepdims=0)
    largest = choices.add_node("ReduceMax-11", (mask,), "largest", axes=[choice_axis], keepdims=0)
    has_choice, last_axis = choices.add_cast(largest, "bool", "has_choice"), choices.add_constant("last_axis", [1])
    is_chosen = choices.add_node("Unsqueeze-13", (has_choice, last_axis), "is_chosen")
    yield Replacement(choice, tuple(choices.nodes), {choice.outputs[0]: choice_index}, constants=choices.constants)

    for node in _find_gathers(graph, token.outputs[0]):
        yield Replacement(node, (), aliases={node.outputs[0]: node.inputs[0]})
    for node in selection.scatters:
        data, _, update = node.inputs
        nodes: list[Node] = []
        if node.attrs.get("reduction", "none") == "add":
            added = f"{node.outputs[0]}.added"
            nodes.append(Node("Add-7", (data, update), (added,), {}, node.name))
            update = added
        yield Replacement(node, (*nodes, Node("Where-9", (is_chosen, update, data), node.outputs, name=node.name)))
