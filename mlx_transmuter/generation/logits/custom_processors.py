"""Checks of a task's own processors: of the pairs themselves, of the states and of the logits that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.errors import first_line, shorten
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.logits.processor_types import CustomProcessor

NARROW_DTYPES = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
# Kinds of numpy: booleans, integers, floats, complex numbers.
_NUMERIC_KINDS = "biufc"
_PAIR = "a pair of functions (make_state, process)"


def custom_state_name(index: int) -> str:
    """Returns the name in the state of what the task's processor of this index reads."""
    return f"custom.{index}"


def check_processors(processors: Any) -> tuple[CustomProcessor, ...]:
    """Returns the pairs of functions. Raises GenerationError, which names the processor, for anything else."""
    try:
        entries = None if isinstance(processors, (str, bytes, Mapping)) else list(processors)
    except (TypeError, MemoryError):
        entries = None
    if entries is None:
        raise GenerationError("processors", shorten(processors), f"a list, each entry {_PAIR}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not all(map(callable, entry)):
            raise GenerationError(f"processor {index}", shorten(entry), _PAIR)
    return tuple((make_state, process) for make_state, process in entries)


def compute_state(index: int, make_state: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> np.ndarray:
    """Returns the state of a row by the processor of this index, in a type that a device has.

    Raises GenerationError where it is no array of numbers; what `make_state` raises itself is passed on.
    """
    value = make_state(row)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"a state {shorten(value)} ({first_line(error)})"
        raise GenerationError(f"processor {index}", found, "an array of numbers") from None
    if array.dtype.kind not in _NUMERIC_KINDS and array.dtype.name != "bfloat16":
        raise GenerationError(f"processor {index}", f"a state {shorten(value)}", "an array of numbers")
    return array.astype(NARROW_DTYPES.get(array.dtype, array.dtype))


def check_processor_result(index: int, result: Any, shape: tuple[int, ...]) -> None:
    """Raises GenerationError unless the processor of this index returned logits of that shape."""
    expected = f"logits of shape {shape}, an mlx.core.array"
    if not isinstance(result, mx.array):
        raise GenerationError(f"processor {index}", f"a result {shorten(result)}", expected)
    if result.shape != shape:
        raise GenerationError(f"processor {index}", f"a result of shape {result.shape}", expected)
