"""Text generation: prompts as text, chats or token ids in, texts out, whole or as they come."""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import generation as generation_api
from mlx_transmuter.errors import shorten
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.generation.loop import GenerationSteps
from mlx_transmuter.model import Model, eos_token_ids
from mlx_transmuter.notices import print_notice_once
from mlx_transmuter.tasks.results import Piece, TextResult

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


def generation(
    model: Model,
    *,
    token_logprobs: bool = False,
    chat_template_vars: Mapping[str, Any] | None = None,
    prompt_cache: PromptCache | None = None,
    assistant_model: Model | None = None,
    **settings: Any,
) -> TextGeneration:
    """A callable that continues prompts with `model`.

    settings: names of generation_config.json, which go before the model's own; stop_strings among them. The eos ids of
    the model's files and its tokenizer are joined unless eos_token_id is given. chat_template_vars: what the chat
    template reads besides the messages. prompt_cache: what is computed stays there, so that a later prompt which begins
    like an earlier one, or its text, runs only its own tail. assistant_model: a smaller model of the same tokenizer,
    whose drafts `model` verifies several tokens at once; prompt_lookup_num_tokens among the settings drafts from the
    text itself. The texts are the same with any of them as without. Without max_new_tokens and max_length, here and in
    the model's generation_config.json, a text gets at most 256 new tokens. Raises GenerationError for an unknown name
    or a value out of range.
    """
    return TextGeneration(model, token_logprobs, chat_template_vars or {}, assistant_model, settings, prompt_cache)


