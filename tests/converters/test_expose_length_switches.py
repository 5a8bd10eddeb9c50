"""expose_length_switches: the forms in which graphs compare a step's total length with a constant, and what is none."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy
from onnx import ModelProto, TensorProto, helper, numpy_helper

import mlx_transmuter as mt
from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes import apply_rewrites, graphs_by_side
from mlx_transmuter.converters.passes.simplify.expose_length_switches import expose_length_switches
from mlx_transmuter.program.length_switches import TOTAL_LENGTH_INPUT, LengthSwitches
from mlx_transmuter.program.signature import DecoderSignature, SignatureError
from mlx_transmuter.runtime.decoder import Decoder

SHORT, LONG = 0.3, -0.2  # by what the toy scales its positions
SWITCH = 12


def node(op, inputs, output, **attrs):
    return helper.make_node(op, inputs, [output], name=f"/switch/{op}_{output}", **attrs)


def constant(name, value, dtype=np.int64):
    return numpy_helper.from_array(np.array(value, dtype), name)


def branch(name, value):
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
    nodes = [helper.make_node("Constant", [], [name], value=constant(name, value, np.float32))]
    return helper.make_graph(nodes, f"{name}_graph", [], [output])


def by_if(condition):
    """The scale by an If, as onnxruntime-genai's builder writes it."""
    branches = {"then_branch": branch("long", LONG), "else_branch": branch("short", SHORT)}
    return [*condition, node("If", ["is_long"], "scale", **branches)]


def by_product(condition):
    """The scale by a product with the condition, without If, as the builder writes it for DirectML."""
    return [
        *condition,
        node("Cast", ["is_long"], "long_number", to=TensorProto.FLOAT),
        node("Mul", ["long_number", "difference"], "change"),
        node("Add", ["change", "short_scale"], "scale"),
    ]


# Each is true for rows of more than SWITCH tokens.
FORMS = {
    "mask": by_if([node("Greater", ["total", "switch"], "is_long")]),
    "mirrored": by_if([node("Less", ["switch", "total"], "is_long")]),
    "inverted": by_if([node("LessOrEqual", ["total", "switch"], "not"), node("Not", ["not"], "is_long")]),
    "past and tokens": by_if(
        [
            node("Shape", ["input_ids"], "ids_shape"),
            node("Gather", ["ids_shape", "one0"], "seq"),
            node("Add", ["past", "seq"], "end"),
            node("GreaterOrEqual", ["end", "switch1"], "is_long"),
        ]
    ),
    "floats": by_if(
        [node("Cast", ["total"], "total_f", to=TensorProto.FLOAT), node("Greater", ["total_f", "switch_f"], "is_long")]
    ),
    "positions": by_product(
        [node("ReduceMax", ["position_ids"], "newest"), node("GreaterOrEqual", ["newest", "switch"], "is_long")]
    ),
    "positions of one": by_product(
        [
            node("Cast", ["position_ids"], "places32", to=TensorProto.INT32),
            node("ReduceMax", ["places32"], "newest", keepdims=0),
            node("Add", ["one32", "newest"], "length"),
            node("Less", ["switch32", "length"], "is_long"),
        ]
    ),
}


def decoder(nodes, switch=SWITCH, cached=True) -> ModelProto:
    """The toy, with a cache or none, whose positions are scaled by `scale` of the nodes."""
    model = toy.decoder() if cached else toy.without_cache()
    toy.node(model, "rotated").input[1] = "scale"
    moved = [one for one in model.graph.node if one.output[0] in ("past_shape", "past", "mask_shape", "total")]
    others = [one for one in model.graph.node if one not in moved]
    del model.graph.node[:]
    model.graph.node.extend([*moved, *nodes, *others])
    model.graph.initializer.extend(
        [
            constant("switch", switch), constant("switch1", switch + 1), constant("switch_f", switch + 0.5, np.float32),
            constant("switch32", switch, np.int32), constant("one32", 1, np.int32),
            constant("difference", LONG - SHORT, np.float32), constant("short_scale", SHORT, np.float32),
        ]
    )  # fmt: skip
    return model


