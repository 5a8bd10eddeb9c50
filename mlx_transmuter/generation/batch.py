"""One call of generation: its prompts, seeds and inputs, checked, and the results of its rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError, ScoreError
from mlx_transmuter.generation.exit_gate import exit_gate
from mlx_transmuter.generation.generation_context import CompiledGeneration
from mlx_transmuter.generation.length_notices import length_notice, table_end
from mlx_transmuter.generation.logits.score_faults import ScoreFault, fault_of
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.prompt_positions import PromptPositions, clip_to_positions
from mlx_transmuter.generation.row import GenerationResult, Row
from mlx_transmuter.generation.setting_checks import to_integers
from mlx_transmuter.generation.stop_rules import FINISH_LENGTH, StopCondition, StopRules

# Inputs of a call that are not inputs of the decoder.
ENCODER_INPUT_IDS, POSITION_IDS = "encoder_input_ids", "position_ids"


class StepOutput(NamedTuple):
    """The new tokens of a step, with one entry per result.

    token: int32, the new token, or -1 where there is none. finished: bool, whether no more come. logprob: float32, the
    token's log-probability or NaN; None where not asked for.
    """

    token: np.ndarray
    finished: np.ndarray
    logprob: np.ndarray | None


class RowFault(NamedTuple):
    """What was wrong with the scores of a row, and the step: the number of its new tokens before them."""

    fault: ScoreFault
    step: int


class Batch:
    """The checked prompts of a call, and its results.

    encoder_input_ids: per prompt the tokens that the encoder_ settings read. new_token_limits: per prompt its most new
    tokens. extra_inputs: the decoder's other inputs, one row per prompt. results, finished_flags: one entry per result,
    filled in by the loop. faults: the results that ended because their scores left no token. Raises GenerationError for
    what does not fit the compiled context.
    """

    def __init__(
        self,
        gen: CompiledGeneration,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        inputs: Mapping[str, Any],
        *,
        stop: Sequence[StopCondition | None] | None = None,
        cancel_event: threading.Event | None = None,
        prompt_cache: PromptCache | None = None,
    ):
        self.compiled, self.context, self.settings = gen, gen.context, gen.context.settings
        self.cancel_event = cancel_event
        self.prompts = _check_prompts(prompts, gen)
        self.seeds = to_integers("seeds", _one_per_prompt("seeds", seeds, gen))
        self.stop_rules = self._make_stop_rules(stop)
        inputs = dict(inputs)
        self.encoder_input_ids = self._check_encoder_input_ids(inputs.pop(ENCODER_INPUT_IDS, None))
        takes_positions = POSITION_IDS not in self.context.extra_input_names
        self.prompt_positions = self._check_positions(inputs.pop(POSITION_IDS, None) if takes_positions else None)
        self.extra_inputs = self._check_extra_inputs(inputs)
        if prompt_cache is not None:
            _check_prompt_cache(prompt_cache, gen, self.prompt_positions)
        self.prompt_cache = prompt_cache
        self.new_token_limits = [
            self._new_token_limit(index) if prompt else 0 for index, prompt in enumerate(self.prompts)
        ]
        per_prompt = self.settings.num_return_sequences
        self.results = [GenerationResult([], FINISH_LENGTH) for _ in range(gen.batch_size * per_prompt)]
        self.faults: dict[int, RowFault] = {}
        self.finished_flags = np.array([not self.prompts[index // per_prompt] for index in range(len(self.results))])

    @property
    def row_count(self) -> int:
        """The rows of the decoder, those of all prompts."""
        return self.compiled.batch_size * self.settings.rows_per_prompt

    @property
    def cancelled(self) -> bool:
        """Whether the caller cancelled the generation, or the interpreter exits and this is a daemon thread."""
        return exit_gate.is_closed or (self.cancel_event is not None and self.cancel_event.is_set())

    def make_row(self, row: int) -> Row:
        """Returns a row of the batch without new tokens."""
        prompt = self.settings.prompt_of(row)
        return Row(self.prompts[prompt], self.new_token_limits[prompt], self.stop_rules[prompt])

    def append_tokens(self, rows: Mapping[int, Row], selected: Mapping[int, tuple[int, float | None]]) -> StepOutput:
        """Appends the selected tokens, row -> (token, log-probability), to the rows that have not ended, and returns
        the step. A row of which the selection is a ScoreFault ends without a token."""
        new_tokens = {}
        for index, (token, logprob) in selected.items():
            row = rows[index]
            if row.is_live:
                if (fault := fault_of(token)) is not None:
                    self.faults[index] = RowFault(fault, len(row.new_tokens))
                    row.fail()
                elif row.append_token(token, logprob):
                    new_tokens[index] = token, logprob
                self.finished_flags[index] = not row.is_live
        return self.make_step_output(new_tokens)

    def make_step_output(self, new_tokens: Mapping[int, tuple[int, float | None]]) -> StepOutput:
        """Returns the step of new tokens, result -> (token, log-probability)."""
        tokens, logprobs = [-1] * len(self.results), [math.nan] * len(self.results)
        for index, (token, logprob) in new_tokens.items():
            tokens[index] = token
            logprobs[index] = math.nan if logprob is None else logprob
        output_logprobs = np.array(logprobs, np.float32) if self.context.token_logprobs else None
        return StepOutput(np.array(tokens, np.int32), self.finished_flags.copy(), output_logprobs)

    def raise_faults(self) -> None:
        """Raises ScoreError where the scores of a row left no token to select."""
        if self.faults:
            raise ScoreError(dict(sorted(self.faults.items())), self.results)

    def add_length_notices(self) -> None:
        """Gives each result its notice, where its length met a limit of the model."""
        for index, result in enumerate(self.results):
            prompt = index // self.settings.num_return_sequences
            length, count = len(self.prompts[prompt]), len(result.tokens)
            missing = 0
            if result.finish_reason == FINISH_LENGTH and length and count == self.new_token_limits[prompt]:
                missing = self.context.new_token_limit(length) - count
            result.notice = length_notice(self.compiled.decoder, length + count, missing)

    def _new_token_limit(self, prompt: int) -> int:
        """Returns the most new tokens of a prompt: what the settings say, as far as there are positions."""
        length = len(self.prompts[prompt])
        count = self.context.new_token_limit(length)
        # Given positions may go further than the tokens are many.
        start = length + max(0, self.prompt_positions.delta(prompt) if self.prompt_positions else 0)
        # The last token needs no position, for no step takes it.
        return clip_to_positions(start + count - 1, self.compiled.decoder.max_positions) - start + 1

    def _make_stop_rules(self, stop: Sequence[StopCondition | None] | None) -> list[StopRules]:
        conditions = _one_per_prompt("stop", stop or [None] * self.compiled.batch_size, self.compiled)
        if self.settings.stop_strings and not any(conditions):
            raise GenerationError(
                "setting stop_strings", "no `stop` that finds them", "a task with a tokenizer", "pass `stop`"
            )
        eos = frozenset(self.settings.eos_token_id)
        return [StopRules(eos, condition) for condition in conditions]

    def _check_positions(self, positions: Sequence[Sequence[Sequence[int]]] | None) -> PromptPositions | None:
        if not positions:
            return None
        checked = PromptPositions(positions, self.prompts, self.compiled.decoder.max_positions)
        if self.compiled.max_draft_tokens:
            found = "positions, and drafts of several tokens"
            raise GenerationError(f"input {POSITION_IDS}", found, "one of them", "leave out the drafts")
        return checked

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
            found, expected = (", ".join(sorted(each)) or "none" for each in (extra_inputs, names))
            raise GenerationError("inputs", found, expected, "pass one array for each extra input of the decoder")
        arrays = {
            name: array if isinstance(array, mx.array) else mx.array(array) for name, array in extra_inputs.items()
        }
        for name, array in arrays.items():
            if not array.ndim or array.shape[0] != size:
                raise GenerationError(f"input {name}", f"shape {list(array.shape)}", f"{size} rows, one per prompt")
        return arrays


def _check_prompts(prompts: Sequence[Sequence[int]], gen: CompiledGeneration) -> list[list[int]]:
    checked = [to_integers(f"prompt {i}", prompt) for i, prompt in enumerate(_one_per_prompt("prompts", prompts, gen))]
    vocab_size, max_positions = gen.decoder.vocab_size, gen.decoder.max_positions
    for index, prompt in enumerate(checked):
        if outside := [token for token in prompt if not 0 <= token < vocab_size]:
            raise GenerationError(f"prompt {index}", f"the token ids {outside[:5]}", f"ids from 0 to {vocab_size - 1}")
        if clip_to_positions(len(prompt), max_positions) < len(prompt):
            expected = f"at most {table_end(gen.decoder)}"
            raise GenerationError(f"prompt {index}", f"{len(prompt)} tokens", expected, "shorten it")
    return checked


def _check_prompt_cache(
    prompt_cache: PromptCache, gen: CompiledGeneration, prompt_positions: PromptPositions | None
) -> None:
    if not isinstance(prompt_cache, PromptCache):
        raise GenerationError(
            "prompt_cache", repr(prompt_cache)[:80], "a generation.PromptCache", "load a file with PromptCache.load"
        )
    prompt_cache.check_fits(gen.decoder, has_positions=prompt_positions is not None)


def _one_per_prompt(name: str, values: Sequence[Any], gen: CompiledGeneration) -> list[Any]:
    if len(values) != gen.batch_size:
        raise GenerationError(name, f"{len(values)}", f"one for each of the {gen.batch_size} prompts of the batch")
    return list(values)
