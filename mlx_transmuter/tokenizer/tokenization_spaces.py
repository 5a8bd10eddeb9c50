"""The spaces before punctuation and English contractions that transformers' clean_up_tokenization removes."""

from __future__ import annotations

# PreTrainedTokenizerBase.clean_up_tokenization of transformers: each replaces in the text that the one before left.
_REPLACEMENTS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip

# What a replacement can match in the original text: its own pattern, or the pattern with the spaces that " ' " loses.
_SOURCES = (*(pattern for pattern, _ in _REPLACEMENTS), " n ' t", "  ' m", "  ' s", "  ' ve", "  ' re")
_UNFINISHED = frozenset(source[:length] for source in _SOURCES for length in range(1, len(source)))
_LENGTHS = range(max(map(len, _UNFINISHED)), 0, -1)


def clean_up_spaces(text: str) -> str:
    """The text without these spaces: "I do n't !" becomes "I don't!"."""
    for pattern, replacement in _REPLACEMENTS:
        text = text.replace(pattern, replacement)
    return text


def decided_length(text: str) -> int:
    """How many first characters of `text` are cleaned up alone as they are before any continuation.

    That is, `clean_up_spaces(text + more)` is `clean_up_spaces(text[:n]) + clean_up_spaces(text[n:] + more)`: no
    replacement can reach over the n-th character, because none begins before it and may go on after it.
    """
    end = len(text)
    while length := next((size for size in _LENGTHS if size <= end and text[end - size : end] in _UNFINISHED), 0):
        end -= length
    return end
