"""Layers: attention of one layer, whatever its nodes are, and the nodes over pools that it becomes.

The rewrite holds for all layers or for none, since a program has one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from converters.match import Answer, Become, Declined, Graph, apply
from converters.passes.masks import Mask, shown
from converters.passes.past import Part
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import INDEX, LANES, Signature


@dataclass(frozen=True)
class Layer:
    """One layer's attention: softmax(q · kᵀ · scale, bounded, with masks and sinks) · v, over past and present.

    root: the node that it is replaced at. q, k, v: of this step, q [rows, heads, seq, size] or [rows · heads, seq,
    size], k and v in the axes of the cache. keys, values: where the cache has them. output: the value that gets the
    result, in the axes of q. before, after: nodes that make q, k, v, and that take the output on; constants: theirs.
    """

    root: Node
    q: str
    k: str
    v: str
    keys: Part
    values: Part
    scale: float
    output: str
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()
    sinks: str | None = None
    before: tuple[Node, ...] = ()
    after: tuple[Node, ...] = ()
    constants: dict[str, np.ndarray] = field(default_factory=dict)


def over_pools(graph: Graph, signature: Signature, layers: Sequence[Layer]) -> Iterator[Answer]:
    """What the layers become over pools, if they are all that reads the past and the mask."""
    used = [part for layer in layers for part in (layer.keys, layer.values)]
    counts = {entry.past: [part.half for part in used if part.entry == entry] for entry in signature.entries}
    if any(sorted(halves, key=str) not in ([None], [0, 1]) for halves in counts.values()):
        yield Declined(layers[0].root, "a part of the cache is used by something else than attention")
        return
    if any(layer.keys.half == 1 for layer in layers):
        yield Declined(layers[0].root, "the cache has the values before the keys")
        return
    if len({layer.keys.entry == layer.values.entry for layer in layers}) > 1:
        yield Declined(layers[0].root, "some layers have one tensor for keys and values, and some have two")
        return
    inputs = (Value(INDEX, "cache_index", None), Value(LANES, "cache_index", None))
    pools = _both(graph, signature, layers)
    seen: dict[tuple[Mask, ...], str] = {}
    forms = _forms(graph)
    made: dict[str, Node] = {}
    answers = []
    for layer in layers:
        nodes: list[Node] = []
        form = tuple(replace(mask, name=forms.get(mask.name, mask.name)) for mask in layer.masks)
        if form not in seen:
            mask = shown(graph, signature, layer.masks)
            if isinstance(mask, str):
                yield Declined(layer.root, mask)
                return
            mask = _named(mask, made)
            nodes += (node for node in mask if node.outputs[0] not in made)
            made |= {node.outputs[0]: node for node in mask}
            seen[form] = mask[-1].outputs[0]
        nodes += (node for node in layer.before if node.outputs[0] not in made)
        made |= {node.outputs[0]: node for node in layer.before}
        pool = pools.get(layer.keys.entry.past, ())
        nodes += _attending(layer, seen[form], [value.name for value in pool])
        entries = (layer.keys.entry, layer.values.entry) if pool else ()
        answers.append(
            Become(
                layer.root,
                tuple(nodes),
                constants=layer.constants,
                inputs=(*inputs, *pool[:1]),
                outputs=pool[1:],
                gone=frozenset(name for entry in entries for name in (entry.past, entry.present)),
            )
        )
        # Nodes that gave what the layer now gives.
        others = {id(node): node for part in (layer.keys, layer.values) if (node := graph.producer(part.entry.present))}
        answers += [Become(node, ()) for node in others.values() if node is not layer.root]
    yield from _checked(graph, signature, answers, layers[0].root)


def _both(graph: Graph, signature: Signature, layers: Sequence[Layer]) -> dict[str, tuple[Value, ...]]:
    """The past of each layer's keys → one pool for its keys and values, as input and as output of the program.

    {} where they stay apart: where some differ in their sizes or type, or are one tensor already. One pool is written
    and read at once.
    """
    entries = [(layer.keys.entry, layer.values.entry) for layer in layers]
    if any(k == v or (k.heads, k.dim, k.dtype) != (v.heads, v.dim, v.dtype) for k, v in entries):
        return {}
    program = graph.program
    taken = {value.name for value in (*program.inputs, *program.outputs)} | program.constants.keys()
    taken |= program.arrays.keys() | {name for node in graph.nodes for name in node.outputs}
    # By its number alone a state may be called, too; pasts and presents must stay pairs by their names.
    dot = ".both." if signature.states else "."
    while not taken.isdisjoint(
        f"{side}{dot}{i}" for side in ("past_key_values", "present") for i in range(len(layers))
    ):
        dot = f"{dot}both."
    pools = {}
    for i, (keys, _) in enumerate(entries):
        shape = (2, "batch_size", keys.heads, "past_sequence_length", keys.dim)
        names = f"past_key_values{dot}{i}", f"present{dot}{i}"
        pools[keys.past] = tuple(Value(name, keys.dtype, shape) for name in names)
    return pools


def _forms(graph: Graph) -> dict[str, str]:
    """For each value that a node gives, the first one that like nodes give of like values: exporters write the mask of
    each layer anew."""
    firsts: dict[Any, str] = {}
    forms = {
        name: firsts.setdefault((str(array.dtype), array.shape, array.tobytes()), name)
        for name, array in graph.program.constants.items()
    }
    for node in graph.nodes:
        given = tuple(forms.get(name, name) for name in node.inputs)
        attrs = tuple((key, _frozen(value)) for key, value in sorted(node.attrs.items()))
        for at, name in enumerate(node.outputs):
            forms[name] = firsts.setdefault((node.op, given, attrs, at), name)
    return forms


def _frozen(value: Any) -> Any:
    return (value.shape, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def _named(mask: list[Node], made: dict[str, Node]) -> list[Node]:
    """The nodes of a mask under names that no other mask has."""
    last = mask[-1]
    taken = made.get(last.outputs[0])
    if taken is None or taken == last:
        return mask
    return [*mask[:-1], replace(last, outputs=(f"{last.outputs[0]}.{len(made)}",))]


def _attending(layer: Layer, mask: str, both: Sequence[str]) -> Iterator[Node]:
    """The nodes of the layer over pools. both: the names of the pool of its keys and values and of the new one, [] for
    those of the cache itself."""
    names = {}
    for part, name in ((layer.keys, layer.k), (layer.values, layer.v)):
        names[name] = name
        if part.order != [0, 1, 2, 3]:
            names[name] = f"{name}.turned"
            yield Node("Transpose-1", (name,), (names[name],), {"perm": part.order})
    sinks: tuple[str, ...] = ()
    if layer.sinks:
        sinks = (f"{layer.output}.sinks",)
        yield Node("Reshape-5", (layer.sinks, f"{layer.output}.sinks.shape"), sinks)
        layer.constants[f"{layer.output}.sinks.shape"] = np.array([-1], np.int64)
    keys, values = layer.keys.entry, layer.values.entry
    if both or keys == values:
        past, present = both or (keys.past, keys.present)
        pasts, presents = (past, ""), (present,)
    else:
        pasts, presents = (keys.past, values.past), (keys.present, values.present)
    yield Node(
        "mlx.attention",
        (layer.q, names[layer.k], names[layer.v], *pasts, LANES, mask, *sinks),
        (layer.output, *presents),
        {"scale": layer.scale} | ({"softcap": layer.softcap} if layer.softcap else {}),
        layer.root.name,
    )
    yield from layer.after


def _checked(graph: Graph, signature: Signature, answers: list[Become], root: Node) -> Iterator[Answer]:
    """The answers, if after them nothing but attention reads the past or the mask, which are no more what they were."""
    if len({entry.heads for entry in signature.entries}) > 1:
        yield Declined(root, "the layers have different numbers of key-value heads")
        return
    program, _ = apply(graph.program, lambda _: iter(answers))
    pasts = {entry.past for entry in signature.entries}
    for node in program.nodes:
        if node.op != "mlx.attention" and (pasts | {signature.mask}) & set(node.reads()):
            yield Declined(root, f"{node.op} reads the past or the mask too")
            return
    yield from answers
