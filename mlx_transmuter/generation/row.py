"""A row of a batch on the host: its prompt, its new tokens, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_transmuter.generation.drafts.draft_tree import DraftCounts
from mlx_transmuter.generation.stop_rules import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    StopRules,
)


class Token(NamedTuple):
    """A new token, and its log-probability where asked for."""

    id: int
    logprob: float | None = None


@dataclass
class GenerationResult:
    """A generated sequence: its tokens without the eos, its finish_reason, its score under beam search, the counts of
    speculative decoding, and a notice where its length met a limit of the model."""

    tokens: list[Token]
    finish_reason: str
    score: float | None = None
    draft_counts: DraftCounts | None = None
    notice: str | None = None


@dataclass
class Row:
    """A row that gets one token after another.

    new_token_limit: the most new tokens. token_ids: the prompt and the new tokens.
    """

    prompt: list[int]
    new_token_limit: int
    stop_rules: StopRules = field(default_factory=StopRules)
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    draft_counts: DraftCounts | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def is_live(self) -> bool:
        """Whether the row gets more tokens."""
        return self.finish_reason is None

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens the row may get."""
        return self.new_token_limit - len(self.new_tokens)

    def append_token(self, token: int, logprob: float | None) -> bool:
        """Appends the token of a step. Returns False for an eos, which is no token of the result."""
        if self.stop_rules.is_eos(token):
            self.finish_reason = FINISH_STOP
            return False
        self.new_tokens.append(token)
        self.token_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.stop_rules.condition_holds(self.new_tokens):
            self.finish_reason = FINISH_STOP
        elif not self.remaining_tokens:
            self.finish_reason = FINISH_LENGTH
        return True

    def fail(self) -> None:
        """Ends the row: its scores leave no token to select."""
        self.finish_reason = FINISH_ERROR

    def to_result(self) -> GenerationResult:
        """Returns the result so far; a row that has not ended was cancelled."""
        return GenerationResult(
            tokens_with_logprobs(self.new_tokens, self.logprobs),
            self.finish_reason or FINISH_CANCELLED,
            draft_counts=self.draft_counts,
        )


def tokens_with_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> list[Token]:
    """Returns the tokens with their log-probabilities, or with None where logprobs is empty."""
    return [Token(token, logprob) for token, logprob in zip(tokens, logprobs or [None] * len(tokens), strict=True)]
