"""PromptCache: what earlier calls computed, by its tokens: a prompt that begins alike runs its tail alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mlx_transmuter.cache import KVCache
from mlx_transmuter.generation import prompt_cache_file
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.runtime.decoder import Decoder


class PromptCache:
    """The keys and values of the prompts and texts that ran with it.

    Give it to `generate`, `run` or a task as `prompt_cache`: each prompt then computes only what comes after its
    longest beginning that is in the cache, in whole blocks, and its last token in any case, for its logits. The rows of
    a batch share one copy of it. A run never changes what is in the cache: it writes to slots of its own. At its end
    its prompts and texts are in the cache too (of a beam search, the prompts).

        cache = PromptCache(model)
        generate(gen, [prompt], [0], prompt_cache=cache)
        generate(gen, [prompt + more], [0], prompt_cache=cache)  # runs the tokens of `more`

    model: a Model, or its decoder; the runs must be of the same one, alone or in batches of any size, one at a time.
    max_tokens and max_bytes: the most that the pools hold, of running rows and of kept tokens together; what was used
    least recently goes first, and None is no limit. block: tokens are kept in blocks of so many; of a beginning that
    ends inside one, the rest is computed again. kv_bits, kv_group_size: as the runs' contexts have them.

    Raises GenerationError for a decoder whose keys and values follow from more than its tokens (an encoder's outputs,
    embeddings), or a limit below one block.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        block: int = 1,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ):
        self.module = getattr(model, "decoder", model)
        self.kv_bits, self.kv_group_size = kv_bits, kv_group_size
        decoder = Decoder(self.module, 1, kv_bits=kv_bits, kv_group_size=kv_group_size)
        signature, found = decoder.signature, None
        if others := [*signature.extra_inputs, *(["inputs_embeds"] if signature.takes_embeddings else [])]:
            found = f"a decoder with the inputs {', '.join(others)}"
        elif signature.state_pairs or not decoder.pool_specs:
            found = "a decoder whose rows have states" if signature.state_pairs else "a decoder without a cache"
        elif decoder.prompt_mode != "parts":
            found = "a decoder that takes no part of a prompt after another"
        if found:
            raise GenerationError("prompt_cache", found, "one whose keys and values follow from its tokens alone")
        self.vocab_size = decoder.vocab_size
        slot_bytes = KVCache(decoder.pool_specs, 0, block).slot_nbytes
        for name, most in (("max_tokens", max_tokens), ("max_bytes", max_bytes)):
            if most is not None and type(most) is not int:
                raise GenerationError(name, repr(most)[:80], "a whole number, or None for no limit")
        limits = [max_tokens, None if max_bytes is None else max_bytes // slot_bytes]
        limit = min((most for most in limits if most is not None), default=None)
        if limit is not None and limit < block:
            expected = f"room for a block of {block} tokens of {slot_bytes} bytes"
            raise GenerationError("prompt_cache", f"room for {limit} tokens", expected, "raise its limit")
        self.kv_cache = KVCache(decoder.pool_specs, 0, block, limit)

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the pools hold; None is no limit."""
        return self.kv_cache.max_slots

    @property
    def tokens(self) -> int:
        """How many tokens are kept; those that several texts begin with count once."""
        return self.kv_cache.block_manager.stored_slots

    @property
    def nbytes(self) -> int:
        """The bytes of the pools."""
        return self.kv_cache.block_manager.num_slots * self.kv_cache.slot_nbytes

    def find(self, tokens: Sequence[int]) -> int:
        """How many first tokens of a prompt a run would not compute."""
        return self.kv_cache.block_manager.match_prefix(tokens)

    def clear(self) -> None:
        """Forgets everything, and gives the memory back. Raises GenerationError while a run uses it."""
        if self.kv_cache.in_use:
            raise GenerationError("prompt_cache", "a run in it that isn't over", "a cache that nothing uses")
        self.kv_cache.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what is kept to a safetensors file, whole or not at all (see prompt_file)."""
        prompt_cache_file.save_prompt_cache(path, self.kv_cache, self.module, self.kv_bits, self.kv_group_size)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, **limits: Any) -> PromptCache:
        """The cache of a file that `save` wrote with the same model. limits: max_tokens, max_bytes.

        Raises GenerationError for a file that is none, isn't whole, is of another model, or holds more than the limit.
        """
        header = prompt_cache_file.read_header(path)
        packing = {} if header.kv_bits is None else {"kv_bits": header.kv_bits, "kv_group_size": header.kv_group_size}
        cache = cls(model, block=header.block_size, **packing, **limits)
        prompt_cache_file.load_prompt_cache(header, cache.kv_cache, cache.module, cache.vocab_size)
        return cache
