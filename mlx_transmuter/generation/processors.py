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
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.generation.state import NO_TOKEN, State, members
from mlx_transmuter.generation.warpers import LOWEST, REMOVED, log_softmax, warpers

HIGHEST = float(np.finfo(np.float32).max)

# A task's own processor: state(dict(prompt, generated, vocab)) -> array of one shape at every step, and
# process(logits of one row, that array) -> logits. `generated` has the last token first.
Custom = tuple[Callable[[Mapping[str, Any]], Any], Callable[[mx.array, mx.array], mx.array]]


class Processor(NamedTuple):
    """One processor: the setting it comes from, the arrays of the state that it reads, and scores, state -> scores."""

    setting: str
    reads: tuple[str, ...]
    process: Callable[[mx.array, State], mx.array]


def processors(settings: Settings, vocab: int, custom: Sequence[Custom] = ()) -> list[Processor]:
    """The processors that settings and the task ask for, in the order of `_get_logits_processor` of transformers
    4.57.6."""
    return list(_in_order(settings, vocab, custom))


def _in_order(s: Settings, vocab: int, custom: Sequence[Custom]) -> Iterator[Processor]:
    if s.sequence_bias:
        yield biases("sequence_bias", s.sequence_bias, vocab)
    if s.encoder_repetition_penalty != 1.0:
        yield encoder_repetition_penalty(s.encoder_repetition_penalty, s.width)
    if s.repetition_penalty != 1.0:
        yield repetition_penalty(s.repetition_penalty)
    yield from _no_repeats(s.no_repeat_ngram_size, s.encoder_no_repeat_ngram_size)
    if s.bad_words_ids:
        yield bad_words(s.bad_words_ids, s.eos_token_id, vocab)
    # transformers sets min_length to the prompt plus min_new_tokens, where that is given
    if s.min_new_tokens is None and s.min_length > 0 and s.eos_token_id:
        yield min_length(s.min_length, s.eos_token_id, vocab)
    if s.min_new_tokens and s.eos_token_id:
        yield min_new_tokens(s.min_new_tokens, s.eos_token_id, vocab)
    if s.forced_bos_token_id is not None:
        yield forced_bos(s.forced_bos_token_id, vocab)
    if s.forced_eos_token_id:
        yield forced_eos(s.forced_eos_token_id, vocab)
    if s.remove_invalid_values:
        yield Processor("remove_invalid_values", (), _valid)
    if s.exponential_decay_length_penalty:
        yield decay(s.exponential_decay_length_penalty, s.eos_token_id, vocab)
    if s.suppress_tokens:
        yield suppress(s.suppress_tokens, vocab)
    if s.begin_suppress_tokens:
        yield begin_suppress(s.begin_suppress_tokens, s.forced_bos_token_id is not None, vocab)
    yield from (_custom(index, process) for index, (_, process) in enumerate(custom))
    yield from (Processor(name, (), _alone(warper)) for name, warper in warpers(s))
    if s.renormalize_logits:
        yield Processor("renormalize_logits", (), lambda scores, state: log_softmax(scores))


def repetition_penalty(penalty: float) -> Processor:
    """Divides the positive and multiplies the negative scores of the row's tokens by penalty, once per token."""
    return Processor("repetition_penalty", ("seen",), lambda scores, state: _penalised(scores, state["seen"], penalty))


def encoder_repetition_penalty(penalty: float, width: int) -> Processor:
    """The inverse penalty, of the tokens of the encoder or prompt, on the first of the width rows of a prompt.

    transformers gathers and scatters by ids that it does not repeat for beams or for several texts of a prompt, so a
    prompt alone changes only in its first row; this does the same.
    """

    def process(scores: mx.array, state: State) -> mx.array:
        first = mx.arange(scores.shape[0])[:, None] % width == 0
        return _penalised(scores, state["source"] & first, 1 / penalty)

    return Processor("encoder_repetition_penalty", ("source",), process)


