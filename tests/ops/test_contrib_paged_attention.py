"""PagedAttention, which onnxruntime has no CPU kernel of, against its GroupQueryAttention sequence by sequence."""

import numpy as np
import pytest
from onnxruntime_node import assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

HEADS, KV, DIM, BLOCK_SIZE, BLOCK_COUNT = 4, 2, 16, 4, 16
OUTPUTS = ("y", "key_cache", "value_cache")
PAST_LENGTHS, NEW_LENGTHS = np.array([5, 0, 9]), np.array([3, 6, 1])
BLOCK_TABLE = np.array([[3, 7, 1, -1], [0, 12, -1, -1], [5, 2, 9, 4]], dtype=np.int32)
FEATURES = {
    "plain": {},
    "packed": {},
    "rotary": {"do_rotary": 1},
    "rotary interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "window": {"local_window_size": 3},
    "softcap": {"softcap": 2.0},
    "sink": {},
    "scale": {"scale": 0.3},
}


def token_slots(row, count):
    """Returns the slots of the first `count` tokens of a sequence in the flat cache."""
    return np.array(
        [BLOCK_TABLE[row, i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)], dtype=np.int64
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_paged_attention(feature):
    attrs = {"num_heads": HEADS, "kv_num_heads": KV, **FEATURES[feature]}
    tokens, bounds = NEW_LENGTHS.sum(), np.concatenate([[0], NEW_LENGTHS.cumsum()]).astype(np.int32)
    q, k, v = floats(1, tokens, HEADS * DIM), floats(2, tokens, KV * DIM), floats(3, tokens, KV * DIM)
    caches = [floats(4, BLOCK_COUNT, BLOCK_SIZE, KV, DIM), floats(5, BLOCK_COUNT, BLOCK_SIZE, KV, DIM)]
    tables = [floats(6, 32, DIM // 2), floats(7, 32, DIM // 2)] if "rotary" in feature else [None, None]
    sink = floats(8, HEADS) if feature == "sink" else None
    given = [np.concatenate([q, k, v], axis=1), None, None] if feature == "packed" else [q, k, v]
    inputs = [*given, *caches, bounds, PAST_LENGTHS.astype(np.int32), BLOCK_TABLE, *tables, None, sink]
    actual = module_outputs("PagedAttention", inputs, attrs, OUTPUTS)
    stored = [cache.reshape(-1, KV, DIM).copy() for cache in caches]
    for row in range(3):
        part, total = slice(bounds[row], bounds[row + 1]), PAST_LENGTHS[row] + NEW_LENGTHS[row]
        past = [s[token_slots(row, PAST_LENGTHS[row])].swapaxes(0, 1)[None] for s in stored]
        alone = [x[None, part] for x in (q, k, v)] + past
        alone += [np.array([total - 1], dtype=np.int32), np.array(total, dtype=np.int32), *tables, None, None, sink]
        expected = onnxruntime_outputs("GroupQueryAttention", alone, attrs, ("y", "k", "v"))
        assert_outputs_close(expected[0][0], actual[0][part], 1e-5)
        for s, present in zip(stored, expected[1:], strict=True):
            s[token_slots(row, total)] = present[0].swapaxes(0, 1)
    for s, cache in zip(stored, actual[1:], strict=True):
        assert_outputs_close(s.reshape(cache.shape), cache, 1e-6)


def test_tokens_with_slot_minus_one_are_not_stored():
    """A token with slot -1 is not in the pages of its own sequence either."""
    q, k, v = floats(1, 3, HEADS * DIM), floats(2, 3, KV * DIM), floats(3, 3, KV * DIM)
    caches = [floats(4, BLOCK_COUNT, BLOCK_SIZE, KV, DIM), floats(5, BLOCK_COUNT, BLOCK_SIZE, KV, DIM)]
    bounds = np.array([0, 1, 2, 3], dtype=np.int32)
    attrs = {"num_heads": HEADS, "kv_num_heads": KV}
    for mapping in ([-1, 20, -1], [-1, -1, -1]):
        inputs = [
            q,
            k,
            v,
            *caches,
            bounds,
            PAST_LENGTHS.astype(np.int32),
            BLOCK_TABLE,
            None,
            None,
            np.array(mapping, dtype=np.int32),
        ]
        _, *stored = module_outputs("PagedAttention", inputs, attrs, OUTPUTS)
        for cache, rows, after in zip(caches, (k, v), stored, strict=True):
            expected = cache.reshape(-1, KV, DIM).copy()
            for token, slot in enumerate(mapping):
                if slot >= 0:
                    expected[slot] = rows[token].reshape(KV, DIM)
            np.testing.assert_array_equal(after, expected.reshape(cache.shape))
