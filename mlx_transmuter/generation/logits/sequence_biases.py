"""sequence_bias and bad_words_ids of transformers 4.57.6: a number is added to the score of a token that would complete
a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.logits.processor_state import NO_TOKEN, ProcessorState, pad_left
from mlx_transmuter.generation.logits.processor_types import LogitsProcessor
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE

BiasPairs = Sequence[tuple[tuple[int, ...], float]]


class _SequenceArrays(NamedTuple):
    """Sequences of several tokens: prefixes int32 [n, longest - 1], padded on the left; lengths, last tokens and biases
    [n]."""

    prefixes: mx.array
    lengths: mx.array
    last_tokens: mx.array
    biases: mx.array

    @classmethod
    def from_pairs(cls, pairs: BiasPairs) -> _SequenceArrays:
        return cls(
            mx.array(pad_left([tokens[:-1] for tokens, _ in pairs], recent_token_count(pairs), NO_TOKEN)),
            mx.array(np.array([len(tokens) for tokens, _ in pairs], np.int32)),
            mx.array(np.array([tokens[-1] for tokens, _ in pairs], np.int32)),
            mx.array(np.array([bias for _, bias in pairs], np.float32)),
        )

    def add_to(self, biases: mx.array, state: ProcessorState) -> mx.array:
        """Adds to biases [rows, vocab] those of each sequence whose prefix ends its row.

        A sequence of n tokens counts in rows of at least n tokens, though n - 1 must match: so does transformers.
        """
        recent = state["recent_tokens"][:, None, -self.prefixes.shape[1] :]
        equal = (recent == self.prefixes[None]) | (self.prefixes[None] == NO_TOKEN)
        matched = mx.all(equal, axis=-1) & (state["length"][:, None] >= self.lengths[None])
        rows = mx.arange(biases.shape[0])[:, None]
        return biases.at[rows, self.last_tokens[None]].add(mx.where(matched, self.biases[None], 0.0))


def sequence_bias_processor(pairs: BiasPairs, vocab_size: int) -> LogitsProcessor:
    """Adds to a token's score the bias of each sequence that the token would complete. SequenceBiasLogitsProcessor."""
    single_tokens = np.zeros(vocab_size, np.float32)
    for (first, *others), bias in pairs:
        if not others:
            single_tokens[first] = bias
    single_biases = mx.array(single_tokens)
    longer = [(tokens, bias) for tokens, bias in pairs if len(tokens) > 1]
    if not longer:
        return LogitsProcessor((), lambda scores, state: scores + single_biases)
    sequences = _SequenceArrays.from_pairs(longer)
    mx.eval(single_biases, *sequences)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return scores + sequences.add_to(mx.broadcast_to(single_biases[None], scores.shape), state)

    return LogitsProcessor(("recent_tokens", "length"), process)


def bad_words_ids(words: Sequence[tuple[int, ...]], eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes each token that would complete one of words; an eos is never a bad word. NoBadWordsLogitsProcessor."""
    biased = [(word, REMOVED_SCORE) for word in words if not (len(word) == 1 and word[0] in eos)]
    return sequence_bias_processor(biased, vocab_size)


def recent_token_count(pairs: Sequence[tuple[Sequence[int], float]]) -> int:
    """Returns how many of a row's last tokens the sequences of pairs are compared with."""
    return max((len(tokens) - 1 for tokens, _ in pairs), default=0)
