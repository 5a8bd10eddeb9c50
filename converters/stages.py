"""The stages of a conversion: what an unexpected error or a crash names, and the signs by which a watcher knows that it
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_stage = ContextVar("stage", default="beginning")
_listener: ContextVar[Callable[[str], None]] = ContextVar("listener", default=lambda stage: None)


def enter_stage(stage: str) -> None:
    """Says what the conversion of this thread does from now on: "reading the file"."""
    _stage.set(stage)
    advance()


def advance() -> None:
    """Tells the listener that the stage goes on: another node, weight or step is done."""
    _listener.get()(_stage.get())


def current_stage() -> str:
    """Returns the stage that was entered last in this thread."""
    return _stage.get()


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls the listener with the stage whenever this thread enters one or advances in it, until the block ends."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
