"""MultiHeadAttention, Attention and RotaryEmbedding of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import agree, check, expected, found

B, S, H, D = 2, 4, 3, 8
T = S + 3


def floats(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def masks(context, seq):
    """onnxruntime's forms of a mask over padded rows; every row sees a column."""
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
@pytest.mark.parametrize("form", masks(1, 1))
def test_attention(form, past, unidirectional):
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, 3 * H * D), floats(3, 3 * H * D)
    inputs = [x, weights, bias, masks(past + S, S)[form], floats(4, 2, B, H, past, D) if past else None]
    attrs = {"num_heads": H, "unidirectional": unidirectional}
    check("Attention", inputs, attrs, ("y", "present"))


def test_attention_biases_sizes_and_scale():
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, H * (8 + 8 + 5)), floats(3, H * (8 + 8 + 5))
    attrs = {"num_heads": H, "qkv_hidden_sizes": [24, 24, 15], "scale": 0.2}
    check("Attention", [x, weights, bias, None, None, floats(5, B, H, S, S)], attrs)
    check("Attention", [x, weights, bias, None, None, floats(5, 1, 1, S, S)], attrs)
    raw = masks(S, S)["raw"]
    check("Attention", [x, weights, bias, raw], {**attrs, "mask_filter_value": -50.0})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("form", ["none", "ends", "raw"])
def test_multi_head_attention(form, unidirectional, bias):
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    inputs = [q, k, v, floats(3, 3 * H * D) if bias else None, masks(S, S)[form]]
    check("MultiHeadAttention", inputs, {"num_heads": H, "unidirectional": unidirectional})


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_multi_head_attention_with_a_past(unidirectional):
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    past = [floats(5, B, H, 3, D), floats(6, B, H, 3, D)]
    outputs = ("y", "present_key", "present_value")
    for attention_bias in (None, floats(7, 1, H, S, T), floats(8, B, 1, S, T)):
        inputs = [q, k, v, floats(3, 3 * H * D), masks(T, S)["raw"], attention_bias, *past]
        check("MultiHeadAttention", inputs, {"num_heads": H, "unidirectional": unidirectional}, outputs)


def test_multi_head_attention_over_another_sequence():
    q, k, v = floats(1, B, S, H * D), floats(2, B, 6, H * D), floats(3, B, 6, H * 5)
    check("MultiHeadAttention", [q, k, v, floats(4, H * (2 * D + 5))], {"num_heads": H})
    check("MultiHeadAttention", [q, k, v], {"num_heads": H, "scale": 0.1})
    cache = [floats(5, B, H, 6, D), floats(6, B, H, 6, D)]
    check("MultiHeadAttention", [q, *cache], {"num_heads": H})
    check("MultiHeadAttention", [q, *cache, floats(4, 3 * H * D)], {"num_heads": H})


def test_multi_head_attention_scores():
    q, k, v = (floats(i, B, S, H * D) for i in range(3))
    outputs = ("y", "present_key", "present_value", "qk")
    check(
        "MultiHeadAttention",
        [q, k, v, None, masks(S, S)["raw"]],
        {"num_heads": H, "mask_filter_value": -5.0},
        outputs,
        output_types={"qk": 1},
    )


def test_packed_projections():
    """onnxruntime's CPU provider refuses them packed: its truth is the same projections apart."""
    q, k, v = (floats(i, B, S, H, D) for i in range(3))
    (truth,) = expected("MultiHeadAttention", [x.reshape(B, S, -1) for x in (q, k, v)], {"num_heads": H}, ("y",))
    (ours,) = found("MultiHeadAttention", [np.stack([q, k, v], axis=3)], {"num_heads": H}, ("y",))
    agree(truth, ours, 1e-5)
    packed = [q.reshape(B, S, -1), np.stack([k, v], axis=3)]
    (ours,) = found("MultiHeadAttention", packed, {"num_heads": H}, ("y",))
    agree(truth, ours, 1e-5)


def test_a_row_that_sees_nothing_gives_no_nan():
    x, weights, bias = floats(1, B, S, 10), floats(2, 10, 3 * H * D), floats(3, 3 * H * D)
    mask = np.zeros((B, S), dtype=np.int32)
    for dtype in (np.float32, np.float16):
        inputs = [*(a.astype(dtype) for a in (x, weights, bias)), mask]
        for unidirectional in (0, 1):
            attrs = {"num_heads": H, "unidirectional": unidirectional, "mask_filter_value": float(np.finfo(dtype).min)}
            (y, _) = found("Attention", inputs, attrs, ("y", "present"))
            assert np.isfinite(y).all()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [np.array([5]), np.array([[3, 4, 5, 6], [0, 1, 9, 2]])])
