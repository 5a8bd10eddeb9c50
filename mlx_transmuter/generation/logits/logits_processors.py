"""The logits processors of transformers 4.57.6, as functions of scores and of the state of the rows on the device.

`processors` lists those that the settings ask for in the order of `_get_logits_processor`. A score is a logit, or under
beam search a log-probability; a removed token has a score of minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.logits.processor_state import NO_TOKEN, ProcessorState, mask_from_ids
from mlx_transmuter.generation.logits.sampling_warpers import LOWEST_FINITE, REMOVED_SCORE, build_warpers, log_softmax
from mlx_transmuter.generation.settings import Settings

HIGHEST_FINITE = float(np.finfo(np.float32).max)

# A task's own processor: state(dict(prompt, generated, vocab)) -> array of one shape at every step, and
# process(logits of one row, that array) -> logits. `generated` has the last token first.
CustomProcessor = tuple[Callable[[Mapping[str, Any]], Any], Callable[[mx.array, mx.array], mx.array]]


class LogitsProcessor(NamedTuple):
    """One processor: the setting it comes from, the arrays of the state that it reads, and scores, state -> scores."""

    setting: str
    state_names: tuple[str, ...]
    process: Callable[[mx.array, ProcessorState], mx.array]


def build_processors(
    settings: Settings, vocab_size: int, custom_processors: Sequence[CustomProcessor] = ()
) -> list[LogitsProcessor]:
    """The processors that settings and the task ask for, in the order of `_get_logits_processor` of transformers
    4.57.6."""
    return list(_ordered_processors(settings, vocab_size, custom_processors))


def _ordered_processors(
    settings: Settings, vocab_size: int, custom: Sequence[CustomProcessor]
) -> Iterator[LogitsProcessor]:
    if settings.sequence_bias:
        yield sequence_bias("sequence_bias", settings.sequence_bias, vocab_size)
    if settings.encoder_repetition_penalty != 1.0:
        yield encoder_repetition_penalty(settings.encoder_repetition_penalty, settings.rows_per_prompt)
    if settings.repetition_penalty != 1.0:
        yield repetition_penalty(settings.repetition_penalty)
    yield from _no_repeat_ngrams(settings.no_repeat_ngram_size, settings.encoder_no_repeat_ngram_size)
    if settings.bad_words_ids:
        yield bad_words_ids(settings.bad_words_ids, settings.eos_token_id, vocab_size)
    # transformers sets min_length to the prompt plus min_new_tokens, where that is given
    if settings.min_new_tokens is None and settings.min_length > 0 and settings.eos_token_id:
        yield min_length(settings.min_length, settings.eos_token_id, vocab_size)
    if settings.min_new_tokens and settings.eos_token_id:
        yield min_new_tokens(settings.min_new_tokens, settings.eos_token_id, vocab_size)
    if settings.forced_bos_token_id is not None:
        yield forced_bos_token_id(settings.forced_bos_token_id, vocab_size)
    if settings.forced_eos_token_id:
        yield forced_eos_token_id(settings.forced_eos_token_id, vocab_size)
    if settings.remove_invalid_values:
        yield LogitsProcessor("remove_invalid_values", (), _replace_invalid_values)
    if settings.exponential_decay_length_penalty:
        yield exponential_decay_length_penalty(
            settings.exponential_decay_length_penalty, settings.eos_token_id, vocab_size
        )
    if settings.suppress_tokens:
        yield suppress_tokens(settings.suppress_tokens, vocab_size)
    if settings.begin_suppress_tokens:
        yield begin_suppress_tokens(
            settings.begin_suppress_tokens, settings.forced_bos_token_id is not None, vocab_size
        )
    yield from (_custom_processor(index, process) for index, (_, process) in enumerate(custom))
    yield from (LogitsProcessor(name, (), _process_with_warper(warper)) for name, warper in build_warpers(settings))
    if settings.renormalize_logits:
        yield LogitsProcessor("renormalize_logits", (), lambda scores, state: log_softmax(scores))


def repetition_penalty(penalty: float) -> LogitsProcessor:
    """Divides the positive and multiplies the negative scores of the row's tokens by penalty, once per token."""
    return LogitsProcessor(
        "repetition_penalty", ("seen",), lambda scores, state: _penalize(scores, state["seen"], penalty)
    )


def encoder_repetition_penalty(penalty: float, width: int) -> LogitsProcessor:
    """The inverse penalty, of the tokens of the encoder or prompt, on the first of the width rows of a prompt.

    transformers gathers and scatters by ids that it does not repeat for beams or for several texts of a prompt, so a
    prompt alone changes only in its first row; this does the same.
    """

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        first = mx.arange(scores.shape[0])[:, None] % width == 0
        return _penalize(scores, state["source"] & first, 1 / penalty)

    return LogitsProcessor("encoder_repetition_penalty", ("source",), process)


