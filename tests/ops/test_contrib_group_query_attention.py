"""GroupQueryAttention against onnxruntime: every attribute, prompts, chunks, single tokens, ragged batches."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime_node import assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import float_source

from mlx_transmuter.ops.contrib.group_query_attention import group_query_attention

OUTPUT_NAMES = ("y", "present_key", "present_value")
HEADS, KV_HEADS, DIM = 4, 2, 16


# The numbers of the rotary tables and of head_sink, which rows share.
SHARED_INPUTS = (7, 8, 11)


class GroupQueryCase:
    """The inputs of one node: rows with past_lengths tokens and seq new ones, over buffers of that capacity."""

    def __init__(
        self,
        seed,
        past_lengths,
        seq,
        capacity=None,
        *,
        packed=False,
        rotary=False,
        bias=False,
        dtype=np.float32,
        **attrs,
    ):
        rng = np.random.default_rng(seed)
        floats = float_source(rng, dtype)
        batch, self.seq, self.past_lengths = len(past_lengths), seq, np.array(past_lengths)
        self.lengths = self.past_lengths + seq
        total = int(self.lengths.max())
        capacity = total - seq if capacity is None else capacity
        width = (HEADS + 2 * KV_HEADS) * DIM if packed else HEADS * DIM
        self.inputs = [
            floats(batch, seq, width),
            *([None] * 2 if packed else (floats(batch, seq, KV_HEADS * DIM) for _ in range(2))),
        ]
        self.inputs += [floats(batch, KV_HEADS, capacity, DIM) for _ in range(2)]
        self.inputs += [(self.lengths - 1).astype(np.int32), np.array(total, dtype=np.int32)]
        angle = rng.uniform(0, 6, size=(64, DIM // 2))
        self.inputs += [np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)] if rotary else [None, None]
        self.inputs += [None, floats(batch, HEADS, seq, total) if bias else None]
        self.attrs = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **({"do_rotary": 1} if rotary else {}), **attrs}

    def single_row(self, b):
        """Returns the case of row b alone."""
        alone = object.__new__(GroupQueryCase)
        alone.seq, alone.attrs = self.seq, self.attrs
        alone.past_lengths, alone.lengths = self.past_lengths[b : b + 1], self.lengths[b : b + 1]
        total = np.array(int(self.lengths[b]), dtype=np.int32)
        alone.inputs = list(self.inputs)
        for i, x in enumerate(self.inputs):
            if x is not None and i not in SHARED_INPUTS:
                alone.inputs[i] = x[b : b + 1] if x.ndim else total
        if self.inputs[10] is not None:
            alone.inputs[10] = self.inputs[10][b : b + 1, ..., : int(total)]
        return alone


FEATURES = {
    "plain": {},
    "packed": {"packed": True},
    "rotary": {"rotary": True},
    "rotary interleaved packed": {"rotary": True, "rotary_interleaved": 1, "packed": True},
    "window": {"local_window_size": 3},
    "window rotary": {"local_window_size": 2, "rotary": True},
    "softcap": {"softcap": 2.0},
    "smooth softmax": {"smooth_softmax": 1},
    "scale": {"scale": 0.3},
    "bias": {"bias": True},
    "bias softcap": {"bias": True, "softcap": 3.0},
    "bias window": {"bias": True, "local_window_size": 4},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    ("past_lengths", "seq", "capacity"),
    [((0, 0), 5, 0), ((0,), 6, 9), ((4, 4), 1, None), ((2, 7), 1, 12), ((7,), 3, None), ((7,), 3, 16)],
    ids=["prompt", "prompt in a buffer", "token", "ragged token", "part", "part in a buffer"],
)
def test_group_query_attention(feature, past_lengths, seq, capacity):
    case = GroupQueryCase(len(feature), past_lengths, seq, capacity, **FEATURES[feature])
    expected = onnxruntime_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES)
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
    assert_outputs_close(expected[0], actual[0], 1e-5)
    for name, a, b in zip(OUTPUT_NAMES[1:], expected[1:], actual[1:], strict=True):
        assert a.shape == b.shape
        for row, length in enumerate(case.lengths):  # what lies past a row's length is unspecified
            assert_outputs_close(a[row, :, :length], b[row, :, :length], 1e-6, name)


def assert_matches_onnxruntime_rows(case, outputs=OUTPUT_NAMES, tolerance=1e-5, host=(6,)):
    """Asserts that the attention and the filled columns of the buffers agree with onnxruntime's."""
    expected = onnxruntime_outputs("GroupQueryAttention", case.inputs, case.attrs, outputs)
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, outputs, host_inputs=host)
    assert_outputs_close(expected[0], actual[0], tolerance)
    for name, a, b in zip(outputs[1:3], expected[1:], actual[1:], strict=False):
        assert a.shape == b.shape
        for row, length in enumerate(case.lengths):  # what lies past a row's length is unspecified
            assert_outputs_close(a[row, :, :length], b[row, :, :length], tolerance, name)
    return expected, actual


