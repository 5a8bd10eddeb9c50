"""The notice of a text that its length ended, or that went past what the model was trained for."""

from __future__ import annotations

from typing import Any


def table_end(decoder: Any) -> str:
    """Returns what ends the rows of a decoder with max_positions."""
    table = f" ({decoder.position_limit.table})" if decoder.position_limit.table else ""
    return f"{decoder.max_positions:,} tokens, where the model's table of positions ends{table}"


def length_notice(decoder: Any, tokens: int, missing_tokens: int) -> str | None:
    """Returns what a user should know of a text of so many tokens, its prompt included; None for nothing.

    missing_tokens: how many more the settings would have allowed, where the text ended at the decoder's max_positions.
    """
    if missing_tokens > 0 and decoder.max_positions:
        return f"the text ends at {table_end(decoder)}; {missing_tokens:,} more were allowed"
    length = decoder.trained_length
    if length is not None and tokens > length:
        return (
            f"the text goes past the model's predefined maximum length of {length:,} tokens "
            "(max_position_embeddings), after which it may get worse, or not"
        )
    return None
