"""Edits of a value of JSON: one place of it is replaced, removed, repeated, renamed or exchanged with another."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from fuzzing import extremes


def pick(value: Any, rng: Random) -> tuple[Any, Any] | None:
    """Returns a place inside the value: the depth is drawn on the way down, so that a long list hides nothing."""
    owner = key = None
    while True:
        one = value if owner is None else owner[key]
        if not isinstance(one, (dict, list)) or not one or (owner is not None and rng.random() < 0.15):
            return None if owner is None else (owner, key)
        owner, key = one, rng.choice(list(one) if isinstance(one, dict) else range(len(one)))


def near(old: Any, rng: Random) -> Any:
    """Returns a value of the same kind as the old one."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return extremes.integer(rng, old)
    if isinstance(old, float):
        return rng.choice([*extremes.FLOATS, old * 1e9, -old])
    if isinstance(old, str):
        at = rng.randint(0, len(old))
        return rng.choice([old[:at], old[at:], old[:at] + rng.choice(extremes.TEXTS) + old[at:], old * 3, old.upper()])
    if isinstance(old, list):
        return rng.choice([old[:-1], old * 2, old[::-1], [*old, extremes.json_value(rng)], [old]])
    if isinstance(old, dict):
        return {**old, rng.choice(extremes.TEXTS): extremes.json_value(rng)}
    return extremes.json_value(rng)


def edit(value: Any, rng: Random) -> Any:
    """Returns a copy of the value with one edit."""
    value = copy.deepcopy(value)
    place = pick(value, rng)
    if place is None:
        return extremes.json_value(rng)
    owner, key = place
    kind = rng.randrange(10)
    if kind <= 4:
        owner[key] = near(owner[key], rng)
    elif kind <= 6:
        owner[key] = extremes.json_value(rng)
    elif kind == 7:
        del owner[key]
    else:
        other = pick(value, rng)
        assert other is not None
        owner[key] = copy.deepcopy(other[0][other[1]])
        if kind == 9 and isinstance(owner, dict):
            owner[rng.choice(extremes.TEXTS)] = owner.pop(key)
    return value


def edited_text(data: bytes, rng: Random) -> bytes:
    """Returns the JSON text with one to three edits; seldom one of its characters."""
    if rng.random() < 0.05:
        at = rng.randrange(len(data))
        return (
            data[:at]
            + rng.choice([b"", b"\0", b"\xff", b'"', b"{", b"[" * 100_000, b"1e9", data[:50]])
            + data[at + 1 :]
        )
    value = json.loads(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = edit(value, rng)
    return json.dumps(value).encode()
