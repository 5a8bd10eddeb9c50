"""The context of generation: a model with its settings, and its form compiled for batches of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transmuter.cache import CacheError, check_quantization
from mlx_transmuter.errors import shorten
from mlx_transmuter.generation.drafts.draft_acceptance import DraftSelection
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.logits.custom_processors import check_processors
from mlx_transmuter.generation.logits.processor_types import CustomProcessor
from mlx_transmuter.generation.logits.token_selection import TokenSelection
from mlx_transmuter.generation.setting_checks import is_integer
from mlx_transmuter.generation.settings import Settings, check_vocabulary, max_new_tokens, resolve_settings
from mlx_transmuter.program import ProgramError
from mlx_transmuter.program.signature import DecoderSignature, SignatureError
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.prefill_schedule import default_prefill_step_size


@dataclass(frozen=True)
class GenerationContext:
    """A model and the options of its generation; `compile` makes it run."""

    model: Any
    settings: Settings
    extra_input_names: tuple[str, ...]
    processors: tuple[CustomProcessor, ...]
    token_logprobs: bool
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    generation_config: Mapping[str, Any]
    options: Mapping[str, Any]
    assistant_model: Any = None

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the decoder continues a prompt of its own, and the text goes into an encoder."""
        return bool(self.model.config.get("is_encoder_decoder"))

    def new_token_limit(self, prompt_length: int) -> int:
        """Returns the most new tokens after a prompt of that length. Raises GenerationError where max_length leaves
        none."""
        count = max_new_tokens(self.generation_config, self.options, prompt_length)
        if count < 1:
            raise GenerationError(
                "setting max_length",
                f"{prompt_length + count} for a prompt of {prompt_length} tokens",
                "more than the prompt",
            )
        return count


@dataclass(frozen=True)
class CompiledAssistant:
    """A decoder that drafts for another one of the same vocabulary and as many rows, and its selection of tokens."""

    decoder: Decoder
    selection: TokenSelection


@dataclass(frozen=True)
class CompiledGeneration:
    """A context for batches of `batch_size` prompts, each of which has settings.rows_per_prompt rows of the decoder."""

    context: GenerationContext
    batch_size: int
    decoder: Decoder
    selection: TokenSelection
    draft_selection: DraftSelection
    assistant: CompiledAssistant | None = None

    @property
    def max_draft_tokens(self) -> int:
        """The most draft tokens of a row in one pass; 0 without speculative decoding."""
        settings = self.context.settings
        return (settings.prompt_lookup_num_tokens or 0) if self.assistant is None else settings.num_assistant_tokens

    @property
    def compilation_count(self) -> int:
        """How many step functions were compiled, the assistant's among them."""
        return self.decoder.compilations + (self.assistant.decoder.compilations if self.assistant else 0)


def context(
    model: Any,
    *,
    given: Sequence[str] = (),
    embed: Any = None,
    image_token: int | None = None,
    processors: Sequence[CustomProcessor] = (),
    token_logprobs: bool = False,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
    prefill_step_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    assistant_model: Any = None,
    **options: Any,
) -> GenerationContext:
    """Returns the context of generation for model: the settings of options, else of its generation_config.json.

    given: the names of the decoder's extra inputs, which `generate` gets; by default those that the decoder declares.
    processors: pairs (make_state, process) of a task; they apply after the processors of the settings and before those
    of sampling. `make_state` takes a dict of one row, with `prompt`, `generated` (the last token first) and `vocab`,
    and returns an array of the same shape at each step; `process` takes the logits [vocab] of the row and that array
    and returns logits. num_beams, max_new_tokens and options are names of generation_config.json (`SETTINGS`).
    prefill_step_size: the most tokens of a prompt that one step takes, of a decoder that takes prompts in chunks.
    kv_bits: 8 or 4, to quantize keys and values to so many bits per element, in groups of kv_group_size (32, 64 or
    128), which changes the numbers (docs/caches.md says how much). assistant_model: a smaller model of the same
    vocabulary, which drafts tokens that the model then verifies, several in one pass; the results stay the same.

    Without max_new_tokens and max_length, of the options and of generation_config.json, a row gets at most 256 new
    tokens, as in the pipelines of transformers.

    Raises GenerationError for an unknown name, a value out of range, token ids outside the vocabulary, a setting that
    is not supported, processors that are no pairs of functions, and an assistant_model that is no model.
    """
    if embed is not None or image_token is not None:
        raise GenerationError(
            "context", "a model of embeddings", "a decoder of token ids", "leave out embed and image_token"
        )
    try:
        check_quantization(kv_bits, kv_group_size)
    except CacheError as error:
        raise GenerationError(error.where, error.found, error.expected) from None
    if prefill_step_size is not None and (not is_integer(prefill_step_size) or prefill_step_size < 1):
        raise GenerationError("prefill_step_size", shorten(prefill_step_size), "an integer of at least 1")
    if not isinstance(given, (list, tuple)) or not all(isinstance(name, str) for name in given):
        raise GenerationError("given", shorten(given), "a list of names")
    named = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    options |= {name: value for name, value in named.items() if value is not None}
    config = dict(model.generation_config or {})
    pairs = check_processors(processors)
    settings = resolve_settings(config, options)
    signature = _decoder_signature(model)
    if signature is not None:
        check_vocabulary(settings, signature.vocab_size)
    if assistant_model is not None:
        _check_assistant_model(model, assistant_model, settings)
    return GenerationContext(
        model,
        settings,
        tuple(given) or (signature.extra_inputs if signature is not None else ()),
        pairs,
        token_logprobs,
        prefill_step_size or default_prefill_step_size(),
        kv_bits,
        kv_group_size,
        config,
        dict(options),
        assistant_model,
    )


