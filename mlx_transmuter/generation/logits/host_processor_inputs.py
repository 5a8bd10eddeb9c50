"""What the host computes for the processors before each token: the ids that would repeat an n-gram, and the arrays of a
task's processors."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.logits.custom_processors import compute_state, custom_state_name
from mlx_transmuter.generation.logits.ngram_bans import NgramBans
from mlx_transmuter.generation.logits.processor_state import ProcessorState, pad_to_power_of_two
from mlx_transmuter.generation.logits.token_selection import TokenSelection


class HostProcessorInputs:
    """The host's part of the processors of a selection, for a batch of rows.

    prompts, and encoder_input_ids (the tokens of the encoder, or the prompts again), have one entry per prompt, which
    has settings.rows_per_prompt rows.
    """

    def __init__(self, selection: TokenSelection, prompts: Sequence[list[int]], encoder_input_ids: Sequence[list[int]]):
        self.settings, self.vocab_size, self.prompts = selection.settings, selection.vocab_size, prompts
        self.custom_processors = selection.custom_processors
        self.prompt_ngrams = _ngram_bans(self.settings.no_repeat_ngram_size, prompts)
        self.encoder_ngrams = _ngram_bans(self.settings.encoder_no_repeat_ngram_size, encoder_input_ids)
        self._custom_shapes: list[tuple[int, ...]] = []

    def arrays_for(
        self, sequences: Sequence[Sequence[int] | None], rows: Sequence[int] | None = None
    ) -> ProcessorState:
        """Returns the arrays for the next token after sequences of tokens, prompt included; None is a row that gets no
        token.

        rows: the row of each sequence, where there is not one sequence per row.
        """
        arrays: ProcessorState = {}
        row_sequences = list(zip(range(len(sequences)) if rows is None else rows, sequences, strict=True))
        if self.prompt_ngrams or self.encoder_ngrams:
            banned = [self._banned_ids(row, sequence) for row, sequence in row_sequences]
            arrays["banned_ids"] = mx.array(pad_to_power_of_two(banned, self.vocab_size))
        for index in range(len(self.custom_processors)):
            states = [self._custom_state(index, row, sequence) for row, sequence in row_sequences]
            arrays[custom_state_name(index)] = mx.array(self._stack_states(index, states))
        return arrays

    def _banned_ids(self, row: int, sequence: Sequence[int] | None) -> list[int]:
        if sequence is None:
            return []
        prompt, banned = self.settings.prompt_of(row), set()
        if self.prompt_ngrams:
            if len(sequence) > len(self.prompts[prompt]):
                self.prompt_ngrams[prompt].add(sequence)
            banned |= self.prompt_ngrams[prompt].banned_ids(sequence)
        if self.encoder_ngrams:
            banned |= self.encoder_ngrams[prompt].banned_ids(sequence)
        # The encoder's vocabulary may be larger than the decoder's.
        return sorted(token for token in banned if token < self.vocab_size)

    def _custom_state(self, index: int, row: int, sequence: Sequence[int] | None) -> np.ndarray | None:
        if sequence is None:
            return None
        prompt = self.prompts[self.settings.prompt_of(row)]
        view = {"prompt": list(prompt), "generated": list(sequence[: len(prompt) - 1 : -1]), "vocab": self.vocab_size}
        return compute_state(index, self.custom_processors[index][0], view)

    def _stack_states(self, index: int, states: list[np.ndarray | None]) -> np.ndarray:
        """Returns the rows' arrays as one; a row without a token has zeros."""
        shapes = {state.shape for state in states if state is not None}
        if len(self._custom_shapes) == index:
            self._custom_shapes += sorted(shapes)[:1]
        if shapes != {self._custom_shapes[index]}:
            found = ", ".join(str(shape) for shape in sorted(shapes))
            expected = f"{self._custom_shapes[index]}, as at the first token"
            raise GenerationError(f"processor {index}", f"a state of shape {found}", expected)
        first = next(state for state in states if state is not None)
        return np.stack([np.zeros_like(first) if state is None else state for state in states])


def _ngram_bans(size: int, sequences: Sequence[list[int]]) -> list[NgramBans]:
    """Returns the n-grams of each sequence; none for single tokens, whose bans the device has in its own state."""
    return [NgramBans(size, sequence) for sequence in sequences] if size > 1 else []
