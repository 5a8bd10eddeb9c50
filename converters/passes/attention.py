"""Attention: past, present, mask and softmax become attention over the pools of the cache.

Exporters write the mask in fifty nodes that differ between any two versions. So a mask isn't recognised by its nodes:
it is computed for a long context, and what it then shows is compared with what an index can show: all columns up to the
token's own, a window of them, a slope on their distance (ALiBi). The rewrite holds for all layers or for none, since a
program has one cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from converters.match import Answer, Become, Declined, Graph, apply, is_kind
from converters.observe import Observation, step
from mlx_transmuter import ops
from mlx_transmuter.module import Module
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import INDEX, LANES, Entry, Signature

# Contexts that a mask is computed for: the first that the graph's tables allow. A window longer than it isn't seen.
CONTEXTS = (140_000, 33_000, 9_000, 4_000, 2_000, 1_000, 500, 200, 100, 40, 20)
_TOKENS = 3
# What a mask adds to hide a column: the lowest number of the type, or half of it, or a plain -10000.
_HIDDEN = -9_000.0
_REPEATS = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Transpose", "Cast", "Identity", "Tile")


@dataclass(frozen=True)
class Scores:
    """What a softmax is taken of: q · kᵀ · scale, bounded by softcap, with masks: names, and what a true element means
    ("add": a number to add; "seen", "hidden")."""

    q: str
    keys: Entry
    scale: float
    softcap: float = 0.0
    masks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer's attention: its scores, the entry of its values, the product that it ends with."""

    softmax: Node
    scores: Scores
    values: Entry
    product: Node


def attention(graph: Graph) -> Iterator[Answer]:
    """softmax(q · kᵀ · scale + mask) · v over past and present → mlx.attention over pools."""
    seen = Observation.of(graph.program)
    if seen is None or seen.signature.index:
        return
    signature = seen.signature
    presents = {entry.present: entry for entry in signature.entries}
    layers = []
    for node in graph.nodes:
        if not is_kind(node, "Softmax"):
            continue
        found = _layer(graph, seen, presents, node)
        if isinstance(found, str):
            yield Declined(node, found)
            return
        layers.append(found)
    used = [entry.present for layer in layers for entry in (layer.scores.keys, layer.values)]
    if not layers or sorted(used) != sorted(presents):
        if layers:
            yield Declined(layers[0].softmax, "a part of the cache is used by something else than attention")
        return
    yield from _replaced(graph, signature, layers)


def _replaced(graph: Graph, signature: Signature, layers: list[Layer]) -> Iterator[Answer]:
    masks: dict[tuple[tuple[str, str], ...], str] = {}
    inputs = (Value(INDEX, "cache_index", None), Value(LANES, "cache_index", None))
    answers = []
    for layer in layers:
        nodes: list[Node] = []
        if layer.scores.masks not in masks:
            shown = _shown(graph, signature, layer.scores.masks)
            if isinstance(shown, str):
                yield Declined(layer.softmax, shown)
                return
            nodes += shown
            masks[layer.scores.masks] = shown[-1].outputs[0]
        keys, values = layer.scores.keys, layer.values
        fresh = [_fresh(graph, entry) for entry in (keys, values)]
        attrs: dict[str, float] = {"scale": layer.scores.scale}
        if layer.scores.softcap:
            attrs["softcap"] = layer.scores.softcap
        nodes.append(
            Node(
                "mlx.attention",
                (layer.scores.q, *fresh, keys.past, values.past, LANES, masks[layer.scores.masks]),
                (layer.product.outputs[0], keys.present, values.present),
                attrs,
                layer.product.name,
            )
        )
        answers.append(Become(layer.product, tuple(nodes), inputs=inputs))
        for entry in (keys, values):
            concat = graph.producer(entry.present)
            assert concat is not None
            answers.append(Become(concat, ()))
    yield from checked(graph, signature, _deduplicated(answers), layers[0].softmax)


def checked(graph: Graph, signature: Signature, answers: list[Become], root: Node) -> Iterator[Answer]:
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


def _deduplicated(answers: list[Become]) -> list[Become]:
    """The answers, with a node of a shared mask in the first of those that have it."""
    given: set[str] = set()
    kept = []
    for answer in answers:
        nodes = tuple(node for node in answer.nodes if node.outputs[0] not in given)
        given.update(node.outputs[0] for node in nodes)
        kept.append(replace(answer, nodes=nodes))
    return kept


