"""The steps in which prompts run: chunks of powers of two, or several prompts packed one after another into a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

# The most tokens of a packed prefill row, where each token is weighed against every other.
MAX_PACKED_TOKENS = 512
# The most tokens of a step that takes about as long as reading the weights does, so that padding costs nothing.
MAX_PADDED_CHUNK = 256


class PackedPrefillRow(NamedTuple):
    """A step of one row that runs several prompts one after another: their rows, and its length with padding."""

    rows: list[int]
    size: int


def default_prefill_step_size() -> int:
    """Returns the most tokens of a prompt that one step takes by default: 2,048 as in mlx_lm.

    On the CPU 128: there attention scores are computed also for the columns that a token does not attend to, and all of
    them are in memory at once.
    """
    return 128 if mx.default_device() == mx.cpu else 2048


def prefill_chunks(
    length: int, max_chunk: int | None = None, prompt_mode: str = "chunks", *, padded: bool = False
) -> list[int]:
    """Returns the lengths of the steps of a prompt of `length` tokens: powers of two, the largest first, none above
    max_chunk (45: 32, 8, 4, 1).

    prompt_mode: what the decoder takes (see RunPlan): "chunks", the prompt at once ("whole"), or one token at a time
    ("token by token"). padded: whether the last chunk may have padding, so that MAX_PADDED_CHUNK tokens and fewer are
    one (45: 64).
    """
    if prompt_mode != "chunks":
        return [length] if prompt_mode == "whole" else [1] * length
    chunks: list[int] = []
    while length > 0:
        most = min(length, max_chunk or length)
        chunk = 1 << (most.bit_length() - 1)
        if padded and length <= MAX_PADDED_CHUNK and chunk < length and 2 * chunk <= (max_chunk or 2 * chunk):
            chunk *= 2
        chunks.append(chunk)
        length -= chunk
    return chunks


def plan_packed_prefill(lengths: Mapping[int, int], rows: int, max_tokens: int | None = None) -> list[PackedPrefillRow]:
    """Returns the packed prefill rows that run the prompts of `lengths` (row -> tokens), or [] where packing saves too
    little.

    Chunks of all rows compute rows × the longest prompt. Packing must save more than a quarter of that, for each size
    is a shape to compile; there are eight sizes per octave. No prompt is split, and a packed row has at most
    MAX_PACKED_TOKENS tokens, or max_tokens.
    """
    limit = min(MAX_PACKED_TOKENS, max_tokens or MAX_PACKED_TOKENS)
    longest = max(lengths.values())
    if longest > limit:
        return []
    packed: list[PackedPrefillRow] = []
    for row, length in lengths.items():
        if not packed or packed[-1].size + length > limit:
            packed.append(PackedPrefillRow([], 0))
        members, size = packed[-1]
        packed[-1] = PackedPrefillRow([*members, row], size + length)
    packed = [PackedPrefillRow(members, min(limit, _padded_size(size))) for members, size in packed]
    return packed if 4 * sum(size for _, size in packed) < 3 * rows * longest else []


def _padded_size(length: int) -> int:
    step = max(1, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step
