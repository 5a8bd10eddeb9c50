"""What the components of a tokenizer.json (normalizer, pre-tokenizer, decoder) do to a text, read off their JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

# How many characters these make of one at most; NFKC and NFKD make 18 of U+FDFA.
_GROWTH = {"NFD": 4, "NFC": 3, "NFKD": 18, "NFKC": 18, "ByteLevel": 4, "BertNormalizer": 8, "Lowercase": 2}


def component_parts(component: Any) -> Iterator[dict[str, Any]]:
    """The JSON of a component, and of each part of a sequence in order; nothing for one that is written in Python."""
    try:
        state = json.loads(component.__getstate__()) if component is not None else {}
    except Exception:  # the library raises a plain Exception where a component has no JSON
        state = {}
    stack = [state]
    while stack:
        part = stack.pop()
        if "type" in part:
            yield part
        lists = [value for value in part.values() if isinstance(value, list)]
        stack.extend(item for value in reversed(lists) for item in reversed(value) if isinstance(item, dict))


def part_types(component: Any) -> set[str]:
    """The types of a component and its parts: {"Sequence", "Replace", "ByteFallback", …}."""
    return {part["type"] for part in component_parts(component)}


def set_byte_level_decoder(backend: tokenizers.Tokenizer) -> None:
    """Sets the ByteLevel decoder where tokens are byte-level characters ("Ġ") that the file's own decoder leaves so.

    They are where the normalizer or the pre-tokenizer is ByteLevel, or every token of the model (added tokens apart) is
    spelled in byte-level characters, "Ġ" among them. Differs from transformers, which prints "HiĠÃ©" for "Hi é" there.
    """
    if "ByteLevel" in part_types(backend.decoder):
        return
    byte_level_text = "ByteLevel" in part_types(backend.normalizer) | part_types(backend.pre_tokenizer)
    if byte_level_text or _has_byte_level_vocabulary(backend):
        backend.decoder = decoders.ByteLevel()


def _has_byte_level_vocabulary(backend: tokenizers.Tokenizer) -> bool:
    if backend.token_to_id("Ġ") is None:
        return False
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    return all(token in added or alphabet.issuperset(token) for token in backend.get_vocab(with_added_tokens=False))


def normalizer_growth(backend: tokenizers.Tokenizer) -> int:
    """How many times as many characters as a text has the normalizer makes of it at most; 1 for most tokenizers."""
    growth = 1
    for part in component_parts(backend.normalizer):
        growth *= _part_growth(part)
    return growth


def _part_growth(part: dict[str, Any]) -> int:
    if part["type"] == "Replace":
        pattern, replacement = part["pattern"].get("String"), len(part["content"])
        # a regular expression and "" match between any two characters too
        return max(1, -(-replacement // len(pattern))) if pattern else 1 + replacement
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] == "Precompiled":
        data = base64.b64decode(part["precompiled_charsmap"])
        replacements = data[4 + int.from_bytes(data[:4], "little") :]
        return max(1, *map(len, replacements.split(b"\0")))
    return _GROWTH.get(part["type"], 1)
