"""PromptCache: the keys and values of earlier calls, found by their tokens, so that a prompt that begins like an
earlier one runs its tail alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from mlx_transmuter.cache import CacheError, KVCache
from mlx_transmuter.generation import prompt_cache_file
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.setting_checks import is_integer
from mlx_transmuter.runtime.decoder import Decoder


class PromptCache:
    """The keys and values of the prompts and results that ran with it.

    Pass it to `generate`, `generate_steps` or a task as `prompt_cache`: each prompt then computes only what comes after
    its longest prefix in the cache, in whole blocks, and its last token in any case, for its logits. The rows of a
    batch share one copy of it. A generation never changes what is stored: it writes to slots of its own. At its end its
    prompts and results are stored too (of a beam search, the prompts).

        cache = PromptCache(model)
        generate(gen, [prompt], [0], prompt_cache=cache)
        generate(gen, [prompt + more], [0], prompt_cache=cache)  # runs the tokens of `more`

    model: a Model, or its decoder; the generations must be of the same one, alone or in batches of any size, one at a
    time. max_tokens and max_bytes: the most that the pools hold, of running rows and of stored tokens together; None is
    no limit. Rows get slots as they grow. Where there are none left, the least recently used stored tokens are evicted,
    then what rows have that ended; after that a generation raises CacheFullError, with the tokens that it has yielded
    stored. block: the tokens of a block; of a prefix that ends
    inside one, the rest is computed again. kv_bits, kv_group_size: as in the contexts of the runs.

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
        _check_decoder(decoder)
        self.vocab_size, self._length_switches = decoder.vocab_size, decoder.signature.length_switches
        slot_bytes = KVCache(decoder.pool_specs, 0, block).slot_nbytes
        for name, limit in (("max_tokens", max_tokens), ("max_bytes", max_bytes)):
            if limit is not None and not is_integer(limit):
                raise GenerationError(name, repr(limit)[:80], "a whole number, or None for no limit")
        limits = [max_tokens, None if max_bytes is None else max_bytes // slot_bytes]
        max_slots = min((int(limit) for limit in limits if limit is not None), default=None)
        if max_slots is not None and max_slots < block:
            expected = f"room for a block of {block} tokens of {slot_bytes} bytes"
            raise GenerationError("prompt_cache", f"room for {max_slots} tokens", expected, "raise its limit")
        self.kv_cache = KVCache(decoder.pool_specs, 0, block, max_slots)

    def check_fits(self, decoder: Decoder, *, has_positions: bool) -> None:
        """Raises GenerationError for a generation with a decoder that is not the cache's, or of prompts with positions
        of their own."""
        if self.module is not getattr(decoder, "module", None):
            _refuse("a cache of another model")
        if self.kv_cache.pool_specs != decoder.pool_specs:
            raise GenerationError(
                "prompt_cache",
                f"a cache with kv_bits={self.kv_bits}, kv_group_size={self.kv_group_size}, unlike this context",
                "keys and values that are quantized in the same way in both",
                "pass both the same kv_bits and kv_group_size, or leave the cache out",
            )
        if has_positions:
            _refuse("a cache, and prompts with positions of their own")

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the pools hold; None is no limit."""
        return self.kv_cache.max_slots

    @property
    def tokens(self) -> int:
        """How many tokens are stored; a common prefix counts once."""
        return self.kv_cache.block_manager.stored_slots

    @property
    def nbytes(self) -> int:
        """The bytes of the pools."""
        return self.kv_cache.block_manager.num_slots * self.kv_cache.slot_nbytes

    def find(self, tokens: Sequence[int]) -> int:
        """Returns how many first tokens of a prompt are stored, which a generation would not compute."""
        return self.kv_cache.block_manager.match_prefix(tokens, self._length_switches.side(len(tokens)))

    def clear(self) -> None:
        """Drops everything, and frees the memory. Raises GenerationError while a generation uses it."""
        with self._without_generation():
            self.kv_cache.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what is stored to a safetensors file, whole or not at all (see prompt_cache_file). Raises
        GenerationError while a generation uses it, and for a path that can't be written."""
        with self._without_generation():
            prompt_cache_file.save_prompt_cache(path, self.kv_cache, self.module, self.kv_bits, self.kv_group_size)

    @contextmanager
    def _without_generation(self) -> Iterator[None]:
        """Keeps runs of all threads away. Raises GenerationError while one uses the cache."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self.kv_cache.use_alone())
            except CacheError:
                raise GenerationError(
                    "prompt_cache", "a generation that is not over", "a cache that no generation uses"
                ) from None
            yield

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, **limits: Any) -> PromptCache:
        """Returns the cache of a file that `save` wrote with the same model. limits: max_tokens, max_bytes.

        Raises GenerationError for a file that is no prompt cache, is not whole, is of another model, or holds more than
        the limit.
        """
        header = prompt_cache_file.read_header(path)
        cache = cls(
            model, block=header.block_size, kv_bits=header.kv_bits, kv_group_size=header.kv_group_size, **limits
        )
        prompt_cache_file.restore_prompt_cache(header, cache.kv_cache, cache.module, cache.vocab_size)
        return cache


def _check_decoder(decoder: Decoder) -> None:
    signature = decoder.signature
    extra_inputs = [*signature.extra_inputs, *(["inputs_embeds"] if signature.takes_embeddings else [])]
    if extra_inputs:
        _refuse_decoder(f"a decoder with the inputs {', '.join(extra_inputs)}")
    if signature.state_pairs:
        _refuse_decoder("a decoder whose rows have states")
    if not decoder.pool_specs:
        _refuse_decoder("a decoder without a cache")
    if decoder.prompt_mode != "chunks":
        _refuse_decoder("a decoder that takes no chunk of a prompt after another")


def _refuse_decoder(found: str) -> NoReturn:
    raise GenerationError("prompt_cache", found, "a decoder whose keys and values follow from its tokens alone")


def _refuse(found: str) -> NoReturn:
    raise GenerationError("prompt_cache", found, "a cache of this model, for prompts of tokens alone", "leave it out")
