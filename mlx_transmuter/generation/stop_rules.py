"""What ends a row: an eos token, or the caller's condition on its new tokens; and the names of the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The finish_reason of a result. "cancelled" is that of a row whose generation the caller cancelled, "error" that of one
# whose scores left no token to select.
FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED, FINISH_ERROR = "stop", "length", "cancelled", "error"

# Returns whether the new tokens of a row, a sequence of ids, end it.
StopCondition = Callable[[Sequence[int]], bool]


@dataclass(frozen=True)
class StopRules:
    """The eos tokens of a row, which are no part of its result, and a condition, whose last token is."""

    eos_token_ids: frozenset[int] = frozenset()
    condition: StopCondition | None = None

    def is_eos(self, token: int) -> bool:
        """Returns whether the token is an eos."""
        return token in self.eos_token_ids

    def condition_holds(self, new_tokens: Sequence[int]) -> bool:
        """Returns whether the caller's condition ends a row with these new tokens."""
        return self.condition is not None and self.condition(new_tokens)

    def ends_row(self, new_tokens: Sequence[int], token: int) -> bool:
        """Returns whether one more token after these new ones ends the row."""
        return self.is_eos(token) or (self.condition is not None and self.condition((*new_tokens, token)))

    def before_eos(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the tokens before the first eos."""
        return tokens[: next((index for index, token in enumerate(tokens) if self.is_eos(token)), None)]