def _layer(graph: Graph, seen: Observation, presents: dict[str, Entry], softmax: Node) -> Layer | str:
    """The layer around a softmax, or why it is none."""
    shapes = seen.shapes(softmax.inputs[0])
    rank = len(shapes[0]) if shapes else 0
    if rank not in (3, 4) or softmax.attrs.get("axis", -1) % rank != rank - 1:
        return f"the softmax is over axis {softmax.attrs.get('axis', -1)} of {rank}"
    scores = _scores(graph, seen, presents, softmax.inputs[0])
    if isinstance(scores, str):
        return scores
    product = _product(graph, seen, softmax.outputs[0])
    if product is None:
        return "the weights go elsewhere than into a product with values"
    values = _entry(graph, presents, product.inputs[1])
    if values is None or values[1] != 1.0:
        return f"the weights' product is with {product.inputs[1]!r}, which is no cache"
    for entry in (scores.keys, values[0]):
        concat = graph.producer(entry.present, "Concat")
        if concat is None or concat.inputs[0] != entry.past or len(concat.inputs) != 2:
            return f"{entry.present!r} is not the past with the new keys or values after it"
        if entry.order != [0, 1, 2, 3] or concat.attrs.get("axis", 0) % 4 != entry.length:
            return f"{entry.past!r} is not [rows, heads, positions, size]"
    return Layer(softmax, scores, values[0], product)


def _fresh(graph: Graph, entry: Entry) -> str:
    concat = graph.producer(entry.present)
    assert concat is not None
    return concat.inputs[1]


def _scores(graph: Graph, seen: Observation, presents: dict[str, Entry], value: str) -> Scores | str:
    """What the value is as scores of attention, or why it is none."""
    node = graph.producer(value)
    unknown = f"the scores come from {node.op if node else value}"
    if node is None:
        return unknown
    if is_kind(node, "MatMul"):
        keys = _entry(graph, presents, node.inputs[1])
        if keys is None:
            return "the scores' product is with something else than cached keys"
        q, scale = _scaled(graph, node.inputs[0])
        return Scores(q, keys[0], scale * keys[1])
    if is_kind(node, "Cast") or is_kind(node, "Identity"):
        return _scores(graph, seen, presents, node.inputs[0])
    if is_kind(node, "Reshape"):
        before, after = seen.shapes(node.inputs[0]), seen.shapes(value)
        if before and after and all(b[-2:] == a[-2:] for b, a in zip(before, after, strict=True)):
            return _scores(graph, seen, presents, node.inputs[0])
        return unknown
    if is_kind(node, "Where"):
        return _masked(graph, seen, presents, node)
    if not (is_kind(node, "Mul") or is_kind(node, "Div") or is_kind(node, "Add")):
        return unknown
    factor = [graph.constant(name) for name in node.inputs]
    scalar = next((float(c.item()) for c in factor if c is not None and c.size == 1), None)
    if is_kind(node, "Add") and scalar is None:
        for chain, mask in (node.inputs, node.inputs[::-1]):
            scores = _scores(graph, seen, presents, chain)
            if isinstance(scores, Scores):
                return replace(scores, masks=(*scores.masks, (mask, "add")))
        return unknown
    if scalar is None or is_kind(node, "Add"):
        return unknown
    chain = node.inputs[0] if factor[0] is None else node.inputs[1]
    if is_kind(node, "Div") and chain != node.inputs[0]:
        return unknown
    factor_ = 1 / scalar if is_kind(node, "Div") else scalar
    bounded = graph.producer(chain, "Tanh")
    scores = _scores(graph, seen, presents, bounded.inputs[0] if bounded else chain)
    if isinstance(scores, str) or scores.masks or scores.softcap:
        return scores if isinstance(scores, str) else "the scores are scaled after their mask"
    if bounded:
        return replace(scores, scale=scores.scale * factor_, softcap=factor_)
    return replace(scores, scale=scores.scale * factor_)


def _masked(graph: Graph, seen: Observation, presents: dict[str, Entry], node: Node) -> Scores | str:
    """Where(condition, scores, low) and Where(condition, low, scores)."""
    for chain, low, meaning in ((node.inputs[1], node.inputs[2], "seen"), (node.inputs[2], node.inputs[1], "hidden")):
        constant = graph.constant(low)
        if constant is not None and constant.size == 1 and float(constant.item()) < _HIDDEN:
            scores = _scores(graph, seen, presents, chain)
            if isinstance(scores, str):
                return scores
            return replace(scores, masks=(*scores.masks, (node.inputs[0], meaning)))
    return "the scores are chosen by a Where that is no mask"


def _scaled(graph: Graph, value: str) -> tuple[str, float]:
    """The value without its constant factors, and their product."""
    scale = 1.0
    while (node := graph.producer(value)) is not None and (is_kind(node, "Mul") or is_kind(node, "Div")):
        constants = [graph.constant(name) for name in node.inputs]
        at = next((i for i, c in enumerate(constants) if c is not None and c.size == 1), None)
        if at is None or (is_kind(node, "Div") and at == 0):
            break
        factor = float(constants[at].item())  # type: ignore[union-attr]
        scale *= 1 / factor if is_kind(node, "Div") else factor
        value = node.inputs[1 - at]
    return value, scale


