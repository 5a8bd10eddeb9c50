"""The memory of a conversion: whether a program's weights are held in it, or read again at each use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.program import Program

# What Python, MLX, a graph and the values of a step take beside weights.
BASE_BYTES = 300 * 10**6
# A weight and what it is made of: the parts of a merged one, the words and scales of a quantized one.
WEIGHT_COPIES = 2


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes of anonymous memory that a conversion may take; files that it maps are no part of them."""

    max_memory: int

    def holds(self, program: Program) -> bool:
        """Returns whether all weights of the program may be in memory at once."""
        return BASE_BYTES + 1.05 * sum(_weight_sizes(program).values()) <= self.max_memory

    def check_weights(self, program: Program, path: Path) -> None:
        """Raises ConvertError for a program with a weight that is too large by itself."""
        sizes = _weight_sizes(program)
        name = max(sizes, key=lambda name: sizes[name], default="")
        needed = BASE_BYTES + WEIGHT_COPIES * sizes.get(name, 0)
        if needed > self.max_memory:
            raise ConvertError(
                path,
                f"the weight {name!r} of {sizes[name]} bytes, which takes {needed} to convert",
                f"at most the {self.max_memory} bytes that a conversion may take here",
                "allow more memory (max_memory)",
            )


def _weight_sizes(program: Program) -> dict[str, int]:
    """The bytes of each weight on the device."""
    return {
        name: ops.device_dtype(weight.dtype).size * math.prod(weight.shape) for name, weight in program.weights.items()
    }