@pytest.mark.parametrize(("form", "cached"), [*((form, True) for form in FORMS), ("mask", False), ("positions", False)])
def test_each_form_becomes_an_input_and_each_row_is_computed_as_if_alone(form, cached, tmp_path):
    """Two rows, of which one passes the switch some tokens before the other, against onnxruntime over their texts."""
    model = decoder(FORMS[form], cached=cached)
    converted = mt.load(mt.convert(toy.write(tmp_path / "source", model), tmp_path / "out", progress=False)).decoder
    signature = DecoderSignature.from_program(converted.program)
    assert signature.length_switches == LengthSwitches((SWITCH,))
    assert bool(signature.pairs) == cached
    texts = np.random.default_rng(2).integers(4, toy.VOCAB, (2, 16)).astype(np.int32)
    lengths = [8, 11]
    session = Decoder(converted, 2).begin_session([16, 16])
    logits = session.step(texts[:, :11], lengths)
    for _ in range(5):
        session.evaluate(logits)
        for row, length in enumerate(lengths):
            expected = toy.onnxruntime_logits(model, texts[row, :length].tolist())
            assert np.abs(ops.to_host(logits[row]) - expected).max() <= 1e-5 * np.ptp(expected)
        logits = session.step(np.stack([texts[row, n : n + 1] for row, n in enumerate(lengths)]), [1, 1])
        lengths = [length + 1 for length in lengths]


def test_a_switch_past_all_lengths_of_the_shape_probe_is_no_constant(tmp_path):
    """Its comparison has one value in every step of the probe, which would be folded."""
    model = decoder(FORMS["mask"], switch=100)
    converted = mt.load(mt.convert(toy.write(tmp_path / "source", model), tmp_path / "out", progress=False)).decoder
    assert DecoderSignature.from_program(converted.program).length_switches == LengthSwitches((100,))
    assert any("If" in one.op for one in converted.program.nodes)
    assert "rows of more than 100 tokens" in (tmp_path / "out" / "README.md").read_text()


def test_the_graph_on_each_side_is_what_the_proof_compares_with(tmp_path):
    """Without its switch, which is fixed: a wrong branch of either side is found."""
    program = read_onnx(toy.write(tmp_path, decoder(FORMS["mirrored"])) / "model.onnx")
    short, long = graphs_by_side(program)
    assert not short.constants["is_long"]
    assert long.constants["is_long"]
    assert (
        graphs_by_side(read_onnx(toy.write(tmp_path, toy.decoder()) / "model.onnx"))[0].input(TOTAL_LENGTH_INPUT)
        is None
    )


@pytest.mark.parametrize(
    "condition",
    [
        [node("Greater", ["past", "switch"], "is_long")],  # of the past alone
        [node("Greater", ["total", "zero0"], "is_long")],  # true for any row
        [node("ReduceMax", ["input_ids"], "newest", keepdims=0), node("Greater", ["newest", "switch"], "is_long")],
        [node("Mul", ["total", "two"], "twice"), node("Greater", ["twice", "switch"], "is_long")],
    ],
    ids=["past", "no tokens", "token ids", "twice the length"],
)
def test_other_comparisons_stay(condition, tmp_path):
    program = read_onnx(toy.write(tmp_path, decoder(by_product(condition))) / "model.onnx")
    exposed, (record,) = apply_rewrites(program, [expose_length_switches])
    assert record.replaced_count == 0
    assert exposed.input(TOTAL_LENGTH_INPUT) is None


def test_a_program_that_reads_the_total_length_for_anything_else_is_refused(tmp_path):
    program = read_onnx(toy.write(tmp_path, decoder(FORMS["mask"])) / "model.onnx")
    exposed, _ = apply_rewrites(program, [expose_length_switches])
    (comparison,) = [one for one in exposed.nodes if TOTAL_LENGTH_INPUT in one.inputs]
    exposed.constants[comparison.inputs[1]] = np.array(2.5)
    with pytest.raises(SignatureError, match="total_length"):
        DecoderSignature.from_program(exposed)


def test_a_file_with_the_short_factors_alone_was_made_for_short_rows(tmp_path):
    """As optimum traces longrope; with the switch a row may be as long as the model takes."""
    config = {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    }
    for name, model, expected in (("traced", toy.decoder(), 32), ("switch", decoder(FORMS["mask"], 32), 128)):
        source = toy.write(tmp_path / name, model)
        (source / "config.json").write_text(json.dumps(config))
        converted = mt.load(mt.convert(source, tmp_path / f"{name}_out", progress=False)).decoder
        assert Decoder(converted, 1).trained_length == expected