class TextGeneration:
    """What `generation` returns. Compiled shapes stay between calls; a batch runs as the next power of two of rows."""

    def __init__(
        self,
        model: Model,
        token_logprobs: bool,
        template_vars: Mapping[str, Any],
        assistant_model: Model | None,
        settings: dict[str, Any],
        prompt_cache: PromptCache | None = None,
    ):
        self.tokenizer, self.prompt_cache = model.tokenizer, prompt_cache
        self.template_vars = dict(template_vars)
        if "eos_token_id" not in settings and (eos := eos_token_ids(model)):
            settings = {**settings, "eos_token_id": eos}
        self.context = generation_api.context(
            model, token_logprobs=token_logprobs, assistant_model=assistant_model, **settings
        )
        self.stop_strings = self.context.settings.stop_strings
        if self.stop_strings and self.tokenizer is None:
            raise GenerationError(
                "setting stop_strings",
                "a model without a tokenizer",
                "a tokenizer that finds them",
                "give eos_token_id",
            )
        self._printed_notices: set[str] = set()
        self._compiled_batches: dict[int, generation_api.CompiledGeneration] = {}

    def __call__(self, prompts: Prompt | Sequence[Prompt], *, seed: int | Sequence[int] | None = None) -> Any:
        """The Result of a prompt, or the list of Results of a list of prompts.

        A prompt is a str, a list of chat messages ({"role": ..., "content": ...}), or a list of token ids. With
        num_return_sequences above 1, each prompt has a list of Results. seed: for sampling, one for all prompts or one
        each; a prompt's text is the same alone and in any batch. Without it each prompt gets a random one.

        A text may go past the length that the model was trained for, and ends where its table of positions does: then
        its Result has a notice, which is also printed on stderr, each once.

        Raises GenerationError for a prompt without tokens, ids outside the vocabulary, or more tokens than the model
        has positions for; TokenizerError where text or a chat cannot become tokens.
        """
        if isinstance(prompts, bytes) or not isinstance(prompts, Sequence | np.ndarray):
            raise GenerationError(
                "prompt", shorten(prompts), "a str, a list of chat messages or token ids, or a list of these"
            )
        if is_single := _is_single_prompt(prompts):
            prompts = [prompts]  # type: ignore[list-item]
        ids = [self.encode(prompt) for prompt in prompts]  # type: ignore[arg-type]
        if not ids:
            return []
        results = [self._text_result(result) for result in generation_api.run_to_end(self._start_steps(ids, seed))]
        for result in results:
            print_notice_once(result.notice, self._printed_notices)
        texts = self.context.settings.num_return_sequences
        grouped = [results[i * texts : i * texts + texts] if texts > 1 else results[i] for i in range(len(ids))]
        return grouped[0] if is_single else grouped

    def stream(self, prompt: Prompt, *, seed: int | None = None) -> Generator[Piece, None, None]:
        """The Pieces of one prompt's text as they become final; joined, they are the text of its Result.

        No piece holds half a character, or the beginning of a stop string that may still come. Closing the generator
        ends the generation. Raises as a call does, and GenerationError for several prompts or texts.
        """
        if not _is_single_prompt(prompt) or self.context.settings.num_return_sequences > 1:
            raise GenerationError("prompt", "several prompts or texts", "one to stream", "call the task itself")
        ids = self.encode(prompt)
        return self._stream_pieces(len(ids), self._start_steps([ids], seed))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, as the model gets them. Raises GenerationError where there are none."""
        chat = _first_item_is(prompt, Mapping)
        if self.tokenizer is None and (chat or isinstance(prompt, str)):
            raise GenerationError(
                "prompt", "text, and a model without a tokenizer", "token ids", "put a tokenizer.json into its folder"
            )
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)  # type: ignore[union-attr]
        elif chat:
            # The template writes the special tokens itself.
            text = self.tokenizer.apply_chat_template(prompt, **self.template_vars)  # type: ignore[union-attr, arg-type]
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
        elif (
            isinstance(prompt, Sequence | np.ndarray)
            and not isinstance(prompt, bytes)
            and all(_is_token_id(id) for id in prompt)
        ):
            ids = [int(id) for id in prompt]  # type: ignore[arg-type]
        else:
            raise GenerationError("prompt", shorten(prompt), "a str, a list of chat messages or a list of token ids")
        if not ids:
            raise GenerationError("prompt", f"no tokens in {shorten(prompt)}", "at least one token")
        return ids

    @property
    def compilations(self) -> int:
        """How many step functions were compiled, one for each shape."""
        return sum(gen.compilation_count for gen in self._compiled_batches.values())

    def _start_steps(self, ids: Sequence[list[int]], seed: int | Sequence[int] | None) -> GenerationSteps:
        """The steps of `generate_steps` for these prompts, in a batch of the next power of two."""
        size = 1 << (len(ids) - 1).bit_length()
        if size not in self._compiled_batches:
            self._compiled_batches[size] = generation_api.compile(self.context, size)
        if seed is None:
            seeds = [random.SystemRandom().randrange(2**31) for _ in ids]
        else:
            seeds = [seed] * len(ids) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(ids):
            raise GenerationError("seed", f"{len(seeds)} seeds", f"one, or one for each of {len(ids)} prompts")
        padding = size - len(ids)
        stop = self._has_stop_string if self.stop_strings else None
        prompts, seeds = [*ids, *[[]] * padding], [*seeds, *[0] * padding]
        return generation_api.generate_steps(
            self._compiled_batches[size], prompts, seeds, stop=[stop] * size, prompt_cache=self.prompt_cache
        )

    def _stream_pieces(self, prompt_tokens: int, steps: GenerationSteps) -> Generator[Piece, None, None]:
        detokenizer = self.tokenizer.stream() if self.tokenizer else None
        count = sent = 0
        final = ""
        started = first = time.perf_counter()
        with closing(steps):  # also where a caller's error keeps this generator in a traceback
            for step in steps:
                now = time.perf_counter()
                token = int(step.token[0]) if step.token[0] >= 0 else None
                if count == 0:
                    first = now
                if token is not None:
                    count += 1
                    final += detokenizer.push(token) if detokenizer else ""
                reason = draft_counts = notice = None
                end = len(final) - _stop_prefix_length(final, self.stop_strings)
                if step.finished[0]:
                    result = self._text_result(generation_api.run_to_end(steps)[0])
                    final, end = result.text, len(result.text)
                    reason, draft_counts, notice = result.finish_reason, result.draft_counts, result.notice
                piece = Piece(final[sent:end])
                sent = end
                piece.token, piece.finish_reason, piece.draft_counts, piece.notice = token, reason, draft_counts, notice
                piece.logprobs = float(step.logprob[0]) if step.logprob is not None and token is not None else None
                piece.prompt_tokens, piece.generation_tokens = prompt_tokens, count
                piece.prompt_tps = prompt_tokens / max(first - started, 1e-9)
                piece.generation_tps = (count - 1) / (now - first) if now > first else 0.0
                piece.peak_memory = mx.get_peak_memory() / 1e9
                yield piece

    def _has_stop_string(self, tokens: Sequence[int]) -> bool:
        """Whether the text of these tokens holds a stop string. It is decoded whole: a byte can change what it ends."""
        text = self.tokenizer.decode(tokens)  # type: ignore[union-attr]
        return any(stop in text for stop in self.stop_strings)

    def _text_result(self, result: generation_api.GenerationResult) -> TextResult:
        tokens = [token.id for token in result.tokens]
        text = self.tokenizer.decode(tokens) if self.tokenizer else ""
        ends = [place for stop in self.stop_strings if (place := text.find(stop)) >= 0]
        logprobs = [token.logprob for token in result.tokens] if self.context.token_logprobs else None
        text = text[: min(ends, default=len(text))]
        return TextResult(text, tokens, logprobs, result.finish_reason, result.draft_counts, result.notice)  # type: ignore[arg-type]


def _is_single_prompt(prompts: Any) -> bool:
    """Whether this is one prompt: a str, or a list that begins with a message or a token id."""
    return isinstance(prompts, str) or _first_item_is(prompts, Mapping | int | np.integer)


def _first_item_is(value: Any, kind: Any) -> bool:
    return hasattr(value, "__len__") and len(value) > 0 and isinstance(value[0], kind)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _stop_prefix_length(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of text may be the beginning of a stop string."""
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)
