"""The rewrites, in their order.

1. fold: what depends on constants alone is computed now; later rewrites then see constants where exporters wrote
chains.
   experts, grouped: before the rewrites that walk the graph, which they can't while the sizes of a step depend on its
   values. (hit is none of these: it is done to the graph before anything is compared with it.)
2. positions: a graph that takes positions from the length of its cache gets an input for them, so that it runs over a
buffer;
   before settle, which would leave fewer nodes to tell positions from columns by.
3. narrow: a cache that is a half type within the graph is one outside too; before settle and attention, which look for
   the cache itself.
4. settle: shapes that are the same in steps of every size become constants, and nodes that change nothing go; same:
   what is written several times is computed once; stored: what is done to a weight alone is done now.
   unpacked: onnxruntime's Attention gives its projections away, before linear, which makes a layer of them.
5. integers: before embedding and linear, which take what is left of its weights in floats.
   embedding: before linear, so that a head tied to the embedding finds its table.
6. linear, quantized: products with a constant matrix become layers; opened: those of a mixture in one operator too.
   flat: these take rows of any shape; chosen: those of alike experts stand in stacks; joined: those of one input become
   one.
7. norms, rotary, gates: one node for what exporters write in several; parted: after rotary, which looks for slices.
   residual: after all that look for products or sums, which are one node then.
8. attention: after settle, which leaves of the repeated keys and of the reshapes only what matters; the past and the
   present become pools, and the mask, which nothing reads any more, goes. group_query: the same for the operator that
   brings its rotation.
9. last: after attention; also where past and present stay as they are.
10. heads: after all that look for a transpose; together: what heads found of one product.
"""

from __future__ import annotations

from dataclasses import replace

from converters.match import Graph, Record, Rewrite, apply, renamed
from converters.passes.attention import attention
from converters.passes.chosen import chosen
from converters.passes.embedding import embedding
from converters.passes.experts import experts
from converters.passes.flat import flat
from converters.passes.fold import fold
from converters.passes.gates import gates
from converters.passes.group_query import group_query
from converters.passes.grouped import grouped
from converters.passes.heads import heads
from converters.passes.integers import integers
from converters.passes.joined import joined
from converters.passes.last import last
from converters.passes.linear import linear
from converters.passes.narrow import narrow
from converters.passes.norms import norms
from converters.passes.opened import opened
from converters.passes.parted import parted
from converters.passes.positions import positions
from converters.passes.quantized import quantized
from converters.passes.residual import residual
from converters.passes.rotary import rotary
from converters.passes.same import same
from converters.passes.settle import settle
from converters.passes.stored import stored
from converters.passes.together import together
from converters.passes.unpacked import unpacked
from mlx_transmuter.program import Program
from mlx_transmuter.signature import ENDS, INDEX, LANES, OPTIONAL, TOKENS

# What leaves past and present as they are, and what makes pools of them.
IN_GRAPH: tuple[Rewrite, ...] = (
    fold,
    experts,
    grouped,
    positions,
    narrow,
    settle,
    same,
    stored,
    unpacked,
    integers,
    embedding,
    linear,
    quantized,
    opened,
    flat,
    chosen,
    joined,
    norms,
    rotary,
    gates,
    parted,
    residual,
)
# Those that take sizes which depend on values out of a step: where one is made, the graph itself runs eagerly.
BY_VALUES = ("experts", "grouped")
OVER_POOLS: tuple[Rewrite, ...] = (attention, group_query, last, heads, together)


def rewrite(program: Program, order: tuple[Rewrite, ...]) -> tuple[Program, list[Record]]:
    """The program after the rewrites of `order`, without inputs that nothing reads any more; what each rewrite did."""
    given = {name for node in program.nodes for name in node.outputs}
    # A value of the graph may have a name that an input of a program over pools has: dynamo's exports call one "index".
    program = renamed(program, {name: f"{name}.value" for name in given & {INDEX, LANES, ENDS}})
    records, graph = [], Graph(program)
    for one in order:
        program, record = apply(program, one, graph)
        records.append(record)
        if program is not graph.program:
            graph = Graph(program, graph)
    known = {*OPTIONAL, *TOKENS}  # what is carried stays, also where nothing reads it
    read = {name for node in program.nodes for name in node.reads()} | {value.name for value in program.outputs}
    return replace(
        program, inputs=tuple(value for value in program.inputs if value.name in read or value.name not in known)
    ), records


__all__ = ["BY_VALUES", "IN_GRAPH", "OVER_POOLS", "rewrite"]
