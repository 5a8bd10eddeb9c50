"""One call of generation: its prompts, seeds and inputs, checked, and the texts that come of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.generation_context import CompiledGeneration
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.row import FINISH_LENGTH, GenerationResult, PromptPositions, Row, to_integers

# Inputs of a call that are not inputs of the decoder.
ENCODER_INPUT_IDS, POSITION_IDS = "encoder_input_ids", "position_ids"

# Whether the new tokens of a text, a sequence of ids, end it.
StopCondition = Callable[[Sequence[int]], bool]


class StepOutput(NamedTuple):
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
        gen: CompiledGeneration,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        inputs: Mapping[str, Any],
        stop: Sequence[StopCondition | None] | None = None,
        cancel: threading.Event | None = None,
        prompt_cache: PromptCache | None = None,
    ):
        self.compiled, self.context, self.settings = gen, gen.context, gen.context.settings
        rest = dict(inputs)
        self.prompts = _check_prompts(prompts, gen)
        self.seeds = to_integers("seeds", _one_per_prompt("seeds", seeds, gen))
        self.stop_conditions = _one_per_prompt("stop", stop or [None] * gen.batch_size, gen)
        if self.settings.stop_strings and not any(self.stop_conditions):
            raise GenerationError(
                "setting stop_strings", "nothing that finds them", "a task with a tokenizer", "give `stop`"
            )
        self.cancel_event = cancel
        self.encoder_input_ids = self._check_encoder_input_ids(rest.pop(ENCODER_INPUT_IDS, None))
        given = rest.pop(POSITION_IDS, None) if POSITION_IDS not in self.context.extra_input_names else None
        self.prompt_positions = PromptPositions(given, self.prompts, gen.decoder.max_positions) if given else None
        if self.prompt_positions is not None and gen.max_draft_tokens:
            raise GenerationError(
                f"input {POSITION_IDS}",
                "positions, and guesses of several tokens",
                "one of them",
                "leave out the guesses",
            )
        self.extra_inputs = self._check_extra_inputs(rest)
        self.prompt_cache = self._check_prompt_cache(prompt_cache)
        self.new_token_limits = [self._new_token_limit(len(prompt)) if prompt else 0 for prompt in self.prompts]
        texts = self.settings.num_return_sequences
        self.results = [GenerationResult([], FINISH_LENGTH) for _ in range(gen.batch_size * texts)]
        self.finished_flags = np.array([not self.prompts[text // texts] for text in range(len(self.results))])

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave the run up."""
        return self.cancel_event is not None and self.cancel_event.is_set()

    def append_tokens(self, rows: Mapping[int, Row], selected: Mapping[int, tuple[int, float | None]]) -> StepOutput:
        """The Step in which the rows of texts take what was chosen, row → (token, log-probability); those that have
        ended take nothing."""
        new = {}
        for row, (token, logprob) in selected.items():
            text = rows[row]
            if text.is_live:
                if text.append_token(
                    token,
                    logprob,
                    self.settings.eos_token_id,
                    self.stop_conditions[row // self.settings.rows_per_prompt],
                ):
                    new[row] = token, logprob
                self.finished_flags[row] = not text.is_live
        return self.make_step_output(new)

    def make_step_output(self, new_tokens: Mapping[int, tuple[int, float | None]]) -> StepOutput:
        """The Step of new tokens, text → (token, log-probability)."""
        tokens, logprobs = [-1] * len(self.results), [math.nan] * len(self.results)
        for text, (token, logprob) in new_tokens.items():
            tokens[text] = token
            logprobs[text] = math.nan if logprob is None else logprob
        told = np.array(logprobs, np.float32) if self.context.token_logprobs else None
        return StepOutput(np.array(tokens, np.int32), self.finished_flags.copy(), told)

    def _new_token_limit(self, length: int) -> int:
        count, most = self.context.new_token_limit(length), self.compiled.decoder.max_positions
        # The last token needs no position, for no step takes it.
        return min(count, most - length + 1) if most else count

    def _check_prompt_cache(self, cache: PromptCache | None) -> PromptCache | None:
        if cache is None:
            return None
        if not isinstance(cache, PromptCache):
            raise GenerationError(
                "prompt_cache", repr(cache)[:80], "a generation.PromptCache", "PromptCache.load a file"
            )
        found = None
        if cache.module is not getattr(self.compiled.decoder, "module", None):
            found = "one of another model"
        elif cache.kv_cache.pool_specs != self.compiled.decoder.pool_specs:
            raise GenerationError(
                "prompt_cache",
                f"one with kv_bits={cache.kv_bits}, kv_group_size={cache.kv_group_size}, unlike this context",
                "keys and values that are packed alike in both",
                "give both the same kv_bits and kv_group_size, or leave the cache out",
            )
        elif self.prompt_positions is not None:
            found = "one, and prompts with positions of their own"
        if found:
            raise GenerationError(
                "prompt_cache", found, "one of this model, for prompts of tokens alone", "leave it out"
            )
        return cache

    def _check_encoder_input_ids(self, encoder_input_ids: Sequence[Sequence[int]] | None) -> list[list[int]]:
        if encoder_input_ids is not None:
            name = f"input {ENCODER_INPUT_IDS}"
            return [to_integers(name, tokens) for tokens in _one_per_prompt(name, encoder_input_ids, self.compiled)]
        read = self.settings.encoder_repetition_penalty != 1.0 or self.settings.encoder_no_repeat_ngram_size > 0
        if read and self.context.is_encoder_decoder:
            raise GenerationError(
                f"input {ENCODER_INPUT_IDS}", "nothing", "the encoder's tokens, which an encoder_ setting reads"
            )
        return self.prompts

    def _check_extra_inputs(self, extra_inputs: dict[str, Any]) -> dict[str, mx.array]:
        names, size = set(self.context.extra_input_names), self.compiled.batch_size
        if extra_inputs.keys() != names:
            found, wanted = (", ".join(sorted(some)) or "none" for some in (extra_inputs, names))
            raise GenerationError("inputs", found, wanted, "name them in the context's `given`")
        arrays = {
            name: array if isinstance(array, mx.array) else mx.array(array) for name, array in extra_inputs.items()
        }
        for name, array in arrays.items():
            if not array.ndim or array.shape[0] != size:
                raise GenerationError(f"input {name}", f"shape {list(array.shape)}", f"{size} rows, one per prompt")
        return arrays


def _check_prompts(prompts: Sequence[Sequence[int]], gen: CompiledGeneration) -> list[list[int]]:
    found = [to_integers(f"prompt {i}", prompt) for i, prompt in enumerate(_one_per_prompt("prompts", prompts, gen))]
    vocab, most = gen.decoder.vocab_size, gen.decoder.max_positions
    for place, prompt in enumerate(found):
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise GenerationError(f"prompt {place}", f"the token ids {wrong[:5]}", f"ids from 0 to {vocab - 1}")
        if most and len(prompt) > most:
            raise GenerationError(
                f"prompt {place}", f"{len(prompt)} tokens", f"at most the model's {most} positions", "shorten it"
            )
    return found


def _one_per_prompt(name: str, values: Sequence[Any], gen: CompiledGeneration) -> list[Any]:
    if len(values) != gen.batch_size:
        raise GenerationError(name, f"{len(values)}", f"one for each of the {gen.batch_size} prompts of the batch")
    return list(values)