def test_rotary_embedding(positions, interleaved):
    attrs = {"interleaved": interleaved}
    check("RotaryEmbedding", [floats(1, B, S, H * D), positions, floats(2, 12, D // 2), floats(3, 12, D // 2)], attrs)
    check("RotaryEmbedding", [floats(1, B, H, S, D), positions, floats(2, 12, D // 2), floats(3, 12, D // 2)], attrs)
    part = {**attrs, "num_heads": H, "rotary_embedding_dim": 4, "scale": 1.0}
    check("RotaryEmbedding", [floats(1, B, S, H * D), positions, floats(2, 12, 2), floats(3, 12, 2)], part)
    half = [
        floats(i, *shape, dtype=np.float16) for i, shape in ((1, (B, S, H * D)), (2, (12, D // 2)), (3, (12, D // 2)))
    ]
    check("RotaryEmbedding", [half[0], positions, *half[1:]], attrs, tolerance=2e-3)


CAPACITY, HELD = 10, 4
PRESENT = ("y", "present_key", "present_value")


def buffered(seq, mask=False, bias=False):
    """query, key, value, mask, attention bias, past key, past value, past length."""
    q, k, v = (floats(i, B, seq, H * D) for i in range(3))
    total = HELD + seq
    raw = np.ones((B, total), dtype=np.int32)
    raw[0, 1] = 0
    pasts = [floats(i, B, H, CAPACITY, D) for i in (5, 6)]
    for past in pasts:
        past[:, :, HELD:] = 1e20  # never read
    extra = floats(7, 1, H, seq, total) if bias else None
    return q, k, v, raw if mask else None, extra, *pasts, np.array([HELD], dtype=np.int32)


def agree_where_written(op_type, inputs, attrs, outputs=PRESENT):
    truth, ours = expected(op_type, inputs, attrs, outputs), found(op_type, inputs, attrs, outputs)
    agree(truth[0], ours[0], 1e-5)
    written = HELD + inputs[0].shape[1]
    for a, b in zip(truth[1:3], ours[1:3], strict=True):
        assert a.shape == b.shape
        agree(a[:, :, :written], b[:, :, :written], 1e-6)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seq", [1, 3])
def test_multi_head_attention_over_a_buffer(seq, bias, mask):
    q, k, v, raw, extra, *past = buffered(seq, mask, bias)
    for unidirectional in (0, 1):
        attrs = {"num_heads": H, "unidirectional": unidirectional}
        agree_where_written("MultiHeadAttention", [q, k, v, None, raw, extra, *past], attrs)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("beams", [False, True])
def test_decoder_masked_multi_head_attention(beams, bias, mask):
    source = np.random.default_rng(8).integers(0, 2, size=(1, 2, CAPACITY)).astype(np.int32)
    beam = [np.array([2], dtype=np.int32), source] if beams else [None, None]
    # onnxruntime reads the mask and the bias of beams whether they are there or not.
    inputs = [*buffered(1, mask or beams, bias or beams), *beam, floats(9, 3 * H * D)]
    attrs = {"num_heads": H, "past_present_share_buffer": 1}
    agree_where_written("DecoderMaskedMultiHeadAttention", inputs, attrs)


def test_decoder_masked_multi_head_attention_over_another_sequence():
    q, cache = floats(1, B, 1, H * D), [floats(2, B, H, 6, D), floats(3, B, H, 6, D)]
    mask = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], dtype=np.int32)
    check("DecoderMaskedMultiHeadAttention", [q, *cache], {"num_heads": H})
    check("DecoderMaskedMultiHeadAttention", [q, *cache, mask], {"num_heads": H, "scale": 0.2})


def test_decoder_masked_scores():
    inputs, attrs = buffered(1), {"num_heads": H, "past_present_share_buffer": 1, "output_qk": 1}
    (*_, truth) = expected("DecoderMaskedMultiHeadAttention", inputs, attrs, (*PRESENT, "qk"), output_types={"qk": 1})
    (*_, ours) = found("DecoderMaskedMultiHeadAttention", inputs, attrs, (*PRESENT, "qk"), host=(7,))
    agree(truth, ours, 1e-5)
