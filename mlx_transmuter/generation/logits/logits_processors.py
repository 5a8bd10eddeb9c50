"""The logits processors of transformers 4.57.6 that the settings ask for, as functions of scores and of the rows'
state.

Their order is that of `_get_logits_processor`, which `Settings` lists. A score is a logit, or under beam search a
log-probability; a removed token has a score of minus infinity. The sampling settings (its logits warpers) each work on
a fresh softmax of the scores that the one before left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_transmuter.generation.logits.custom_processors import check_processor_result, custom_state_name
from mlx_transmuter.generation.logits.forced_and_suppressed_tokens import (
    begin_suppress_tokens,
    forced_bos_token_id,
    forced_eos_token_id,
    suppress_tokens,
)
from mlx_transmuter.generation.logits.length_rules import exponential_decay_length_penalty, min_length, min_new_tokens
from mlx_transmuter.generation.logits.probability_cutoffs import epsilon_cutoff, eta_cutoff, min_p
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.processor_types import CustomProcessor, LogitsProcessor
from mlx_transmuter.generation.logits.repetition_penalties import (
    encoder_repetition_penalty,
    remove_banned_ids,
    remove_seen_tokens,
    repetition_penalty,
)
from mlx_transmuter.generation.logits.scores import HIGHEST_FINITE, LOWEST_FINITE, log_softmax
from mlx_transmuter.generation.logits.sequence_biases import bad_words_ids, sequence_bias_processor
from mlx_transmuter.generation.logits.top_k_top_p import top_k, top_k_top_p, top_p
from mlx_transmuter.generation.logits.typical_sampling import typical_p
from mlx_transmuter.generation.settings import SETTINGS, Settings, check_vocabulary

# The processor of each setting, of the settings and the size of the vocabulary.
PROCESSOR_BUILDERS: dict[str, Callable[[Settings, int], LogitsProcessor]] = {
    "sequence_bias": lambda s, vocab: sequence_bias_processor(s.sequence_bias, vocab),
    "encoder_repetition_penalty": lambda s, _: encoder_repetition_penalty(
        s.encoder_repetition_penalty, s.rows_per_prompt
    ),
    "repetition_penalty": lambda s, _: repetition_penalty(s.repetition_penalty),
    "no_repeat_ngram_size": lambda s, _: (
        remove_seen_tokens("seen_tokens") if s.no_repeat_ngram_size == 1 else remove_banned_ids()
    ),
    "encoder_no_repeat_ngram_size": lambda s, _: (
        remove_seen_tokens("encoder_tokens") if s.encoder_no_repeat_ngram_size == 1 else remove_banned_ids()
    ),
    "bad_words_ids": lambda s, vocab: bad_words_ids(s.bad_words_ids, s.eos_token_id, vocab),
    "min_length": lambda s, vocab: min_length(s.min_length, s.eos_token_id, vocab),
    "min_new_tokens": lambda s, vocab: min_new_tokens(s.min_new_tokens or 0, s.eos_token_id, vocab),
    "forced_bos_token_id": lambda s, vocab: forced_bos_token_id(s.forced_bos_token_id or 0, vocab),
    "forced_eos_token_id": lambda s, vocab: forced_eos_token_id(s.forced_eos_token_id, vocab),
    "remove_invalid_values": lambda s, _: LogitsProcessor((), _replace_invalid_values),
    "exponential_decay_length_penalty": lambda s, vocab: exponential_decay_length_penalty(
        s.exponential_decay_length_penalty or (0, 1.0), s.eos_token_id, vocab, under_beams=s.num_beams > 1
    ),
    "suppress_tokens": lambda s, vocab: suppress_tokens(s.suppress_tokens, vocab),
    "begin_suppress_tokens": lambda s, vocab: begin_suppress_tokens(
        s.begin_suppress_tokens, s.forced_bos_token_id is not None, vocab
    ),
    "temperature": lambda s, _: _stateless_processor(lambda scores: scores / s.temperature),
    "top_k": lambda s, _: _stateless_processor(_top_k_function(s)),
    "top_p": lambda s, _: _stateless_processor(lambda scores: top_p(scores, s.top_p, s.min_tokens_to_keep)),
    "min_p": lambda s, _: _stateless_processor(lambda scores: min_p(scores, s.min_p or 0.0, s.min_tokens_to_keep)),
    "typical_p": lambda s, _: _stateless_processor(lambda scores: typical_p(scores, s.typical_p, s.min_tokens_to_keep)),
    "epsilon_cutoff": lambda s, _: _stateless_processor(
        lambda scores: epsilon_cutoff(scores, s.epsilon_cutoff, s.min_tokens_to_keep)
    ),
    "eta_cutoff": lambda s, _: _stateless_processor(
        lambda scores: eta_cutoff(scores, s.eta_cutoff, s.min_tokens_to_keep)
    ),
    "renormalize_logits": lambda s, _: _stateless_processor(log_softmax),
}


def _top_k_function(settings: Settings) -> Callable[[mx.array], mx.array]:
    """Returns top_k, which does top_p too where that is on, as it then has few scores to sort."""
    k = max(settings.top_k, settings.min_tokens_to_keep)
    if settings.is_enabled("top_p"):
        return lambda scores: top_k_top_p(scores, k, settings.top_p, settings.min_tokens_to_keep)
    return lambda scores: top_k(scores, k)


# When a setting that is on has no processor of its own, beside what its value says.
EXTRA_CONDITIONS: dict[str, Callable[[Settings], bool]] = {
    # Both sizes of several tokens ban ids in the same array.
    "encoder_no_repeat_ngram_size": lambda s: s.encoder_no_repeat_ngram_size == 1 or s.no_repeat_ngram_size <= 1,
    # transformers sets min_length to the prompt plus min_new_tokens, where that is set.
    "min_length": lambda s: s.min_new_tokens is None and bool(s.eos_token_id),
    "min_new_tokens": lambda s: bool(s.min_new_tokens and s.eos_token_id),
    "top_p": lambda s: not s.is_enabled("top_k"),
}

# The processors of a task come before those of sampling.
FIRST_SAMPLING_SETTING = "temperature"


def build_processors(
    settings: Settings, vocab_size: int, custom_processors: Sequence[CustomProcessor] = ()
) -> list[LogitsProcessor]:
    """Returns the processors of the settings that are on and of the task, in the order in which they apply.

    Raises GenerationError for token ids outside the vocabulary, where transformers does.
    """
    check_vocabulary(settings, vocab_size)
    processors: list[LogitsProcessor] = []
    for setting in SETTINGS:
        if setting == FIRST_SAMPLING_SETTING:
            processors += [_custom_processor(index, process) for index, (_, process) in enumerate(custom_processors)]
        if setting in PROCESSOR_BUILDERS and _has_processor(settings, setting):
            processors.append(PROCESSOR_BUILDERS[setting](settings, vocab_size))
    return processors


def _has_processor(settings: Settings, setting: str) -> bool:
    return settings.is_enabled(setting) and (setting not in EXTRA_CONDITIONS or EXTRA_CONDITIONS[setting](settings))


def _stateless_processor(process: Callable[[mx.array], mx.array]) -> LogitsProcessor:
    return LogitsProcessor((), lambda scores, state: process(scores))


def _replace_invalid_values(scores: mx.array, state: ProcessorState) -> mx.array:
    """Replaces NaN by 0 and infinite scores by the finite ones of largest magnitude. InfNanRemoveLogitsProcessor."""
    return mx.where(mx.isnan(scores), 0.0, mx.clip(scores, LOWEST_FINITE, HIGHEST_FINITE))


def _custom_processor(index: int, process: Callable[[mx.array, mx.array], mx.array]) -> LogitsProcessor:
    name = custom_state_name(index)

    def process_rows(scores: mx.array, state: ProcessorState) -> mx.array:
        rows = [process(scores[row], state[name][row]) for row in range(scores.shape[0])]
        for result in rows:
            check_processor_result(index, result, scores.shape[1:])
        return mx.stack(rows).astype(mx.float32)

    return LogitsProcessor((name,), process_rows)
