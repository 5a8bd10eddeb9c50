"""One call of generation: its prompts, seeds and inputs, checked, and the texts that come of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.context import Compiled
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.rows import LENGTH, Positions, Result, Row, integers

# Inputs of a call that are not inputs of the decoder.
ENCODER_TOKENS, POSITIONS = "encoder_input_ids", "position_ids"

# Whether the new tokens of a text, a sequence of ids, end it.
Stop = Callable[[Sequence[int]], bool]


class Step(NamedTuple):
    """What a step brought, with one entry per text.

    token: int32, the new token, or -1 where there is none. finished: bool, whether no more comes. logprob: float32, the
    token's log-probability or NaN; None where not asked for.
    """

    token: np.ndarray
    finished: np.ndarray
    logprob: np.ndarray | None


class Batch:
    """The checked prompts of a call, and its results.

    sources: per prompt the tokens that the encoder_ settings read. limits: per prompt its most new tokens. inputs: the
    decoder's other inputs, one row per prompt. results, finished: one entry per text, filled in by the loop.
    Raises GenerationError for what does not fit the compiled context.
    """

    def __init__(
        self,
        gen: Compiled,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        inputs: Mapping[str, Any],
        stop: Sequence[Stop | None] | None = None,
        cancel: threading.Event | None = None,
        prompt_cache: PromptCache | None = None,
    ):
        self.gen, self.ctx, self.settings = gen, gen.context, gen.context.settings
        rest = dict(inputs)
        self.prompts = _prompts(prompts, gen)
        self.seeds = integers("seeds", _one_each("seeds", seeds, gen))
        self.stop = _one_each("stop", stop or [None] * gen.batch_size, gen)
        if self.settings.stop_strings and not any(self.stop):
            raise GenerationError(
                "setting stop_strings", "nothing that finds them", "a task with a tokenizer", "give `stop`"
            )
        self.cancel = cancel
        self.sources = self._sources(rest.pop(ENCODER_TOKENS, None))
        given = rest.pop(POSITIONS, None) if POSITIONS not in self.ctx.given else None
        self.positions = Positions(given, self.prompts, gen.decoder.max_positions) if given else None
        if self.positions is not None and gen.guesses:
            raise GenerationError(
                f"input {POSITIONS}", "positions, and guesses of several tokens", "one of them", "leave out the guesses"
            )
        self.inputs = self._inputs(rest)
        self.prompt_cache = self._usable(prompt_cache)
        self.limits = [self._limit(len(prompt)) if prompt else 0 for prompt in self.prompts]
        texts = self.settings.num_return_sequences
        self.results = [Result([], LENGTH) for _ in range(gen.batch_size * texts)]
        self.finished = np.array([not self.prompts[text // texts] for text in range(len(self.results))])

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave the run up."""
        return self.cancel is not None and self.cancel.is_set()

    def accept(self, rows: Mapping[int, Row], chosen: Mapping[int, tuple[int, float | None]]) -> Step:
        """The Step in which the rows of texts take what was chosen, row → (token, log-probability); those that have
        ended take nothing."""
        new = {}
        for row, (token, logprob) in chosen.items():
            text = rows[row]
            if text.live:
                if text.accept(token, logprob, self.settings.eos_token_id, self.stop[row // self.settings.width]):
                    new[row] = token, logprob
                self.finished[row] = not text.live
        return self.step(new)

    def step(self, new: Mapping[int, tuple[int, float | None]]) -> Step:
        """The Step of new tokens, text → (token, log-probability)."""
        tokens = np.full(len(self.results), -1, np.int32)
        logprobs = np.full(len(self.results), np.nan, np.float32)
        for text, (token, logprob) in new.items():
            tokens[text] = token
            logprobs[text] = np.nan if logprob is None else logprob
        return Step(tokens, self.finished.copy(), logprobs if self.ctx.token_logprobs else None)

    def _limit(self, length: int) -> int:
        count, most = self.ctx.new_tokens(length), self.gen.decoder.max_positions
        # The last token needs no position, for no step takes it.
        return min(count, most - length + 1) if most else count

    def _usable(self, cache: PromptCache | None) -> PromptCache | None:
        if cache is None:
            return None
        if not isinstance(cache, PromptCache):
            raise GenerationError(
                "prompt_cache", repr(cache)[:80], "a generation.PromptCache", "PromptCache.load a file"
            )
        found = None
        if cache.module is not getattr(self.gen.decoder, "module", None):
            found = "one of another model"
        elif cache.store.kinds != self.gen.decoder.kinds:
            raise GenerationError(
                "prompt_cache",
                f"one with kv_bits={cache.kv_bits}, kv_group_size={cache.kv_group_size}, unlike this context",
                "keys and values that are packed alike in both",
                "give both the same kv_bits and kv_group_size, or leave the cache out",
            )
        elif self.positions is not None:
            found = "one, and prompts with positions of their own"
        if found:
            raise GenerationError(
                "prompt_cache", found, "one of this model, for prompts of tokens alone", "leave it out"
            )
        return cache

    def _sources(self, given: Sequence[Sequence[int]] | None) -> list[list[int]]:
        if given is not None:
            name = f"input {ENCODER_TOKENS}"
            return [integers(name, tokens) for tokens in _one_each(name, given, self.gen)]
        read = self.settings.encoder_repetition_penalty != 1.0 or self.settings.encoder_no_repeat_ngram_size > 0
        if read and self.ctx.encoder_decoder:
            raise GenerationError(
                f"input {ENCODER_TOKENS}", "nothing", "the encoder's tokens, which an encoder_ setting reads"
            )
        return self.prompts

    def _inputs(self, given: dict[str, Any]) -> dict[str, mx.array]:
        names, size = set(self.ctx.given), self.gen.batch_size
        if given.keys() != names:
            found, wanted = (", ".join(sorted(some)) or "none" for some in (given, names))
            raise GenerationError("inputs", found, wanted, "name them in the context's `given`")
        arrays = {name: array if isinstance(array, mx.array) else mx.array(array) for name, array in given.items()}
        for name, array in arrays.items():
            if not array.ndim or array.shape[0] != size:
                raise GenerationError(f"input {name}", f"shape {list(array.shape)}", f"{size} rows, one per prompt")
        return arrays


def _prompts(prompts: Sequence[Sequence[int]], gen: Compiled) -> list[list[int]]:
    found = [integers(f"prompt {i}", prompt) for i, prompt in enumerate(_one_each("prompts", prompts, gen))]
    vocab, most = gen.decoder.vocab, gen.decoder.max_positions
    for place, prompt in enumerate(found):
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise GenerationError(f"prompt {place}", f"the token ids {wrong[:5]}", f"ids from 0 to {vocab - 1}")
        if most and len(prompt) > most:
            raise GenerationError(
                f"prompt {place}", f"{len(prompt)} tokens", f"at most the model's {most} positions", "shorten it"
            )
    return found


def _one_each(name: str, values: Sequence[Any], gen: Compiled) -> list[Any]:
    if len(values) != gen.batch_size:
        raise GenerationError(name, f"{len(values)}", f"one for each of the {gen.batch_size} prompts of the batch")
    return list(values)
