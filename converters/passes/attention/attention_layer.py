"""Layers: attention of one layer, whatever its nodes are, and the nodes over pools that it becomes.

The rewrite holds for all layers or for none, since a program has one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch, apply_rewrite
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.masks import ScoreMask, match_index_mask
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, DecoderSignature


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention: softmax(q · kᵀ · scale, bounded, with masks and sinks) · v, over past and present.

    root: the node that it is replaced at. q, k, v: of this step, q [rows, heads, seq, size] or [rows · heads, seq,
    size], k and v in the axes of the cache. keys, values: where the cache has them. output: the value that gets the
    result, in the axes of q. before, after: nodes that make q, k, v, and that take the output on; constants: theirs.
    """

    root: Node
    q: str
    k: str
    v: str
    cached_keys: CachePairView
    cached_values: CachePairView
    scale: float
    output: str
    softcap: float = 0.0
    masks: tuple[ScoreMask, ...] = ()
    sinks: str | None = None
    nodes_before: tuple[Node, ...] = ()
    nodes_after: tuple[Node, ...] = ()
    constants: dict[str, np.ndarray] = field(default_factory=dict)


def build_pooled_attention(
    graph: GraphView, signature: DecoderSignature, layers: Sequence[AttentionLayer]
) -> Iterator[MatchOutcome]:
    """What the layers become over pools, if they are all that reads the past and the mask."""
    used = [part for layer in layers for part in (layer.cached_keys, layer.cached_values)]
    counts = {entry.past: [part.half for part in used if part.pair == entry] for entry in signature.cache_pairs}
    if any(sorted(halves, key=str) not in ([None], [0, 1]) for halves in counts.values()):
        yield SkippedMatch(layers[0].root, "a part of the cache is used by something else than attention")
        return
    if any(layer.cached_keys.half == 1 for layer in layers):
        yield SkippedMatch(layers[0].root, "the cache has the values before the keys")
        return
    if len({layer.cached_keys.pair == layer.cached_values.pair for layer in layers}) > 1:
        yield SkippedMatch(layers[0].root, "some layers have one tensor for keys and values, and some have two")
        return
    inputs = (Value(CACHE_INDEX_INPUT, "cache_index", None), Value(HEAD_INDEX_INPUT, "cache_index", None))
    pools = _shared_pools(graph, signature, layers)
    seen: dict[tuple[ScoreMask, ...], str] = {}
    forms = _value_numbers(graph)
    made: dict[str, Node] = {}
    answers = []
    for layer in layers:
        nodes: list[Node] = []
        form = tuple(replace(mask, name=forms.get(mask.name, mask.name)) for mask in layer.masks)
        if form not in seen:
            mask = match_index_mask(graph, signature, layer.masks)
            if isinstance(mask, str):
                yield SkippedMatch(layer.root, mask)
                return
            mask = _with_unique_name(mask, made)
            nodes += (node for node in mask if node.outputs[0] not in made)
            made |= {node.outputs[0]: node for node in mask}
            seen[form] = mask[-1].outputs[0]
        nodes += (node for node in layer.nodes_before if node.outputs[0] not in made)
        made |= {node.outputs[0]: node for node in layer.nodes_before}
        pool = pools.get(layer.cached_keys.pair.past, ())
        nodes += _pooled_attention_nodes(layer, seen[form], [value.name for value in pool])
        entries = (layer.cached_keys.pair, layer.cached_values.pair) if pool else ()
        answers.append(
            Replacement(
                layer.root,
                tuple(nodes),
                constants=layer.constants,
                program_inputs=(*inputs, *pool[:1]),
                program_outputs=pool[1:],
                removed_values=frozenset(name for entry in entries for name in (entry.past, entry.present)),
            )
        )
        # Nodes that gave what the layer now gives.
        others = {
            id(node): node
            for part in (layer.cached_keys, layer.cached_values)
            if (node := graph.producer(part.pair.present))
        }
        answers += [Replacement(node, ()) for node in others.values() if node is not layer.root]
    yield from _check_other_readers(graph, signature, answers, layers[0].root)


