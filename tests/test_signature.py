"""DecoderSignature: the roles of a decoder's inputs and outputs, and the decoders that are refused."""

from __future__ import annotations

import pytest

from mlx_transmuter.ops import OPERATORS
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.attention_nodes import INPUT_NAMES, VISIBILITY_MASK
from mlx_transmuter.program.signature import DecoderSignature, SignatureError, infer_cache_mode, outputs

IDS = Value("input_ids", "int64", ("batch_size", "sequence_length"))
LOGITS = Value("logits", "float32", ("batch_size", "sequence_length", 32))
PAST = ("batch_size", 2, "past_sequence_length", 8)


def decoder(*inputs: Value, presents=("present.0.key",), logits: Value | None = LOGITS, nodes=()) -> Program:
    given = [Value(name, "float32", None) for name in presents] + ([logits] if logits else [])
    return Program((IDS, *inputs), tuple(given), list(nodes))


def past(name: str = "past_key_values.0.key", shape=PAST, dtype: str = "float32") -> Value:
    return Value(name, dtype, shape)


def test_a_decoder_of_optimum():
    positions = Value("position_ids", "int64", ("batch_size", "sequence_length"))
    mask = Value("attention_mask", "int64", ("batch_size", "total"))
    actual = DecoderSignature.from_program(decoder(mask, positions, past(dtype="float16")))
    assert (actual.token_input, actual.takes_embeddings, actual.mask_input, actual.positions_input, actual.vocab_size) == (
        "input_ids", False, "attention_mask", "position_ids", 32
    )  # fmt: skip
    assert (actual.position_axes, actual.use_cache_branch_input, actual.logits_to_keep_input, actual.extra_inputs) == (
        0,
        None,
        None,
        (),
    )
    (entry,) = actual.cache_pairs
    assert (entry.past, entry.present, entry.dtype) == ("past_key_values.0.key", "present.0.key", "float16")
    assert (entry.heads, entry.head_dim, entry.axis_order, entry.shape_for(3, 7)) == (2, 8, [0, 1, 2, 3], (3, 2, 7, 8))


SPELLINGS = [
    ("past_key_values.3.value", "present.3.value"),
    ("past_key_values.3.value", "present_key_values.3.value"),
    ("past_3", "present_3"),
    ("past.3.key", "present.3.key"),
]


@pytest.mark.parametrize(("name", "present"), SPELLINGS)
def test_the_present_of_a_past_is_found(name, present):
    (entry,) = DecoderSignature.from_program(decoder(past(name), presents=(present,))).cache_pairs
    assert entry.present == present


# shape, (batch, length) axes, heads, dim, sizes for 3 rows of 7 positions
LAYOUTS = [
    (PAST, (0, 2), 2, 8, (3, 2, 7, 8)),
    (
        (2, "batch", 4, "past_seq_len", 8),
        (1, 3),
        8,
        8,
        (2, 3, 4, 7, 8),
    ),  # keys and values in one, as onnxruntime's GPT-2
    (("batch_size", "past_len", 4, 8), (0, 1), 4, 8, (3, 7, 4, 8)),
    (("batch", "kv_len", 24), (0, 1), 1, 24, (3, 7, 24)),
    ((None, 2, None, 8), (0, 2), 2, 8, (3, 2, 7, 8)),  # four axes without names are taken for the usual ones
]


@pytest.mark.parametrize(("shape", "axes", "heads", "dim", "sizes"), LAYOUTS)
def test_layouts_of_a_cache(shape, axes, heads, dim, sizes):
    (entry,) = DecoderSignature.from_program(decoder(past(shape=shape))).cache_pairs
    assert ((entry.batch_axis, entry.length_axis), entry.heads, entry.head_dim) == (axes, heads, dim)
    assert entry.shape_for(3, 7) == sizes
    assert sorted(entry.axis_order) == list(range(len(shape)))
    assert (entry.axis_order[0], entry.axis_order[-2], entry.axis_order[-1]) == (*axes, len(shape) - 1)


def test_axes_of_positions():
    for shape, axes in [(("b", "s"), 0), ((3, "b", "s"), 3), (("axes", "b", "s"), 3), (None, 0)]:
        assert DecoderSignature.from_program(decoder(Value("position_ids", "int64", shape))).position_axes == axes


def test_other_inputs_are_extra_inputs():
    branch = Value("use_cache_branch", "bool", (1,))
    keep = Value("num_logits_to_keep", "int64", ())
    states = Value("encoder_hidden_states", "float32", ("batch", "len", 8))
    actual = DecoderSignature.from_program(decoder(branch, keep, states))
    assert (actual.use_cache_branch_input, actual.logits_to_keep_input, actual.extra_inputs) == (
        "use_cache_branch",
        "num_logits_to_keep",
        ("encoder_hidden_states",),
    )


REFUSED = {
    "no logits": (decoder(logits=None), "the outputs present.0.key"),
    "logits without a vocabulary": (decoder(logits=Value("logits", "float32", ("b", "s", "vocab"))), "logits of shape"),
    "logits of unknown rank": (decoder(logits=Value("logits", "float32", None)), "logits of shape []"),
    "logits of one position": (decoder(logits=Value("logits", "float32", ("b", 32))), "logits of shape ['b', 32]"),
    "a vocabulary of one": (decoder(logits=Value("logits", "float32", ("b", "s", 1))), "logits of shape"),
    "a vocabulary without end": (decoder(logits=Value("logits", "float32", ("b", "s", 2**40))), "logits of shape"),
    "no tokens": (Program((past(),), (LOGITS,), []), "the inputs past_key_values.0.key"),
    "a past without a present": (decoder(past("past_key_values.1.key")), "'past_key_values.1.key'"),
    "a past of unknown rank": (decoder(past(shape=None)), "of shape None"),
    "a past of two axes": (decoder(past(shape=("batch", "len"))), "of shape"),
    "a past with rows times heads": (decoder(past(shape=("batch x heads", "past_len", "dim"))), "rows"),
    "a past without fixed sizes": (decoder(past(shape=("batch", "heads", "past_len", "dim"))), "of shape"),
    "a past of no size": (decoder(past(shape=("batch", 2, "past_len", 0))), "of shape"),
    "a past of five fixed axes": (decoder(past(shape=(1, 2, 3, 4, 5))), "of shape"),
    "a past without end": (decoder(past(shape=("batch", 2**40, "past_len", 8))), "of shape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_program_that_is_no_decoder_is_refused_by_name(what):
    program, actual = REFUSED[what]
    with pytest.raises(SignatureError) as error:
        DecoderSignature.from_program(program)
    assert actual in str(error.value)
    assert error.value.expected
    assert error.value.do


def test_the_cache_mode_that_a_graph_suggests():
    positions = Value("position_ids", "int64", ("b", "s"))
    gqa = [Node("com.microsoft.GroupQueryAttention-1", ("input_ids",), ("logits",))]
    for program, mode in [
        (decoder(positions), "append"),
        (decoder(), "grow"),
        (decoder(positions, nodes=gqa), "in_place"),
    ]:
        assert infer_cache_mode(program, DecoderSignature.from_program(program)) == mode


def test_outputs_are_the_logits_and_the_present():
    names = ["logits", "present.0.key", "attentions.0", "hidden_states.1", "present_1", "last_hidden_state"]
    assert outputs(names) == ["logits", "present.0.key", "present_1"]


def test_the_inputs_of_attention_nodes_are_named_as_the_operators_declare_them():
    for op, names in INPUT_NAMES.items():
        assert OPERATORS[op].input_names == names
    assert VISIBILITY_MASK in OPERATORS