def _entry(graph: Graph, presents: dict[str, Entry], value: str) -> tuple[Entry, float] | None:
    """The entry whose present the value is, repeated for the heads that share it, and its constant factor."""
    scale = 1.0
    while value not in presents:
        value, factor = _scaled(graph, value)
        scale *= factor
        node = graph.producer(value)
        if value in presents or node is None or not any(is_kind(node, kind) for kind in _REPEATS):
            break
        value = node.inputs[0]
    return (presents[value], scale) if value in presents else None


def _product(graph: Graph, seen: Observation, weights: str) -> Node | None:
    """The product of the weights with values, past casts and the guard against NaN (Where(IsNaN(w), 0, w))."""
    for node in graph.consumers(weights):
        if is_kind(node, "MatMul") and node.inputs[0] == weights:
            return node
        plain = any(is_kind(node, kind) for kind in ("Cast", "Dropout", "Identity"))
        guard = (
            is_kind(node, "Where") and node.inputs[2] == weights and graph.producer(node.inputs[0], "IsNaN") is not None
        )
        before, after = seen.shapes(weights), seen.shapes(node.outputs[0])
        same = before and after and all(b[-2:] == a[-2:] for b, a in zip(before, after, strict=True))
        if (plain or guard or (is_kind(node, "Reshape") and same)) and (
            found := _product(graph, seen, node.outputs[0])
        ):
            return found
    return None


def _shown(graph: Graph, signature: Signature, masks: tuple[tuple[str, str], ...]) -> list[Node] | str:
    """The nodes of the mask that an index gives and that shows what `masks` show; or why there is none."""
    if not masks:
        return "no mask: every column is seen, also those after a token's own"
    for context in CONTEXTS:
        added = _added(graph, signature, masks, context)
        if added is not None:
            break
    else:
        return "the mask depends on more than the sizes of a step"
    seen = added > _HIDDEN
    columns = np.arange(context + _TOKENS)
    own = context + np.arange(_TOKENS)[:, None]
    counts = seen.sum(-1)
    window = int(counts.max())
    if not np.array_equal(seen, np.broadcast_to((columns <= own) & (columns > own - window), seen.shape)):
        return "the mask shows other columns than the last ones up to a token's own"
    window = 0 if window >= context + 1 else window
    name = f"seen.{window}" if window else "seen"
    nodes = [Node("mlx.visible", (INDEX,), (name,), {"window": window} if window else {})]
    values = np.where(seen, added, 0.0)
    if not values.any():
        return nodes
    slopes = _slopes(added, seen)
    if slopes is None:
        return "the mask adds numbers that are no slope on the distance"
    return [*nodes, Node("mlx.alibi", (INDEX, name), (f"{name}.alibi",), {"slopes": slopes})]


def _added(graph: Graph, signature: Signature, masks: tuple[tuple[str, str], ...], context: int) -> np.ndarray | None:
    """What the masks add to the scores, [heads or 1, tokens, columns], in a step over that context; None if it can't
    run.
    """
    program = graph.program
    outputs = tuple(Value(name, "float32", None) for name, _ in masks if graph.constant(name) is None)
    part = replace(program, outputs=outputs).select([value.name for value in outputs])
    arrays: dict[str, mx.array] = {name: tensor.array() for name, tensor in part.arrays.items()}
    try:
        found = Module(part, arrays)(**step(program, signature, 1, context, _TOKENS))
        total = np.zeros((1, 1, 1), np.float32)
        for name, meaning in masks:
            constant = graph.constant(name)
            array = ops.to_host(found[name]) if constant is None else constant
            array = array.reshape(-1, *array.shape[-2:]) if array.ndim >= 2 else array
            array = array if meaning == "add" else np.where(array == (meaning == "seen"), 0.0, -np.inf)
            total = total + array.astype(np.float32)
    except (ops.OperatorError, ValueError, RuntimeError):
        return None
    wanted = (_TOKENS, context + _TOKENS)
    return np.broadcast_to(total, (total.shape[0], *wanted)) if total.shape[-2:] in (wanted, (1, wanted[1])) else None


def _slopes(added: np.ndarray, seen: np.ndarray) -> list[float] | None:
    """A slope per head such that what is added is slope · column, up to a constant per token, or None."""
    slopes = []
    for head, shown in zip(added, np.broadcast_to(seen, added.shape), strict=True):
        columns = np.flatnonzero(shown.all(axis=0))
        if len(columns) < 2:
            return None
        slope = float((head[0, columns[-1]] - head[0, columns[0]]) / (columns[-1] - columns[0]))
        line = head[:, columns] - head[:, columns[:1]]
        if not np.allclose(line, slope * (columns - columns[0]), rtol=1e-4, atol=1e-4 * max(1.0, abs(slope))):
            return None
        slopes.append(slope)
    return slopes
