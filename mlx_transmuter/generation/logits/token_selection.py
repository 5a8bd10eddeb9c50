"""The compiled selection of a step's tokens: from logits and the state of the rows to one int32 array and the next
state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.float_bits import array_to_bits
from mlx_transmuter.generation.logits.custom_processors import custom_state_name
from mlx_transmuter.generation.logits.logits_processors import build_processors
from mlx_transmuter.generation.logits.processor_state import (
    FIXED_NAMES,
    ProcessorInputs,
    ProcessorState,
    advance_state,
    build_state,
    gather_state,
)
from mlx_transmuter.generation.logits.processor_types import CustomProcessor
from mlx_transmuter.generation.logits.score_faults import ScoreFault, best_scores, fault_of, tokens_or_faults
from mlx_transmuter.generation.logits.scores import LOWEST_FINITE, log_softmax, log_softmax_at
from mlx_transmuter.generation.logits.sequence_biases import recent_token_count
from mlx_transmuter.generation.logits.top_k_indices import top_k_indices
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.ops.compiled_function import CompiledFunction


class BeamCandidates(NamedTuple):
    """The best continuations of one prompt's beams, the best first: the beam that each continues, its token, its score
    float32, and its log-probability where asked for."""

    beams: list[int]
    tokens: list[int]
    scores: np.ndarray
    logprobs: list[float] | None


class TokenSelection:
    """The selection of tokens under one set of settings, for any number of rows.

    `select_tokens` selects one token per row, `select_candidates` the best continuations of each prompt's beams; both
    are compiled once per shape and thread. `state_names` names the arrays of the state in use, `host_names` those that
    the host computes before each token: without any, a step needs nothing of the token before it but the token itself.
    """

    def __init__(
        self,
        settings: Settings,
        vocab_size: int,
        custom_processors: Sequence[CustomProcessor] = (),
        logprobs: bool = False,
    ):
        """logprobs: whether selected tokens come with their log-probabilities. Raises GenerationError for settings
        whose ids are outside the vocabulary."""
        self.settings, self.vocab_size, self.logprobs = settings, vocab_size, logprobs
        self.custom_processors = custom_processors
        self.processors = build_processors(settings, vocab_size, custom_processors)
        self.state_names = {name for processor in self.processors for name in processor.state_names}
        from_host = {"banned_ids", *(custom_state_name(index) for index in range(len(custom_processors)))}
        self.host_names = self.state_names & from_host
        if settings.do_sample:
            self.state_names.add("random_keys")
        self.candidate_count = min(settings.candidates_per_beam * settings.num_beams, settings.num_beams * vocab_size)
        self._compiled_select = CompiledFunction(self.trace_selection)
        self._compiled_rank = CompiledFunction(self._rank_candidates)
        self._compiled_fork_state = CompiledFunction(
            lambda state, parents, tokens: advance_state(gather_state(state, parents), tokens)
        )

    def initial_state(self, inputs: ProcessorInputs) -> tuple[ProcessorState, ProcessorState]:
        """Returns the state of the rows after their prompts, and the part of it that stays fixed."""
        pairs = [*self.settings.sequence_bias, *((word, 0.0) for word in self.settings.bad_words_ids)]
        state = build_state(self.state_names, inputs, self.vocab_size, recent_token_count(pairs))
        fixed = {name: state.pop(name) for name in FIXED_NAMES if name in state}
        return state, fixed

    def select_tokens(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState
    ) -> tuple[mx.array, ProcessorState]:
        """Returns the selection, int32 [rows, 1]: the token of each row, or its ScoreFault where the scores leave none;
        or [rows, 2] with the bits of its log-probability (see `read_token`); and the state after it.

        logits: [rows, vocab] of any float type. fixed: the fixed arrays, and those that the host computed for this
        token.
        """
        return self._compiled_select(logits, state, fixed)

    def read_token(self, selected_tokens: np.ndarray) -> tuple[int, float | None]:
        """Returns the token or ScoreFault, and the log-probability where asked for, of one row of what `select_tokens`
        returned."""
        return int(selected_tokens[0]), float(selected_tokens[1:].view(np.float32)[0]) if self.logprobs else None

    def select_candidates(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState, scores: mx.array
    ) -> tuple[mx.array, ProcessorState]:
        """Returns the best continuations of each prompt, for the beams' scores float32 [rows], and the next state.

        int32 [prompts, n × candidate_count]: the indices beam × vocab + token, or ScoreFault.NAN where a score of the
        prompt is NaN, the bits of their scores, and where asked for those of their log-probabilities; `read_candidates`
        reads a row of it.
        """
        return self._compiled_rank(logits, state, fixed, scores)

    def read_candidates(self, selected_candidates: np.ndarray) -> BeamCandidates | ScoreFault:
        """Returns the candidates of one prompt, a row of what `select_candidates` returned; the fault where a score of
        the prompt is NaN.

        Sampled ones come in the order of their draws; of equal scores the lower index comes first.
        """
        parts = selected_candidates.reshape(-1, self.candidate_count)
        indices, values = parts[0].tolist(), parts[1:].view(np.float32)
        if (fault := fault_of(indices[0])) is not None:
            return fault
        scores, *logprobs = values.tolist()
        order = list(range(self.candidate_count))
        if not self.settings.do_sample:
            order.sort(key=lambda i: (-scores[i], indices[i]))
        beams, tokens = zip(*(divmod(indices[i], self.vocab_size) for i in order), strict=True)
        ordered = [logprobs[0][i] for i in order] if logprobs else None
        return BeamCandidates(list(beams), list(tokens), values[0, order], ordered)

    def fork_state(self, state: ProcessorState, parents: mx.array, tokens: mx.array) -> ProcessorState:
        """Returns the state in which each row continues row parents[r] with tokens[r]; both int32 [rows]."""
        return self._compiled_fork_state(state, parents, tokens)

    def process_scores(self, scores: mx.array, state: ProcessorState, fixed: ProcessorState) -> mx.array:
        """Returns scores float32 [rows, vocab] after all processors: what a token is selected from."""
        arrays = state | fixed
        for processor in self.processors:
            scores = processor.process(scores, arrays)
        return scores

    def trace_selection(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState
    ) -> tuple[mx.array, ProcessorState]:
        """Does `select_tokens` inside a function that is being compiled."""
        scores = self.process_scores(logits.astype(mx.float32), state, fixed)
        perturbed = scores
        if "random_keys" in state:
            noise, state = _gumbel_noise(state, scores.shape[-1])
            perturbed = scores + noise
        tokens = mx.argmax(perturbed, axis=-1, keepdims=True).astype(mx.int32)
        columns = [tokens_or_faults(tokens, best_scores(scores), sampled=self.settings.do_sample)]
        if self.logprobs:
            columns.append(array_to_bits(log_softmax_at(scores, tokens)))
        return mx.concatenate(columns, axis=-1), advance_state(state, tokens[:, 0])

    def _rank_candidates(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState, scores: mx.array
    ) -> tuple[mx.array, ProcessorState]:
        processed = self.process_scores(log_softmax(logits.astype(mx.float32)), state, fixed)
        total = mx.maximum(mx.maximum(processed, LOWEST_FINITE) + scores[:, None], LOWEST_FINITE)
        total = total.reshape(-1, self.settings.num_beams * self.vocab_size)
        perturbed = total
        if "random_keys" in state:
            noise, state = _gumbel_noise(state, total.shape[-1])
            perturbed = total + noise
        best = top_k_indices(perturbed, self.candidate_count)
        if "random_keys" in state:
            descending = mx.argsort(-mx.take_along_axis(perturbed, best, axis=-1), axis=-1)
            best = mx.take_along_axis(best, descending, axis=-1)
        is_nan = mx.isnan(best_scores(total))
        columns = [mx.where(is_nan, int(ScoreFault.NAN), best), array_to_bits(mx.take_along_axis(total, best, axis=-1))]
        if self.logprobs:
            columns.append(array_to_bits(log_softmax_at(processed, best, self.settings.num_beams)))
        return mx.concatenate(columns, axis=-1), state


def row_random_keys(seeds: Sequence[int], count: int) -> list[mx.array]:
    """Returns `count` keys for each seed; a seed is any int, of which the low 64 bits count."""
    keys = [mx.random.key(seed % 2**64) for seed in seeds]
    return [part for key in keys for part in (mx.random.split(key, count) if count > 1 else [key])]


def _gumbel_noise(state: ProcessorState, size: int) -> tuple[mx.array, ProcessorState]:
    """Returns Gumbel noise [keys, size], and the state with the next keys.

    The largest of scores + noise is a draw from their softmax, the n largest n draws without replacement (Gumbel 1954;
    Kool et al. 2019). Each row draws from its own key, so its tokens do not depend on the batch.
    """
    keys = mx.vmap(mx.random.split)(state["random_keys"])
    noise = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys[:, 1])
    return noise, {**state, "random_keys": keys[:, 0]}
