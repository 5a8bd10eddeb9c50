"""Compiled steps: the same values as eager ones, one trace for every position and allocation, no repeated work."""

from __future__ import annotations

from io import StringIO

import mlx.core as mx
import numpy as np
import pytest
from index_cases import assert_same_bits, random_array

from mlx_transmuter.cache import CacheIndex

NUM_SLOTS = 24


def random_table(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    table = rng.permutation(NUM_SLOTS)[: rows * width].reshape(rows, width)
    return np.where(rng.random((rows, width)) < 0.15, rng.choice([-1, 99]), table)


def random_positions(rng: np.random.Generator, batch: int, seq: int, width: int) -> np.ndarray:
    start = rng.integers(0, width, (batch, 1))
    return np.where(rng.random((batch, seq)) < 0.2, -1, start + np.arange(seq))


def table_index(rng: np.random.Generator) -> CacheIndex:
    return CacheIndex.make(random_positions(rng, 3, 2, 5), random_table(rng, 2, 5), row=rng.permutation([0, 1, -1]))


def window_index(rng: np.random.Generator) -> CacheIndex:
    return table_index(rng).window(2)


def selection_index(rng: np.random.Generator) -> CacheIndex:
    return table_index(rng).select(rng.integers(-2, 7, (3, 2, 3)))


def every_index(rng: np.random.Generator) -> CacheIndex:
    index = CacheIndex.make(
        random_positions(rng, 2, 3, 9), random_table(rng, 2, 9), every=[(2, random_table(rng, 2, 4))]
    )
    return index.every(2)


def draft_index(rng: np.random.Generator) -> CacheIndex:
    table = rng.permutation(NUM_SLOTS)
    index = CacheIndex.make(random_positions(rng, 2, 3, 6), table[:12].reshape(2, 6))
    return index.draft(table[12:18].reshape(2, 3), rng.random((2, 3, 3)) < 0.5)


def heads_run_index(rng: np.random.Generator) -> CacheIndex:
    index = CacheIndex.rows(6, [3, int(rng.integers(0, 4))])
    return index.limit_context(4).for_heads(2, 6)


def packed_index(rng: np.random.Generator) -> CacheIndex:
    cut = int(rng.integers(0, 4))
    return CacheIndex.packed(4, [[cut, 4 - cut], [cut]])


def key_value_index(rng: np.random.Generator) -> CacheIndex:
    return draft_index(rng).for_key_value_pool(NUM_SLOTS // 2)


def key_value_run_index(rng: np.random.Generator) -> CacheIndex:
    index = CacheIndex.rows(3, [2, int(rng.integers(0, 3))])
    return index.limit_context(2).for_heads(2, 3).for_key_value_pool(12)


INDEX_FACTORIES = [
    table_index,
    window_index,
    selection_index,
    every_index,
    draft_index,
    heads_run_index,
    packed_index,
    key_value_index,
    key_value_run_index,
]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("make_index", INDEX_FACTORIES)
def test_a_compiled_step_returns_the_values_of_an_eager_one(make_index):
    """Values vary, shapes do not: one trace serves every index of one structure."""
    rng = np.random.default_rng(4)
    signature, _ = make_index(rng).walk()
    traces = []
    # A thread's default stream is made at its first use, and MLX traces again for it.
    mx.default_stream(mx.default_device())

    @mx.compile
    def step(leaves, values, pool):
        traces.append(signature)
        index = CacheIndex.from_walk(signature, leaves)
        return *index.extend(values, pool), index.mask(), index.positions()

    for _ in range(30):
        index = make_index(rng)
        own_signature, leaves = index.walk()
        assert own_signature == signature
        pool = random_array(rng, (NUM_SLOTS, 2), np.float32)
        values = random_array(rng, (index.batch, index.seq, 2), np.float32)
        compiled = step(leaves, mx.array(values), mx.array(pool))
        eager = (*index.extend(values, pool), index.mask(), index.positions())
        for array, expected in zip(compiled, eager, strict=True):
            assert_same_bits(array, np.array(expected))
    assert len(traces) == 1


@pytest.mark.usefixtures("compiling")
def test_a_step_may_build_and_advance_an_index():
    """No method looks at a value on the device, so each works on tracers."""
    rng = np.random.default_rng(5)

    def step(pos, table, columns, values, pool):
        index = CacheIndex.make(pos, table)
        seen, pool = index.limit_context(5).window(3).select(columns).extend(values, pool)
        return seen, pool, index.for_heads(2, 6).mask(), index.advance().positions()

    compiled = mx.compile(step)
    for _ in range(10):
        arguments = [
            random_positions(rng, 1, 2, 6).astype(np.int32),
            rng.permutation(12)[:6].reshape(1, 6).astype(np.int32),
            rng.integers(-2, 8, (1, 2, 3)).astype(np.int32),
            random_array(rng, (1, 2, 2), np.float32),
            random_array(rng, (12, 2), np.float32),
        ]
        arguments = [mx.array(a) for a in arguments]
        for array, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert_same_bits(array, np.array(expected))


def test_layers_share_the_index_arithmetic():
    """A step computes slots and masks once: a further layer adds only the reads and writes of its own pools."""

    def count_primitives(layers: int) -> int:
        index = CacheIndex.make([[3], [1]], [[0, 1, 2, 3], [4, 5, 6, 7]])
        values, out = mx.zeros((2, 1, 2)), []
        for pool in [mx.zeros((8, 2)) for _ in range(layers)]:
            seen, pool = index.extend(values, pool)
            out += [seen, pool]
        text = StringIO()
        mx.export_to_dot(text, *out)
        return text.getvalue().count("shape=rectangle")

    one, two, three = (count_primitives(n) for n in (1, 2, 3))
    assert three - two == two - one
    assert two - one < one - 10
