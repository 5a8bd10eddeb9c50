"""The compiled choice of a step: from logits and the state of the rows to one int32 array and the next state."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.best import best_places
from mlx_transmuter.generation.bits import QUIET_NAN
from mlx_transmuter.generation.processors import Custom, custom_name, processors, recent_tokens
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.generation.state import FIXED, State, first_state, inherited, moved
from mlx_transmuter.generation.warpers import LOWEST, log_softmax, log_softmax_at


class Selection:
    """The choice of tokens under one set of settings, for any number of rows.

    `tokens` chooses one token per row, `path` those along a tree of guesses, `candidates` the best continuations of
    each prompt's beams. All are compiled once per shape. `reads` names the arrays of the state in use, `host` those
    that the host gives before each token: without any, a step needs nothing of the token before it but the token
    itself.
    """

    def __init__(self, settings: Settings, vocab: int, custom: Sequence[Custom] = (), logprobs: bool = False):
        """Raises GenerationError for settings whose ids are outside the vocabulary."""
        self.settings, self.vocab, self.logprobs = settings, vocab, logprobs
        self.processors = processors(settings, vocab, custom)
        given = {"banned", *(custom_name(index) for index in range(len(custom)))}
        self.reads = {name for processor in self.processors for name in processor.reads}
        self.host = self.reads & given
        if settings.do_sample:
            self.reads.add("keys")
        self.count = min(settings.candidates * settings.num_beams, settings.num_beams * vocab)
        self._tokens = mx.compile(self._choose)
        self._path = mx.compile(self._walk)
        self._candidates = mx.compile(self._rank)
        self._follow = mx.compile(lambda state, parents, tokens: moved(inherited(state, parents), tokens))

    def begin(
        self,
        rows: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        ends: Sequence[int],
        keys: Sequence[mx.array],
    ) -> tuple[State, State]:
        """The state of rows of prompt tokens, and the part of it that stays fixed.

        sources: the tokens that the encoder_ settings read. ends: max_length. keys: per row, or per prompt of beams.
        """
        pairs = [*self.settings.sequence_bias, *((word, 0.0) for word in self.settings.bad_words_ids)]
        state = first_state(self.reads, rows, sources, ends, keys, self.vocab, recent_tokens(pairs))
        return {k: v for k, v in state.items() if k not in FIXED}, {k: v for k, v in state.items() if k in FIXED}

    def tokens(self, logits: mx.array, state: State, fixed: State) -> tuple[mx.array, State]:
        """The token of each row, and the state after it.

        int32 [rows, 1], or [rows, 2] with the bits of the token's log-probability. logits: [rows, vocab] of any float
        type. fixed: the fixed arrays and those that the host gives for this token.
        """
        return self._tokens(logits, state, fixed)

    def path(
        self,
        logits: mx.array,
        state: State,
        fixed: State,
        given: State,
        tokens: mx.array,
        parents: mx.array,
        depth: int,
    ) -> tuple[mx.array, State]:
        """The tokens that plain decoding chooses after node 0 of each row's tree of guesses and along the guesses it
        chooses too, and the state after them.

        int32 [rows, depth, 1 or 2]: for each node of the path what `tokens` gives; what stands after the path's end is
        unspecified. logits: [rows, nodes, vocab]. given: arrays [rows, nodes, ...], those that the host gives for each
        node. tokens, parents: int32 [rows, nodes], the tree; a parent of -1 is none. depth: nodes of the longest path.

        This is not the rejection sampling of Leviathan et al. 2023, whose texts only have the right distribution: each
        choice is made from the true logits, with the processors' state and the random key that it has without guesses,
        and a guess counts where it equals it. So texts, log-probabilities and seeds mean the same with and without.
        """
        return self._path(logits, state, fixed, given, tokens, parents, depth)

    def candidates(self, logits: mx.array, state: State, fixed: State, scores: mx.array) -> tuple[mx.array, State]:
        """The best continuations of each prompt, for beam scores float32 [rows].

        int32 [prompts, n × count]: the indices beam × vocab + token, the bits of their scores, and where asked those of
        their log-probabilities; `ranked` reads a row of it.
        """
        return self._candidates(logits, state, fixed, scores)

    def ranked(self, read: np.ndarray) -> tuple[list[int], list[int], np.ndarray, list[float] | None]:
        """The candidates of one prompt, a row of what `candidates` gave, the best first.

        The beams they continue, their tokens, their scores float32, and their log-probabilities where asked for. Those
        that were sampled come in the order of their draws; of equal scores the lower index comes first.
        """
        parts = read.reshape(-1, self.count)
        indices, values = parts[0].tolist(), parts[1:].view(np.float32)
        scores, *logprobs = values.tolist()
        order = list(range(self.count))
        if not self.settings.do_sample:
            order.sort(key=lambda i: (-scores[i], indices[i]))
        beams, tokens = zip(*(divmod(indices[i], self.vocab) for i in order), strict=True)
        return list(beams), list(tokens), values[0, order], [logprobs[0][i] for i in order] if logprobs else None

    def follow(self, state: State, parents: mx.array, tokens: mx.array) -> State:
        """The state in which each row continues row parents[r] with tokens[r]; both int32 [rows]."""
        return self._follow(state, parents, tokens)

    def processed(self, scores: mx.array, state: State, fixed: State) -> mx.array:
        """scores float32 [rows, vocab] after all processors: what a token is chosen from."""
        everything = state | fixed
        for processor in self.processors:
            scores = processor.process(scores, everything)
        return scores

    def _choose(self, logits: mx.array, state: State, fixed: State) -> tuple[mx.array, State]:
        scores = self.processed(logits.astype(mx.float32), state, fixed)
        drawn = scores
        if "keys" in state:
            noise, state = _noise(state, scores.shape[-1])
            drawn = scores + noise
        chosen = mx.argmax(drawn, axis=-1, keepdims=True).astype(mx.int32)
        columns = [chosen]
        if self.logprobs:
            columns.append(_bits(log_softmax_at(scores, chosen)))
        return mx.concatenate(columns, axis=-1), moved(state, chosen[:, 0])

    def _walk(
        self,
        logits: mx.array,
        state: State,
        fixed: State,
        given: State,
        tokens: mx.array,
        parents: mx.array,
        depth: int,
    ) -> tuple[mx.array, State]:
        rows = mx.arange(logits.shape[0])
        node, live = mx.zeros(rows.shape, mx.int32), mx.ones(rows.shape, mx.bool_)
        found = []
        for _ in range(depth):
            here = {name: array[rows, node] for name, array in given.items()}
            packed, after = self._choose(logits[rows, node], state, fixed | here)
            # The state goes on along the path alone: as many keys are used, as many tokens seen, as were chosen.
            state = {name: _where(live, after[name], array) for name, array in state.items()}
            found.append(packed)
            fits = (tokens == packed[:, :1]) & (parents == node[:, None])
            live = live & mx.any(fits, axis=-1)
            node = mx.where(live, mx.argmax(fits, axis=-1).astype(mx.int32), node)
        return mx.stack(found, axis=1), state

    def _rank(self, logits: mx.array, state: State, fixed: State, scores: mx.array) -> tuple[mx.array, State]:
        processed = self.processed(log_softmax(logits.astype(mx.float32)), state, fixed)
        total = mx.maximum(mx.maximum(processed, LOWEST) + scores[:, None], LOWEST)
        total = total.reshape(-1, self.settings.num_beams * self.vocab)
        drawn = total
        if "keys" in state:
            noise, state = _noise(state, total.shape[-1])
            drawn = total + noise
        best = best_places(drawn, self.count)
        if "keys" in state:
            best = mx.take_along_axis(best, mx.argsort(-mx.take_along_axis(drawn, best, axis=-1), axis=-1), axis=-1)
        columns = [best, _bits(mx.take_along_axis(total, best, axis=-1))]
        if self.logprobs:
            columns.append(_bits(log_softmax_at(processed, best, self.settings.num_beams)))
        return mx.concatenate(columns, axis=-1), state


def row_keys(seeds: Sequence[int], count: int) -> list[mx.array]:
    """count keys for each seed; a seed is any int, of which the low 64 bits count."""
    keys = [mx.random.key(seed % 2**64) for seed in seeds]
    return [part for key in keys for part in (mx.random.split(key, count) if count > 1 else [key])]


def _noise(state: State, size: int) -> tuple[mx.array, State]:
    """Gumbel noise [keys, size], and the state with the next keys.

    The largest of scores + noise is a draw from their softmax, the n largest n draws without replacement (Gumbel 1954;
    Kool et al. 2019). Each row draws from its own key, so its tokens do not depend on the batch.
    """
    keys = mx.vmap(mx.random.split)(state["keys"])
    noise = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys[:, 1])
    return noise, {**state, "keys": keys[:, 0]}


def _where(rows: mx.array, yes: mx.array, no: mx.array) -> mx.array:
    """yes in the rows [rows] that are true, no in the others."""
    return mx.where(rows.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def _bits(values: mx.array) -> mx.array:
    """int32: the bits of float32 values."""
    return mx.where(mx.isnan(values), QUIET_NAN, values.view(mx.int32))
