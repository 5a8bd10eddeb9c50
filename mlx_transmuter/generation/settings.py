"""The settings of generation: the names of generation_config.json, what each does here, and one checked object.

`SETTINGS` is the whole table. The defaults, the meaning of null and the ranges are those of `GenerationConfig` and of
the logits processors of transformers 4.57.6.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from mlx_transmuter.generation import setting_checks
from mlx_transmuter.generation.errors import GenerationError

ValueCheck = Callable[[Any], Any]

DEFAULT_MAX_LENGTH = 20
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Setting:
    """One name of generation_config.json.

    `status`: supported; neutral, which changes no token and takes any value; refused, which would change the tokens and
    is an error unless its value is one of `harmless`. `note` says what the setting does, or what to do without it.
    `check` turns a value into the one that Settings holds. `off` is the meaning of null, and `default` the value when
    nobody gives one. `when_sampling`: transformers reads, and so checks, the value only under do_sample; else it is
    off. `golden`: goldens of transformers on every architecture hold it, and not only tests of its own.
    """

    status: Literal["supported", "neutral", "refused"]
    note: str
    check: ValueCheck | None = None
    disabled_value: Any = None
    default: Any = None
    sampling_only: bool = False
    harmless_values: tuple[Any, ...] = (None,)
    has_goldens: bool = False


_UNSET = object()


def _supported_setting(
    note: str,
    check: ValueCheck,
    off: Any = None,
    default: Any = _UNSET,
    when_sampling: bool = False,
    golden: bool = True,
) -> Setting:
    default = off if default is _UNSET else default
    return Setting("supported", note, check, off, default, when_sampling, has_goldens=golden)


def _neutral_setting(note: str) -> Setting:
    return Setting("neutral", note)


def _refused_setting(note: str, *harmless: Any) -> Setting:
    return Setting("refused", note, harmless_values=(None, *harmless))


_CACHE_NOTE = "a cache or compilation of Python transformers; the tokens are the same"
_OUTPUT_NOTE = "an output of Python transformers; the tokens are the same"
_ASSISTANT_NOTE = "read only with an assistant model of another vocabulary or of fewer layers, which are refused"

SETTINGS: dict[str, Setting] = {
    # how many tokens
    "max_new_tokens": _supported_setting("most new tokens of a row", setting_checks.integer(1)),
    "max_length": _supported_setting(
        "most tokens of a row, its prompt counted; max_new_tokens goes before it",
        setting_checks.integer(1),
        golden=False,
    ),
    "min_length": _supported_setting("no eos while prompt and new tokens are fewer", setting_checks.integer(0), 0),
    "min_new_tokens": _supported_setting(
        "no eos while the new tokens are fewer; replaces min_length", setting_checks.integer(0)
    ),
    "stop_strings": _supported_setting(
        "ends a row whose text comes to hold one; needs a task with a tokenizer",
        setting_checks.strings,
        (),
        golden=False,
    ),
    "eos_token_id": _supported_setting("one id or a list: each ends a row", setting_checks.token_ids, ()),
    # how a token is chosen
    "do_sample": _supported_setting("samples instead of taking the best token", setting_checks.boolean, False),
    "num_beams": _supported_setting("beams of a prompt; above 1, beam search", setting_checks.integer(1), 1),
    "num_return_sequences": _supported_setting(
        "texts per prompt, by sampling or from the beams", setting_checks.integer(1), 1
    ),
    "length_penalty": _supported_setting(
        "power of the length that divides a beam's score", setting_checks.number(), 1.0
    ),
    "early_stopping": _supported_setting(
        "when a beam search ends: True, False or 'never'", setting_checks.early_stopping, False
    ),
    # processors, in the order in which they apply
    "sequence_bias": _supported_setting(
        "adds to the score of a token that completes a sequence", setting_checks.sequence_bias, ()
    ),
    "encoder_repetition_penalty": _supported_setting(
        "rewards (above 1) the tokens of the encoder, or of the prompt of a decoder-only model",
        setting_checks.number(above=0),
        1.0,
    ),
    "repetition_penalty": _supported_setting(
        "penalises (above 1) each token that a row already has", setting_checks.number(above=0), 1.0
    ),
    "no_repeat_ngram_size": _supported_setting("no n-gram of this size twice in a row", setting_checks.integer(0), 0),
    "encoder_no_repeat_ngram_size": _supported_setting(
        "no n-gram of this size of the encoder, or of the prompt", setting_checks.integer(0), 0
    ),
    "bad_words_ids": _supported_setting("token sequences that are never completed", setting_checks.token_sequences, ()),
    "forced_bos_token_id": _supported_setting("the token after a prompt of one token", setting_checks.integer(0)),
    "forced_eos_token_id": _supported_setting(
        "one id or a list: the last token before max_length", setting_checks.token_ids, ()
    ),
    "remove_invalid_values": _supported_setting(
        "NaN becomes 0, infinite the largest finite value", setting_checks.boolean, False, golden=False
    ),
    "exponential_decay_length_penalty": _supported_setting(
        "(start, factor): raises the eos ever more", setting_checks.decay_pair
    ),
    "suppress_tokens": _supported_setting("tokens that are never chosen", setting_checks.unbounded_token_ids, ()),
    "begin_suppress_tokens": _supported_setting(
        "tokens that are not chosen first", setting_checks.unbounded_token_ids, ()
    ),
    "temperature": _supported_setting("divides the scores", setting_checks.number(above=0), 1.0, when_sampling=True),
    "top_k": _supported_setting(
        "keeps the k best tokens and the ties of the last", setting_checks.integer(0), 0, 50, when_sampling=True
    ),
    "top_p": _supported_setting(
        "keeps the fewest tokens whose mass reaches p", setting_checks.number(0, 1), 1.0, when_sampling=True
    ),
    "min_p": _supported_setting(
        "keeps tokens of at least this part of the best one", setting_checks.number(0, 1), when_sampling=True
    ),
    "typical_p": _supported_setting(
        "keeps the tokens nearest to the entropy", setting_checks.number(above=0, high=1), 1.0, when_sampling=True
    ),
    "epsilon_cutoff": _supported_setting(
        "keeps tokens of at least this mass", setting_checks.number(0, below=1), 0.0, when_sampling=True
    ),
    "eta_cutoff": _supported_setting(
        "epsilon_cutoff by the entropy", setting_checks.number(0, below=1), 0.0, when_sampling=True
    ),
    "renormalize_logits": _supported_setting("log-softmax after all processors", setting_checks.boolean, False),
    # guesses, checked several in one pass: the tokens are the same
    "prompt_lookup_num_tokens": _supported_setting(
        "the most guesses in a pass, from what followed the last tokens before", setting_checks.integer(1), golden=False
    ),
    "max_matching_ngram_size": _supported_setting(
        "the most last tokens that prompt lookup looks for", setting_checks.integer(1), 2, golden=False
    ),
    "num_assistant_tokens": _supported_setting(
        "the most guesses of assistant_model in a pass", setting_checks.integer(1), 20, golden=False
    ),
    "num_assistant_tokens_schedule": _supported_setting(
        "constant, or heuristic: two guesses more after all were right (up to the most), else one less; for prompt "
        "lookup too",
        setting_checks.draft_schedule,
        "constant",
        golden=False,
    ),
    "assistant_confidence_threshold": _supported_setting(
        "assistant_model guesses on while its own token has this probability",
        setting_checks.number(0, 1),
        0.0,
        0.4,
        golden=False,
    ),
    # special tokens that a task or the form of a result needs
    "bos_token_id": _supported_setting(
        "begins the decoder of an encoder-decoder without decoder_start_token_id",
        setting_checks.first_token_id,
        golden=False,
    ),
    "decoder_start_token_id": _supported_setting(
        "begins the decoder of an encoder-decoder", setting_checks.first_token_id, golden=False
    ),
    "pad_token_id": _neutral_setting("rows come back without padding"),
    # names that change no token
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "cache_config", "return_legacy_cache"), _neutral_setting(_CACHE_NOTE)
    ),
    **dict.fromkeys(("prefill_chunk_size", "compile_config", "disable_compile"), _neutral_setting(_CACHE_NOTE)),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits"), _neutral_setting(_OUTPUT_NOTE)
    ),
    "return_dict_in_generate": _neutral_setting(_OUTPUT_NOTE),
    "transformers_version": _neutral_setting("what wrote the file"),
    **dict.fromkeys(("is_assistant", "assistant_lookbehind", "target_lookbehind"), _neutral_setting(_ASSISTANT_NOTE)),
    # names that would change the tokens
    "max_time": _refused_setting("a limit in seconds gives other tokens on each machine: cancel the run instead"),
    "num_beam_groups": _refused_setting("diverse beam search left transformers in 4.57", 1),
    "diversity_penalty": _refused_setting("diverse beam search left transformers in 4.57", 0.0),
    "penalty_alpha": _refused_setting("contrastive search left transformers in 4.57", 0.0),
    "dola_layers": _refused_setting("DoLa left transformers in 4.57"),
    "constraints": _refused_setting("constrained beam search left transformers in 4.57"),
    "force_words_ids": _refused_setting("constrained beam search left transformers in 4.57"),
    "low_memory": _refused_setting("transformers 4.57 refuses it too", False),
    "guidance_scale": _refused_setting("classifier-free guidance runs a second prompt", 1.0),
    "watermarking_config": _refused_setting("give the watermark as one of `processors`"),
    "token_healing": _refused_setting("heal the prompt before it is given", False),
    "assistant_early_exit": _refused_setting("give a smaller model as `assistant_model`"),
    "assistant_model": _refused_setting("give it to generation.context or to the task, as a Model"),
    "prefix_allowed_tokens_fn": _refused_setting("give the constraint as one of `processors`"),
    "logits_processor": _refused_setting("give them as `processors`"),
    "stopping_criteria": _refused_setting("give `stop` to generation.run"),
}


@dataclass(frozen=True)
class Settings:
    """The supported settings of one context, validated. Ids are tuples; what is off has the `off` of its `Setting`."""

    max_new_tokens: int | None
    max_length: int | None
    min_length: int
    min_new_tokens: int | None
    stop_strings: tuple[str, ...]
    eos_token_id: tuple[int, ...]
    do_sample: bool
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...]
    encoder_repetition_penalty: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    bad_words_ids: tuple[tuple[int, ...], ...]
    forced_bos_token_id: int | None
    forced_eos_token_id: tuple[int, ...]
    remove_invalid_values: bool
    exponential_decay_length_penalty: tuple[int, float] | None
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    renormalize_logits: bool
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int
    num_assistant_tokens: int
    num_assistant_tokens_schedule: str
    assistant_confidence_threshold: float
    bos_token_id: int | None
    decoder_start_token_id: int | None

    @property
    def rows_per_prompt(self) -> int:
        """Rows that a prompt takes: its beams, or the texts sampled for it."""
        return max(self.num_beams, self.num_return_sequences)

    @property
    def candidates_per_beam(self) -> int:
        """Candidates per beam that a step of beam search keeps, as `_beam_search` does."""
        return max(2, 1 + len(self.eos_token_id))

    @property
    def min_tokens_to_keep(self) -> int:
        """Tokens that no sampling setting removes (min_tokens_to_keep): beams need one that does not end."""
        return 1 if self.num_beams == 1 else max(2, 1 + len(self.eos_token_id))


def resolve_settings(generation_config: Mapping[str, Any], options: Mapping[str, Any]) -> Settings:
    """The settings of options, else of generation_config, else the defaults of transformers.

    A None in options, or a null in generation_config, switches a setting off. Names of generation_config that nothing
    knows are left alone, as in transformers; of options they are an error that lists the near ones. Raises
    GenerationError for them, for a value out of range, and for a setting that would change the tokens and is not
    supported.
    """
    for name in options:
        if name not in SETTINGS and not name.startswith("_"):
            near = difflib.get_close_matches(name, SETTINGS, n=4, cutoff=0.5)
            raise GenerationError(f"setting {name}", "no setting of that name", f"one of {', '.join(near or SETTINGS)}")
    given = {**generation_config, **options}
    for name, value in given.items():
        setting = SETTINGS.get(name)
        if setting and setting.status == "refused" and value not in setting.harmless_values:
            harmless = " or ".join(repr(value) for value in setting.harmless_values)
            raise GenerationError(f"setting {name}", repr(value), f"{harmless}, for it is not supported", setting.note)
    sampling = _resolve_value("do_sample", given, sampling=False)
    chosen = Settings(**{field.name: _resolve_value(field.name, given, sampling) for field in fields(Settings)})
    _check_combinations(chosen)
    return chosen


def _resolve_value(name: str, named_values: Mapping[str, Any], sampling: bool) -> Any:
    setting = SETTINGS[name]
    value = named_values.get(name, setting.default)
    if value is None or (setting.sampling_only and not sampling):
        return setting.disabled_value
    if setting.check is None or name not in named_values:
        return value
    try:
        return setting.check(value)
    except setting_checks.InvalidSettingValue as wrong:
        raise GenerationError(f"setting {name}", repr(value), wrong.expected) from None


def _check_combinations(settings: Settings) -> None:
    if settings.num_return_sequences > 1 and settings.num_beams == 1 and not settings.do_sample:
        raise GenerationError(
            "setting num_return_sequences",
            f"{settings.num_return_sequences} greedy texts",
            "1",
            "set do_sample or num_beams",
        )
    if 1 < settings.num_beams < settings.num_return_sequences:
        raise GenerationError(
            "setting num_return_sequences",
            f"{settings.num_return_sequences}",
            f"at most num_beams, {settings.num_beams}",
        )
    if settings.prompt_lookup_num_tokens and settings.num_beams > 1:
        raise GenerationError(
            "setting num_beams", f"{settings.num_beams} with prompt_lookup_num_tokens", "1", "leave one of them out"
        )
    if settings.bad_words_ids and all(
        len(word) == 1 and word[0] in settings.eos_token_id for word in settings.bad_words_ids
    ):
        raise GenerationError(
            "setting bad_words_ids", "only eos tokens, which are never bad", "another token", "leave it out"
        )
    if settings.exponential_decay_length_penalty and not settings.eos_token_id:
        raise GenerationError(
            "setting exponential_decay_length_penalty", "no eos_token_id", "an eos token that it can raise"
        )


def max_new_tokens(generation_config: Mapping[str, Any], options: Mapping[str, Any], prompt_length: int) -> int:
    """The most new tokens of a row whose prompt has prompt_length tokens, by the rule of the pipelines of transformers
    4.

    max_new_tokens of options, else of generation_config; else max_length minus the prompt, or 256 where max_length is
    not set or is 20, the default of GenerationConfig. A max_length in options counts whatever it is.
    """
    for given in (options, generation_config):
        if given.get("max_new_tokens") is not None:
            return given["max_new_tokens"]
    if options.get("max_length") is not None:
        return options["max_length"] - prompt_length
    length = generation_config.get("max_length")
    return DEFAULT_NEW_TOKENS if length is None or length == DEFAULT_MAX_LENGTH else length - prompt_length