def sequence_bias(setting: str, pairs: Sequence[tuple[tuple[int, ...], float]], vocab_size: int) -> LogitsProcessor:
    """Adds to a token's score the bias of each sequence that the token would complete. SequenceBiasLogitsProcessor.

    A sequence of n tokens counts in rows of at least n tokens, though its first n - 1 are all that must match: so does
    transformers.
    """
    _check_token_ids(setting, {token for tokens, _ in pairs for token in tokens}, vocab_size)
    always = np.zeros(vocab_size, np.float32)
    for (first, *others), bias in pairs:
        if not others:
            always[first] = bias
    longer = [(tokens, bias) for tokens, bias in pairs if len(tokens) > 1]
    if not longer:
        row = mx.array(always)
        return LogitsProcessor(setting, (), lambda scores, state: scores + row)
    width = recent_token_count(pairs)
    prefixes = np.full((len(longer), width), NO_TOKEN, np.int32)
    for place, (tokens, _) in enumerate(longer):
        prefixes[place, width - len(tokens) + 1 :] = tokens[:-1]
    arrays = [
        mx.array(array)
        for array in (
            always,
            prefixes,
            np.array([len(tokens) for tokens, _ in longer], np.int32),
            np.array([tokens[-1] for tokens, _ in longer], np.int32),
            np.array([bias for _, bias in longer], np.float32),
        )
    ]
    mx.eval(arrays)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        single, wanted, lengths, completing, added = arrays
        same = (state["recent"][:, None, -width:] == wanted[None]) | (wanted[None] == NO_TOKEN)
        matched = mx.all(same, axis=-1) & (state["length"][:, None] >= lengths[None])
        rows = mx.arange(scores.shape[0])[:, None]
        bias = mx.broadcast_to(single[None], scores.shape)
        return scores + bias.at[rows, completing[None]].add(mx.where(matched, added[None], 0.0))

    return LogitsProcessor(setting, ("recent", "length"), process)


