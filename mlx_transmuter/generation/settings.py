"""The settings of generation: the names of generation_config.json, what each does here, and their checked values.

`Settings` is the table of the supported ones, `SETTINGS` that of every name. The defaults, the meaning of null and the
ranges are those of `GenerationConfig` and of the logits processors of transformers 4.57.6, but for the number of new
tokens: without max_new_tokens and max_length it is 256, the rule of the pipelines (see `max_new_tokens`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from mlx_transmuter.errors import abbreviate, shorten
from mlx_transmuter.generation import setting_checks
from mlx_transmuter.generation.errors import GenerationError

ValueCheck = Callable[[Any], Any]

DEFAULT_MAX_LENGTH = 20
DEFAULT_NEW_TOKENS = 256
# The rows of one prompt, each of which has a cache of its own.
MAX_ROWS_PER_PROMPT = 1024


class _Unset:
    """No value."""


@dataclass(frozen=True)
class Setting:
    """One name of generation_config.json.

    status: supported; neutral, which changes no token and takes any value; refused, which would change the tokens and
    is an error unless its value is one of harmless_values. note: what the setting does, or what to do without it.
    check: turns a value into the one that Settings holds. disabled_value: the meaning of null. default: the value when
    nobody gives one. sampling_only: transformers reads, and so checks, the value only under do_sample; else it is
    disabled. has_goldens: goldens of transformers on every architecture cover it, beside tests of its own.
    """

    status: Literal["supported", "neutral", "refused"]
    note: str
    check: ValueCheck | None = None
    disabled_value: Any = None
    default: Any = None
    sampling_only: bool = False
    harmless_values: tuple[Any, ...] = (None,)
    has_goldens: bool = False


def _supported_setting(
    note: str,
    check: ValueCheck,
    disabled_value: Any = None,
    *,
    default: Any = _Unset,
    sampling_only: bool = False,
    has_goldens: bool = True,
) -> Any:
    """Returns a field of Settings that carries its Setting; the default is the disabled value unless given."""
    setting = Setting(
        "supported",
        note,
        check,
        disabled_value,
        disabled_value if default is _Unset else default,
        sampling_only,
        has_goldens=has_goldens,
    )
    return field(metadata={"setting": setting})


def _neutral_setting(note: str) -> Setting:
    return Setting("neutral", note)


def _refused_setting(note: str, *harmless_values: Any) -> Setting:
    return Setting("refused", note, harmless_values=(None, *harmless_values))


@dataclass(frozen=True)
class Settings:
    """The supported settings of one context, checked: the table of them. Ids are tuples; a setting that is off has the
    disabled_value of its Setting. The processors are listed in the order in which they apply."""

    # how many tokens
    max_new_tokens: int | None = _supported_setting(
        "most new tokens of a row; 256 where neither it nor max_length is set", setting_checks.integer(1)
    )
    max_length: int | None = _supported_setting(
        "most tokens of a row, prompt included; max_new_tokens takes precedence",
        setting_checks.integer(1),
        has_goldens=False,
    )
    stop_strings: tuple[str, ...] = _supported_setting(
        "ends a row when its text contains one of them; needs a task with a tokenizer",
        setting_checks.strings,
        (),
        has_goldens=False,
    )
    eos_token_id: tuple[int, ...] = _supported_setting(
        "one id or a list: each ends a row", setting_checks.token_ids, ()
    )
    # how a token is selected
    do_sample: bool = _supported_setting("samples instead of taking the best token", setting_checks.boolean, False)
    num_beams: int = _supported_setting(
        "beams of a prompt, at most 1,024; above 1, beam search", setting_checks.integer(1, MAX_ROWS_PER_PROMPT), 1
    )
    num_return_sequences: int = _supported_setting(
        "results per prompt, at most 1,024, by sampling or from the beams",
        setting_checks.integer(1, MAX_ROWS_PER_PROMPT),
        1,
    )
    length_penalty: float = _supported_setting(
        "power of the length that divides a beam's score", setting_checks.number(), 1.0
    )
    early_stopping: bool | str = _supported_setting(
        "when a beam search ends: True, False or 'never'", setting_checks.early_stopping, False
    )
    # processors, in the order in which they apply
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = _supported_setting(
        "adds to the score of a token that completes a sequence", setting_checks.sequence_bias_pairs, ()
    )
    encoder_repetition_penalty: float = _supported_setting(
        "rewards (above 1) the tokens of the encoder, or of the prompt of a decoder-only model",
        setting_checks.number(above=0),
        1.0,
    )
    repetition_penalty: float = _supported_setting(
        "penalizes (above 1) each token that a row already has", setting_checks.number(above=0), 1.0
    )
    no_repeat_ngram_size: int = _supported_setting(
        "no n-gram of this size occurs twice in a sequence", setting_checks.integer(0), 0
    )
    encoder_no_repeat_ngram_size: int = _supported_setting(
        "no n-gram of this size of the encoder, or of the prompt", setting_checks.integer(0), 0
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = _supported_setting(
        "token sequences that are never completed", setting_checks.token_sequences, ()
    )
    min_length: int = _supported_setting(
        "no eos while prompt and new tokens together are fewer", setting_checks.integer(0), 0
    )
    min_new_tokens: int | None = _supported_setting(
        "no eos while the new tokens are fewer; replaces min_length", setting_checks.integer(0)
    )
    forced_bos_token_id: int | None = _supported_setting(
        "the token after a prompt of one token", setting_checks.integer(0)
    )
    forced_eos_token_id: tuple[int, ...] = _supported_setting(
        "one id or a list: the last token before max_length", setting_checks.token_ids, ()
    )
    remove_invalid_values: bool = _supported_setting(
        "NaN becomes 0, infinite the largest finite value", setting_checks.boolean, False, has_goldens=False
    )
    exponential_decay_length_penalty: tuple[int, float] | None = _supported_setting(
        "(start, factor): raises the score of the eos more with each new token after start. Where min_length or "
        "min_new_tokens removes the eos, its score is NaN in transformers: a greedy row ends there, before the "
        "minimum, there and here; beams, whose texts the NaN cuts in transformers, end after the minimum here",
        setting_checks.decay_pair,
    )
    suppress_tokens: tuple[int, ...] = _supported_setting(
        "tokens that are never selected", setting_checks.unbounded_token_ids, ()
    )
    begin_suppress_tokens: tuple[int, ...] = _supported_setting(
        "tokens that are not selected first", setting_checks.unbounded_token_ids, ()
    )
    temperature: float = _supported_setting(
        "divides the scores; at least the smallest normal float32, 1.18e-38, which devices do not take for 0",
        setting_checks.number(low=setting_checks.MIN_NORMAL),
        1.0,
        sampling_only=True,
    )
    top_k: int = _supported_setting(
        "leaves the k best tokens and the ties of the last",
        setting_checks.integer(0),
        0,
        default=50,
        sampling_only=True,
    )
    top_p: float = _supported_setting(
        "leaves the fewest tokens whose probabilities reach p", setting_checks.number(0, 1), 1.0, sampling_only=True
    )
    min_p: float | None = _supported_setting(
        "leaves tokens of at least this fraction of the best one's probability",
        setting_checks.number(0, 1),
        sampling_only=True,
    )
    typical_p: float = _supported_setting(
        "leaves the tokens whose surprise is nearest to the entropy",
        setting_checks.number(above=0, high=1),
        1.0,
        sampling_only=True,
    )
    epsilon_cutoff: float = _supported_setting(
        "leaves tokens of at least this probability", setting_checks.number(0, below=1), 0.0, sampling_only=True
    )
    eta_cutoff: float = _supported_setting(
        "epsilon_cutoff, lowered by the entropy", setting_checks.number(0, below=1), 0.0, sampling_only=True
    )
    renormalize_logits: bool = _supported_setting("log-softmax after all processors", setting_checks.boolean, False)
    # drafts, several verified in one pass: the tokens are the same
    prompt_lookup_num_tokens: int | None = _supported_setting(
        "most draft tokens per pass, from what followed the row's last tokens before",
        setting_checks.integer(1),
        has_goldens=False,
    )
    max_matching_ngram_size: int = _supported_setting(
        "most last tokens that prompt lookup searches for", setting_checks.integer(1), 2, has_goldens=False
    )
    num_assistant_tokens: int = _supported_setting(
        "most draft tokens of assistant_model per pass", setting_checks.integer(1), 20, has_goldens=False
    )
    num_assistant_tokens_schedule: str = _supported_setting(
        "constant, or heuristic: two draft tokens more after all were accepted (up to the most), else one fewer; for "
        "prompt lookup too",
        setting_checks.draft_schedule,
        "constant",
        has_goldens=False,
    )
    assistant_confidence_threshold: float = _supported_setting(
        "assistant_model drafts on while its own token has at least this probability",
        setting_checks.number(0, 1),
        0.0,
        default=0.4,
        has_goldens=False,
    )
    # special tokens that a task or the form of a result needs
    bos_token_id: int | None = _supported_setting(
        "begins the decoder of an encoder-decoder without decoder_start_token_id",
        setting_checks.first_token_id,
        has_goldens=False,
    )
    decoder_start_token_id: int | None = _supported_setting(
        "begins the decoder of an encoder-decoder", setting_checks.first_token_id, has_goldens=False
    )

    @property
    def rows_per_prompt(self) -> int:
        """The rows of a prompt: its beams, or its sampled sequences."""
        return max(self.num_beams, self.num_return_sequences)

    def prompt_of(self, row: int) -> int:
        """Returns the prompt that a row continues; prompt i has the rows i × rows_per_prompt and those after it."""
        return row // self.rows_per_prompt

    @property
    def candidates_per_beam(self) -> int:
        """The candidates per beam of a step of beam search, as in `_beam_search`: enough for one that does not end."""
        return max(2, 1 + len(self.eos_token_id))

    @property
    def min_tokens_to_keep(self) -> int:
        """The tokens that no sampling setting removes: beams need one that does not end."""
        return 1 if self.num_beams == 1 else self.candidates_per_beam

    def is_enabled(self, name: str) -> bool:
        """Returns whether the setting of this name has another value than its disabled one."""
        return getattr(self, name) != SETTINGS[name].disabled_value


_CACHE_NOTE = "a cache or compilation of Python transformers; the tokens are the same"
_OUTPUT_NOTE = "an output of Python transformers; the tokens are the same"
_ASSISTANT_NOTE = "read only with an assistant model of another vocabulary or of fewer layers, which are refused"

# Every name of generation_config.json: the supported ones, as Settings lists them, and the others.
SETTINGS: dict[str, Setting] = {
    **{entry.name: entry.metadata["setting"] for entry in fields(Settings)},
    "pad_token_id": _neutral_setting("rows are returned without padding"),
    # names that change no token
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "cache_config", "return_legacy_cache"), _neutral_setting(_CACHE_NOTE)
    ),
    **dict.fromkeys(("prefill_chunk_size", "compile_config", "disable_compile"), _neutral_setting(_CACHE_NOTE)),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits"), _neutral_setting(_OUTPUT_NOTE)
    ),
    "return_dict_in_generate": _neutral_setting(_OUTPUT_NOTE),
    "transformers_version": _neutral_setting("the version that wrote the file"),
    **dict.fromkeys(("is_assistant", "assistant_lookbehind", "target_lookbehind"), _neutral_setting(_ASSISTANT_NOTE)),
    # names that would change the tokens
    "max_time": _refused_setting(
        "a limit in seconds gives other tokens on each machine: cancel the generation instead"
    ),
    "num_beam_groups": _refused_setting("diverse beam search left transformers in 4.57", 1),
    "diversity_penalty": _refused_setting("diverse beam search left transformers in 4.57", 0.0),
    "penalty_alpha": _refused_setting("contrastive search left transformers in 4.57", 0.0),
    "dola_layers": _refused_setting("DoLa left transformers in 4.57"),
    "constraints": _refused_setting("constrained beam search left transformers in 4.57"),
    "force_words_ids": _refused_setting("constrained beam search left transformers in 4.57"),
    "low_memory": _refused_setting("transformers 4.57 refuses it too", False),
    "guidance_scale": _refused_setting("classifier-free guidance runs a second prompt", 1.0),
    "watermarking_config": _refused_setting("pass the watermark as one of `processors`"),
    "token_healing": _refused_setting("heal the prompt before passing it", False),
    "assistant_early_exit": _refused_setting("pass a smaller model as `assistant_model`"),
    "assistant_model": _refused_setting("pass it to generation.context or to the task, as a Model"),
    "prefix_allowed_tokens_fn": _refused_setting("pass the constraint as one of `processors`"),
    "logits_processor": _refused_setting("pass them as `processors`"),
    "stopping_criteria": _refused_setting("pass `stop` to generation.generate_steps"),
}


def resolve_settings(generation_config: Mapping[str, Any], options: Mapping[str, Any]) -> Settings:
    """Returns the settings of options, else of generation_config, else the defaults of transformers.

    Without max_new_tokens it is None here, and `max_new_tokens` says how many there are.

    None in options, or null in generation_config, switches a setting off. Unknown names of generation_config are
    ignored, as in transformers; of options they are an error that lists the near ones. Raises GenerationError for them,
    for a value out of range, and for a setting that would change the tokens and is not supported.
    """
    for name in options:
        if name not in SETTINGS and not name.startswith("_"):
            near = difflib.get_close_matches(name, SETTINGS, n=4, cutoff=0.5)
            raise GenerationError(f"setting {name}", "no setting of that name", f"one of {', '.join(near or SETTINGS)}")
    named_values = {**generation_config, **options}
    for name, value in named_values.items():
        setting = SETTINGS.get(name)
        if setting and setting.status == "refused" and not setting_checks.is_one_of(value, setting.harmless_values):
            harmless = " or ".join(repr(value) for value in setting.harmless_values)
            raise GenerationError(f"setting {name}", shorten(value), f"{harmless}: it is not supported", setting.note)
    sampling = _resolve_value("do_sample", named_values, sampling=False)
    settings = Settings(
        **{entry.name: _resolve_value(entry.name, named_values, sampling) for entry in fields(Settings)}
    )
    _check_combinations(settings)
    return settings


def _resolve_value(name: str, named_values: Mapping[str, Any], sampling: bool) -> Any:
    setting = SETTINGS[name]
    value = named_values.get(name, setting.default)
    if value is None or (setting.sampling_only and not sampling):
        return setting.disabled_value
    if setting.check is None or name not in named_values:
        return value
    try:
        return setting.check(value)
    except setting_checks.InvalidSettingValue as error:
        raise GenerationError(f"setting {name}", shorten(value), error.expected) from None


def _check_combinations(settings: Settings) -> None:
    texts = settings.num_return_sequences
    if texts > 1 and settings.num_beams == 1 and not settings.do_sample:
        raise GenerationError(
            "setting num_return_sequences", f"{texts} greedy sequences", "1", "set do_sample or num_beams"
        )
    if 1 < settings.num_beams < texts:
        raise GenerationError("setting num_return_sequences", str(texts), f"at most num_beams, {settings.num_beams}")
    if settings.prompt_lookup_num_tokens and settings.num_beams > 1:
        found = f"{settings.num_beams} with prompt_lookup_num_tokens"
        raise GenerationError("setting num_beams", found, "1", "leave one of them out")
    words, eos = settings.bad_words_ids, settings.eos_token_id
    if words and all(len(word) == 1 and word[0] in eos for word in words):
        found = "only eos tokens, which are never bad"
        raise GenerationError("setting bad_words_ids", found, "another token", "leave it out")
    if settings.exponential_decay_length_penalty and not eos:
        raise GenerationError(
            "setting exponential_decay_length_penalty", "no eos_token_id", "an eos token whose score it can raise"
        )


def check_vocabulary(settings: Settings, vocab_size: int) -> None:
    """Raises GenerationError for token ids that the vocabulary lacks, of the settings of which transformers checks
    them."""
    eos = settings.eos_token_id
    named_ids: dict[str, Iterable[int]] = {
        "sequence_bias": (token for tokens, _ in settings.sequence_bias for token in tokens),
        # An eos is never a bad word.
        "bad_words_ids": (token for word in settings.bad_words_ids if word[1:] or word[0] not in eos for token in word),
        "forced_bos_token_id": [] if settings.forced_bos_token_id is None else [settings.forced_bos_token_id],
        "forced_eos_token_id": settings.forced_eos_token_id,
        "eos_token_id": eos if settings.exponential_decay_length_penalty else (),
    }
    for name, ids in named_ids.items():
        if outside := sorted({token for token in ids if token >= vocab_size}):
            found = f"the token ids {abbreviate(list(map(str, outside)))}"
            raise GenerationError(f"setting {name}", found, f"ids below the vocabulary's {vocab_size}")


def max_new_tokens(generation_config: Mapping[str, Any], options: Mapping[str, Any], prompt_length: int) -> int:
    """Returns the most new tokens of a row whose prompt has prompt_length tokens, by the rule of the pipelines of
    transformers 4.

    max_new_tokens of options, else of generation_config; else max_length minus the prompt, or 256 where max_length is
    not set or is 20, the default of GenerationConfig. A max_length in options always counts.
    """
    for values in (options, generation_config):
        if values.get("max_new_tokens") is not None:
            return values["max_new_tokens"]
    if options.get("max_length") is not None:
        return options["max_length"] - prompt_length
    length = generation_config.get("max_length")
    return DEFAULT_NEW_TOKENS if length is None or length == DEFAULT_MAX_LENGTH else length - prompt_length
