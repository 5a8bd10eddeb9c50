"""Layers of attention over the pools of a cache: the nodes and the program inputs and outputs that replace them.

A program has one cache, so either all layers run over pools or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlx_transmuter.converters.graph.equal_values import first_equal_values
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch, apply_rewrite
from mlx_transmuter.converters.passes.attention.attention_context import UnsupportedAttention
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.index_masks import build_index_mask
from mlx_transmuter.converters.passes.attention.score_masks import ScoreMask
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, DecoderSignature

_INDEX_INPUTS = (Value(CACHE_INDEX_INPUT, "cache_index", None), Value(HEAD_INDEX_INPUT, "cache_index", None))


def build_pooled_attention(
    graph: GraphView, signature: DecoderSignature, layers: Sequence[AttentionLayer]
) -> Iterator[MatchOutcome]:
    """Replaces the layers by attention over pools.

    All are skipped where one cannot be replaced, or where anything else reads the cache or the mask.
    """
    root = layers[0].root
    try:
        _check_cache_use(signature, layers)
        pools = _shared_pools(graph, signature, layers)
        mask_nodes = _IndexMaskNodes(graph, signature, first_equal_values(graph))
        replacements: list[Replacement] = []
        for layer in layers:
            root = layer.root
            pool = pools.get(layer.cached_keys.pair.past, ())
            replacements += _replace_layer(graph, layer, pool, mask_nodes)
        root = layers[0].root
        _check_other_readers(graph, signature, replacements)
    except UnsupportedAttention as problem:
        yield SkippedMatch(root, str(problem))
        return
    yield from replacements


def _check_cache_use(signature: DecoderSignature, layers: Sequence[AttentionLayer]) -> None:
    """Raises UnsupportedAttention unless each cache pair is one layer's keys, values or both, alike in all layers."""
    views = [view for layer in layers for view in (layer.cached_keys, layer.cached_values)]
    halves = [sorted((view.half for view in views if view.pair == pair), key=str) for pair in signature.cache_pairs]
    if any(used not in ([None], [0, 1]) for used in halves):
        raise UnsupportedAttention("a part of the cache is not used by attention, or not by attention alone")
    if any(layer.cached_keys.half == 1 for layer in layers):
        raise UnsupportedAttention("the cache has the values before the keys")
    if len({layer.cached_keys.pair == layer.cached_values.pair for layer in layers}) > 1:
        raise UnsupportedAttention("some layers have one tensor for keys and values, and some have two")


def _shared_pools(
    graph: GraphView, signature: DecoderSignature, layers: Sequence[AttentionLayer]
) -> dict[str, tuple[Value, ...]]:
    """Returns, by the past of each layer's keys, one pool for its keys and values: (program input, program output).

    {} where keys and values stay apart: where some differ in their sizes or type, or are one tensor already. One pool
    is written and read at once.
    """
    pairs = [(layer.cached_keys.pair, layer.cached_values.pair) for layer in layers]
    if any(k == v or (k.heads, k.head_dim, k.dtype) != (v.heads, v.head_dim, v.dtype) for k, v in pairs):
        return {}
    program = graph.program
    taken = {value.name for value in (*program.inputs, *program.outputs)} | program.constants.keys()
    taken |= program.tensors.keys() | {name for node in graph.nodes for name in node.outputs}
    # A state may be named by its number alone too; pasts and presents must stay pairs by their names.
    dot = ".both." if signature.state_pairs else "."
    while not taken.isdisjoint(
        f"{side}{dot}{i}" for side in ("past_key_values", "present") for i in range(len(layers))
    ):
        dot = f"{dot}both."
    pools = {}
    for i, (keys, _) in enumerate(pairs):
        shape = (2, "batch_size", keys.heads, "past_sequence_length", keys.head_dim)
        names = f"past_key_values{dot}{i}", f"present{dot}{i}"
        pools[keys.past] = tuple(Value(name, keys.dtype, shape) for name in names)
    return pools


