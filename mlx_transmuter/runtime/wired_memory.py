"""Memory that macOS keeps wired for a GPU while a model runs, and buffers that MLX keeps for the next step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from mlx_transmuter.notices import print_notice

# From this share of the memory that a GPU is recommended to work in, a model gets a notice; mlx_lm has the same.
_LARGE_SHARE = 0.9
_GIGABYTE = 10**9


class _WiredLimit:
    """The limit of wired memory of this process, which runs in several threads share."""

    def __init__(self) -> None:
        self.lock, self.runs, self.before = threading.Lock(), 0, 0

    def enter(self, limit: int) -> None:
        with self.lock:
            if not self.runs:
                self.before = mx.set_wired_limit(limit)
            self.runs += 1

    def leave(self) -> None:
        with self.lock:
            self.runs -= 1
            if not self.runs:
                mx.synchronize()  # what still runs needs its memory
                mx.set_wired_limit(self.before)


_wired_limit = _WiredLimit()


@contextmanager
def wired_memory() -> Iterator[None]:
    """Lets a GPU keep as much memory wired as is recommended for it, until the block ends; elsewhere does nothing.

    Without that macOS may page out weights between two steps. It takes macOS 15.
    """
    limit = recommended_bytes()
    if limit is None:
        yield
        return
    _wired_limit.enter(limit)
    try:
        yield
    finally:
        _wired_limit.leave()


def recommended_bytes() -> int | None:
    """Returns the memory that the GPU is recommended to work in, in bytes; None where no GPU is the default device."""
    if mx.default_device() == mx.cpu or not mx.metal.is_available():
        return None
    return int(mx.device_info()["max_recommended_working_set_size"]) or None


def notice_large_model(model_bytes: int) -> None:
    """Prints a notice where a model's weights leave little of the recommended memory, or none."""
    limit = recommended_bytes()
    if limit is not None and model_bytes > _LARGE_SHARE * limit:
        print_notice(
            f"the weights take {model_bytes / _GIGABYTE:.1f} GB of the {limit / _GIGABYTE:.1f} GB that this Mac"
            " recommends for its GPU, so that generation may be slow; quantize the model (convert -q), or see"
            " `sysctl iogpu.wired_limit_mb`"
        )


def release_buffers() -> None:
    """Gives the buffers back that MLX keeps for the next arrays on a GPU: a prompt's fit no step of one token."""
    if mx.default_device() != mx.cpu:
        mx.clear_cache()