def _decoder_signature(model: Any) -> DecoderSignature | None:
    """Returns the signature of the model's decoder; None for what is no decoder, which `compile` refuses."""
    program = getattr(getattr(model, "decoder", None), "program", None)
    if program is None:
        return None
    try:
        return DecoderSignature.from_program(program)
    except (SignatureError, ProgramError):
        return None


def _require_draft_support(where: str, decoder: Decoder) -> None:
    if not decoder.supports_drafts:
        raise GenerationError(
            where,
            "a graph whose attention was not rewritten onto pools, which cannot verify or reject drafts",
            "a model whose attention was rewritten (mlx-transmuter inspect says so)",
            "leave it out",
        )


def _check_assistant_model(model: Any, assistant: Any, settings: Settings) -> None:
    if not hasattr(assistant, "decoder"):
        raise GenerationError("assistant_model", shorten(assistant), "a Model", "load it: mlx_transmuter.load(...)")
    for name, harmless in (("num_beams", 1), ("prompt_lookup_num_tokens", None)):
        value = getattr(settings, name)
        if value != harmless:
            found = f"{value} with an assistant_model"
            raise GenerationError(f"setting {name}", found, str(harmless), "leave one of them out")
    own, other = (getattr(each, "tokenizer", None) for each in (model, assistant))
    if own is not None and other is not None and own.vocabulary != other.vocabulary:
        differing = len({token for token, _ in own.vocabulary.items() ^ other.vocabulary.items()})
        raise GenerationError(
            "assistant_model",
            f"a tokenizer of which {differing} tokens differ",
            "the model's own tokenizer",
            "use a smaller model of the same family",
        )


def compile(
    ctx: GenerationContext, batch_size: int, *, decoder: Decoder | None = None, assistant_decoder: Decoder | None = None
) -> CompiledGeneration:
    """Returns ctx for batches of batch_size prompts. Steps and selections are compiled at their first use.

    decoder: a Decoder of the same model for batch_size × settings.rows_per_prompt rows, where the caller has one;
    assistant_decoder: the same of the assistant model. Call this in the thread that generates: what MLX compiles
    belongs to a thread. Raises GenerationError for settings with ids outside the vocabulary, for drafts where the model
    cannot verify several tokens in one pass, and for an assistant model of another vocabulary.
    """
    if not is_integer(batch_size) or batch_size < 1:
        raise GenerationError("batch_size", shorten(batch_size), "a whole number of at least 1")
    batch_size = int(batch_size)
    if decoder is None:
        rows = batch_size * ctx.settings.rows_per_prompt
        decoder = Decoder(ctx.model.decoder, rows, kv_bits=ctx.kv_bits, kv_group_size=ctx.kv_group_size)
    if ctx.assistant_model is not None:
        _require_draft_support("assistant_model", decoder)
    elif ctx.settings.prompt_lookup_num_tokens:
        _require_draft_support("setting prompt_lookup_num_tokens", decoder)
    selection = TokenSelection(ctx.settings, decoder.vocab_size, ctx.processors, ctx.token_logprobs)
    assistant = _compile_assistant(ctx, decoder, assistant_decoder)
    return CompiledGeneration(ctx, batch_size, decoder, selection, DraftSelection(selection), assistant)


def _compile_assistant(
    ctx: GenerationContext, decoder: Decoder, assistant_decoder: Decoder | None
) -> CompiledAssistant | None:
    if ctx.assistant_model is None:
        return None
    if assistant_decoder is None:
        assistant_decoder = Decoder(ctx.assistant_model.decoder, decoder.rows)
    _require_draft_support("the assistant_model", assistant_decoder)
    if assistant_decoder.vocab_size != decoder.vocab_size:
        raise GenerationError(
            "assistant_model", f"logits of {assistant_decoder.vocab_size} tokens", f"the model's {decoder.vocab_size}"
        )
    # The settings with which the model selects, and log-probabilities for assistant_confidence_threshold.
    selection = TokenSelection(ctx.settings, assistant_decoder.vocab_size, ctx.processors, logprobs=True)
    return CompiledAssistant(assistant_decoder, selection)
