"""Random arrays for tests of operators, the same for the same seed."""

from collections.abc import Callable

import numpy as np


def floats(seed: int, *shape: int, dtype: type = np.float32, spread: float = 1.0) -> np.ndarray:
    """Returns normally distributed numbers of that shape with the standard deviation `spread`."""
    return (np.random.default_rng(seed).normal(size=shape) * spread).astype(dtype)


def integers(seed: int, dtype: type, *shape: int) -> np.ndarray:
    """Returns integers of that shape from the whole range of the type."""
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, size=shape, endpoint=True).astype(dtype)


def float_source(rng: np.random.Generator, dtype: type = np.float32) -> Callable[..., np.ndarray]:
    """Returns a function that gives the next normally distributed numbers of a shape."""
    return lambda *shape: rng.normal(size=shape).astype(dtype)


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns values below 2^bits packed into bytes along the last axis, lowest bits first: uint8."""
    per_byte = 8 // bits
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_byte)])
    groups = padded.reshape(*values.shape[:-1], -1, per_byte).astype(np.uint8)
    return np.bitwise_or.reduce(groups << (np.arange(per_byte, dtype=np.uint8) * bits), axis=-1).astype(np.uint8)
