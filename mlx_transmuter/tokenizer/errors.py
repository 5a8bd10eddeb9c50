"""The error of tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_transmuter.errors import TransmuterError, first_line


class TokenizerError(TransmuterError):
    """A tokenizer or a chat template that cannot be used; `where` is its file."""

    def __init__(self, found: str, *, where: object = "", expected: str = "", do: str = ""):
        super().__init__(where, found, expected, do)


@contextmanager
def library_errors(found: str = "", *, where: object = "", expected: str = "") -> Iterator[None]:
    """Raises what the tokenizers library raises as a TokenizerError of one line, which begins with `found`.

    The library is written in Rust, whose panics are outside Exception; KeyboardInterrupt and SystemExit pass. Rust has
    written a panic to stderr before Python sees it: two lines, or a backtrace where RUST_BACKTRACE is set.
    """
    try:
        yield
    except (TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{found}{first_line(error)}", where=where, expected=expected) from error
