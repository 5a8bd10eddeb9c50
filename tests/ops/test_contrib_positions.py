"""Position operators of com.microsoft against onnxruntime, or against their formulas in numpy."""

import math

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats


def t5_bucket(distance, bidirectional, buckets, most):
    """Returns T5's bucket of a distance, key minus query. Raffel et al. 2020."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    return first + min(
        exact + int(math.log(distance / exact) / math.log(most / exact) * (buckets - exact)), buckets - 1
    )


@pytest.mark.parametrize("bidirectional", [0, 1])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_relative_position_bias(length, bidirectional):
    buckets, heads = 32, 4
    by_head = floats(1, heads, buckets)
    lengths = [np.array(length), np.array(length)]
    attrs = {"max_distance": 128, "is_bidirectional": bidirectional}
    (actual,) = module_outputs("RelativePositionBias", [by_head.reshape(buckets, heads), *lengths], attrs, ("y",))
    places = [[t5_bucket(j - i, bidirectional, buckets, 128) for j in range(length)] for i in range(length)]
    np.testing.assert_array_equal(actual, by_head[:, np.array(places)][None])


def test_gated_relative_position_bias():
    batch, seq, heads, dim, width = 2, 5, 3, 8, 6
    query, query_bias, rel_pos = (
        floats(1, batch, seq, heads * dim),
        floats(2, heads * dim),
        floats(3, 1, heads, seq, seq),
    )
    weight, bias, eco_a = floats(4, dim, width), floats(5, width), floats(6, 1, heads, 1, 1)
    inputs = [query, query_bias, rel_pos, weight, bias, eco_a]
    (actual,) = module_outputs("GatedRelativePositionBias", inputs, {"num_heads": heads}, ("y",))
    expected = np.zeros((batch, heads, seq, seq), dtype=np.float32)
    for b, h, i in np.ndindex(batch, heads, seq):
        row = (query + query_bias)[b, i, h * dim : (h + 1) * dim] @ weight + bias
        u, r = (1 / (1 + math.exp(-half.sum())) for half in (row[: width // 2], row[width // 2 :]))
        expected[b, h, i] = (u * (r * eco_a[0, h, 0, 0] - 1) + 2) * rel_pos[0, h, i]
    assert_outputs_close(expected, actual, 1e-5)


@pytest.mark.parametrize(("layout", "section"), [(0, [2, 1, 1]), (0, [1, 0, 3]), (1, [2, 1, 1]), (1, [2, 2, 0])])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_m_rotary_embedding(rank, interleaved, layout, section):
    positions = np.random.default_rng(1).integers(0, 20, size=(3, 2, 5))
    x = floats(2, 2, 5, 32) if rank == 3 else floats(2, 2, 2, 5, 16)
    attrs = {"mrope_section": section, "mrope_layout": layout, "interleaved": interleaved}
    attrs |= {"num_heads": 2, "rotary_embedding_dim": 8}
    assert_matches_onnxruntime("MRotaryEmbedding", [x, positions, floats(3, 20, 4), floats(4, 20, 4)], attrs)


def test_gemma_rotary_embedding():
    """Against RotaryEmbedding with tables of the angles, as onnxruntime has no CPU kernel of it."""
    angles, q, k = floats(1, 2, 5, 4), floats(2, 2, 3, 5, 8), floats(3, 2, 3, 5, 8)
    emb = np.concatenate([angles, angles], axis=-1)
    turned = [np.concatenate([-x[..., 4:], x[..., :4]], axis=-1) for x in (q, k)]
    actual = module_outputs("GemmaRotaryEmbedding", [emb, q, turned[0], k, turned[1]], {}, ("q", "k"))
    for row in range(2):
        tables = [np.cos(angles[row]), np.sin(angles[row])]
        for x, y in zip((q, k), actual, strict=True):
            (expected,) = onnxruntime_outputs("RotaryEmbedding", [x[row : row + 1], np.array([0]), *tables], {}, ("y",))
            assert_outputs_close(expected[0], y[row], 1e-6)
