"""What the host gives the selection before each token: the ids that n-grams ban, and the arrays of a task's
processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.ngrams import Ngrams
from mlx_transmuter.generation.processors import Custom, custom_name
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.generation.state import State, padded_ids

NARROWED = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}


class HostView:
    """The host's part of the processors, for a batch of rows.

    prompts and sources (the tokens of the encoder, or the prompts again) have one entry per prompt; a prompt has
    `width` rows.
    """

    def __init__(
        self,
        settings: Settings,
        custom: Sequence[Custom],
        vocab: int,
        prompts: Sequence[list[int]],
        sources: Sequence[list[int]],
    ):
        self.custom, self.vocab, self.prompts, self.width = custom, vocab, prompts, settings.width
        size, encoder_size = settings.no_repeat_ngram_size, settings.encoder_no_repeat_ngram_size
        self.own = [Ngrams(size, prompt) for prompt in prompts] if size > 1 else []
        self.encoder = [Ngrams(encoder_size, source) for source in sources] if encoder_size > 1 else []
        self.shapes: list[tuple[int, ...]] = []

    def arrays(self, texts: Sequence[Sequence[int] | None], rows: Sequence[int] | None = None) -> State:
        """The arrays for the next token of rows with these tokens, prompt and new ones; None is a row that gets none.

        rows: the row of each text, where they are not one text per row.
        """
        found: State = {}
        of = list(zip(range(len(texts)) if rows is None else rows, texts, strict=True))
        if self.own or self.encoder:
            banned = [self._banned(row, text) for row, text in of]
            found["banned"] = mx.array(padded_ids(banned, self.vocab))
        for index, (state, _) in enumerate(self.custom):
            found[custom_name(index)] = mx.array(self._stacked(index, [self._seen(state, *row) for row in of]))
        return found

    def _banned(self, row: int, text: Sequence[int] | None) -> list[int]:
        if text is None:
            return []
        prompt, banned = row // self.width, set()
        if self.own:
            if len(text) > len(self.prompts[prompt]):
                self.own[prompt].add(text)
            banned |= self.own[prompt].banned(text)
        if self.encoder:
            banned |= self.encoder[prompt].banned(text)
        # The encoder's vocabulary may be larger than the decoder's.
        return sorted(token for token in banned if token < self.vocab)

    def _seen(self, state: Callable[..., Any], row: int, text: Sequence[int] | None) -> np.ndarray | None:
        if text is None:
            return None
        prompt = self.prompts[row // self.width]
        view = {"prompt": list(prompt), "generated": list(text[: len(prompt) - 1 : -1]), "vocab": self.vocab}
        array = np.asarray(state(view))
        return array.astype(NARROWED.get(array.dtype, array.dtype))

    def _stacked(self, index: int, rows: list[np.ndarray | None]) -> np.ndarray:
        """The rows' arrays as one; a padding row has zeros."""
        shapes = {row.shape for row in rows if row is not None}
        if len(self.shapes) == index:
            self.shapes += sorted(shapes)[:1]
        if shapes != {self.shapes[index]}:
            found = ", ".join(str(shape) for shape in sorted(shapes))
            raise GenerationError(
                f"processor {index}", f"a state of shape {found}", f"{self.shapes[index]}, as at first"
            )
        first = next(row for row in rows if row is not None)
        return np.stack([np.zeros_like(first) if row is None else row for row in rows])
