"""What the host gives the selection before each token: the ids that n-grams ban, and the arrays of a task's
processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.logits.logits_processors import CustomProcessor, custom_state_name
from mlx_transmuter.generation.logits.ngram_bans import NgramBans
from mlx_transmuter.generation.logits.processor_state import ProcessorState, pad_ids
from mlx_transmuter.generation.settings import Settings

NARROW_DTYPES = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}


class HostProcessorInputs:
    """The host's part of the processors, for a batch of rows.

    prompts and sources (the tokens of the encoder, or the prompts again) have one entry per prompt; a prompt has
    `width` rows.
    """

    def __init__(
        self,
        settings: Settings,
        custom_processors: Sequence[CustomProcessor],
        vocab_size: int,
        prompts: Sequence[list[int]],
        encoder_input_ids: Sequence[list[int]],
    ):
        self.custom_processors, self.vocab_size, self.prompts, self.rows_per_prompt = (
            custom_processors,
            vocab_size,
            prompts,
            settings.rows_per_prompt,
        )
        size, encoder_size = settings.no_repeat_ngram_size, settings.encoder_no_repeat_ngram_size
        self.prompt_ngrams = [NgramBans(size, prompt) for prompt in prompts] if size > 1 else []
        self.encoder_ngrams = (
            [NgramBans(encoder_size, source) for source in encoder_input_ids] if encoder_size > 1 else []
        )
        self.state_shapes: list[tuple[int, ...]] = []

    def arrays_for(
        self, sequences: Sequence[Sequence[int] | None], rows: Sequence[int] | None = None
    ) -> ProcessorState:
        """The arrays for the next token of rows with these tokens, prompt and new ones; None is a row that gets none.

        rows: the row of each text, where they are not one text per row.
        """
        found: ProcessorState = {}
        of = list(zip(range(len(sequences)) if rows is None else rows, sequences, strict=True))
        if self.prompt_ngrams or self.encoder_ngrams:
            banned = [self._banned_ids(row, text) for row, text in of]
            found["banned"] = mx.array(pad_ids(banned, self.vocab_size))
        for index, (state, _) in enumerate(self.custom_processors):
            found[custom_state_name(index)] = mx.array(
                self._stack_states(index, [self._custom_state(state, *row) for row in of])
            )
        return found

    def _banned_ids(self, row: int, sequence: Sequence[int] | None) -> list[int]:
        if sequence is None:
            return []
        prompt, banned = row // self.rows_per_prompt, set()
        if self.prompt_ngrams:
            if len(sequence) > len(self.prompts[prompt]):
                self.prompt_ngrams[prompt].add(sequence)
            banned |= self.prompt_ngrams[prompt].banned_ids(sequence)
        if self.encoder_ngrams:
            banned |= self.encoder_ngrams[prompt].banned_ids(sequence)
        # The encoder's vocabulary may be larger than the decoder's.
        return sorted(token for token in banned if token < self.vocab_size)

    def _custom_state(self, state: Callable[..., Any], row: int, sequence: Sequence[int] | None) -> np.ndarray | None:
        if sequence is None:
            return None
        prompt = self.prompts[row // self.rows_per_prompt]
        view = {"prompt": list(prompt), "generated": list(sequence[: len(prompt) - 1 : -1]), "vocab": self.vocab_size}
        array = np.asarray(state(view))
        return array.astype(NARROW_DTYPES.get(array.dtype, array.dtype))

    def _stack_states(self, index: int, rows: list[np.ndarray | None]) -> np.ndarray:
        """The rows' arrays as one; a padding row has zeros."""
        shapes = {row.shape for row in rows if row is not None}
        if len(self.state_shapes) == index:
            self.state_shapes += sorted(shapes)[:1]
        if shapes != {self.state_shapes[index]}:
            found = ", ".join(str(shape) for shape in sorted(shapes))
            raise GenerationError(
                f"processor {index}", f"a state of shape {found}", f"{self.state_shapes[index]}, as at first"
            )
        first = next(row for row in rows if row is not None)
        return np.stack([np.zeros_like(first) if row is None else row for row in rows])