def bad_words_ids(words: Sequence[tuple[int, ...]], eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes each token that would complete one of words; an eos is never a bad word. NoBadWordsLogitsProcessor."""
    kept = [word for word in words if not (len(word) == 1 and word[0] in eos)]
    return sequence_bias("bad_words_ids", [(word, REMOVED_SCORE) for word in kept], vocab_size)


def recent_token_count(pairs: Sequence[tuple[Sequence[int], float]]) -> int:
    """How many of a row's last tokens the sequences of pairs are compared with."""
    return max((len(tokens) - 1 for tokens, _ in pairs), default=0)


def min_length(minimum: int, eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes the eos tokens from rows of fewer than least tokens, the prompt counted."""
    ends = _token_mask(eos, vocab_size)
    return _removal_processor("min_length", ("length",), ends, lambda state: state["length"] < minimum)


def min_new_tokens(minimum: int, eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes the eos tokens from rows of fewer than least new tokens."""
    ends = _token_mask(eos, vocab_size)
    return _removal_processor(
        "min_new_tokens", ("length", "start"), ends, lambda state: state["length"] - state["start"] < minimum
    )


def forced_bos_token_id(token: int, vocab_size: int) -> LogitsProcessor:
    """Leaves only token, with a score of 0, to rows of one token."""
    return _forcing_processor(
        "forced_bos_token_id", ("length",), [token], vocab_size, lambda state: state["length"] == 1
    )


def forced_eos_token_id(tokens: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Leaves only tokens, with a score of 0, to rows of max_length - 1 tokens."""
    return _forcing_processor(
        "forced_eos_token_id", ("length", "end"), tokens, vocab_size, lambda state: state["length"] == state["end"] - 1
    )


def exponential_decay_length_penalty(
    penalty: tuple[int, float], eos: Sequence[int], vocab_size: int
) -> LogitsProcessor:
    """Adds |score| · (factor^n - 1) to the eos tokens, n new tokens after start. ExponentialDecayLengthPenalty."""
    start, factor = penalty
    _check_token_ids("eos_token_id", eos, vocab_size)
    ends = _token_mask(eos, vocab_size)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        late = (state["length"] - state["start"] - start).astype(mx.float32)[:, None]
        # The factor's power is taken of its magnitude: a device's power of a negative number is NaN.
        power = mx.power(abs(factor), mx.maximum(late, 0.0))
        if factor < 0:
            power = mx.where(late.astype(mx.int32) % 2 == 1, -power, power)
        return mx.where((late > 0) & ends, scores + mx.abs(scores) * (power - 1), scores)

    return LogitsProcessor("exponential_decay_length_penalty", ("length", "start"), process)


def suppress_tokens(tokens: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes tokens always."""
    gone = _token_mask(tokens, vocab_size)
    return LogitsProcessor("suppress_tokens", (), lambda scores, state: mx.where(gone, REMOVED_SCORE, scores))


def begin_suppress_tokens(tokens: Sequence[int], after_forced: bool, vocab_size: int) -> LogitsProcessor:
    """Removes tokens at the first new token, or at the second after a forced one of a prompt of one token."""
    gone = _token_mask(tokens, vocab_size)

    def begins(state: ProcessorState) -> mx.array:
        start = state["start"]
        return state["length"] == (mx.where(start > 1, start, start + 1) if after_forced else start)

    return _removal_processor("begin_suppress_tokens", ("length", "start"), gone, begins)


def _penalize(scores: mx.array, tokens: mx.array, penalty: float) -> mx.array:
    return mx.where(tokens, mx.where(scores < 0, scores * penalty, scores / penalty), scores)


def _replace_invalid_values(scores: mx.array, state: ProcessorState) -> mx.array:
    return mx.where(mx.isnan(scores), 0.0, mx.clip(scores, LOWEST_FINITE, HIGHEST_FINITE))


def _no_repeat_ngrams(size: int, encoder_size: int) -> Iterator[LogitsProcessor]:
    """The bans of n-grams: the host names the few ids of each row, and the device has the set of single tokens
    itself."""
    if size > 1 or encoder_size > 1:
        setting = "no_repeat_ngram_size" if size > 1 else "encoder_no_repeat_ngram_size"
        yield LogitsProcessor(
            setting,
            ("banned",),
            lambda scores, state: _remove_tokens(scores, mask_from_ids(state["banned"], scores.shape[-1])),
        )
    if size == 1:
        yield LogitsProcessor(
            "no_repeat_ngram_size", ("seen",), lambda scores, state: _remove_tokens(scores, state["seen"])
        )
    if encoder_size == 1:
        yield LogitsProcessor(
            "encoder_no_repeat_ngram_size", ("source",), lambda scores, state: _remove_tokens(scores, state["source"])
        )


def _remove_tokens(scores: mx.array, tokens: mx.array) -> mx.array:
    return mx.where(tokens, REMOVED_SCORE, scores)


def _custom_processor(index: int, process: Callable[[mx.array, mx.array], mx.array]) -> LogitsProcessor:
    name = custom_state_name(index)

    def all_rows(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.stack([process(scores[row], state[name][row]) for row in range(scores.shape[0])]).astype(mx.float32)

    return LogitsProcessor("processors", (name,), all_rows)


def custom_state_name(index: int) -> str:
    """The name in the state of what the task's processor of this index reads."""
    return f"custom.{index}"


def _process_with_warper(warper: Callable[[mx.array], mx.array]) -> Callable[[mx.array, ProcessorState], mx.array]:
    return lambda scores, state: warper(scores)


def _removal_processor(
    setting: str, reads: tuple[str, ...], tokens: mx.array, when: Callable[[ProcessorState], mx.array]
) -> LogitsProcessor:
    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.where(when(state)[:, None] & tokens, REMOVED_SCORE, scores)

    return LogitsProcessor(setting, reads, process)


def _forcing_processor(
    setting: str,
    reads: tuple[str, ...],
    tokens: Sequence[int],
    vocab_size: int,
    when: Callable[[ProcessorState], mx.array],
) -> LogitsProcessor:
    _check_token_ids(setting, tokens, vocab_size)
    forced = mx.where(_token_mask(tokens, vocab_size), 0.0, REMOVED_SCORE)
    mx.eval(forced)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.where(when(state)[:, None], forced, scores)

    return LogitsProcessor(setting, reads, process)


def _token_mask(tokens: Sequence[int], vocab_size: int) -> mx.array:
    """bool [1, vocab]; ids outside the vocabulary match nothing."""
    mask = np.zeros((1, vocab_size), bool)
    mask[0, [token for token in tokens if 0 <= token < vocab_size]] = True
    return mx.array(mask)


def _check_token_ids(setting: str, tokens: Sequence[int] | set[int], vocab_size: int) -> None:
    if outside := sorted(token for token in tokens if token >= vocab_size):
        raise GenerationError(
            f"setting {setting}", f"the token ids {outside}", f"ids below the vocabulary's {vocab_size}"
        )
