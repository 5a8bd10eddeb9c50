"""MultiHeadAttention, Attention and RotaryEmbedding of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

B, S, H, D = 2, 4, 3, 8
T = S + 3


def padding_masks(context, seq):
    """Returns onnxruntime's kinds of masks over padded rows, by name; every row sees a column."""
    raw = np.ones((B, context), dtype=np.int32)
    raw[0, 0] = raw[1, -1] = 0
    return {
        "none": None,
        "ends": np.array([context, context - 2], dtype=np.int32),
        "ends and starts": np.array([context, context - 1, 1, 0], dtype=np.int32),
        "raw": raw,
        "raw by token": np.broadcast_to(raw[:, None], (B, seq, context)).copy(),
    }


@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("mask_kind", padding_masks(1, 1))
def test_attention(mask_kind, past, unidirectional):
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, 3 * H * D), floats(3, 3 * H * D)
    inputs = [x, weights, bias, padding_masks(past + S, S)[mask_kind], floats(4, 2, B, H, past, D) if past else None]
    attrs = {"num_heads": H, "unidirectional": unidirectional}
    assert_matches_onnxruntime("Attention", inputs, attrs, ("y", "present"))


def test_attention_with_bias_sizes_and_scale():
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, H * (8 + 8 + 5)), floats(3, H * (8 + 8 + 5))
    attrs = {"num_heads": H, "qkv_hidden_sizes": [24, 24, 15], "scale": 0.2}
    assert_matches_onnxruntime("Attention", [x, weights, bias, None, None, floats(5, B, H, S, S)], attrs)
    assert_matches_onnxruntime("Attention", [x, weights, bias, None, None, floats(5, 1, 1, S, S)], attrs)
    raw = padding_masks(S, S)["raw"]
    assert_matches_onnxruntime("Attention", [x, weights, bias, raw], {**attrs, "mask_filter_value": -50.0})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("mask_kind", ["none", "ends", "raw"])
def test_multi_head_attention(mask_kind, unidirectional, bias):
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    inputs = [q, k, v, floats(3, 3 * H * D) if bias else None, padding_masks(S, S)[mask_kind]]
    assert_matches_onnxruntime("MultiHeadAttention", inputs, {"num_heads": H, "unidirectional": unidirectional})


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_multi_head_attention_with_a_past(unidirectional):
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    past = [floats(5, B, H, 3, D), floats(6, B, H, 3, D)]
    outputs = ("y", "present_key", "present_value")
    for attention_bias in (None, floats(7, 1, H, S, T), floats(8, B, 1, S, T)):
        inputs = [q, k, v, floats(3, 3 * H * D), padding_masks(T, S)["raw"], attention_bias, *past]
        assert_matches_onnxruntime(
            "MultiHeadAttention", inputs, {"num_heads": H, "unidirectional": unidirectional}, outputs
        )


def test_multi_head_cross_attention():
    q, k, v = floats(1, B, S, H * D), floats(2, B, 6, H * D), floats(3, B, 6, H * 5)
    assert_matches_onnxruntime("MultiHeadAttention", [q, k, v, floats(4, H * (2 * D + 5))], {"num_heads": H})
    assert_matches_onnxruntime("MultiHeadAttention", [q, k, v], {"num_heads": H, "scale": 0.1})
    cache = [floats(5, B, H, 6, D), floats(6, B, H, 6, D)]
    assert_matches_onnxruntime("MultiHeadAttention", [q, *cache], {"num_heads": H})
    assert_matches_onnxruntime("MultiHeadAttention", [q, *cache, floats(4, 3 * H * D)], {"num_heads": H})


def test_multi_head_attention_scores():
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    outputs = ("y", "present_key", "present_value", "qk")
    assert_matches_onnxruntime(
        "MultiHeadAttention",
        [q, k, v, None, padding_masks(S, S)["raw"]],
        {"num_heads": H, "mask_filter_value": -5.0},
        outputs,
        output_types={"qk": 1},
    )


def test_packed_projections():
    """Against separate projections, as onnxruntime's CPU provider has no packed ones."""
    q, k, v = (floats(i, B, S, H, D) for i in range(3))
    (expected,) = onnxruntime_outputs(
        "MultiHeadAttention", [x.reshape(B, S, -1) for x in (q, k, v)], {"num_heads": H}, ("y",)
    )
    (actual,) = module_outputs("MultiHeadAttention", [np.stack([q, k, v], axis=3)], {"num_heads": H}, ("y",))
    assert_outputs_close(expected, actual, 1e-5)
    packed = [q.reshape(B, S, -1), np.stack([k, v], axis=3)]
    (actual,) = module_outputs("MultiHeadAttention", packed, {"num_heads": H}, ("y",))
    assert_outputs_close(expected, actual, 1e-5)


