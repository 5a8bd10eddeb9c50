"""Where the tables of a graph end: the limit that is found is where onnxruntime stops running the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import FIXTURES
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.program.position_limit import PositionLimit, find_position_limit
from mlx_transmuter.program.position_limit.lengths import PAST, ROW, STEP, Length, TokenRange, larger, smaller
from mlx_transmuter.program.signature import DecoderSignature

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}
VOCAB, HEADS, DIM, ROWS = 16, 2, 4, 12


def open_session(model: bytes | str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def runs(session: onnxruntime.InferenceSession, past: int, seq: int) -> bool:
    """Whether onnxruntime runs a step of seq tokens after `past` of one row."""
    feeds: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        dtype = DTYPES[value.type]
        if value.name == "attention_mask":
            feeds[value.name] = np.ones((1, past + seq), dtype)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(past, past + seq, dtype=dtype)[None]
        elif value.name == "use_cache_branch":
            feeds[value.name] = np.array([past > 0])
        elif value.name.startswith("past"):
            symbols = {n: 1 if "batch" in n else past for n in value.shape if isinstance(n, str)}
            sizes = [symbols.get(n, n) for n in value.shape]
            feeds[value.name] = np.zeros(sizes, dtype)
        else:
            feeds[value.name] = np.zeros((1, seq), dtype)
    try:
        outputs = session.run(None, feeds)
    except Exception:  # onnxruntime's errors have no common class
        return False
    return bool(np.isfinite(outputs[0]).all())


def limit_of(path) -> PositionLimit | None:
    program = read_onnx(path, progress=False)
    return find_position_limit(program, DecoderSignature.from_program(program))


# Exports.

TABLES = ["codegen", "gpt2", "gpt2_dynamo", "gpt2_merged", "gpt2_ort", "gpt2_reread", "gpt_neo", "gptj", "opt"]
CACHES = ["gemma3_genai", "llama_genai", "mistral_genai", "qwen3_genai_int4"]
# mixtral's export runs only where a prompt hits all of its experts; deltanet_ort has states alone.
ENDLESS = [
    "bloom",
    "deepseek_v3",
    "falcon",
    "falcon_alibi",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "llama_dynamo",
    "llama_q4",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_dynamo_raw",
    "qwen3",
    "qwen3_dynamo",
    "smollm3",
]


@pytest.mark.parametrize("name", [*TABLES, *CACHES])
def test_a_table_ends_rows_where_onnxruntime_stops(name):
    limit, session = limit_of(FIXTURES / name / "model.onnx"), open_session(str(FIXTURES / name / "model.onnx"))
    assert limit is not None
    for count, expected in ((limit.tokens, True), (limit.tokens + 1, False)):
        assert runs(session, 0, count) is expected
        if name not in ("gpt2_reread", *CACHES):  # no past, and one that is a buffer
            assert runs(session, count - 1, 1) is expected


@pytest.mark.parametrize("name", ENDLESS)
def test_computed_rotations_and_slopes_end_nothing(name):
    assert limit_of(FIXTURES / name / "model.onnx") is None
    assert runs(open_session(str(FIXTURES / name / "model.onnx")), 0, 300)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "codegen", "llama_genai", "gpt2_reread"])
def test_rewrites_keep_the_limit(name, loaded):
    limit = limit_of(FIXTURES / name / "model.onnx")
    assert limit is not None
    assert loaded(name).decoder.position_limit.tokens == limit.tokens


# Forms of tables: a decoder whose logits are those of its tokens and of what it reads of a table.


def constant(name: str, values, dtype=np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def table(*shape: int, name: str = "table") -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def node(op: str, inputs: str, output: str, domain: str = "", **attrs) -> onnx.NodeProto:
    return helper.make_node(
        op, ["" if name == "_" else name for name in inputs.split()], [output], domain=domain, **attrs
    )


def decoder(nodes: Sequence[onnx.NodeProto], initializers: Sequence[onnx.TensorProto], *, read="read") -> bytes:
    """Returns a decoder that adds `read` [..., seq or 1, VOCAB] to the embeddings of its tokens.

    Its nodes may read position_ids, attention_mask, past ([1, HEADS, past, DIM]) and these integers, of shape []:
    the tokens of the step, those before it, and their sum, as `step`, `before` and `total`.
    """
    base = [
        node("Gather", "embedding input_ids", "tokens"),
        node("Shape", "input_ids", "ids.shape"),
        node("Gather", "ids.shape one", "step", axis=0),
        node("Shape", "past", "past.shape"),
        node("Gather", "past.shape two", "before", axis=0),
        node("Add", "step before", "total"),
        node("Unsqueeze", "tokens axis1", "tokens.4"),
        node("Slice", "tokens.4 starts ends axis3", "tokens.dim"),
        node("Expand", "tokens.dim heads", "tokens.heads"),
        node("Concat", "past tokens.heads", "present", axis=2),
    ]
    floats, integers = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        [*base, *nodes, node("Add", f"tokens {read}", "logits")],
        "decoder",
        [
            helper.make_tensor_value_info("input_ids", integers, ["batch", "seq"]),
            helper.make_tensor_value_info("attention_mask", integers, ["batch", "total"]),
            helper.make_tensor_value_info("position_ids", integers, ["batch", "seq"]),
            helper.make_tensor_value_info("past", floats, ["batch", HEADS, "past_length", DIM]),
        ],
        [
            helper.make_tensor_value_info("logits", floats, ["batch", "seq", VOCAB]),
            helper.make_tensor_value_info("present", floats, ["batch", HEADS, "present_length", DIM]),
        ],
        [
            numpy_helper.from_array(np.ones((VOCAB, VOCAB), np.float32), "embedding"),
            *(constant(name, value) for name, value in CONSTANTS.items()),
            *initializers,
        ],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


CONSTANTS = {
    "zero": 0,
    "one": 1,
    "two": 2,
    "rows": ROWS,
    "bucket": 8,
    "minus": -1,
    "offset": 2,
    "last": 7,
    "axis0": [0],
    "axis1": [1],
    "axis2": [2],
    "axis3": [3],
    "axes23": [2, 3],
    "starts": [0],
    "ends": [DIM],
    "heads": [1, HEADS, 1, 1],
    "end": [2**63 - 1],
    "vocab": [1, 1, VOCAB],
    "minus1": [-1],
    "rows1": [ROWS],
}


def test_the_decoder_without_a_table_has_no_limit(tmp_path):
    assert find_limit(tmp_path, [node("Identity", "vocab.float", "read")], [table(VOCAB, name="vocab.float")]) is None


SLICED_MASK = [
    # GPT-2's causal mask: the rows of the step's tokens, the columns of all.
    *(node("Unsqueeze", f"{name} axis0", f"{name}.1") for name in ("before", "total")),
    node("Slice", "mask before.1 total.1 axis2", "mask.rows"),
    node("Slice", "mask.rows starts total.1 axis3", "mask.read"),
]
SCORES = [
    # Scores [1, HEADS, seq, total], and what is read of them.
    node("Transpose", "present", "keys", perm=[0, 1, 3, 2]),
    node("MatMul", "tokens.heads keys", "scores"),
]
READ_SCORES = [
    node("ReduceMax", "masked axes13", "best", keepdims=0),
    node("Unsqueeze", "best minus1", "read"),
]
AXES13 = constant("axes13", [1, 3])

FORMS: dict[str, tuple[list, list, int | None]] = {
    "positions": ([node("Gather", "table position_ids", "read")], [table(ROWS, VOCAB)], ROWS),
    "positions at an offset, as OPT's": (
        [node("Add", "position_ids offset", "shifted"), node("Gather", "table shifted", "read")],
        [table(ROWS, VOCAB)],
        ROWS - 2,
    ),
    "positions that the mask counts": (
        [
            node("CumSum", "attention_mask one", "counts"),
            node("Mul", "counts attention_mask", "counted"),
            node("Sub", "counted one", "positions"),
            node("Unsqueeze", "before axis0", "before.1"),
            node("Slice", "positions before.1 end axis1", "new"),
            node("Add", "new offset", "shifted"),
            node("Gather", "table shifted", "read"),
        ],
        [table(ROWS, VOCAB)],
        ROWS - 2,
    ),
    "a range after the past": (
        [
            node("Range", "before total one", "range"),
            node("Unsqueeze", "range axis0", "positions"),
            node("Gather", "table positions", "read"),
        ],
        [table(ROWS, VOCAB)],
        ROWS,
    ),
    "rows of a transposed table": (
        [node("Transpose", "table", "turned", perm=[1, 0]), node("Gather", "turned position_ids", "read")],
        [table(VOCAB, ROWS)],
        ROWS,
    ),
    "elements at positions, as GPT-J's": (
        [
            node("Unsqueeze", "table axis0", "table.3"),
            node("Unsqueeze", "position_ids minus1", "positions"),
            node("Expand", "positions vocab", "indices"),
            node("GatherElements", "table.3 indices", "read", axis=1),
        ],
        [table(ROWS, VOCAB)],
        ROWS,
    ),
    "a slice of a table": (
        [
            node("Unsqueeze", "total axis0", "total.1"),
            node("Unsqueeze", "before axis0", "before.1"),
            node("Slice", "table before.1 total.1 axis0", "read"),
        ],
        [table(ROWS, VOCAB)],
        ROWS,
    ),
    "a slice of a slice": (
        [
            node("Unsqueeze", "step axis0", "step.1"),
            node("Unsqueeze", "before axis0", "before.1"),
            node("Slice", "table before.1 end axis0", "rest"),
            node("Slice", "rest starts step.1 axis0", "read"),
        ],
        [table(ROWS, VOCAB)],
        ROWS,
    ),
    "a causal mask of fixed size": (
        [
            *SCORES,
            *SLICED_MASK,
            node("Cast", "mask.read", "visible", to=TensorProto.BOOL),
            node("Where", "visible scores lowest", "masked"),
            *READ_SCORES,
        ],
        [table(1, 1, ROWS, ROWS, name="mask"), table(name="lowest"), AXES13],
        ROWS,
    ),
    "the end of a table, as slopes have it": (
        [
            *SCORES,
            node("Neg", "total", "minus.total"),
            node("Unsqueeze", "minus.total axis0", "start"),
            node("Slice", "slopes start end axis3", "slopes.read"),
            node("Add", "scores slopes.read", "masked"),
            *READ_SCORES,
        ],
        [table(1, HEADS, 1, ROWS, name="slopes"), AXES13],
        ROWS,
    ),
    "the end of a table by its size, as MPT has it": (
        [
            *SCORES,
            node("Sub", "rows total", "rest"),
            node("Max", "zero rest", "clamped"),
            node("Unsqueeze", "clamped axis0", "start"),
            node("Slice", "slopes start end axis3", "slopes.read"),
            node("Add", "scores slopes.read", "masked"),
            *READ_SCORES,
        ],
        [table(1, HEADS, 1, ROWS, name="slopes"), AXES13],
        ROWS,
    ),
    "clipped positions": (
        [node("Min", "position_ids last", "clipped"), node("Gather", "table clipped", "read")],
        [table(8, VOCAB)],
        None,
    ),
    "buckets of distances, as T5's": (
        [
            node("Less", "position_ids bucket", "is.small"),
            node("Where", "is.small position_ids last", "clipped"),
            node("Gather", "table clipped", "read"),
        ],
        [table(8, VOCAB)],
        None,
    ),
    "positions that turn around": (
        [node("Mod", "position_ids bucket", "turned"), node("Gather", "table turned", "read")],
        [table(8, VOCAB)],
        None,
    ),
    "rotations of a table": (
        [
            node("RotaryEmbedding", "tokens.heads position_ids cos sin", "rotated", "com.microsoft"),
            node("ReduceMax", "rotated axes13", "best", keepdims=0),
            node("Unsqueeze", "best minus1", "read"),
        ],
        [table(ROWS, DIM // 2, name="cos"), table(ROWS, DIM // 2, name="sin"), AXES13],
        ROWS,
    ),
}


def find_limit(tmp_path, nodes, initializers) -> PositionLimit | None:
    (tmp_path / "model.onnx").write_bytes(decoder(nodes, initializers))
    return limit_of(tmp_path / "model.onnx")


def most_tokens(model: bytes, most: int = 2 * ROWS) -> int | None:
    """Returns the most tokens that onnxruntime runs, at once and one after the others; None for `most` or more."""
    session = open_session(model)
    for count in range(1, most + 1):
        if not all(runs(session, past, count - past) for past in {0, count // 2, count - 1}):
            return count - 1
    return None


@pytest.mark.parametrize("form", FORMS)
def test_the_limit_of_a_form_is_onnxruntimes(form, tmp_path):
    nodes, initializers, expected = FORMS[form]
    assert most_tokens(decoder(nodes, initializers)) == expected
    limit = find_limit(tmp_path, nodes, initializers)
    assert (limit and limit.tokens) == expected


def branch(name: str, rows: int) -> onnx.GraphProto:
    result = helper.make_tensor_value_info(f"{name}.table", TensorProto.FLOAT, [rows, VOCAB])
    return helper.make_graph([node("Identity", name, f"{name}.table")], name, [], [result])


@pytest.mark.parametrize(
    ("short", "long", "switch", "expected"),
    [
        (8, ROWS, 8, ROWS),  # as longrope's: each table is read where it has rows
        (ROWS, 8, 8, 8),  # the table of long rows has none for them
        (6, ROWS, 8, 6),  # short rows already end
        (8, 8, 20, 8),
    ],
)
@pytest.mark.parametrize("length", ["total", "most"])
def test_a_table_that_an_if_chooses_counts_for_the_rows_that_reach_it(short, long, switch, expected, length, tmp_path):
    nodes = [
        node("ReduceMax", "position_ids", "newest", keepdims=0),
        node("Add", "newest one", "most"),
        node("Greater", f"{length} switch", "is.long"),
        node("If", "is.long", "table", then_branch=branch("long", long), else_branch=branch("short", short)),
        node("Gather", "table position_ids", "read"),
    ]
    tables = [table(long, VOCAB, name="long"), table(short, VOCAB, name="short"), constant("switch", switch)]
    assert most_tokens(decoder(nodes, tables)) == expected
    limit = find_limit(tmp_path, nodes, tables)
    assert limit is not None
    assert limit.tokens == expected


def test_an_unknown_operator_on_the_way_reaches_no_table(tmp_path):
    nodes = [
        node("BitwiseAnd", "position_ids last", "mixed"),
        node("Gather", "table mixed", "read"),
    ]
    assert most_tokens(decoder(nodes, [table(8, VOCAB)])) is None
    assert find_limit(tmp_path, nodes, [table(8, VOCAB)]) is None


def test_the_limit_names_its_table(tmp_path):
    limit = find_limit(tmp_path, *FORMS["a causal mask of fixed size"][:2])
    assert limit == PositionLimit(ROWS, "mask")


# Lengths, against all rows and steps of few tokens.


@pytest.mark.parametrize("seed", range(40))
def test_lengths_are_compared_as_their_numbers(seed):
    draw = np.random.default_rng(seed)
    a, b = (Length(*map(int, draw.integers(-3, 4, 3))) for _ in range(2))
    first, most = int(draw.integers(1, 5)), 60

    def values(number: Length, tokens: int) -> np.ndarray:
        steps = np.arange(1, tokens + 1)
        return number.tokens * tokens + number.step * steps + number.constant

    def differences(tokens: int) -> np.ndarray:
        return values(a, tokens) - values(b, tokens)

    within = [tokens for tokens in range(1, most) if (differences(tokens) > 0).any()]
    limit = a.most_tokens_at_most(b)
    if limit is not None and limit >= 0:
        assert within[:1] == [limit + 1]
    numbers = np.concatenate([differences(tokens) for tokens in range(first, most)])
    for last in (None, most - 1):
        is_positive = TokenRange(first, last).is_positive(a.minus(b))
        if is_positive is not None or last is not None:
            assert (is_positive is True) == (numbers > 0).all()
            assert (is_positive is False) == (numbers <= 0).all()
    long_rows = range(40, most)
    assert all((values(larger(a, b), n) >= np.maximum(values(a, n), values(b, n))).all() for n in long_rows)
    assert all((values(smaller(a, b), n) <= np.minimum(values(a, n), values(b, n))).all() for n in long_rows)


def test_the_parts_of_a_row():
    assert PAST.plus(STEP) == ROW
    assert TokenRange().split_after(5) == [TokenRange(1, 5), TokenRange(6, None)]
    assert TokenRange(6, 9).split_after(5) == [TokenRange(6, 9)]
