"""CompiledFunction: a function that mx.compile compiles once in each thread, and that goes with the thread."""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class _ThreadFunctions(threading.local):
    """The compiled functions of one thread, by key; nothing else refers to them.

    MLX keeps what a thread traced in a cache of that thread, under the function's address, until the compiled function
    is destroyed in that same thread. Where it is destroyed in another, the entry remains: it keeps the weights in
    memory, meets the next function at that address, and needs Python's lock when the thread ends, which aborts a
    process that exits then. So the thread alone destroys them: at its end, or where `unused`, the keys that any thread
    has no more use for, names them.
    """

    def __init__(self) -> None:
        self.by_key: dict[int, Callable[..., Any]] = {}
        self.unused: deque[int] = deque()

    def remove_unused(self) -> None:
        """Destroys the functions that no thread calls any more."""
        while self.unused:
            self.by_key.pop(self.unused.popleft(), None)


_thread_functions = _ThreadFunctions()
_keys = itertools.count()


class CompiledFunction:
    """A function of trees of arrays, compiled at its first call in each thread, for each shape of its arguments.

    What a thread compiled is freed at the thread's end; after this object's end at the thread's next call of any
    CompiledFunction, in the thread that ends the object at once.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._key = next(_keys)
        # By the thread's number, which the next thread may have: as many as there are threads at a time.
        self._unused_of_thread: dict[int, deque[int]] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the function of this thread."""
        if _thread_functions.unused:
            _thread_functions.remove_unused()
        return (_thread_functions.by_key.get(self._key) or self._compile())(*args)

    def _compile(self) -> Callable[..., Any]:
        """Returns the compiled function of this thread, which does not keep this object alive."""
        reference = weakref.ref(self)

        def call_function(*args: Any) -> Any:
            compiled_function = reference()
            assert compiled_function is not None, "only its own call traces it"
            return compiled_function._function(*args)

        call_function.__qualname__ = self._function.__qualname__
        self._unused_of_thread[threading.get_ident()] = _thread_functions.unused
        _thread_functions.by_key[self._key] = compiled = mx.compile(call_function)
        return compiled

    def __del__(self, functions: _ThreadFunctions = _thread_functions) -> None:
        for unused in list(self._unused_of_thread.values()):
            unused.append(self._key)
        functions.remove_unused()
