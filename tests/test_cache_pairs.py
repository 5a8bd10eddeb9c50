"""Cache pairs: pasts and presents paired by the spellings of exporters, by order and shape, and what is refused."""

from __future__ import annotations

import pytest

from mlx_transmuter.program import Value
from mlx_transmuter.program.cache_pairs import CachePair, SignatureError, StatePair, find_pairs, is_cache_or_state_name

PAST = ("batch_size", 2, "past_sequence_length", 8)
CONV, MEMORY = ("batch_size", 12, 3), ("batch_size", 2, 4, 4)


def value(name: str, shape=PAST, dtype: str = "float32") -> Value:
    return Value(name, dtype, shape)


# Past → present, of two layers, as exporters spell them.
SPELLINGS = {
    "optimum": ("past_key_values.{i}.key", "present.{i}.key"),
    "optimum, values": ("past_key_values.{i}.value", "present.{i}.value"),
    "presents named as pasts": ("past_key_values.{i}.key", "present_key_values.{i}.key"),
    "encoder-decoders": ("past_key_values.{i}.decoder.key", "present.{i}.decoder.key"),
    "their cross-attention": ("past_key_values.{i}.encoder.key", "present.{i}.encoder.key"),
    "onnxruntime's GPT-2": ("past_{i}", "present_{i}"),
    "onnxruntime's Whisper": ("past_key_self_{i}", "present_key_self_{i}"),
    "its cross-attention": ("past_key_cross_{i}", "present_key_cross_{i}"),
    "onnxruntime's BART": ("past_key_{i}", "present_key_{i}"),
    "one dot": ("past.{i}.key", "present.{i}.key"),
    "pkv": ("pkv_{i}", "new_pkv_{i}"),
    "in and out": ("past_key_{i}_in", "past_key_{i}_out"),
    "caches in and out": ("cache.{i}.key", "cache_out.{i}.key"),
    "k cache": ("k_cache_{i}", "k_cache_{i}_out"),
    "kcache": ("kcache_input_{i}", "kcache_output_{i}"),
    "key_cache": ("past_key_cache_{i}", "key_cache_out_{i}"),
    "camel": ("pastKeyValues.{i}.key", "presentKeyValues.{i}.key"),
    "words apart": ("layer_{i}_past_key", "layer_{i}_present_key"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("turned", [False, True])
def test_pairs_are_found_by_their_names(spelling, turned):
    past, present = SPELLINGS[spelling]
    outputs = [value(present.format(i=i)) for i in range(12)]
    actual = find_pairs([value(past.format(i=i)) for i in range(12)], outputs[::-1] if turned else outputs)
    assert [(entry.past, entry.present) for entry in actual] == [
        (past.format(i=i), present.format(i=i)) for i in range(12)
    ]
    assert all(isinstance(entry, CachePair) for entry in actual)


STATES = {
    "LFM2": ("past_conv.{i}", "present_conv.{i}", CONV),
    "Qwen3.5": ("past_recurrent.{i}", "present_recurrent.{i}", MEMORY),
    "Mamba": ("past_ssm.{i}", "present_ssm.{i}", MEMORY),
    "onnxruntime-genai": ("past_key_values.{i}.recurrent_state", "present.{i}.recurrent_state", MEMORY),
    "its convolutions": ("past_key_values.{i}.conv_state", "present.{i}.conv_state", CONV),
    "others": ("past_recurrent_state_{i}", "recurrent_state_out_{i}", MEMORY),
    "without a past": ("conv_state_in.{i}", "conv_state_out.{i}", CONV),
}


@pytest.mark.parametrize("spelling", STATES)
def test_states_are_distinguished_from_a_cache(spelling):
    past, present, shape = STATES[spelling]
    inputs = [value(past.format(i=0), shape), value("past_key_values.1.key"), value(past.format(i=2), shape)]
    outputs = [value(present.format(i=0), shape), value("present.1.key"), value(present.format(i=2), shape)]
    first, entry, last = find_pairs(inputs, outputs)
    assert isinstance(first, StatePair)
    assert isinstance(entry, CachePair)
    assert isinstance(last, StatePair)
    assert (first.present, entry.present, last.present) == tuple(one.name for one in outputs)
    assert first.shape_for(5) == (5, *shape[1:])


def test_opaque_names_are_paired_by_order_and_shape():
    inputs = [value("onnx::Concat_3"), value("onnx::Concat_4", CONV), value("onnx::Concat_5")]
    outputs = [value("1203"), value("1204", CONV), value("1205")]
    actual = find_pairs(inputs, outputs)
    assert [one.present for one in actual] == ["1203", "1204", "1205"]
    assert [type(one) for one in actual] == [CachePair, StatePair, CachePair]
    assert find_pairs(inputs, outputs[:2]) == ()  # one too few: nothing says that they are carried
    assert find_pairs(inputs, [outputs[0], outputs[2], outputs[1]]) == ()  # and of other shapes neither


def test_pasts_with_presents_of_opaque_names_are_paired_by_order():
    actual = find_pairs(
        [value("past_key_values.0.key"), value("past_key_values.0.value")], [value("812"), value("815")]
    )
    assert [one.present for one in actual] == ["812", "815"]


def test_inputs_that_are_not_carried_are_left_out():
    inputs = [
        value("past_key_values.0.key"),
        value("encoder_hidden_states", ("batch_size", "encoder_length", 8)),
        value("image_features", ("images", "patches", 8)),
        value("past_sequence_length", (), "int64"),
        value("token_type_ids", ("batch_size", "sequence_length"), "int64"),
    ]
    outputs = [value("hidden_states.0", ("batch_size", "sequence_length", 8)), value("present.0.key")]
    assert [one.past for one in find_pairs(inputs, outputs)] == ["past_key_values.0.key"]


REFUSED = {
    "a past without a present": ([value("past_key_values.1.key")], [value("present.0.key")], "past_key_values.1.key"),
    "another type": ([value("past_0")], [value("out", dtype="float16")], "past_0"),
    "rows and heads in one axis": (
        [value("past_0", ("batch_size x num_heads", "past_length", 8))], [value("present_0")], "axes of their own"
    ),
    "rows times heads": ([value("past_0", ("batch*heads", 8, "past_length"))], [value("present_0")], "of their own"),
    "a cache of a fixed length": ([value("past_0", (1, 2, 128, 8))], [value("present_0")], "may grow"),
    "two axes that vary": ([value("past_0", ("batch", "heads", "past", 8))], [value("present_0")], "fixed sizes"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_cache_that_cannot_be_carried_is_refused_by_name(what):
    inputs, outputs, match = REFUSED[what]
    with pytest.raises(SignatureError, match=match) as error:
        find_pairs(inputs, outputs)
    assert inputs[0].name in error.value.found
    assert error.value.do


def test_an_error_lists_both_sides():
    inputs = [value("past_0"), value("past_1")]
    with pytest.raises(SignatureError) as error:
        find_pairs(inputs, [value("present_0"), value("something_5", ("batch", 3, "len", 8)), value("other")])
    assert "past_1" in error.value.found
    assert "something_5, other" in error.value.found


def test_names_that_call_a_tensor_a_cache():
    assert all(map(is_cache_or_state_name, ("past_0", "present.0.key", "k_cache_1", "conv_state_out_3", "past_conv.0")))
    assert not any(
        map(is_cache_or_state_name, ("logits", "last_hidden_state", "hidden_states.0", "attentions.0", "input_ids"))
    )
