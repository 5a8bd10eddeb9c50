"""The exit gate: no daemon thread uses MLX while the interpreter exits.

Once the interpreter is exiting, Python ends a daemon thread where it next needs Python's lock. Inside MLX that aborts
the process, so runs use MLX inside the gate, which is closed when the interpreter exits: the exit waits for the steps
that are running, and no other begins.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Generator
from typing import TypeVar

# How long an exit waits for a step, in seconds, before it goes on without it.
MAX_WAIT_SECONDS = 30

Step = TypeVar("Step")
Result = TypeVar("Result")


class ExitGate:
    """A context manager for what must not run while the interpreter exits; any number of threads are inside at a time.

    Once a thread has closed it, entering and leaving it end any other thread by SystemExit, as sys.exit does.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed_by: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether another thread has closed the gate."""
        return self._closed_by not in (None, threading.get_ident())

    def __enter__(self) -> None:
        with self._condition:
            if self.is_closed:
                raise SystemExit
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()
            if self.is_closed:
                raise SystemExit

    def close(self, max_wait: float = MAX_WAIT_SECONDS) -> None:
        """Lets no other thread in any more, and waits until all that are inside have left, or for max_wait seconds."""
        with self._condition:
            self._closed_by = threading.get_ident()
            self._condition.wait_for(lambda: not self._inside, max_wait)


exit_gate = ExitGate()
# After Python has waited for all threads but daemon threads: those may need the results of a run.
atexit.register(exit_gate.close)
if hasattr(os, "register_at_fork"):  # a child has none of the other threads
    os.register_at_fork(after_in_child=exit_gate.__init__)


def run_inside(gate: ExitGate, steps: Generator[Step, None, Result]) -> Generator[Step, None, Result]:
    """Yields what `steps` yields, and returns what it returns; it runs inside the gate, and its caller outside.

    Where the gate is closed, `steps` is closed outside of it, so that it must not use MLX then.
    """
    try:
        while True:
            with gate:
                try:
                    step = next(steps)
                except StopIteration as end:
                    return end.value
            yield step
    finally:
        if gate.is_closed:
            steps.close()
        else:
            with gate:
                steps.close()
