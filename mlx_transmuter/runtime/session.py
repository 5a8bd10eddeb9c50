"""Sessions: what a decoder does with the tokens of its rows from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from mlx_transmuter.runtime.errors import DecoderError

if TYPE_CHECKING:
    from mlx_transmuter.runtime.decoder import Decoder


@runtime_checkable
class Session(Protocol):
    """What generation uses of a session; see DecoderSession and CacheSession for what its methods do."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def copied_slots(self) -> int: ...
    @property
    def max_step_tokens(self) -> int | None: ...
    @property
    def runs_ahead(self) -> bool: ...
    def announce_prompts(self, lengths: Sequence[int], max_chunk_tokens: int) -> None: ...
    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array: ...
    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array: ...
    def draft_limits(self) -> list[int] | None: ...
    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array: ...
    def accept(self, accepted: Sequence[Sequence[int]]) -> None: ...
    def truncate(self, lengths: Sequence[int]) -> None: ...
    def fork(self, parents: Sequence[int]) -> None: ...
    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None: ...
    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None: ...
    def end_rows(self, row_tokens: Sequence[Sequence[int] | None]) -> None: ...
    def close(self) -> None: ...


class DecoderSession:
    """What the sessions of a Decoder share: the lengths of its rows, and an error for all that needs a cache.

    lengths, max_lengths: int32 [rows], the tokens that each row has, and the most that it will have. extra_inputs: the
    arrays of the graph's other inputs. max_step_tokens: the most tokens of a step, None for no limit. runs_ahead:
    whether a step can be built while the one before it runs.
    """

    max_step_tokens: int | None = None
    runs_ahead: bool = False

    def __init__(self, decoder: Decoder, max_lengths: Sequence[int], extra_inputs: Mapping[str, mx.array]):
        self.decoder, self.extra_inputs = decoder, extra_inputs
        self.max_lengths = np.asarray(max_lengths, np.int32)
        self.lengths = np.zeros(decoder.rows, np.int32)

    @property
    def copied_slots(self) -> int:
        """How many slots were copied for this session."""
        return 0

    def announce_prompts(self, lengths: Sequence[int], max_chunk_tokens: int) -> None:
        """Says that the next steps bring each row to lengths[r] tokens, in chunks of at most max_chunk_tokens, and that
        no logits count before.

        Where keys follow from how many tokens a row has (see LengthSwitches), those of the first chunks are right at
        once; without it they are computed again.
        """

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """Returns lazy logits [rows, vocab] at the last token of each row; those of a row without one are unspecified.

        tokens: int32 [rows, seq], or float embeddings [rows, seq, dim]; the first counts[r] of row r are tokens, the
        rest is padding, ids too. positions: int32 [rows, seq] or [axes, rows, seq], by default each token's index in
        its row. Raises DecoderError for a row that would have more tokens than its max_lengths, and for ids outside
        the vocabulary; CacheFullError, before anything is done, where a prompt cache has no slots for the tokens. Where
        steps run ahead, ids on the device are not read: they are those that were selected from the decoder's logits.
        """
        raise NotImplementedError

    def fork(self, parents: Sequence[int]) -> None:
        """Makes row r continue after the tokens of row parents[r] from now on."""
        self._check_parents(parents)
        order = list(parents)
        self.lengths = self.lengths[order]
        self.max_lengths = np.maximum(self.max_lengths, self.max_lengths[order])

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step."""
        (mx.eval if wait else mx.async_eval)(*arrays)

    def close(self) -> None:
        """Ends the session and frees its memory."""
        raise NotImplementedError

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        """Returns the logits after prompts that run one after another in one row. Needs a cache."""
        raise _no_cache("a packed prefill")

    def draft_limits(self) -> list[int] | None:
        """Returns how deep in each row draft tokens may be, after its next token; None where nothing limits them."""
        return None

    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array:
        """Returns the logits after each token of a draft. Needs a cache."""
        raise _no_cache("a draft")

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Takes tokens of the draft into the rows. Needs a cache."""
        raise _no_cache("a draft")

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drops the last tokens of rows. Needs a cache."""
        raise _no_cache("a truncation")

    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Leaves the rows' slots for later prompts. Needs a cache."""
        raise _no_cache("a prompt cache")

    def end_rows(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Stores rows and ends them before the session. Needs a cache."""
        raise _no_cache("a prompt cache")

    def _check_tokens(self, tokens: Any) -> mx.array | np.ndarray:
        """Returns the token ids or embeddings of a step. Raises DecoderError for ids outside the vocabulary."""
        is_on_device = isinstance(tokens, mx.array)
        if self.decoder.signature.takes_embeddings or (is_on_device and self.runs_ahead):
            return tokens if is_on_device else np.asarray(tokens)
        ids, vocab = np.asarray(tokens), self.decoder.vocab_size
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab):
            outside = ids[(ids < 0) | (ids >= vocab)]
            raise DecoderError(f"the token ids {outside[:5].tolist()}", f"ids from 0 to {vocab - 1}")
        return tokens if is_on_device else ids

    def _check_parents(self, parents: Sequence[int]) -> None:
        """Raises DecoderError unless there is one parent for each row, and each is a row."""
        rows = self.decoder.rows
        if len(parents) != rows or not all(0 <= parent < rows for parent in parents):
            raise DecoderError(f"the parents {list(parents)}", f"{rows} rows, each from 0 to {rows - 1}")

    def _check_counts(self, tokens: Any, counts: Sequence[int]) -> np.ndarray:
        """Returns counts as int32 [rows]. Raises DecoderError where they don't fit the tokens or the rows' lengths."""
        rows, shape, checked = self.decoder.rows, tokens.shape, np.asarray(counts, np.int32)
        if shape[0] != rows or checked.shape != (rows,) or min(counts) < 0 or max(counts) > shape[1]:
            found = f"tokens {list(shape)} and counts {list(counts)}"
            raise DecoderError(found, f"{rows} rows, and counts from 0 to all tokens of a row")
        if (self.lengths + checked > self.max_lengths).any():
            found = f"rows of {(self.lengths + checked).tolist()} tokens"
            raise DecoderError(found, f"at most {self.max_lengths.tolist()}, as the session was begun")
        return checked


def _no_cache(what: str) -> DecoderError:
    return DecoderError(f"{what} for a graph with no cache", "one whose attention is over pools", "run plain steps")


def run_by_side(
    sides: np.ndarray,
    active: np.ndarray,
    run: Callable[[int, np.ndarray], mx.array],
    between: Callable[[mx.array], None] = mx.eval,
) -> mx.array:
    """Returns the logits [rows, ...] of run(side, members), called once for each side that an active row is on, with
    members, bool [rows], the active rows on it.

    sides: int32 [rows], of the decoder's length switches. active: bool [rows]; of other rows the logits are
    unspecified. between: evaluates the logits so far before another call, so that each call writes its pools in place.
    """
    first, *others = sorted({*sides[active].tolist()}) or [0]
    logits = run(first, active & (sides == first))
    for side in others:
        between(logits)
        members = active & (sides == side)
        other = run(side, members)
        logits = mx.where(mx.array(members).reshape(-1, *[1] * (logits.ndim - 1)), other, logits)
    return logits