def biases(setting: str, pairs: Sequence[tuple[tuple[int, ...], float]], vocab: int) -> Processor:
    """Adds to a token's score the bias of each sequence that the token would complete. SequenceBiasLogitsProcessor.

    A sequence of n tokens counts in rows of at least n tokens, though its first n - 1 are all that must match: so does
    transformers.
    """
    _check_ids(setting, {token for tokens, _ in pairs for token in tokens}, vocab)
    always = np.zeros(vocab, np.float32)
    for (first, *others), bias in pairs:
        if not others:
            always[first] = bias
    longer = [(tokens, bias) for tokens, bias in pairs if len(tokens) > 1]
    if not longer:
        row = mx.array(always)
        return Processor(setting, (), lambda scores, state: scores + row)
    width = recent_tokens(pairs)
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

    def process(scores: mx.array, state: State) -> mx.array:
        single, wanted, lengths, completing, added = arrays
        same = (state["recent"][:, None, -width:] == wanted[None]) | (wanted[None] == NO_TOKEN)
        matched = mx.all(same, axis=-1) & (state["length"][:, None] >= lengths[None])
        rows = mx.arange(scores.shape[0])[:, None]
        bias = mx.broadcast_to(single[None], scores.shape)
        return scores + bias.at[rows, completing[None]].add(mx.where(matched, added[None], 0.0))

    return Processor(setting, ("recent", "length"), process)


def bad_words(words: Sequence[tuple[int, ...]], eos: Sequence[int], vocab: int) -> Processor:
    """Removes each token that would complete one of words; an eos is never a bad word. NoBadWordsLogitsProcessor."""
    kept = [word for word in words if not (len(word) == 1 and word[0] in eos)]
    return biases("bad_words_ids", [(word, REMOVED) for word in kept], vocab)


def recent_tokens(pairs: Sequence[tuple[Sequence[int], float]]) -> int:
    """How many of a row's last tokens the sequences of pairs are compared with."""
    return max((len(tokens) - 1 for tokens, _ in pairs), default=0)


def min_length(least: int, eos: Sequence[int], vocab: int) -> Processor:
    """Removes the eos tokens from rows of fewer than least tokens, the prompt counted."""
    ends = _one_of(eos, vocab)
    return _removing("min_length", ("length",), ends, lambda state: state["length"] < least)


def min_new_tokens(least: int, eos: Sequence[int], vocab: int) -> Processor:
    """Removes the eos tokens from rows of fewer than least new tokens."""
    ends = _one_of(eos, vocab)
    return _removing(
        "min_new_tokens", ("length", "start"), ends, lambda state: state["length"] - state["start"] < least
    )


def forced_bos(token: int, vocab: int) -> Processor:
    """Leaves only token, with a score of 0, to rows of one token."""
    return _forcing("forced_bos_token_id", ("length",), [token], vocab, lambda state: state["length"] == 1)


def forced_eos(tokens: Sequence[int], vocab: int) -> Processor:
    """Leaves only tokens, with a score of 0, to rows of max_length - 1 tokens."""
    return _forcing(
        "forced_eos_token_id", ("length", "end"), tokens, vocab, lambda state: state["length"] == state["end"] - 1
    )


def decay(penalty: tuple[int, float], eos: Sequence[int], vocab: int) -> Processor:
    """Adds |score| · (factor^n - 1) to the eos tokens, n new tokens after start. ExponentialDecayLengthPenalty."""
    start, factor = penalty
    _check_ids("eos_token_id", eos, vocab)
    ends = _one_of(eos, vocab)

    def process(scores: mx.array, state: State) -> mx.array:
        late = (state["length"] - state["start"] - start).astype(mx.float32)[:, None]
        # The factor's power is taken of its magnitude: a device's power of a negative number is NaN.
        power = mx.power(abs(factor), mx.maximum(late, 0.0))
        if factor < 0:
            power = mx.where(late.astype(mx.int32) % 2 == 1, -power, power)
        return mx.where((late > 0) & ends, scores + mx.abs(scores) * (power - 1), scores)

    return Processor("exponential_decay_length_penalty", ("length", "start"), process)