def _shared_pools(
    graph: GraphView, signature: DecoderSignature, layers: Sequence[AttentionLayer]
) -> dict[str, tuple[Value, ...]]:
    """The past of each layer's keys → one pool for its keys and values, as input and as output of the program.

    {} where they stay apart: where some differ in their sizes or type, or are one tensor already. One pool is written
    and read at once.
    """
    entries = [(layer.cached_keys.pair, layer.cached_values.pair) for layer in layers]
    if any(k == v or (k.heads, k.head_dim, k.dtype) != (v.heads, v.head_dim, v.dtype) for k, v in entries):
        return {}
    program = graph.program
    taken = {value.name for value in (*program.inputs, *program.outputs)} | program.constants.keys()
    taken |= program.tensors.keys() | {name for node in graph.nodes for name in node.outputs}
    # By its number alone a state may be called, too; pasts and presents must stay pairs by their names.
    dot = ".both." if signature.state_pairs else "."
    while not taken.isdisjoint(
        f"{side}{dot}{i}" for side in ("past_key_values", "present") for i in range(len(layers))
    ):
        dot = f"{dot}both."
    pools = {}
    for i, (keys, _) in enumerate(entries):
        shape = (2, "batch_size", keys.heads, "past_sequence_length", keys.head_dim)
        names = f"past_key_values{dot}{i}", f"present{dot}{i}"
        pools[keys.past] = tuple(Value(name, keys.dtype, shape) for name in names)
    return pools


def _value_numbers(graph: GraphView) -> dict[str, str]:
    """For each value that a node gives, the first one that like nodes give of like values: exporters write the mask of
    each layer anew."""
    firsts: dict[Any, str] = {}
    forms = {
        name: firsts.setdefault((str(array.dtype), array.shape, array.tobytes()), name)
        for name, array in graph.program.constants.items()
    }
    for node in graph.nodes:
        given = tuple(forms.get(name, name) for name in node.inputs)
        attrs = tuple((key, _hashable_attribute(value)) for key, value in sorted(node.attrs.items()))
        for at, name in enumerate(node.outputs):
            forms[name] = firsts.setdefault((node.op, given, attrs, at), name)
    return forms


def _hashable_attribute(value: Any) -> Any:
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def _with_unique_name(mask_nodes: list[Node], existing_nodes: dict[str, Node]) -> list[Node]:
    """The nodes of a mask under names that no other mask has."""
    last = mask_nodes[-1]
    taken = existing_nodes.get(last.outputs[0])
    if taken is None or taken == last:
        return mask_nodes
    return [*mask_nodes[:-1], replace(last, outputs=(f"{last.outputs[0]}.{len(existing_nodes)}",))]


def _pooled_attention_nodes(layer: AttentionLayer, mask_name: str, pool_names: Sequence[str]) -> Iterator[Node]:
    """The nodes of the layer over pools. both: the names of the pool of its keys and values and of the new one, [] for
    those of the cache itself."""
    names = {}
    for part, name in ((layer.cached_keys, layer.k), (layer.cached_values, layer.v)):
        names[name] = name
        if part.axis_order != [0, 1, 2, 3]:
            names[name] = f"{name}.turned"
            yield Node("Transpose-1", (name,), (names[name],), {"perm": part.axis_order})
    sinks: tuple[str, ...] = ()
    if layer.sinks:
        sinks = (f"{layer.output}.sinks",)
        yield Node("Reshape-5", (layer.sinks, f"{layer.output}.sinks.shape"), sinks)
        layer.constants[f"{layer.output}.sinks.shape"] = np.array([-1], np.int64)
    keys, values = layer.cached_keys.pair, layer.cached_values.pair
    if pool_names or keys == values:
        past, present = pool_names or (keys.past, keys.present)
        pasts, presents = (past, ""), (present,)
    else:
        pasts, presents = (keys.past, values.past), (keys.present, values.present)
    yield Node(
        "mlx.attention",
        (layer.q, names[layer.k], names[layer.v], *pasts, HEAD_INDEX_INPUT, mask_name, *sinks),
        (layer.output, *presents),
        {"scale": layer.scale} | ({"softcap": layer.softcap} if layer.softcap else {}),
        layer.root.name,
    )
    yield from layer.nodes_after


def _check_other_readers(
    graph: GraphView, signature: DecoderSignature, answers: list[Replacement], root: Node
) -> Iterator[MatchOutcome]:
    """The answers, if after them nothing but attention reads the past or the mask, which are no more what they were."""
    if len({entry.heads for entry in signature.cache_pairs}) > 1:
        yield SkippedMatch(root, "the layers have different numbers of key-value heads")
        return
    program, _ = apply_rewrite(graph.program, lambda _: iter(answers))
    pasts = {entry.past for entry in signature.cache_pairs}
    for node in program.nodes:
        if node.op != "mlx.attention" and (pasts | {signature.mask_input}) & set(node.all_inputs()):
            yield SkippedMatch(root, f"{node.op} reads the past or the mask too")
            return
    yield from answers