def test_a_fully_masked_row_gives_no_nan():
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, 3 * H * D), floats(3, 3 * H * D)
    mask = np.zeros((B, S), dtype=np.int32)
    for dtype in (np.float32, np.float16):
        inputs = [*(a.astype(dtype) for a in (x, weights, bias)), mask]
        for unidirectional in (0, 1):
            attrs = {"num_heads": H, "unidirectional": unidirectional, "mask_filter_value": float(np.finfo(dtype).min)}
            (y, _) = module_outputs("Attention", inputs, attrs, ("y", "present"))
            assert np.isfinite(y).all()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [np.array([5]), np.array([[3, 4, 5, 6], [0, 1, 9, 2]])])
def test_rotary_embedding(positions, interleaved):
    attrs = {"interleaved": interleaved}
    assert_matches_onnxruntime(
        "RotaryEmbedding", [floats(1, B, S, H * D), positions, floats(2, 12, D // 2), floats(3, 12, D // 2)], attrs
    )
    assert_matches_onnxruntime(
        "RotaryEmbedding", [floats(1, B, H, S, D), positions, floats(2, 12, D // 2), floats(3, 12, D // 2)], attrs
    )
    part = {**attrs, "num_heads": H, "rotary_embedding_dim": 4, "scale": 1.0}
    assert_matches_onnxruntime(
        "RotaryEmbedding", [floats(1, B, S, H * D), positions, floats(2, 12, 2), floats(3, 12, 2)], part
    )
    half = [
        floats(i, *shape, dtype=np.float16) for i, shape in ((1, (B, S, H * D)), (2, (12, D // 2)), (3, (12, D // 2)))
    ]
    assert_matches_onnxruntime("RotaryEmbedding", [half[0], positions, *half[1:]], attrs, tolerance=2e-3)


CAPACITY, PAST_LENGTH = 10, 4
OUTPUT_NAMES = ("y", "present_key", "present_value")


def buffer_inputs(seq, mask=False, bias=False):
    """Returns query, key, value, mask, attention bias, past key, past value, past length."""
    q, k, v = (floats(i, B, seq, H * D) for i in range(3))
    total = PAST_LENGTH + seq
    raw = np.ones((B, total), dtype=np.int32)
    raw[0, 1] = 0
    pasts = [floats(i, B, H, CAPACITY, D) for i in (5, 6)]
    for past in pasts:
        past[:, :, PAST_LENGTH:] = 1e20  # never read
    extra = floats(7, 1, H, seq, total) if bias else None
    return q, k, v, raw if mask else None, extra, *pasts, np.array([PAST_LENGTH], dtype=np.int32)


def assert_written_part_close(op_type, inputs, attrs, outputs=OUTPUT_NAMES):
    expected, actual = (
        onnxruntime_outputs(op_type, inputs, attrs, outputs),
        module_outputs(op_type, inputs, attrs, outputs),
    )
    assert_outputs_close(expected[0], actual[0], 1e-5)
    written = PAST_LENGTH + inputs[0].shape[1]
    for a, b in zip(expected[1:3], actual[1:3], strict=True):
        assert a.shape == b.shape
        assert_outputs_close(a[:, :, :written], b[:, :, :written], 1e-6)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seq", [1, 3])
def test_multi_head_attention_over_a_buffer(seq, bias, mask):
    q, k, v, raw, extra, *past = buffer_inputs(seq, mask, bias)
    for unidirectional in (0, 1):
        attrs = {"num_heads": H, "unidirectional": unidirectional}
        assert_written_part_close("MultiHeadAttention", [q, k, v, None, raw, extra, *past], attrs)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("beams", [False, True])
def test_decoder_masked_multi_head_attention(beams, bias, mask):
    source = np.random.default_rng(8).integers(0, 2, size=(1, 2, CAPACITY)).astype(np.int32)
    beam = [np.array([2], dtype=np.int32), source] if beams else [None, None]
    # onnxruntime reads the mask and the bias of beams whether they are there or not.
    inputs = [*buffer_inputs(1, mask or beams, bias or beams), *beam, floats(9, 3 * H * D)]
    attrs = {"num_heads": H, "past_present_share_buffer": 1}
    assert_written_part_close("DecoderMaskedMultiHeadAttention", inputs, attrs)


def test_decoder_masked_multi_head_cross_attention():
    q, cache = floats(1, B, 1, H * D), [floats(2, B, H, 6, D), floats(3, B, H, 6, D)]
    mask = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], dtype=np.int32)
    assert_matches_onnxruntime("DecoderMaskedMultiHeadAttention", [q, *cache], {"num_heads": H})
    assert_matches_onnxruntime("DecoderMaskedMultiHeadAttention", [q, *cache, mask], {"num_heads": H, "scale": 0.2})


def test_decoder_masked_scores():
    inputs, attrs = buffer_inputs(1), {"num_heads": H, "past_present_share_buffer": 1, "output_qk": 1}
    (*_, expected) = onnxruntime_outputs(
        "DecoderMaskedMultiHeadAttention", inputs, attrs, (*OUTPUT_NAMES, "qk"), output_types={"qk": 1}
    )
    (*_, actual) = module_outputs(
        "DecoderMaskedMultiHeadAttention", inputs, attrs, (*OUTPUT_NAMES, "qk"), host_inputs=(7,)
    )
    assert_outputs_close(expected, actual, 1e-5)
