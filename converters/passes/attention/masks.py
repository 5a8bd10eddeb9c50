"""Masks: what a graph adds to its scores and hides of them, and what an index shows instead.

Exporters write the mask in fifty nodes that differ between any two versions. So a mask isn't recognised by its nodes:
it is computed for a long context, and what it then shows is compared with what an index can show: all columns up to the
token's own, a window of them, a slope on their distance (ALiBi). Where it is a window, the mask is computed once more
for a prompt and for steps whose tokens stand on both sides of the window's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.ops.functional.attention import padding_mask_bias
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule

# Contexts that a mask is computed for: the first that the graph's tables allow. A window longer than it isn't seen.
PROBE_CONTEXTS = (140_000, 33_000, 9_000, 4_000, 2_000, 1_000, 500, 200, 100, 40, 20)
_PROBE_TOKENS = 3
# The longest prompt that a mask is computed for: it has that many columns squared.
_LONGEST_PROBE_PROMPT = 5_000
# What a mask adds to hide a column: the lowest number of the type, or half of it, or a plain -10000.
HIDDEN_THRESHOLD = -9_000.0


@dataclass(frozen=True)
class ScoreMask:
    """A mask of scores: a value's name ("" where there is none), what its elements mean, and a number.

    add: number · element is added. seen, hidden: a true element leaves the score, or hides it; number is then added.
    padding: a mask of com.microsoft's forms (see padding_bias), number what it adds to hide. Without a name, causal:
    columns up to the token's own; window: the last `number` of them.
    """

    name: str
    kind: str
    number: float = 1.0

    def multiply(self, factor: float) -> ScoreMask:
        """The mask of scores that are multiplied by the factor."""
        return replace(self, number=self.number * factor) if self.name else self


def match_index_mask(graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask]) -> list[Node] | str:
    """The nodes of the mask that an index gives and that shows what `masks` show; or why there is none."""
    if not masks:
        return "no mask: every column is seen, also those after a token's own"
    for context in PROBE_CONTEXTS:
        added = _evaluate_masks(graph, signature, masks, context, _PROBE_TOKENS)
        # In half a type a slope on so long a distance may be infinite.
        if added is not None and np.isfinite(added[added > HIDDEN_THRESHOLD]).all():
            break
    else:
        return "the mask depends on more than the sizes of a step"
    counts = (added > HIDDEN_THRESHOLD).sum(-1)
    window = int(counts.max())
    if not _is_window(added, window, context):
        return "the mask shows other columns than the last ones up to a token's own"
    window = 0 if window >= context + 1 else window
    for past, seq in ((0, min(window + 2, _LONGEST_PROBE_PROMPT)), (max(0, window - 2), 4)) if window else ((0, 5),):
        again = _evaluate_masks(graph, signature, masks, past, seq)
        if again is not None and not _is_window(again, window or past + seq, past):
            return f"the mask shows other columns in a step of {seq} tokens after {past} than in later ones"
    name = f"seen.{window}" if window else "seen"
    nodes = [Node("mlx.visible", (CACHE_INDEX_INPUT,), (name,), {"window": window} if window else {})]
    seen = added > HIDDEN_THRESHOLD
    if not np.where(seen, added, 0.0).any():
        return nodes
    slopes = _alibi_slopes(added, seen)
    if slopes is None:
        return "the mask adds numbers that are no slope on the distance"
    return [*nodes, Node("mlx.alibi", (CACHE_INDEX_INPUT, name), (f"{name}.alibi",), {"slopes": slopes})]


def _is_window(bias: np.ndarray, window: int, past: int) -> bool:
    """Whether what is added, [heads, tokens, columns], hides all but the last `window` columns up to a token's own."""
    columns, own = np.arange(bias.shape[2]), past + np.arange(bias.shape[1])[:, None]
    return np.array_equal(
        bias > HIDDEN_THRESHOLD, np.broadcast_to((columns <= own) & (columns > own - window), bias.shape)
    )


def _evaluate_masks(
    graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask], past: int, seq: int
) -> np.ndarray | None:
    """What the masks add to the scores, [heads or 1, tokens, columns], in a step of `seq` tokens after `past`; None if
    it can't run.
    """
    program, wanted = graph.program, (seq, past + seq)
    given = make_step_inputs(program, signature, 1, past, seq)
    names = [mask.name for mask in masks if mask.name and graph.constant(mask.name) is None and mask.name not in given]
    outputs = tuple(Value(name, "float32", None) for name in dict.fromkeys(names))
    try:
        found: dict[str, mx.array | np.ndarray] = dict(given)
        if outputs:
            part = replace(program, outputs=outputs).select_outputs([value.name for value in outputs])
            arrays: dict[str, mx.array] = {name: tensor.to_device() for name, tensor in part.tensors.items()}
            found |= ProgramModule(part, arrays)(**given)
        total = np.zeros((1, 1, 1))  # in float64: two masks of the lowest float32 would add up to -inf
        for mask in masks:
            constant = graph.constant(mask.name)
            total = total + _evaluate_mask(mask, found.get(mask.name) if constant is None else constant, seq, past)
    except (ops.OperatorError, ValueError, RuntimeError):
        return None
    return np.broadcast_to(total, (total.shape[0], *wanted)) if total.shape[-2:] in (wanted, (1, wanted[1])) else None


def _evaluate_mask(mask: ScoreMask, value: mx.array | np.ndarray | None, seq: int, past: int) -> np.ndarray:
    """What the mask adds, float64 [heads or 1, tokens or 1, columns]."""
    if value is None:
        columns, own = np.arange(past + seq), past + np.arange(seq)[:, None]
        return np.where(columns <= own if mask.kind == "causal" else columns > own - mask.number, 0.0, -np.inf)[None]
    if mask.kind == "padding":
        value = value if isinstance(value, mx.array) else ops.to_device(value)
        bias = padding_mask_bias(value, 1, seq, past + seq, mask.number, mx.float32)
        return ops.to_host(bias).astype(np.float64).reshape(-1, *bias.shape[2:])
    array = ops.to_host(value) if isinstance(value, mx.array) else value
    array = array.reshape(-1, *array.shape[-2:]) if array.ndim >= 2 else array
    if mask.kind == "add":
        return array.astype(np.float64) * mask.number
    return np.where(array == (mask.kind == "seen"), 0.0, mask.number)


def _alibi_slopes(bias: np.ndarray, visibility: np.ndarray) -> list[float] | None:
    """A slope per head such that what is added is slope · column, up to a constant per token, or None."""
    slopes = []
    for head, visible in zip(bias, np.broadcast_to(visibility, bias.shape), strict=True):
        columns = np.flatnonzero(visible.all(axis=0))
        if len(columns) < 2:
            return None
        slope = float((head[0, columns[-1]] - head[0, columns[0]]) / (columns[-1] - columns[0]))
        line = head[:, columns] - head[:, columns[:1]]
        if not np.allclose(line, slope * (columns - columns[0]), rtol=1e-4, atol=1e-4 * max(1.0, abs(slope))):
            return None
        slopes.append(slope)
    return slopes