@pytest.mark.parametrize("feature", ["rotary", "window", "softcap", "smooth softmax", "bias"])
def test_float16(feature):
    assert_matches_onnxruntime_rows(
        GroupQueryCase(1, (3, 5), 1, 10, dtype=np.float16, **FEATURES[feature]), tolerance=2e-3
    )


@pytest.mark.parametrize(("past_lengths", "seq", "capacity"), [((0, 0), 4, 0), ((3, 6), 1, 10), ((5,), 2, 8)])
def test_head_sink_and_softcap(past_lengths, seq, capacity):
    sink = np.array([0.5, -1.0, 2.0, 0.0], dtype=np.float32)
    for extra in ({}, {"softcap": 2.0}):
        case = GroupQueryCase(2, past_lengths, seq, capacity, **extra)
        case.inputs.append(sink)
        assert_matches_onnxruntime_rows(case)


def test_position_ids():
    case = GroupQueryCase(3, (3, 5), 1, 10, rotary=True)
    case.inputs[9] = np.array([[11], [2]], dtype=np.int64)  # not where the tokens stand
    assert_matches_onnxruntime_rows(case)
    prompt = GroupQueryCase(4, (0,), 5, 0, rotary=True)
    prompt.inputs[9] = np.arange(7, 12)[None]
    assert_matches_onnxruntime_rows(prompt)


def test_prompts_padded_on_the_right():
    case = GroupQueryCase(5, (0, 0, 0), 6, 0, rotary=True, local_window_size=4)
    case.lengths = np.array([6, 2, 4])
    case.inputs[5] = (case.lengths - 1).astype(np.int32)
    expected = onnxruntime_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES)
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
    for row, length in enumerate(case.lengths):
        assert_outputs_close(expected[0][row, :length], actual[0][row, :length], 1e-5)
        assert_outputs_close(expected[1][row, :, :length], actual[1][row, :, :length], 1e-6, "present_key")


@pytest.mark.parametrize("feature", FEATURES)
def test_each_row_of_a_ragged_batch_equals_the_row_alone(feature):
    """onnxruntime takes several tokens on a past for one row only: expected are its outputs row by row."""
    case = GroupQueryCase(6, (3, 0, 7), 4, 16, **FEATURES[feature])
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
    for b, length in enumerate(case.lengths):
        alone = case.single_row(b)
        expected = onnxruntime_outputs("GroupQueryAttention", alone.inputs, alone.attrs, OUTPUT_NAMES)
        assert_outputs_close(expected[0][0], actual[0][b], 1e-5)
        assert_outputs_close(expected[1][0, :, :length], actual[1][b, :, :length], 1e-6, "present_key")
        assert_outputs_close(expected[2][0, :, :length], actual[2][b, :, :length], 1e-6, "present_value")


def test_a_total_known_only_when_the_step_runs():
    case = GroupQueryCase(7, (3, 6), 1, 12, rotary=True)
    assert_matches_onnxruntime_rows(case, host=())


def test_unfilled_columns_of_the_buffers_are_never_read():
    case = GroupQueryCase(8, (3, 6), 1, 12)
    for past in (3, 4):
        for row, past_length in enumerate(case.past_lengths):
            case.inputs[past][row, :, past_length:] = 1e30
    _, actual = assert_matches_onnxruntime_rows(case)
    assert np.isfinite(actual[0]).all()


def test_query_seqlens():
    case = GroupQueryCase(9, (3, 5), 4, 12, rotary=True)
    real = np.array([4, 2], dtype=np.int32)
    case.lengths = case.past_lengths + real
    case.inputs[5] = (case.lengths - 1).astype(np.int32)
    case.inputs[6] = np.array(12, dtype=np.int32)
    case.inputs += [None] * 5 + [real]
    expected = onnxruntime_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES)
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
    for row, length in enumerate(case.lengths):
        assert_outputs_close(expected[0][row, : real[row]], actual[0][row, : real[row]], 1e-5)
        assert_outputs_close(expected[1][row, :, :length], actual[1][row, :, :length], 1e-6, "present_key")


def test_not_causal():
    assert_matches_onnxruntime_rows(GroupQueryCase(10, (0, 0), 5, 0, causal=0))
    assert_matches_onnxruntime_rows(GroupQueryCase(11, (4,), 3, 9, causal=0))


@pytest.mark.parametrize("stage", [1, 2])
def test_scores(stage):
    case = GroupQueryCase(12, (0, 0), 4, 0, qk_output=stage, softcap=2.0)
    expected, actual = assert_matches_onnxruntime_rows(case, outputs=(*OUTPUT_NAMES, "output_qk"))
    seen = np.tril(np.ones((4, 4), dtype=bool))  # the hidden scores are unspecified
    assert_outputs_close(expected[3][..., seen], actual[3][..., seen], 1e-5)