@dataclass
class _IndexMaskNodes:
    """The masks of an index that layers read, each built once. first_values: value -> the first that is equal to it.

    built: the nodes of all masks, and those before the layers, by their outputs.
    """

    graph: GraphView
    signature: DecoderSignature
    first_values: dict[str, str]
    names: dict[tuple[ScoreMask, ...], str] = field(default_factory=dict)
    built: dict[str, Node] = field(default_factory=dict)

    def mask_of(self, layer: AttentionLayer) -> tuple[str, list[Node]]:
        """Returns the name of the layer's mask, and its nodes that are not built yet."""
        # Exporters write the mask of each layer anew.
        key = tuple(replace(mask, value=self.first_values.get(mask.value, mask.value)) for mask in layer.masks)
        nodes: list[Node] = []
        if key not in self.names:
            mask = self._with_unique_name(build_index_mask(self.graph, self.signature, layer.masks))
            nodes = self.new_nodes(mask)
            self.names[key] = mask[-1].outputs[0]
        return self.names[key], nodes

    def new_nodes(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the nodes whose outputs no node before has, and remembers them."""
        new = [node for node in nodes if node.outputs[0] not in self.built]
        self.built |= {node.outputs[0]: node for node in nodes}
        return new

    def _with_unique_name(self, mask: list[Node]) -> list[Node]:
        """Returns the nodes of a mask under names that no other mask has."""
        last = mask[-1]
        taken = self.built.get(last.outputs[0])
        if taken is None or taken == last:
            return mask
        return [*mask[:-1], replace(last, outputs=(f"{last.outputs[0]}.{len(self.built)}",))]


def _replace_layer(
    graph: GraphView, layer: AttentionLayer, pool: tuple[Value, ...], mask_nodes: _IndexMaskNodes
) -> list[Replacement]:
    """Returns the replacement of the layer's root, and of the nodes that compute its presents."""
    views = (layer.cached_keys, layer.cached_values)
    mask_name, nodes = mask_nodes.mask_of(layer)
    nodes += mask_nodes.new_nodes(layer.nodes_before)
    builder = _build_attention(layer, mask_name, [value.name for value in pool])
    removed = {name for view in views for name in (view.pair.past, view.pair.present)} if pool else set()
    attention = Replacement(
        layer.root,
        (*nodes, *builder.nodes, *layer.nodes_after),
        constants={**layer.constants, **builder.constants},
        program_inputs=(*_INDEX_INPUTS, *pool[:1]),
        program_outputs=pool[1:],
        removed_values=frozenset(removed),
    )
    presents = {id(node): node for view in views if (node := graph.producer(view.pair.present)) is not None}
    return [attention, *(Replacement(node, ()) for node in presents.values() if node is not layer.root)]


def _build_attention(layer: AttentionLayer, mask_name: str, pool_names: Sequence[str]) -> NodeBuilder:
    """Returns the builder of mlx.attention and what computes its inputs.

    pool_names: the pool of the layer's keys and values, as input and as output; [] for the pairs of the cache itself.
    """
    builder = NodeBuilder(layer.output)
    k = _with_pool_axes(builder, layer.k, layer.cached_keys)
    v = k if layer.v == layer.k else _with_pool_axes(builder, layer.v, layer.cached_values)
    sinks: tuple[str, ...] = ()
    if layer.sinks:
        shape = builder.add_constant("sinks.shape", np.array([-1], np.int64))
        sinks = (builder.add_node("Reshape-5", (layer.sinks, shape), "sinks"),)
    keys, values = layer.cached_keys.pair, layer.cached_values.pair
    if pool_names or keys == values:
        past, present = pool_names or (keys.past, keys.present)
        pasts, presents = (past, ""), (present,)
    else:
        pasts, presents = (keys.past, values.past), (keys.present, values.present)
    builder.nodes.append(
        Node(
            "mlx.attention",
            (layer.q, k, v, *pasts, HEAD_INDEX_INPUT, mask_name, *sinks),
            (layer.output, *presents),
            {"scale": layer.scale} | ({"softcap": layer.softcap} if layer.softcap else {}),
            layer.root.name,
        )
    )
    return builder


def _with_pool_axes(builder: NodeBuilder, value: str, view: CachePairView) -> str:
    """Returns this step's keys or values as [rows, heads, seq, size]."""
    if view.axis_order == [0, 1, 2, 3]:
        return value
    builder.nodes.append(Node("Transpose-1", (value,), (f"{value}.transposed",), {"perm": view.axis_order}))
    return f"{value}.transposed"


def _check_other_readers(graph: GraphView, signature: DecoderSignature, replacements: list[Replacement]) -> None:
    """Raises UnsupportedAttention where another node than attention reads the past or the mask."""
    if len({pair.heads for pair in signature.cache_pairs}) > 1:
        raise UnsupportedAttention("the layers have different numbers of key-value heads")
    program, _ = apply_rewrite(graph.program, lambda _: iter(replacements))
    removed_inputs = {pair.past for pair in signature.cache_pairs} | {signature.mask_input}
    for node in program.nodes:
        if node.op != "mlx.attention" and removed_inputs & set(node.all_inputs()):
            raise UnsupportedAttention(f"{node.op} reads the past or the mask too")
