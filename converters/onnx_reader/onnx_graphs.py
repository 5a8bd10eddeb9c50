"""Walks over the nodes of ONNX graphs and of the graphs inside them, and the order in which nodes can be read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from onnx import AttributeProto, GraphProto, NodeProto


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs among a node's attributes: branches of If, bodies of Loop and Scan."""
    return (attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH)


def walk_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, each followed by those of every graph inside it."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from walk_nodes(graph.node)


def walk_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and every graph inside it."""
    yield graph
    for node in walk_nodes(graph.node):
        yield from subgraphs(node)


def input_names(node: NodeProto) -> Iterator[str]:
    """The names that a node and the graphs inside it read, names of values inside these graphs among them."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in graph.node:
            yield from input_names(inner)
        yield from (output.name for output in graph.output)


def sort_topologically(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Returns the nodes, each after those whose outputs it reads, and otherwise in the order of the file.

    ONNX demands that order, but onnxruntime does without it, and its float16 converter breaks it. Nodes on a cycle come
    last; reading them fails then.
    """
    producers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    sources = [
        {producers[name] for name in input_names(node) if name in producers} - {i} for i, node in enumerate(nodes)
    ]
    readers: dict[int, list[int]] = {}
    for i, indices in enumerate(sources):
        for j in indices:
            readers.setdefault(j, []).append(i)
    missing_counts = [len(indices) for indices in sources]
    ready = [i for i, count in enumerate(missing_counts) if not count]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in readers.get(i, ()):
            missing_counts[j] -= 1
            if not missing_counts[j]:
                heapq.heappush(ready, j)
    sorted_indices = set(order)
    return [nodes[i] for i in (*order, *(i for i in range(len(nodes)) if i not in sorted_indices))]