def test_query_and_key_norms():
    """onnxruntime's CPU provider has no such norms: expected is the node without them after separate norms."""
    case = GroupQueryCase(13, (3, 6), 1, 12, rotary=True, q_norm_epsilon=1e-3)
    rng = np.random.default_rng(13)
    q_norm, k_norm = (rng.normal(size=DIM).astype(np.float32) for _ in range(2))
    plain = list(case.inputs)
    for i, weight, epsilon in ((0, q_norm, 1e-3), (1, k_norm, 1e-6)):
        heads = plain[i].reshape(2, 1, -1, DIM)
        (normed,) = onnxruntime_outputs(
            "SimplifiedLayerNormalization", [heads, weight], {"epsilon": epsilon, "axis": -1}, ("y",), domain="ai.onnx"
        )
        plain[i] = normed.reshape(plain[i].shape)
    expected = onnxruntime_outputs(
        "GroupQueryAttention", plain, {k: v for k, v in case.attrs.items() if k != "q_norm_epsilon"}, OUTPUT_NAMES
    )
    actual = module_outputs(
        "GroupQueryAttention",
        [*case.inputs, None, None, None, q_norm, k_norm],
        case.attrs,
        OUTPUT_NAMES,
        host_inputs=(6,),
    )
    assert_outputs_close(expected[0], actual[0], 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_fully_masked_row_gives_no_nan(dtype, softcap):
    """Exporters add the lowest number, or −inf, for every column of a padding token."""
    for smallest in (np.finfo(dtype).min, -np.inf):
        case = GroupQueryCase(14, (0, 0), 4, 0, bias=True, dtype=dtype, softcap=softcap)
        case.inputs[10][0, :, 2] = smallest
        (y, *_) = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
        assert np.isfinite(y).all()


@settings(max_examples=80)
@given(st.data())
def test_random_cases(data):
    """Row by row, as onnxruntime takes several tokens on a past for one row only."""
    batch, seq = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    past_lengths = [data.draw(st.integers(0, 8)) for _ in range(batch)]
    attrs = {
        "packed": data.draw(st.booleans()),
        "rotary": data.draw(st.booleans()),
        "bias": data.draw(st.booleans()),
        "rotary_interleaved": data.draw(st.integers(0, 1)),
        "local_window_size": data.draw(st.sampled_from([-1, 1, 2, 5])),
        "softcap": data.draw(st.sampled_from([0.0, 1.5])),
        "smooth_softmax": data.draw(st.integers(0, 1)),
        "scale": data.draw(st.sampled_from([0.0, 0.4])),
    }
    case = GroupQueryCase(
        data.draw(st.integers(0, 99)),
        past_lengths,
        seq,
        max(past_lengths) + seq + data.draw(st.integers(0, 3)),
        **attrs,
    )
    actual = module_outputs("GroupQueryAttention", case.inputs, case.attrs, OUTPUT_NAMES, host_inputs=(6,))
    for b, length in enumerate(case.lengths):
        alone = case.single_row(b)
        expected = onnxruntime_outputs("GroupQueryAttention", alone.inputs, alone.attrs, OUTPUT_NAMES)
        assert_outputs_close(expected[0][0], actual[0][b], 1e-5)
        assert_outputs_close(expected[1][0, :, :length], actual[1][b, :, :length], 1e-6, "present_key")
        assert_outputs_close(expected[2][0, :, :length], actual[2][b, :, :length], 1e-6, "present_value")


@pytest.mark.usefixtures("compiling")
def test_layers_of_a_step_share_positions_angles_and_masks(tmp_path):
    """More layers gather angles and compare positions no more often, as mx.compile merges these operations."""

    def counts(layers):
        case = GroupQueryCase(15, (3, 6), 1, 12, rotary=True, local_window_size=5)
        names = [f"x{i}" for i, x in enumerate(case.inputs) if x is not None and i != 6]
        values = {f"x{i}": mx.array(x) for i, x in enumerate(case.inputs) if f"x{i}" in names}

        def step(given):
            inputs = [given.get(f"x{i}") for i in range(len(case.inputs))]
            inputs[6], results = mx.array(12), []
            for _ in range(layers):
                results += group_query_attention(*inputs, **case.attrs)
                inputs[:5] = [x + 1 for x in inputs[:5]]  # other layers have other arrays
            return results

        mx.export_to_dot(str(tmp_path / "step.dot"), *mx.compile(step)(values))
        graph = (tmp_path / "step.dot").read_text()
        return [graph.count(f'label ="{kind}"') for kind in ("Gather", "CompiledBroadcastLessEqual")], graph.count(
            "label ="
        )

    (two, more), (three, most) = counts(2), counts(3)
    assert two == three
    assert most > more
