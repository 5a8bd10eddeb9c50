"""The compiled choice of a step: from logits and the state of the rows to one int32 array and the next state."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.float_bits import QUIET_NAN
from mlx_transmuter.generation.logits.logits_processors import (
    CustomProcessor,
    build_processors,
    custom_state_name,
    recent_token_count,
)
from mlx_transmuter.generation.logits.processor_state import (
    FIXED_NAMES,
    ProcessorState,
    advance_state,
    build_state,
    gather_state,
)
from mlx_transmuter.generation.logits.sampling_warpers import LOWEST_FINITE, log_softmax, log_softmax_at
from mlx_transmuter.generation.logits.top_k_indices import top_k_indices
from mlx_transmuter.generation.settings import Settings


class TokenSelection:
    """The choice of tokens under one set of settings, for any number of rows.

    `tokens` chooses one token per row, `path` those along a tree of guesses, `candidates` the best continuations of
    each prompt's beams. All are compiled once per shape. `reads` names the arrays of the state in use, `host` those
    that the host gives before each token: without any, a step needs nothing of the token before it but the token
    itself.
    """

    def __init__(
        self,
        settings: Settings,
        vocab_size: int,
        custom_processors: Sequence[CustomProcessor] = (),
        logprobs: bool = False,
    ):
        """Raises GenerationError for settings whose ids are outside the vocabulary."""
        self.settings, self.vocab_size, self.logprobs = settings, vocab_size, logprobs
        self.processors = build_processors(settings, vocab_size, custom_processors)
        given = {"banned", *(custom_state_name(index) for index in range(len(custom_processors)))}
        self.state_names = {name for processor in self.processors for name in processor.state_names}
        self.host_names = self.state_names & given
        if settings.do_sample:
            self.state_names.add("keys")
        self.candidate_count = min(settings.candidates_per_beam * settings.num_beams, settings.num_beams * vocab_size)
        self._compiled_select = mx.compile(self._select)
        self._compiled_select_along_tree = mx.compile(self._select_along_tree)
        self._compiled_rank = mx.compile(self._rank_candidates)
        self._compiled_fork_state = mx.compile(
            lambda state, parents, tokens: advance_state(gather_state(state, parents), tokens)
        )

    def initial_state(
        self,
        prompts: Sequence[Sequence[int]],
        encoder_input_ids: Sequence[Sequence[int]],
        requested_max_lengths: Sequence[int],
        keys: Sequence[mx.array],
    ) -> tuple[ProcessorState, ProcessorState]:
        """The state of rows of prompt tokens, and the part of it that stays fixed.

        sources: the tokens that the encoder_ settings read. ends: max_length. keys: per row, or per prompt of beams.
        """
        pairs = [*self.settings.sequence_bias, *((word, 0.0) for word in self.settings.bad_words_ids)]
        state = build_state(
            self.state_names,
            prompts,
            encoder_input_ids,
            requested_max_lengths,
            keys,
            self.vocab_size,
            recent_token_count(pairs),
        )
        return {k: v for k, v in state.items() if k not in FIXED_NAMES}, {
            k: v for k, v in state.items() if k in FIXED_NAMES
        }

    def select_tokens(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState
    ) -> tuple[mx.array, ProcessorState]:
        """The token of each row, and the state after it.

        int32 [rows, 1], or [rows, 2] with the bits of the token's log-probability. logits: [rows, vocab] of any float
        type. fixed: the fixed arrays and those that the host gives for this token.
        """
        return self._compiled_select(logits, state, fixed)

    def select_along_tree(
        self,
        logits: mx.array,
        state: ProcessorState,
        fixed: ProcessorState,
        host_arrays: ProcessorState,
        tokens: mx.array,
        parents: mx.array,
        depth: int,
    ) -> tuple[mx.array, ProcessorState]:
        """The tokens that plain decoding chooses after node 0 of each row's tree of guesses and along the guesses it
        chooses too, and the state after them.

        int32 [rows, depth, 1 or 2]: for each node of the path what `tokens` gives; what stands after the path's end is
        unspecified. logits: [rows, nodes, vocab]. given: arrays [rows, nodes, ...], those that the host gives for each
        node. tokens, parents: int32 [rows, nodes], the tree; a parent of -1 is none. depth: nodes of the longest path.

        This is not the rejection sampling of Leviathan et al. 2023, whose texts only have the right distribution: each
        choice is made from the true logits, with the processors' state and the random key that it has without guesses,
        and a guess counts where it equals it. So texts, log-probabilities and seeds mean the same with and without.
        """
        return self._compiled_select_along_tree(logits, state, fixed, host_arrays, tokens, parents, depth)

    def select_candidates(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState, scores: mx.array
    ) -> tuple[mx.array, ProcessorState]:
        """The best continuations of each prompt, for beam scores float32 [rows].

        int32 [prompts, n × count]: the indices beam × vocab + token, the bits of their scores, and where asked those of
        their log-probabilities; `ranked` reads a row of it.
        """
        return self._compiled_rank(logits, state, fixed, scores)

    def unpack_candidates(self, read: np.ndarray) -> tuple[list[int], list[int], np.ndarray, list[float] | None]:
        """The candidates of one prompt, a row of what `candidates` gave, the best first.

        The beams they continue, their tokens, their scores float32, and their log-probabilities where asked for. Those
        that were sampled come in the order of their draws; of equal scores the lower index comes first.
        """
        parts = read.reshape(-1, self.candidate_count)
        indices, values = parts[0].tolist(), parts[1:].view(np.float32)
        scores, *logprobs = values.tolist()
        order = list(range(self.candidate_count))
        if not self.settings.do_sample:
            order.sort(key=lambda i: (-scores[i], indices[i]))
        beams, tokens = zip(*(divmod(indices[i], self.vocab_size) for i in order), strict=True)
        return list(beams), list(tokens), values[0, order], [logprobs[0][i] for i in order] if logprobs else None

    def fork_state(self, state: ProcessorState, parents: mx.array, tokens: mx.array) -> ProcessorState:
        """The state in which each row continues row parents[r] with tokens[r]; both int32 [rows]."""
        return self._compiled_fork_state(state, parents, tokens)

    def process_scores(self, scores: mx.array, state: ProcessorState, fixed: ProcessorState) -> mx.array:
        """scores float32 [rows, vocab] after all processors: what a token is chosen from."""
        everything = state | fixed
        for processor in self.processors:
            scores = processor.process(scores, everything)
        return scores

    def _select(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState
    ) -> tuple[mx.array, ProcessorState]:
        scores = self.process_scores(logits.astype(mx.float32), state, fixed)
        drawn = scores
        if "keys" in state:
            noise, state = _gumbel_noise(state, scores.shape[-1])
            drawn = scores + noise
        chosen = mx.argmax(drawn, axis=-1, keepdims=True).astype(mx.int32)
        columns = [chosen]
        if self.logprobs:
            columns.append(_float_bits(log_softmax_at(scores, chosen)))
        return mx.concatenate(columns, axis=-1), advance_state(state, chosen[:, 0])

    def _select_along_tree(
        self,
        logits: mx.array,
        state: ProcessorState,
        fixed: ProcessorState,
        host_arrays: ProcessorState,
        tokens: mx.array,
        parents: mx.array,
        depth: int,
    ) -> tuple[mx.array, ProcessorState]:
        rows = mx.arange(logits.shape[0])
        node, live = mx.zeros(rows.shape, mx.int32), mx.ones(rows.shape, mx.bool_)
        found = []
        for _ in range(depth):
            here = {name: array[rows, node] for name, array in host_arrays.items()}
            packed, after = self._select(logits[rows, node], state, fixed | here)
            # The state goes on along the path alone: as many keys are used, as many tokens seen, as were chosen.
            state = {name: _where_rows(live, after[name], array) for name, array in state.items()}
            found.append(packed)
            fits = (tokens == packed[:, :1]) & (parents == node[:, None])
            live = live & mx.any(fits, axis=-1)
            node = mx.where(live, mx.argmax(fits, axis=-1).astype(mx.int32), node)
        return mx.stack(found, axis=1), state

    def _rank_candidates(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState, scores: mx.array
    ) -> tuple[mx.array, ProcessorState]:
        processed = self.process_scores(log_softmax(logits.astype(mx.float32)), state, fixed)
        total = mx.maximum(mx.maximum(processed, LOWEST_FINITE) + scores[:, None], LOWEST_FINITE)
        total = total.reshape(-1, self.settings.num_beams * self.vocab_size)
        drawn = total
        if "keys" in state:
            noise, state = _gumbel_noise(state, total.shape[-1])
            drawn = total + noise
        best = top_k_indices(drawn, self.candidate_count)
        if "keys" in state:
            best = mx.take_along_axis(best, mx.argsort(-mx.take_along_axis(drawn, best, axis=-1), axis=-1), axis=-1)
        columns = [best, _float_bits(mx.take_along_axis(total, best, axis=-1))]
        if self.logprobs:
            columns.append(_float_bits(log_softmax_at(processed, best, self.settings.num_beams)))
        return mx.concatenate(columns, axis=-1), state


def row_random_keys(seeds: Sequence[int], count: int) -> list[mx.array]:
    """count keys for each seed; a seed is any int, of which the low 64 bits count."""
    keys = [mx.random.key(seed % 2**64) for seed in seeds]
    return [part for key in keys for part in (mx.random.split(key, count) if count > 1 else [key])]


def _gumbel_noise(state: ProcessorState, size: int) -> tuple[mx.array, ProcessorState]:
    """Gumbel noise [keys, size], and the state with the next keys.

    The largest of scores + noise is a draw from their softmax, the n largest n draws without replacement (Gumbel 1954;
    Kool et al. 2019). Each row draws from its own key, so its tokens do not depend on the batch.
    """
    keys = mx.vmap(mx.random.split)(state["keys"])
    noise = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys[:, 1])
    return noise, {**state, "keys": keys[:, 0]}


def _where_rows(rows: mx.array, yes: mx.array, no: mx.array) -> mx.array:
    """yes in the rows [rows] that are true, no in the others."""
    return mx.where(rows.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def _float_bits(values: mx.array) -> mx.array:
    """int32: the bits of float32 values."""
    return mx.where(mx.isnan(values), QUIET_NAN, values.view(mx.int32))
