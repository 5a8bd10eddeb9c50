"""What tasks give: a text with its tokens, and the pieces of one that streams."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_transmuter.generation import DraftCounts


@dataclass(frozen=True)
class TextResult:
    """A generated text.

    text: up to the eos or the stop string, neither included; "" where the model has no tokenizer. tokens: ids without
    the eos; the token that completed a stop string is among them. logprobs: one per token, or None where not asked for.
    finish_reason: "stop" at an eos or a stop string, "length" at the limit of tokens, or where the model's table of
    positions ends. draft_counts: what speculative decoding brought (passes, proposed, accepted, tokens_per_pass), or
    None without it. notice: says that the table of positions ended the text, or that the text went past the length that
    the model was trained for; None otherwise.
    """

    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str
    draft_counts: DraftCounts | None = None
    notice: str | None = None


class Piece(str):
    """A piece of text that will not change, and is a str; the numbers beside it are those of the stream so far.

    One comes with each token, often empty; the last one has the finish_reason, the notice of its TextResult, and under
    speculative decoding the draft_counts. token: its id, None for an eos. logprobs: its log-probability, or None where
    not asked for. prompt_tps and generation_tps: tokens per second, the latter 0 before the second token. peak_memory:
    the most that MLX held in this process, in 10⁹ bytes.
    """

    token: int | None
    logprobs: float | None
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    draft_counts: DraftCounts | None
    notice: str | None = None

    @property
    def text(self) -> str:
        return str(self)
