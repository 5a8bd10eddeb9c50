"""The text of a sequence as its tokens come, in whole characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from mlx_transmuter.tokenizer.components import part_types
from mlx_transmuter.tokenizer.errors import TokenizerError, library_errors
from mlx_transmuter.tokenizer.tokenization_spaces import clean_up_spaces, decided_length

if TYPE_CHECKING:
    from mlx_transmuter.tokenizer.tokenizer import Tokenizer


class DetokenizerStream:
    """The text of one sequence as its tokens come: what `push` returns is final, what `flush` returns is the rest.

    All pieces joined are `tokenizer.decode` of all ids. Half a character waits for its other half. A run of
    byte-fallback tokens (`<0xE4>`) waits for the token after it, because one bad byte turns the whole run into U+FFFD.
    Where the tokenizer cleans up spaces, a space waits for what shows whether punctuation follows it.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special_ids = {id for id, token in added.items() if token.special}
        self._byte_fallback = "ByteFallback" in part_types(tokenizer.backend.decoder)
        self._reset()

    def _reset(self) -> None:
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._pending_ids: list[int] = []
        self._undecided_text = ""
        self._sent_length = 0
        self._prefix_is_final = True

    def push(self, id: int) -> str:
        """The text that became final with this token; often "", when a character is not whole yet."""
        id = int(id)
        if id in self._special_ids:
            return ""
        self._ids.append(id)
        self._pending_ids.append(id)
        if not self._prefix_is_final or self._may_continue(id):
            return ""
        held, self._pending_ids = self._pending_ids, []
        try:
            with library_errors():
                text = self._decoder.step(self._tokenizer.backend, held) or ""
        except TokenizerError:
            # This decoder changes earlier text as tokens come: nothing more is final before the end.
            self._prefix_is_final = False
            return ""
        if self._tokenizer.clean_up_tokenization_spaces:
            text = self._clean_up(text)
        self._sent_length += len(text)
        return text

    def flush(self) -> str:
        """The text still held back, at the end of the sequence. The stream then stands at the start of a new one."""
        rest = self._tokenizer.decode(self._ids)[self._sent_length :]
        self._reset()
        return rest

    def _clean_up(self, text: str) -> str:
        """The part of the text so far that no later text can change, cleaned up; the rest waits."""
        text = self._undecided_text + text
        length = decided_length(text)
        self._undecided_text = text[length:]
        return clean_up_spaces(text[:length])

    def _may_continue(self, id: int) -> bool:
        token = self._tokenizer.backend.id_to_token(id)
        if token is None:
            return True
        return self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
