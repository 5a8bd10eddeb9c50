"""Values at the edges of what a field can hold."""

from __future__ import annotations

import math
from random import Random
from typing import Any

INTEGERS = [
    *(0, 1, -1, 2, -2, 3, 7, 8, 16, 31, 32, 33, 64, 127, 128, 129, 255, 256, 4096, 65535, 65536, 2**20),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**32 + 1, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63)),
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-8, 0.5, 2.0, 65504.0, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
TEXTS = [
    *("", " ", "x", "\0", "a\nb", "é", "\u202e", "🙂", "../x", "/etc/passwd", "model.onnx", "null", "0", "-1", "1e999"),
    *("%s%n", "{}", "{{ x }}", "x" * 5000, "\\", '"', "input_ids", "float32", "int64", "ai.onnx"),
]


def integer(rng: Random, near: int | None = None) -> int:
    """Returns an integer at an edge, or one that differs little from `near`."""
    if near is not None and rng.random() < 0.5:
        return rng.choice([near + 1, near - 1, near * 2, near // 2, -near, near + 7])
    return rng.choice(INTEGERS)


def json_value(rng: Random) -> Any:
    """Returns any value that JSON has, or that Python reads as such."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind <= 2:
        return integer(rng)
    if kind == 3:
        return rng.choice([*FLOATS, 1e308, 2**64, 2**70, 10**400])
    if kind <= 5:
        return rng.choice(TEXTS)
    if kind == 6:
        return [json_value(rng) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): json_value(rng) for _ in range(rng.randrange(3))}