def suppress(tokens: Sequence[int], vocab: int) -> Processor:
    """Removes tokens always."""
    gone = _one_of(tokens, vocab)
    return Processor("suppress_tokens", (), lambda scores, state: mx.where(gone, REMOVED, scores))


def begin_suppress(tokens: Sequence[int], after_forced: bool, vocab: int) -> Processor:
    """Removes tokens at the first new token, or at the second after a forced one of a prompt of one token."""
    gone = _one_of(tokens, vocab)

    def begins(state: State) -> mx.array:
        start = state["start"]
        return state["length"] == (mx.where(start > 1, start, start + 1) if after_forced else start)

    return _removing("begin_suppress_tokens", ("length", "start"), gone, begins)


def _penalised(scores: mx.array, tokens: mx.array, penalty: float) -> mx.array:
    return mx.where(tokens, mx.where(scores < 0, scores * penalty, scores / penalty), scores)


def _valid(scores: mx.array, state: State) -> mx.array:
    return mx.where(mx.isnan(scores), 0.0, mx.clip(scores, LOWEST, HIGHEST))


def _no_repeats(size: int, encoder_size: int) -> Iterator[Processor]:
    """The bans of n-grams: the host names the few ids of each row, and the device has the set of single tokens
    itself."""
    if size > 1 or encoder_size > 1:
        setting = "no_repeat_ngram_size" if size > 1 else "encoder_no_repeat_ngram_size"
        yield Processor(
            setting, ("banned",), lambda scores, state: _without(scores, members(state["banned"], scores.shape[-1]))
        )
    if size == 1:
        yield Processor("no_repeat_ngram_size", ("seen",), lambda scores, state: _without(scores, state["seen"]))
    if encoder_size == 1:
        yield Processor(
            "encoder_no_repeat_ngram_size", ("source",), lambda scores, state: _without(scores, state["source"])
        )


def _without(scores: mx.array, tokens: mx.array) -> mx.array:
    return mx.where(tokens, REMOVED, scores)


def _custom(index: int, process: Callable[[mx.array, mx.array], mx.array]) -> Processor:
    name = custom_name(index)

    def all_rows(scores: mx.array, state: State) -> mx.array:
        return mx.stack([process(scores[row], state[name][row]) for row in range(scores.shape[0])]).astype(mx.float32)

    return Processor("processors", (name,), all_rows)


def custom_name(index: int) -> str:
    """The name in the state of what the task's processor of this index reads."""
    return f"custom.{index}"


def _alone(warper: Callable[[mx.array], mx.array]) -> Callable[[mx.array, State], mx.array]:
    return lambda scores, state: warper(scores)


def _removing(setting: str, reads: tuple[str, ...], tokens: mx.array, when: Callable[[State], mx.array]) -> Processor:
    def process(scores: mx.array, state: State) -> mx.array:
        return mx.where(when(state)[:, None] & tokens, REMOVED, scores)

    return Processor(setting, reads, process)


def _forcing(
    setting: str, reads: tuple[str, ...], tokens: Sequence[int], vocab: int, when: Callable[[State], mx.array]
) -> Processor:
    _check_ids(setting, tokens, vocab)
    forced = mx.where(_one_of(tokens, vocab), 0.0, REMOVED)
    mx.eval(forced)

    def process(scores: mx.array, state: State) -> mx.array:
        return mx.where(when(state)[:, None], forced, scores)

    return Processor(setting, reads, process)


def _one_of(tokens: Sequence[int], vocab: int) -> mx.array:
    """bool [1, vocab]; ids outside the vocabulary match nothing."""
    mask = np.zeros((1, vocab), bool)
    mask[0, [token for token in tokens if 0 <= token < vocab]] = True
    return mx.array(mask)


def _check_ids(setting: str, tokens: Sequence[int] | set[int], vocab: int) -> None:
    if outside := sorted(token for token in tokens if token >= vocab):
        raise GenerationError(f"setting {setting}", f"the token ids {outside}", f"ids below the vocabulary's {vocab}")
