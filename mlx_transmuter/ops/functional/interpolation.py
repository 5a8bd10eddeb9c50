"""Keys's cubic convolution kernel, for numpy and MLX alike. Keys 1981."""

from typing import TypeVar

import mlx.core as mx
import numpy as np

Array = TypeVar("Array", mx.array, np.ndarray)


def cubic_kernel_near(distance: Array, a: float) -> Array:
    """Returns the weights of elements at distances from 0 to 1; a is the kernel's slope at 1."""
    return ((a + 2) * distance - (a + 3)) * distance * distance + 1


def cubic_kernel_far(distance: Array, a: float) -> Array:
    """Returns the weights of elements at distances from 1 to 2; a is the kernel's slope at 1."""
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
