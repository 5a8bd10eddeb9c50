"""Settings: names, precedence, null, ranges, and refusals. The truth is `GenerationConfig` and its
processors."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from fake_generation import fake_model

from mlx_transmuter import generation
from mlx_transmuter.generation import SETTINGS, GenerationError, Settings, max_new_tokens
from mlx_transmuter.generation.settings import resolve_settings
from mlx_transmuter.program import Program, Value


def test_the_table_and_the_object_name_the_same_settings():
    assert {field.name for field in fields(Settings)} == {
        name for name, s in SETTINGS.items() if s.status == "supported"
    }


def test_every_name_of_transformers_is_in_the_table():
    transformers = pytest.importorskip("transformers")
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert names - SETTINGS.keys() == set()


def test_the_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig()
    same = ["do_sample", "num_beams", "early_stopping", "length_penalty", "repetition_penalty", "no_repeat_ngram_size"]
    ours = resolve_settings({}, {"do_sample": True})
    for name in (*same[1:], "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        assert getattr(ours, name) == getattr(config, name), name
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
        assert getattr(ours, name) == getattr(config, name), name


def test_options_override_the_generation_config_and_none_switches_off():
    config = {"repetition_penalty": 1.2, "min_length": 5, "eos_token_id": [4, 5]}
    assert resolve_settings(config, {}).repetition_penalty == 1.2
    assert resolve_settings(config, {"repetition_penalty": 1.5}).repetition_penalty == 1.5
    chosen = resolve_settings(config, {"repetition_penalty": None, "eos_token_id": None})
    assert (chosen.repetition_penalty, chosen.min_length, chosen.eos_token_id) == (1.0, 5, ())
    assert resolve_settings({"top_k": None, "do_sample": True}, {}).top_k == 0
    assert resolve_settings({"do_sample": True}, {}).top_k == 50


def test_num_beams_of_the_generation_config_counts_unless_given():
    assert generation.context(fake_model({"num_beams": 4})).settings.num_beams == 4
    assert generation.context(fake_model({"num_beams": 4}), num_beams=1).settings.num_beams == 1


@pytest.mark.parametrize("eos", [7, [7], [7, 7]])
def test_eos_is_an_id_or_a_list(eos):
    assert resolve_settings({}, {"eos_token_id": eos}).eos_token_id == (7,)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tempreature", "temperature"),
        ("max_tokens", "max_new_tokens"),
        ("topk", "top_k"),
        ("eos_token", "eos_token_id"),
    ],
)
def test_an_unknown_option_lists_the_near_names(name, near):
    with pytest.raises(GenerationError, match=near) as error:
        resolve_settings({}, {name: 1})
    assert name in str(error.value)


def test_unknown_names_of_a_generation_config_are_ignored():
    whisper = {
        "alignment_heads": [[2, 2]],
        "lang_to_id": {"<|en|>": 50259},
        "_from_model_config": True,
        "no_timestamps_token_id": 9,
    }
    assert resolve_settings(whisper, {}) == resolve_settings({}, {})


NEUTRAL_VALUES = {
    "transformers_version": "4.57.6",
    "use_cache": False,
    "cache_implementation": "static",
    "return_dict_in_generate": True,
    "output_scores": True,
    "pad_token_id": 0,
    "is_assistant": True,
    "disable_compile": True,
    "prefill_chunk_size": 64,
}


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_names_that_change_no_token_are_accepted(name):
    assert (
        resolve_settings({name: NEUTRAL_VALUES[name]}, {})
        == resolve_settings({}, {name: NEUTRAL_VALUES[name]})
        == resolve_settings({}, {})
    )


REFUSED_VALUES = {
    "num_beam_groups": (2, 1),
    "diversity_penalty": (0.5, 0.0),
    "penalty_alpha": (0.6, 0.0),
    "constraints": ([object()], None),
    "force_words_ids": ([[1]], None),
    "dola_layers": ("low", None),
    "guidance_scale": (1.5, 1.0),
    "watermarking_config": ({"bias": 2.0}, None),
    "assistant_early_exit": (4, None),
    "assistant_model": (object(), None),
    "max_time": (1.0, None),
    "token_healing": (True, False),
    "low_memory": (True, False),
    "prefix_allowed_tokens_fn": (len, None),
    "logits_processor": ([len], None),
    "stopping_criteria": ([len], None),
}


def test_the_refused_names_are_those_of_the_table():
    assert REFUSED_VALUES.keys() == {name for name, setting in SETTINGS.items() if setting.status == "refused"}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_a_setting_that_would_change_the_tokens_is_an_error_by_name(name):
    value, harmless = REFUSED_VALUES[name]
    for where in ({name: value}, {}), ({}, {name: value}):
        with pytest.raises(GenerationError, match=name):
            resolve_settings(*where)
    assert resolve_settings({name: harmless}, {}) == resolve_settings({name: None}, {}) == resolve_settings({}, {})


INVALID_VALUES = [
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("encoder_repetition_penalty", 0.0),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.5),
    ("bad_words_ids", []),
    ("bad_words_ids", [3]),
    ("bad_words_ids", [[-1]]),
    ("bad_words_ids", [[]]),
    ("bad_words_ids", "no"),
    ("sequence_bias", []),
    ("sequence_bias", [[[1], "x"]]),
    ("sequence_bias", [[1, 2.0]]),
    ("min_length", -1),
    ("min_new_tokens", -1),
    ("min_new_tokens", 1.5),
    ("max_new_tokens", 0),
    ("max_length", 0),
    ("forced_bos_token_id", -1),
    ("forced_eos_token_id", [1.5]),
    ("suppress_tokens", 4),
    ("begin_suppress_tokens", ["a"]),
    ("renormalize_logits", "yes"),
    ("do_sample", 1),
    ("early_stopping", "always"),
    ("early_stopping", 1),
    ("length_penalty", "long"),
    ("length_penalty", float("nan")),
    ("num_beams", 0),
    ("num_beams", True),
    ("num_return_sequences", 0),
    ("exponential_decay_length_penalty", 3),
    ("exponential_decay_length_penalty", (1.5, 1.1)),
    ("eos_token_id", -1),
    ("eos_token_id", "</s>"),
    ("stop_strings", [""]),
    ("decoder_start_token_id", []),
    ("prompt_lookup_num_tokens", 0),
    ("max_matching_ngram_size", 0),
    ("num_assistant_tokens", 0),
    ("num_assistant_tokens_schedule", "never"),
    ("assistant_confidence_threshold", 1.5),
    ("num_beams", 10**6),
    ("num_return_sequences", 1025),
    ("min_length", 2**31),
    ("max_new_tokens", 2**31),
    ("eos_token_id", [2**31]),
    ("bad_words_ids", [[2**40]]),
    ("repetition_penalty", 10**400),
    ("length_penalty", -(10**400)),
    ("length_penalty", 1e39),
    pytest.param("encoder_repetition_penalty", 10**5000, id="more digits than Python writes"),
    ("exponential_decay_length_penalty", (1, 10**400)),
]
INVALID_SAMPLING_VALUES = [
    ("temperature", 0.0),
    ("temperature", -1.0),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("typical_p", 0.0),
    ("epsilon_cutoff", 1.0),
    ("eta_cutoff", -0.1),
]


@pytest.mark.parametrize(("name", "value"), INVALID_VALUES)
def test_a_value_out_of_range_is_an_error_that_names_it(name, value):
    for where in ({name: value}, {}), ({}, {name: value}):
        with pytest.raises(GenerationError, match=f"setting {name}"):
            resolve_settings(*where)


@pytest.mark.parametrize(("name", "value"), INVALID_SAMPLING_VALUES)
def test_sampling_settings_are_checked_and_used_only_under_do_sample(name, value):
    with pytest.raises(GenerationError, match=f"setting {name}"):
        resolve_settings({name: value}, {"do_sample": True})
    assert resolve_settings({name: value}, {}) == resolve_settings({}, {})


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2},
        {"num_return_sequences": 3, "num_beams": 2},
        {"bad_words_ids": [[1]], "eos_token_id": [1]},
        {"exponential_decay_length_penalty": (1, 1.1)},
        {"prompt_lookup_num_tokens": 3, "num_beams": 2},
    ],
)
def test_contradicting_settings_are_an_error(options):
    with pytest.raises(GenerationError):
        resolve_settings({}, options)


@pytest.mark.parametrize(
    "options",
    [
        {"suppress_tokens": [3, 99]},
        {"begin_suppress_tokens": [-1, 99]},
        {"eos_token_id": 99},
        {"temperature": 2, "do_sample": True},
        {"sequence_bias": {(3, 4): 1.5}},
    ],
)
def test_values_that_transformers_accepts_are_accepted(options):
    generation.compile(generation.context(fake_model(), **options), 1, decoder=_VocabOnlyDecoder())


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_ids": [[99]]},
        {"bad_words_ids": [[3, 16]]},
        {"sequence_bias": [[[16], 1.0]]},
        {"forced_bos_token_id": 16},
        {"forced_eos_token_id": [1, 16]},
        {"exponential_decay_length_penalty": (1, 1.1), "eos_token_id": 16},
    ],
)
def test_an_id_outside_the_vocabulary_is_an_error_where_transformers_has_one(options):
    with pytest.raises(GenerationError, match="vocabulary"):
        generation.compile(generation.context(fake_model(), **options), 1, decoder=_VocabOnlyDecoder())


class _VocabOnlyDecoder:
    vocab_size = 16


@pytest.mark.parametrize(
    ("config", "options", "prompt", "expected"),
    [
        ({}, {}, 7, 256),
        ({"max_length": None}, {}, 7, 256),
        ({"max_length": 20}, {}, 7, 256),
        ({"max_length": 448}, {}, 4, 444),
        ({"max_length": 512}, {}, 1, 511),
        ({"max_length": 448, "max_new_tokens": 9}, {}, 4, 9),
        ({"max_length": 448, "max_new_tokens": None}, {}, 4, 444),
        ({"max_new_tokens": 9}, {"max_new_tokens": 3}, 4, 3),
        ({"max_new_tokens": 9}, {"max_new_tokens": None}, 4, 9),
        ({"max_length": 448}, {"max_length": 20}, 4, 16),
        ({}, {"max_length": 20}, 4, 16),
    ],
)
def test_max_new_tokens_follows_the_rule_of_the_pipelines(config, options, prompt, expected):
    assert max_new_tokens(config, options, prompt) == expected


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("num_beams", 10**6, "1024"),
        ("min_length", 2**31, "2147483647"),
        ("length_penalty", 1e39, "3.4028235e+38"),
        ("repetition_penalty", 10**400, "3.4028235e+38"),
    ],
)
def test_an_error_names_the_value_and_the_bound(name, value, bound):
    with pytest.raises(GenerationError) as error:
        resolve_settings({}, {name: value})
    assert error.value.where == f"setting {name}"
    assert str(value)[:40] in error.value.found
    assert bound in error.value.expected


@pytest.mark.parametrize("value", [True, False])
def test_booleans_of_numpy_are_booleans(value):
    options = {"do_sample": np.bool_(value), "early_stopping": np.bool_(value)}
    settings = resolve_settings({}, options)
    assert settings.do_sample is value
    assert settings.early_stopping is value


def test_an_infinite_bias_is_a_number():
    assert resolve_settings({}, {"sequence_bias": [[[3], float("-inf")]]}).sequence_bias == (((3,), float("-inf")),)


@pytest.mark.parametrize("size", [0, -1, 2.0, 1.5, True, "2", None])
def test_the_size_of_a_batch_is_a_whole_number(size):
    ctx = generation.context(fake_model())
    with pytest.raises(GenerationError, match=r"batch_size: found .*whole number"):
        generation.compile(ctx, size, decoder=_VocabOnlyDecoder())
    gen = generation.compile(ctx, np.int64(2), decoder=_VocabOnlyDecoder())
    assert (gen.batch_size, type(gen.batch_size)) == (2, int)


def test_ids_outside_the_vocabulary_are_an_error_when_the_settings_are_made():
    tokens, logits = Value("input_ids", "int64", ("b", "s")), Value("logits", "float32", ("b", "s", 16))
    model = fake_model()
    model.decoder = SimpleNamespace(program=Program((tokens,), (logits,), []))
    with pytest.raises(GenerationError, match=r"bad_words_ids: found the token ids 16, 99; expected ids below .* 16"):
        generation.context(model, bad_words_ids=[[3, 99], [16]])


@pytest.mark.parametrize("assistant", [3, "model", True])
def test_an_assistant_is_a_model(assistant):
    with pytest.raises(GenerationError, match=f"assistant_model: found {assistant!r}; expected a Model"):
        generation.context(fake_model(), assistant_model=assistant)


def test_an_error_has_its_fields():
    with pytest.raises(GenerationError) as error:
        resolve_settings({}, {"num_beam_groups": 2})
    assert error.value.where == "setting num_beam_groups"
    assert error.value.found == "2"
    assert "None or 1" in error.value.expected
    assert error.value.do
