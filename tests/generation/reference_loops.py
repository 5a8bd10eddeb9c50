"""Generation as plain loops over lists, one row at a time: a second implementation of what transformers 4.57.6 does.

`test_against_transformers.py` compares it with transformers itself; the other tests compare the compiled, batched code
with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Scores = np.ndarray
LOWEST, HIGHEST = np.finfo(np.float32).min, np.finfo(np.float32).max


def id_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def softmax(scores: Scores) -> Scores:
    return np.exp(log_softmax(scores))


def log_softmax(scores: Scores) -> Scores:
    below = scores.astype(np.float64) - scores.max()
    return below - np.log(np.exp(below).sum())


@dataclass(frozen=True)
class ReferenceRow:
    """A row as the processors see it: its prompt, its new tokens, the encoder's tokens, and whether it is the first row
    of its prompt."""

    settings: dict[str, Any]
    prompt: Sequence[int]
    new: Sequence[int]
    encoder_tokens: Sequence[int]
    is_first: bool

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.new]

    @property
    def eos(self) -> list[int]:
        return id_list(self.settings.get("eos_token_id"))


def process_scores(
    scores: Scores,
    prompt: Sequence[int],
    new: Sequence[int],
    first_row: bool = True,
    source: Sequence[int] | None = None,
    **settings: Any,
) -> Scores:
    """Returns scores float32 [vocab] of one row after every processor of the settings, max_new_tokens among them."""
    row = ReferenceRow(settings, prompt, new, prompt if source is None else source, first_row)
    scores = scores.astype(np.float32).copy()
    for process in PROCESSORS:
        changed = process(scores, row)
        scores = scores if changed is None else changed
    return scores


def add_sequence_bias(scores: Scores, row: ReferenceRow) -> None:
    for word, bias in row.settings.get("sequence_bias") or []:
        if completes(row.tokens, word):
            scores[word[-1]] += np.float32(bias)


def penalize_repetitions(scores: Scores, row: ReferenceRow) -> None:
    if row.is_first:
        penalize(scores, row.encoder_tokens, 1 / row.settings.get("encoder_repetition_penalty", 1.0))
    penalize(scores, row.tokens, row.settings.get("repetition_penalty", 1.0))


def remove_repeated_ngrams(scores: Scores, row: ReferenceRow) -> None:
    sizes = (("no_repeat_ngram_size", row.tokens), ("encoder_no_repeat_ngram_size", row.encoder_tokens))
    for name, tokens in sizes:
        if size := row.settings.get(name, 0):
            remove(scores, [gram[-1] for gram in ngrams(tokens, size) if ends_with(row.tokens, gram[:-1])])


def remove_bad_words(scores: Scores, row: ReferenceRow) -> None:
    for word in row.settings.get("bad_words_ids") or []:
        if not (len(word) == 1 and word[0] in row.eos) and completes(row.tokens, word):
            scores[word[-1]] = -np.inf


def remove_early_eos(scores: Scores, row: ReferenceRow) -> None:
    minimum = row.settings.get("min_length", 0)
    if row.settings.get("min_new_tokens") is not None:
        minimum = len(row.prompt) + row.settings["min_new_tokens"]
    if len(row.tokens) < minimum:
        remove(scores, row.eos)


def force_tokens(scores: Scores, row: ReferenceRow) -> None:
    settings = row.settings
    if settings.get("forced_bos_token_id") is not None and len(row.tokens) == 1:
        force(scores, [settings["forced_bos_token_id"]])
    if settings.get("forced_eos_token_id") is not None and len(row.new) == settings["max_new_tokens"] - 1:
        force(scores, id_list(settings["forced_eos_token_id"]))


def replace_invalid_values(scores: Scores, row: ReferenceRow) -> None:
    if row.settings.get("remove_invalid_values"):
        scores[:] = np.nan_to_num(scores, nan=0.0, posinf=HIGHEST, neginf=LOWEST)


def decay_length(scores: Scores, row: ReferenceRow) -> None:
    if decay := row.settings.get("exponential_decay_length_penalty"):
        late = len(row.new) - decay[0]
        if late > 0:
            scores[row.eos] += np.abs(scores[row.eos]) * np.float32(decay[1] ** late - 1)


def suppress(scores: Scores, row: ReferenceRow) -> None:
    remove(scores, row.settings.get("suppress_tokens") or [])
    after_forced_bos = len(row.prompt) == 1 and row.settings.get("forced_bos_token_id") is not None
    if len(row.new) == int(after_forced_bos):
        remove(scores, row.settings.get("begin_suppress_tokens") or [])


def apply_custom(scores: Scores, row: ReferenceRow) -> Scores:
    for process in row.settings.get("processors") or []:
        scores = process(scores, row.prompt, row.new)
    return scores


def warp_if_sampling(scores: Scores, row: ReferenceRow) -> Scores:
    if not row.settings.get("do_sample"):
        return scores
    min_tokens_to_keep = 1 if row.settings.get("num_beams", 1) == 1 else max(2, len(row.eos) + 1)
    return warp_scores(scores, min_tokens_to_keep, **row.settings)


def renormalize(scores: Scores, row: ReferenceRow) -> Scores:
    return log_softmax(scores).astype(np.float32) if row.settings.get("renormalize_logits") else scores


# In the order of `_get_logits_processor`. Each changes the scores in place or returns others.
PROCESSORS: tuple[Callable[[Scores, ReferenceRow], Scores | None], ...] = (
    add_sequence_bias,
    penalize_repetitions,
    remove_repeated_ngrams,
    remove_bad_words,
    remove_early_eos,
    force_tokens,
    replace_invalid_values,
    decay_length,
    suppress,
    apply_custom,
    warp_if_sampling,
    renormalize,
)


def warp_scores(scores: Scores, min_tokens_to_keep: int = 1, **s: Any) -> Scores:
    """Returns scores after the settings of sampling."""
    scores = scores / np.float32(s.get("temperature", 1.0))
    if k := s.get("top_k", 50):
        kth = np.sort(scores)[::-1][min(max(k, min_tokens_to_keep), len(scores)) - 1]
        scores = np.where(scores < kth, -np.inf, scores)
    if (p := s.get("top_p", 1.0)) < 1:
        mass, removed = 0.0, []
        for token in np.argsort(scores, kind="stable")[: len(scores) - min_tokens_to_keep]:
            mass += softmax(scores)[token]
            if mass <= 1 - p:
                removed.append(token)
        scores = copy_without(scores, removed)
    if (p := s.get("min_p")) is not None:
        masses = softmax(scores)
        spared = np.argsort(-scores, kind="stable")[:min_tokens_to_keep]
        scores = copy_without(scores, [t for t in np.flatnonzero(masses < p * masses.max()) if t not in spared])
    if (p := s.get("typical_p", 1.0)) < 1:
        logs = log_softmax(scores)
        masses = np.exp(logs)
        entropy = -sum(mass * log for mass, log in zip(masses, logs, strict=True) if mass > 0)
        far = np.abs(-logs - entropy)
        order = np.argsort(far, kind="stable")
        last = min(int((np.cumsum(masses[order]) < p).sum()), len(scores) - 1)
        scores = copy_without(scores, [t for t in order[min_tokens_to_keep:] if far[t] > far[order[last]]])
    for name in ("epsilon_cutoff", "eta_cutoff"):
        if epsilon := s.get(name, 0.0):
            masses = softmax(scores)
            if name == "eta_cutoff":
                entropy = -sum(mass * math.log(mass) for mass in masses if mass > 0)
                epsilon = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy))
            kth = np.sort(scores)[::-1][min_tokens_to_keep - 1]
            scores = np.where((masses < epsilon) & (scores < kth), -np.inf, scores)
    return scores.astype(np.float32)


def greedy(model: Callable[[Sequence[int]], Scores], prompt: list[int], **s: Any) -> tuple[list[int], list[float], str]:
    """New tokens without the eos, their log-probabilities, and why the text ends."""
    new: list[int] = []
    logprobs: list[float] = []
    while len(new) < s["max_new_tokens"]:
        scores = process_scores(model([*prompt, *new]), prompt, new, **s)
        if np.isnan(scores).all() or (scores == -np.inf).all():
            return new, logprobs, "error"
        token = int(np.argmax(scores))
        if token in id_list(s.get("eos_token_id")):
            return new, logprobs, "stop"
        new.append(token)
        logprobs.append(float(log_softmax(scores)[token]))
    return new, logprobs, "length"


def score_all_sequences(
    model: Callable[[Sequence[int]], Scores], prompt: list[int], vocab: int, **s: Any
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns (score, tokens with their eos) of every possible sequence, the best first: what a beam search with as many
    beams must find."""
    found = []
    for length in range(1, s["max_new_tokens"] + 1):
        for text in itertools.product(range(vocab), repeat=length):
            ends = text[-1] in id_list(s.get("eos_token_id"))
            if any(token in id_list(s.get("eos_token_id")) for token in text[:-1]) or not (
                ends or length == s["max_new_tokens"]
            ):
                continue
            total = sum(
                float(process_scores(log_softmax(model([*prompt, *text[:at]])), prompt, text[:at], at == 0, **s)[token])
                for at, token in enumerate(text)
            )
            found.append((total / length ** s.get("length_penalty", 1.0), text))
    return sorted(found, reverse=True)


def penalize(scores: Scores, tokens: Sequence[int], penalty: float) -> None:
    for token in set(tokens):
        scores[token] = (
            scores[token] * np.float32(penalty) if scores[token] < 0 else scores[token] / np.float32(penalty)
        )


def remove(scores: Scores, tokens: Sequence[int]) -> None:
    for token in tokens:
        if 0 <= token < len(scores):
            scores[token] = -np.inf


def force(scores: Scores, tokens: Sequence[int]) -> None:
    scores[:] = -np.inf
    scores[list(tokens)] = 0


def copy_without(scores: Scores, tokens: Sequence[int]) -> Scores:
    scores = scores.copy()
    remove(scores, tokens)
    return scores


def ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]


def ends_with(tokens: Sequence[int], tail: Sequence[int]) -> bool:
    return len(tail) <= len(tokens) and list(tokens[len(tokens) - len(tail) :]) == list(tail)


def completes(tokens: Sequence[int], word: Sequence[int]) -> bool:
    """Returns whether word's last token would complete it after tokens; transformers requires as many tokens as the word
    has."""
    return len(word) == 1 or (len(word) <= len(tokens) and ends_with(tokens, word[:-1]))
