"""Checks of the values of settings: each takes a value as JSON or Python gives it and returns the one to use, or raises
InvalidSettingValue."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mlx_transmuter.generation.errors import GenerationError

# Counts, lengths and token ids are int32 on a device, scores float32.
MAX_INTEGER = 2**31 - 1
MAX_NUMBER, MIN_NORMAL = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
# More than any vocabulary has; a range of billions would never end.
MAX_LIST_LENGTH = 2**24


class InvalidSettingValue(Exception):
    """A value that a check refuses; `expected` completes the sentence "expected …"."""

    def __init__(self, expected: str):
        self.expected = expected
        super().__init__(expected)


def is_integer(value: Any) -> bool:
    """Returns whether value is a whole number; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Returns whether value equals one of the choices, as no array and no object does that may compare as it likes."""
    return (value is None or isinstance(value, (numbers.Number, str, list, dict))) and value in choices


def to_integers(name: str, values: Iterable[Any]) -> list[int]:
    """Returns the values as ints. Raises GenerationError, with `name` as its place, for any that is no whole number."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise GenerationError(name, repr(values)[:80], "whole numbers") from None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) <= MAX_LIST_LENGTH


def _is_boolean(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _is_token_id(value: Any) -> bool:
    return is_integer(value) and 0 <= value <= MAX_INTEGER


def _is_infinite_or_float32(value: Any) -> bool:
    try:
        magnitude = abs(float(value))
    except OverflowError:  # a whole number beyond float64
        return False
    return math.isinf(magnitude) or magnitude <= MAX_NUMBER


def integer(minimum: int, maximum: int = MAX_INTEGER) -> Callable[[Any], int]:
    """Returns a check for an int from minimum to maximum."""

    def check(value: Any) -> int:
        if not is_integer(value) or value < minimum:
            raise InvalidSettingValue(f"an integer of at least {minimum}")
        if value > maximum:
            raise InvalidSettingValue(f"an integer of at most {maximum}")
        return int(value)

    return check


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None, below: float | None = None
) -> Callable[[Any], float]:
    """Returns a check for a number of low to high, both included, or between above and below, both excluded.

    A finite number must be one of float32, in which scores are computed.
    """
    bounds = [
        (low, "of at least", lambda x, bound: x >= bound),
        (above, "above", lambda x, bound: x > bound),
        (high, "of at most", lambda x, bound: x <= bound),
        (below, "below", lambda x, bound: x < bound),
    ]
    limits = [(bound, words, holds) for bound, words, holds in bounds if bound is not None]
    described = " and ".join(f"{words} {bound}" for bound, words, _ in limits)

    def check(value: Any) -> float:
        is_real = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value
        if not is_real or not all(holds(value, bound) for bound, _, holds in limits):
            raise InvalidSettingValue(f"a number {described}".rstrip())
        if not _is_infinite_or_float32(value):
            raise InvalidSettingValue(f"a number from {-MAX_NUMBER:.8g} to {MAX_NUMBER:.8g}, as float32 has them")
        return float(value)

    return check


def boolean(value: Any) -> bool:
    """Takes True or False."""
    if not _is_boolean(value):
        raise InvalidSettingValue("True or False")
    return bool(value)


def early_stopping(value: Any) -> bool | str:
    """Takes True, False or "never"."""
    if _is_boolean(value):
        return bool(value)
    if not isinstance(value, str) or value != "never":
        raise InvalidSettingValue("True, False or 'never'")
    return value


def draft_schedule(value: Any) -> str:
    """Takes the rule by which the number of draft tokens follows how many were accepted."""
    if not is_one_of(value, ("constant", "heuristic", "heuristic_transient")):
        raise InvalidSettingValue("'constant', 'heuristic' or 'heuristic_transient'")
    return value


def unbounded_token_ids(value: Any) -> tuple[int, ...]:
    """Takes a list of ints, and returns each once; ids outside the vocabulary are no error, for they match nothing."""
    if not _is_sequence(value) or not all(is_integer(token) for token in value):
        raise InvalidSettingValue("a list of token ids")
    return tuple(dict.fromkeys(int(token) for token in value))


def token_ids(value: Any) -> tuple[int, ...]:
    """Takes a token id or a list of them, and returns each once."""
    if is_integer(value):
        value = [value]
    if not _is_sequence(value) or not all(_is_token_id(token) for token in value):
        raise InvalidSettingValue("a token id or a list of token ids")
    return tuple(dict.fromkeys(int(token) for token in value))


def first_token_id(value: Any) -> int:
    """Takes a token id, or a list, of which it returns the first."""
    ids = token_ids(value)
    if not ids:
        raise InvalidSettingValue("a token id")
    return ids[0]


def strings(value: Any) -> tuple[str, ...]:
    """Takes a string or a list of strings, none empty."""
    if isinstance(value, str):
        value = [value]
    if not _is_sequence(value) or not all(isinstance(text, str) and text for text in value):
        raise InvalidSettingValue("a string or a list of strings, none of them empty")
    return tuple(value)


def token_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """Takes a list of lists of token ids, none empty."""
    expected = "a list of lists of token ids, none of them empty"
    if not _is_sequence(value) or not value or not all(_is_sequence(word) and word for word in value):
        raise InvalidSettingValue(expected)
    if not all(_is_token_id(token) for word in value for token in word):
        raise InvalidSettingValue(expected)
    return tuple(dict.fromkeys(tuple(int(token) for token in word) for word in value))


def sequence_bias_pairs(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Takes [[ids, bias], …] or {ids: bias}: sequences of token ids, each with the number to add."""
    expected = "a list of pairs of token ids and a number, as [[[10, 45], -2.0], [[64], -7.5]]"
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not _is_sequence(pairs) or not pairs or not all(_is_sequence(pair) and len(pair) == 2 for pair in pairs):
        raise InvalidSettingValue(expected)
    try:
        return tuple({token_sequences([tokens])[0]: number()(bias) for tokens, bias in pairs}.items())
    except InvalidSettingValue:
        raise InvalidSettingValue(expected) from None


def decay_pair(value: Any) -> tuple[int, float]:
    """Takes (start, factor)."""
    expected = "a pair of an integer and a number: the new tokens after which the penalty starts, and its factor"
    if not _is_sequence(value) or len(value) != 2:
        raise InvalidSettingValue(expected)
    try:
        return integer(0)(value[0]), number()(value[1])
    except InvalidSettingValue:
        raise InvalidSettingValue(expected) from None
