"""Quantized rows of a pool, read bit by bit in numpy."""

from __future__ import annotations

import numpy as np


def dequantized_rows(rows: np.ndarray, bits: int, group_size: int, dim: int, scale: type) -> np.ndarray:
    """Vectors float32 [..., dim] of quantized rows uint32 [..., width]: elements, from the lowest bits of each word up,
    then the groups' scales, then their biases."""
    groups = -(-dim // group_size)
    words, rest = np.split(rows, [groups * group_size * bits // 32], axis=-1)
    elements = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    elements = elements.reshape(*rows.shape[:-1], groups, group_size).astype(np.float32)
    scales, biases = np.split(np.ascontiguousarray(rest).view(scale).astype(np.float32), 2, axis=-1)
    return (elements * scales[..., None] + biases[..., None]).reshape(*rows.shape[:-1], -1)[..., :dim]
