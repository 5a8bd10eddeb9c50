"""Masks of scores: what a graph adds to the scores of attention, in each of the forms that exporters write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.converters.graph.subgraph import evaluate_outputs
from mlx_transmuter.ops.functional.attention import padding_mask_bias
from mlx_transmuter.program.signature import DecoderSignature

# A mask hides a column where it adds less than this: the lowest number of a type, half of that, or a plain -10000.
HIDDEN_THRESHOLD = -9_000.0


@dataclass(frozen=True)
class ScoreMask(ABC):
    """What is added to the scores. value: the graph's value that the mask is read from, "" where there is none."""

    value: str = ""

    def scaled(self, factor: float) -> ScoreMask:
        """Returns the mask after the masked scores are multiplied by the factor."""
        return self

    @abstractmethod
    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        """Returns what the mask adds in a step of `seq` tokens after `past`: float64 [heads or 1, seq or 1, columns].

        array: what `value` is in that step.
        """


@dataclass(frozen=True)
class AddedMask(ScoreMask):
    """A value that is added to the scores, times a factor."""

    factor: float = 1.0

    def scaled(self, factor: float) -> ScoreMask:
        return replace(self, factor=self.factor * factor)

    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        assert array is not None
        return _by_head(array).astype(np.float64) * self.factor


@dataclass(frozen=True)
class BooleanMask(ScoreMask):
    """A boolean value; where an element is not `visible`, `hidden_bias` takes the score's place."""

    visible: bool = True
    hidden_bias: float = -np.inf

    def scaled(self, factor: float) -> ScoreMask:
        return replace(self, hidden_bias=self.hidden_bias * factor)

    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        assert array is not None
        return np.where(_by_head(array) == self.visible, 0.0, self.hidden_bias)


@dataclass(frozen=True)
class PaddingMask(ScoreMask):
    """A padding mask in one of com.microsoft's forms (see padding_mask_bias), which adds `hidden_bias` to hide."""

    hidden_bias: float = -10_000.0

    def scaled(self, factor: float) -> ScoreMask:
        return replace(self, hidden_bias=self.hidden_bias * factor)

    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        assert array is not None
        bias = padding_mask_bias(ops.to_device(array), 1, seq, past + seq, self.hidden_bias, mx.float32)
        return ops.to_host(bias).astype(np.float64).reshape(-1, *bias.shape[2:])


@dataclass(frozen=True)
class CausalMask(ScoreMask):
    """An operator's own causal mask: a token sees the columns up to its own."""

    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        columns, own_column = np.arange(past + seq), past + np.arange(seq)[:, None]
        return np.where(columns <= own_column, 0.0, -np.inf)[None]


@dataclass(frozen=True)
class WindowMask(ScoreMask):
    """An operator's own window: a token sees no column that is `window` or more before its own."""

    window: int = 0

    def bias(self, array: np.ndarray | None, past: int, seq: int) -> np.ndarray:
        columns, own_column = np.arange(past + seq), past + np.arange(seq)[:, None]
        return np.where(columns > own_column - self.window, 0.0, -np.inf)[None]


def evaluate_masks(
    graph: GraphView, signature: DecoderSignature, masks: Sequence[ScoreMask], past: int, seq: int
) -> np.ndarray | None:
    """Returns what the masks add together in a step of `seq` tokens after `past`: float64 [heads or 1, seq, columns].

    None where the graph cannot run such a step, or where the masks have other axes.
    """
    inputs, shape = make_step_inputs(graph.program, signature, 1, past, seq), (seq, past + seq)
    read = {mask.value: None for mask in masks if mask.value and graph.constant(mask.value) is None}
    computed = [name for name in read if name not in inputs]
    try:
        values = inputs | (evaluate_outputs(graph.program, inputs, computed) if computed else {})
        bias = np.zeros((1, 1, 1))  # in float64: two masks of the lowest float32 would add up to -inf
        for mask in masks:
            constant = graph.constant(mask.value)
            array = values.get(mask.value) if constant is None else constant
            bias = bias + mask.bias(ops.to_host(array) if isinstance(array, mx.array) else array, past, seq)
    except (ops.OperatorError, ValueError, RuntimeError):
        return None
    return np.broadcast_to(bias, (bias.shape[0], *shape)) if bias.shape[-2:] in (shape, (1, shape[1])) else None


def _by_head(array: np.ndarray) -> np.ndarray:
    """Returns a mask [1, heads or 1, tokens, columns], or of fewer axes, as [heads or 1, tokens, columns]."""
    return array.reshape(-1, *array.shape[-2:]) if array.ndim >= 2 else array
