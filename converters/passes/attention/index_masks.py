"""Masks that a cache index gives: causal, a sliding window, and ALiBi; and which of them a layer's masks are.

Exporters write a mask in fifty nodes that differ between any two versions. So a mask is not recognized by its nodes: it
is computed for a long context, and what it shows is compared with what an index can show: all columns up to a token's
own, a window of them, and a slope on their distance (ALiBi). A window is computed once more for a prompt, and for a
step whose tokens stand on both sides of the window's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.passes.attention.attention_context import UnsupportedAttention
from mlx_transmuter.converters.passes.attention.score_masks import HIDDEN_THRESHOLD, ScoreMask, evaluate_masks
from mlx_transmuter.program import Node
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, DecoderSignature

# Contexts that a mask is computed for: the first that the graph's tables allow. A longer window looks like none.
PROBE_CONTEXTS = (140_000, 33_000, 9_000, 4_000, 2_000, 1_000, 500, 200, 100, 40, 20)
_PROBE_TOKENS = 3
# The longest prompt that a mask is computed for: it has that many columns squared.
_LONGEST_PROBE_PROMPT = 5_000
_NO_SLOPE = "the mask adds numbers that are not a slope on the distance (ALiBi)"


def build_index_mask(graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask]) -> list[Node]:
    """Returns the nodes of the index's mask that hides and adds what `masks` do; the last one computes the mask.

    Raises UnsupportedAttention where no mask of an index does.
    """
    if not masks:
        raise UnsupportedAttention("there is no mask, so a token attends to later tokens too")
    bias, context = _bias_of_long_context(graph, signature, masks)
    visible = bias > HIDDEN_THRESHOLD
    window = int(visible.sum(-1).max())
    if not _is_window(bias, window, context):
        raise UnsupportedAttention("the mask is neither causal nor a sliding window")
    window = 0 if window >= context + 1 else window
    _check_other_steps(graph, signature, masks, window)
    name = f"visible.{window}" if window else "visible"
    nodes = [Node("mlx.visible", (CACHE_INDEX_INPUT,), (name,), {"window": window} if window else {})]
    if np.where(visible, bias, 0.0).any():
        slopes = _alibi_slopes(bias, visible)
        nodes.append(Node("mlx.alibi", (CACHE_INDEX_INPUT, name), (f"{name}.alibi",), {"slopes": slopes}))
    return nodes


def _bias_of_long_context(
    graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask]
) -> tuple[np.ndarray, int]:
    """Returns what the masks add in a step of a few tokens after the longest context that they can be computed for."""
    for context in PROBE_CONTEXTS:
        bias = evaluate_masks(graph, signature, masks, context, _PROBE_TOKENS)
        # In half a type a slope on so long a distance may be infinite.
        if bias is not None and np.isfinite(bias[bias > HIDDEN_THRESHOLD]).all():
            return bias, context
    raise UnsupportedAttention("the mask depends on more than the sizes of a step")


def _check_other_steps(graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask], window: int) -> None:
    """Raises UnsupportedAttention where the masks of a prompt, or of a step at the window's end, are not the window."""
    steps = [(0, 5)]
    if window:
        steps = [(0, min(window + 2, _LONGEST_PROBE_PROMPT)), (max(0, window - 2), 4)]
    for past, seq in steps:
        bias = evaluate_masks(graph, signature, masks, past, seq)
        if bias is not None and not _is_window(bias, window or past + seq, past):
            raise UnsupportedAttention(f"the mask of a step of {seq} tokens after {past} differs from later ones")


def _is_window(bias: np.ndarray, window: int, past: int) -> bool:
    """Whether what is added, [heads, tokens, columns], hides all but the last `window` columns up to a token's own."""
    columns, own_column = np.arange(bias.shape[2]), past + np.arange(bias.shape[1])[:, None]
    visible = (columns <= own_column) & (columns > own_column - window)
    return np.array_equal(bias > HIDDEN_THRESHOLD, np.broadcast_to(visible, bias.shape))


def _alibi_slopes(bias: np.ndarray, visible: np.ndarray) -> list[float]:
    """Returns a slope per head such that what is added is slope · column, up to a constant per token.

    Raises UnsupportedAttention where there are no such slopes.
    """
    slopes = []
    for head, head_visible in zip(bias, np.broadcast_to(visible, bias.shape), strict=True):
        columns = np.flatnonzero(head_visible.all(axis=0))
        if len(columns) < 2:
            raise UnsupportedAttention(_NO_SLOPE)
        slope = float((head[0, columns[-1]] - head[0, columns[0]]) / (columns[-1] - columns[0]))
        line = head[:, columns] - head[:, columns[:1]]
        if not np.allclose(line, slope * (columns - columns[0]), rtol=1e-4, atol=1e-4 * max(1.0, abs(slope))):
            raise UnsupportedAttention(_NO_SLOPE)
        slopes.append(slope)
    return slopes
