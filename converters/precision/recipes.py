"""The layers to which a mixed recipe gives more bits, found by what they do in the graph; names may be opaque.

mlx_lm's recipes (convert.mixed_quant_predicate_builder, after llama.cpp's Q4_K_M) give more bits to the head, and in
the first and last eighth of the blocks and every third one between them to v_proj and down_proj. Here a value
projection is the layer whose output is kept as a value of the cache, a down projection the layer that reads a gated or
activated product of layers, the head the layer that gives the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Node, Program

# What takes a part of a value: a projection that gives queries and keys too is no value projection.
_SLICING_OPS = ("Split-", "Slice-", "Gather-")
# What has the value as its first input, and a shape or axes after it.
_FIRST_INPUT_OPS = ("Reshape-", "Expand-", "Unsqueeze-", "Squeeze-", "Tile-", *_SLICING_OPS)
LAYER_OPS = ("mlx.linear", "mlx.switch_linear", "mlx.as_linear", "mlx.embedding")
LINEAR_OPS = ("mlx.linear", "mlx.switch_linear")
ACTIVATION_OPS = (
    "mlx.gate",
    "mlx.activate",
    "mlx.expert_activation",
    "Sigmoid-",
    "Tanh-",
    "Relu-",
    "Gelu-",
    "Erf-",
    "Elu-",
    "LeakyRelu-",
    "Swish-",
    "HardSwish-",
    "Softplus-",
    "Mish-",
    # As onnxruntime's own conversions and its optimiser write them.
    *(f"com.microsoft.{name}-" for name in ("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasSplitGelu")),
)


def recipe_bits(program: Program, quantization: Quantization, path: Path) -> dict[str, int]:
    """The bits of the layers that the recipe gives more; none without a recipe. Raises ConvertError for a graph in
    which no down projection is found.
    """
    if quantization.recipe is None:
        return {}
    graph = GraphView(program)
    place = {node.outputs[0]: i for i, node in enumerate(program.nodes) if node.outputs}
    values = sorted(_value_projections(graph), key=lambda node: place[node.outputs[0]])
    downs = [node for node in graph.nodes if node.op in LINEAR_OPS and _is_down_projection(graph, node)]
    if not downs:
        found = f"no down projection among {len(program.layers)} layers"
        do = "quantize to one number of bits"
        raise ConvertError(path, found, f"a gated or activated product, for the recipe {quantization.recipe}", do)
    blocks = len(values) or len(downs)
    starts = [place[node.outputs[0]] for node in values]
    more = [node.inputs[1] for i, node in enumerate(values) if _gets_more_bits(i, blocks)]
    for i, node in enumerate(downs):
        block = max(sum(start < place[node.outputs[0]] for start in starts) - 1, 0) if values else i
        more += [node.inputs[1]] if _gets_more_bits(block, blocks) else []
    more += [node.inputs[1] for node in _nearest_layers(graph, ["logits"]) if node.op == "mlx.linear"]
    return dict.fromkeys(more, quantization.more_bits)


def _gets_more_bits(block: int, blocks: int) -> bool:
    return block < blocks // 8 or block >= 7 * blocks // 8 or (block - blocks // 8) % 3 == 2


def _value_projections(graph: GraphView) -> Iterator[Node]:
    """The layers that give the cache's values alone, a block each."""
    kept = [
        node
        for node in graph.nodes
        if (node.op == "mlx.attention" and node.inputs[2])
        or (len(node.outputs) > 2 and _is_graph_output(graph, node.outputs[2]))
    ]
    yield from (source for node in kept for source in _sole_linear_source(graph, [node.inputs[2]]))
    inside = {name for node in kept for name in node.outputs}
    names = [
        value.name for value in graph.program.outputs if _is_cache_value_name(value.name) and value.name not in inside
    ]
    for name in names:
        yield from _sole_linear_source(graph, [name])


def _is_graph_output(graph: GraphView, name: str) -> bool:
    return bool(name) and any(value.name == name for value in graph.program.outputs)


def _is_cache_value_name(name: str) -> bool:
    return name.startswith("present") and "value" in name


def _sole_linear_source(graph: GraphView, names: list[str]) -> Iterator[Node]:
    """The one layer that the values come from, if it is one and they are all of its output."""
    passed: set[str] = set()
    sources = list(_nearest_layers(graph, names, passed))
    if len(sources) == 1 and sources[0].op == "mlx.linear" and not any(op.startswith(_SLICING_OPS) for op in passed):
        yield sources[0]


def _is_down_projection(graph: GraphView, node: Node) -> bool:
    passed: set[str] = set()
    reached: set[str] = set()
    sources = list(_nearest_layers(graph, [node.inputs[0]], passed, reached))
    inputs = {value.name for value in graph.program.inputs}
    return (
        bool(sources)
        and all(source.op in LINEAR_OPS for source in sources)
        and any(op.startswith(ACTIVATION_OPS) for op in passed)
        and not reached & inputs
    )


def _nearest_layers(
    graph: GraphView, names: list[str], operators: set[str] | None = None, value_names: set[str] | None = None
) -> Iterator[Node]:
    """The nearest layers that the values come from. passed: gets the operators between; reached: the names there."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        node = graph.producer(name)
        if name in seen:
            continue
        seen.add(name)
        if value_names is not None:
            value_names.add(name)
        if node is None:
            continue
        if node.op in LAYER_OPS:
            yield node
            left += node.inputs[2:] if node.op == "mlx.linear" else ()  # what the product is added to
            continue
        if operators is not None:
            operators.add(node.op)
        left += [one for one in (node.inputs[:1] if node.op.startswith(_FIRST_INPUT_OPS) else node.inputs) if one]
