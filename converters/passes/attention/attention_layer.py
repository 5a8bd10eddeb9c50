"""The attention of one layer, whatever nodes an exporter writes it in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.score_masks import ScoreMask
from mlx_transmuter.program import Node


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One layer's attention: softmax(q · kᵀ · scale, with softcap, masks and sinks) · v over past and present.

    root: the node that is replaced. q: this step's queries, [rows, heads, seq, size] or [rows · heads, seq, size].
    k, v: this step's keys and values, in the axes of cached_keys and cached_values. output: the value of the result, in
    the axes of q. softcap: 0 for none. sinks: a weight [heads], each a score of no column. nodes_before: the nodes that
    compute q, k and v; nodes_after: those that read the output; constants: what both read.
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
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    def with_surrounding_nodes(self, builder: NodeBuilder, merges_heads: bool) -> AttentionLayer:
        """Returns the layer with the builder's nodes before it.

        merges_heads: the output of the root is [rows, seq, heads · size], which nodes after the layer then compute.
        """
        layer = replace(self, nodes_before=tuple(builder.nodes), constants=builder.constants)
        if not merges_heads:
            return layer
        shape, heads, transposed = (f"{self.output}.{suffix}" for suffix in ("shape", "heads", "transposed"))
        return replace(
            layer,
            output=heads,
            nodes_after=(
                Node("Transpose-1", (heads,), (transposed,), {"perm": [0, 2, 1, 3]}),
                Node("Reshape-5", (transposed, shape), (self.output,)),
            ),
            constants={**builder.constants, shape: np.array([0, 0, -1], np.int64)},
        )


def default_scale(head_dim: int) -> float:
    """Returns the scale of scores where an operator names none."""
    return 1 / math.sqrt(head_dim)


def unpack_qkv(builder: NodeBuilder, inputs: Mapping[str, str], sizes: Sequence[int]) -> list[str]:
    """Returns the operator's queries, keys and values, each [rows, seq, heads · size].

    inputs: by the names of the operator's parameters; without a key, the query holds all three, which have `sizes`.
    """
    if "key" in inputs:
        return [inputs["query"], inputs["key"], inputs.get("value", "")]
    return builder.add_split(inputs["query"], sizes, ("q.merged", "k.merged", "v.merged"))
