"""Generation as plain loops over lists, one row at a time: a second writing of what transformers 4.57.6 does.

`test_against_transformers.py` holds it against transformers itself; the other tests hold the compiled, batched code
against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Scores = np.ndarray
LOWEST, HIGHEST = np.finfo(np.float32).min, np.finfo(np.float32).max


def id_list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def softmax(scores: Scores) -> Scores:
    return np.exp(log_softmax(scores))


def log_softmax(scores: Scores) -> Scores:
    below = scores.astype(np.float64) - scores.max()
    return below - np.log(np.exp(below).sum())


def process_scores(
    scores: Scores,
    prompt: Sequence[int],
    new: Sequence[int],
    first_row: bool = True,
    source: Sequence[int] | None = None,
    **s: Any,
) -> Scores:
    """scores float32 [vocab] after every processor of settings s, max_new_tokens among them, for one row."""
    tokens, eos = [*prompt, *new], id_list(s.get("eos_token_id"))
    source = prompt if source is None else source
    scores = scores.astype(np.float32).copy()
    for word, bias in s.get("sequence_bias") or []:
        if completes(tokens, word):
            scores[word[-1]] += np.float32(bias)
    if (penalty := s.get("encoder_repetition_penalty", 1.0)) != 1.0 and first_row:
        penalize(scores, source, 1 / penalty)
    penalize(scores, tokens, s.get("repetition_penalty", 1.0))
    if size := s.get("no_repeat_ngram_size", 0):
        remove(scores, [gram[-1] for gram in ngrams(tokens, size) if ends_with(tokens, gram[:-1])])
    if size := s.get("encoder_no_repeat_ngram_size", 0):
        remove(scores, [gram[-1] for gram in ngrams(source, size) if ends_with(tokens, gram[:-1])])
    for word in s.get("bad_words_ids") or []:
        if not (len(word) == 1 and word[0] in eos) and completes(tokens, word):
            scores[word[-1]] = -np.inf
    least = s.get("min_length", 0)
    if s.get("min_new_tokens") is not None:
        least = len(prompt) + s["min_new_tokens"]
    if len(tokens) < least:
        remove(scores, eos)
    if s.get("forced_bos_token_id") is not None and len(tokens) == 1:
        force(scores, [s["forced_bos_token_id"]])
    if s.get("forced_eos_token_id") is not None and len(tokens) == len(prompt) + s["max_new_tokens"] - 1:
        force(scores, id_list(s["forced_eos_token_id"]))
    if s.get("remove_invalid_values"):
        scores[:] = np.nan_to_num(scores, nan=0.0, posinf=HIGHEST, neginf=LOWEST)
    if decay := s.get("exponential_decay_length_penalty"):
        late = len(new) - decay[0]
        if late > 0:
            scores[eos] += np.abs(scores[eos]) * np.float32(decay[1] ** late - 1)
    remove(scores, s.get("suppress_tokens") or [])
    after_forced = len(prompt) == 1 and s.get("forced_bos_token_id") is not None
    if len(new) == int(after_forced):
        remove(scores, s.get("begin_suppress_tokens") or [])
    for process in s.get("processors") or []:
        scores = process(scores, prompt, new)
    if s.get("do_sample"):
        scores = warp_scores(scores, 1 if s.get("num_beams", 1) == 1 else max(2, len(eos) + 1), **s)
    if s.get("renormalize_logits"):
        scores = log_softmax(scores).astype(np.float32)
    return scores


def warp_scores(scores: Scores, min_tokens_to_keep: int = 1, **s: Any) -> Scores:
    """scores after the settings of sampling."""
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
        token = int(np.argmax(scores))
        if token in id_list(s.get("eos_token_id")):
            return new, logprobs, "stop"
        new.append(token)
        logprobs.append(float(log_softmax(scores)[token]))
    return new, logprobs, "length"


def score_all_sequences(
    model: Callable[[Sequence[int]], Scores], prompt: list[int], vocab: int, **s: Any
) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens with their eos) of every text that there can be, the best first: what beams as wide as that must
    find."""
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
    """Whether word's last token would complete it after tokens; transformers wants as many tokens as the word has."""
    return len(word) == 1 or (len(word) <= len(tokens) and ends_with(tokens, word[:-1]))
