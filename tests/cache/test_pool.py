"""Pools: what a step may do with them, and that a write costs the call's tokens whatever the number of slots."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from cases import assert_same_bits

from mlx_transmuter.cache import CacheError, CacheIndex, Pools

FEW, MANY = 2_000, 200_000
WIDTH = 8

# A write costs the call's tokens, and never the slots


def run_index(slots: int, dropped: bool) -> CacheIndex:
    index = CacheIndex.rows(slots // 2, [3, 0]).limit_context(64).window(5)
    return index if not dropped else CacheIndex.from_walk(index.walk()[0], [index.walk()[1][0] - 9, index.walk()[1][1]])


def paged_index(slots: int, dropped: bool) -> CacheIndex:
    """Two of four tokens are dropped: a padding token, and one whose column has no slot."""
    table = np.array([[slots - 1, 4, 9, 17], [3, 7, slots // 2, -1]])
    return CacheIndex.make([[-1, 2], [1, 3]] if not dropped else [[-1, 4], [-2, 3]], table)


def shared_sequence_index(slots: int, dropped: bool) -> CacheIndex:
    index = CacheIndex.make([[1], [2]], [[5, slots - 2, 8]], row=[0, 0] if not dropped else [-1, 1])
    return index.select([[[0, 1, 9]], [[2, 1, 0]]])


def heads_index(slots: int, dropped: bool) -> CacheIndex:
    return paged_index(slots // 4, dropped).for_heads(4, 50)


def draft_index(slots: int, dropped: bool) -> CacheIndex:
    tree = [[slots - 3, 2]] if not dropped else [[-1, slots]]
    return CacheIndex.make([[2, 3]], [[0, slots // 3, -1]]).draft(tree, [[[True, False], [True, True]]])


def every_index(slots: int, dropped: bool) -> CacheIndex:
    at = [[3, 4]] if not dropped else [[4, 5]]
    return CacheIndex.make(at, [[0, 1, 2, 3, 4]], every=[(4, [[slots - 1, 6]])]).every(4)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "all dropped"])
@pytest.mark.parametrize("form", [run_index, paged_index, shared_sequence_index, heads_index, draft_index, every_index])
def test_a_compiled_step_needs_no_more_memory_for_more_slots(form, dropped: bool):
    """Keys and values of a layer, written and read: beside the pools the step holds what its few tokens need."""
    extra = {}
    for slots in (FEW, MANY):
        index = form(slots, dropped)
        signature, leaves = index.walk()

        @mx.compile
        def step(pools, leaves, values, signature=signature):
            index = CacheIndex.from_walk(signature, leaves)
            (seen, keys), (also, held) = (index.extend(values, pool) for pool in pools)
            return [seen.sum(), also.sum()], [keys, held]

        shape = (slots, WIDTH)
        pools = Pools([mx.full(shape, i, mx.float32) for i in (1, 2)])
        pools.evaluate()
        values = mx.ones((index.batch, index.seq, WIDTH))
        mx.eval(leaves, values)
        most = 0
        for _ in range(4):
            gc.collect()
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            out, new = step(pools.take(), leaves, values)
            pools.put(new)
            pools.evaluate(*out)
            most = max(most, mx.get_peak_memory() - before)
            del out
        extra[slots] = most
        size = slots * WIDTH * 4
        before = np.repeat(np.float32([[1], [2]])[..., None], slots, axis=1)
        changed = [np.array(pool) != old for pool, old in zip(pools.arrays, before, strict=True)]
        assert sum(c.sum() for c in changed) == (0 if dropped else _num_written_rows(form) * WIDTH)
    step_size = 2 * WIDTH * 4 * index.batch * (index.seq + 64)
    assert extra[MANY] < 8 * step_size < size / 4
    assert extra[MANY] < extra[FEW] + step_size


def _num_written_rows(form) -> int:
    """How many rows of the second pool the form's tokens change (the first one holds ones already, as they do)."""
    return {run_index: 3, paged_index: 2, shared_sequence_index: 2, heads_index: 8, draft_index: 2, every_index: 1}[
        form
    ]


def test_a_copy_of_rows_and_a_longer_pool_hold_one_pool_more_at_most():
    """copy writes in place; grow holds one grown pool beside the old ones."""
    pools = Pools([mx.full((MANY, WIDTH), i, mx.float32) for i in range(3)])
    pools.evaluate()
    size = MANY * WIDTH * 4
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pools.copy_rows([0, 1], [5, MANY - 1])
    assert mx.get_peak_memory() - before < 65536
    mx.reset_peak_memory()
    pools.grow(2 * MANY)
    assert mx.get_peak_memory() - before < 4 * size + 2 * size + 65536
    assert mx.get_active_memory() - before < 3 * size + 65536


# Given away for good


def two_pools() -> Pools:
    return Pools([mx.zeros((4, 2)), mx.ones((4, 3), mx.float16)])


def test_pools_come_back_after_a_step():
    pools = two_pools()
    pools.put([pool + 1 for pool in pools.take()])
    pools.evaluate()
    assert_same_bits(pools.arrays[0], np.ones((4, 2), np.float32))
    assert_same_bits(pools.arrays[1], np.full((4, 3), 2, np.float16))
    assert (len(pools), pools.num_slots) == (2, 4)


@pytest.mark.parametrize(
    "use", [Pools.take, Pools.evaluate, lambda p: p.arrays, lambda p: p.grow(8), lambda p: p.copy_rows([0], [1])]
)
def test_given_away_pools_are_gone_and_the_error_shows_the_mend(use):
    pools = two_pools()
    pools.take()
    with pytest.raises(CacheError, match=r"Wrong: .*Right: new = step\(pools\.take\(\), x\)") as raised:
        use(pools)
    assert "given away" in raised.value.found
    assert "new pools" in raised.value.do


def test_pools_are_gone_after_a_step_that_failed():
    pools = two_pools()

    def step(arrays):
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        pools.put(step(pools.take()))
    with pytest.raises(CacheError, match="given away"):
        pools.take()


def test_pools_are_gone_after_an_evaluation_that_failed(monkeypatch):
    pools = two_pools()

    def broken(*arrays):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "eval", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        pools.evaluate()
    with pytest.raises(CacheError, match="given away"):
        pools.take()


def test_a_second_reference_is_found_at_put():
    """A name for the list, for one array, or for the arrays that made the pools: each would make the write a copy."""
    first = mx.zeros((4, 2))
    pools = Pools([first])
    with pytest.raises(CacheError, match=r"old pools \[0\] held elsewhere"):
        pools.put([pool + 1 for pool in pools.take()])
    pools = two_pools()
    kept = pools.take()
    with pytest.raises(CacheError, match=r"old pools \[0, 1\] held elsewhere"):
        pools.put([pool + 1 for pool in kept])
    pools = two_pools()
    kept = pools.arrays[1]
    with pytest.raises(CacheError, match=r"old pools \[1\] held elsewhere"):
        pools.put([pool + 1 for pool in pools.take()])


def test_put_empties_the_list_it_is_given():
    """So that the caller's name for the new pools holds none of them at the next step."""
    pools = two_pools()
    for _ in range(2):
        new = [pool + 1 for pool in pools.take()]
        pools.put(new)
        assert new == []


def test_a_step_may_give_a_pool_back_as_it_is():
    pools = two_pools()
    pools.put(pools.take())
    assert_same_bits(pools.arrays[0], np.zeros((4, 2), np.float32))


def test_put_takes_only_what_was_taken():
    pools = two_pools()
    with pytest.raises(CacheError, match="nobody took"):
        pools.put([mx.zeros((4, 2)), mx.ones((4, 3), mx.float16)])
    for new in (
        [mx.zeros((4, 2))],
        [mx.zeros((5, 2)), mx.ones((4, 3), mx.float16)],
        [mx.zeros((4, 2)), mx.ones((4, 3))],
    ):
        pools = two_pools()
        pools.take()
        with pytest.raises(
            CacheError, match=r"\[4, 2\] mlx\.core\.float32, \[4, 3\] mlx\.core\.float16, as they were given"
        ):
            pools.put(new)


@pytest.mark.usefixtures("compiling")
def test_running_ahead_does_not_copy():
    """evaluate(wait=False) returns early; the next one waits first, so no write meets an unfinished read."""
    index = CacheIndex.make([[1]], [[5, 3]])
    signature, leaves = index.walk()

    @mx.compile
    def step(pools, leaves, values):
        seen, pool = CacheIndex.from_walk(signature, leaves).extend(values, pools[0])
        return seen.sum() + mx.matmul(mx.ones((64, 64)), mx.ones((64, 64))).sum(), [pool]

    pools = Pools([mx.zeros((MANY, WIDTH))])
    pools.evaluate()
    values = mx.ones((1, 1, WIDTH))
    mx.eval(leaves, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(10):
        out, new = step(pools.take(), leaves, values)
        pools.put(new)
        pools.evaluate(out, wait=False)
    assert out.item() == WIDTH + 64**3
    assert mx.get_peak_memory() - before < MANY * WIDTH


def test_grow_adds_empty_slots_at_the_end():
    """Each pool by its own rows a slot, no slot loses what it holds; fewer slots or other rows are errors."""
    pools = Pools([mx.ones((4, 2)), mx.ones((12, 3), mx.float16)], num_slots=4)
    pools.grow(6)
    assert_same_bits(pools.arrays[0], np.concatenate([np.ones((4, 2), np.float32), np.zeros((2, 2), np.float32)]))
    assert_same_bits(pools.arrays[1], np.concatenate([np.ones((12, 3), np.float16), np.zeros((6, 3), np.float16)]))
    assert pools.num_slots == 6
    pools.put([pool * 1 for pool in pools.take()])
    with pytest.raises(CacheError, match="at least 6"):
        pools.grow(5)
    with pytest.raises(CacheError, match="multiple of 4 slots"):
        Pools([mx.ones((4, 2)), mx.ones((6, 2))]).grow(8)


def test_grown_pools_keep_what_an_index_by_heads_reads():
    """With blocks smaller than the pool the heads of the old slots stay where they were."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal((3, 2, 5)).astype(np.float32)
    index = CacheIndex.make([[0, 1]], [[6, 3]]).for_heads(3, 4)
    pools = Pools([mx.zeros((8 * 3, 5))], num_slots=8)
    pools.put([index.write(values, pool) for pool in pools.take()])
    pools.grow(16)
    assert_same_bits(index.read(pools.arrays[0]), values)


def test_copy_moves_rows():
    pools = Pools([mx.arange(5, dtype=mx.int32), mx.arange(10, dtype=mx.float32).reshape(5, 2)])
    pools.copy_rows([0, 4], [3, 1])
    assert_same_bits(pools.arrays[0], np.int32([0, 4, 2, 0, 4]))
    assert_same_bits(pools.arrays[1][:, 0], np.float32([0, 8, 4, 0, 8]))
    pools.copy_rows([], [])
    with pytest.raises(CacheError, match="targets"):
        pools.copy_rows([0], [1, 2])


def test_dropped_pools_are_gone_and_may_be_dropped_again():
    pools = Pools([mx.zeros((4, 2))])
    pools.drop()
    pools.drop()
    with pytest.raises(CacheError, match="given away"):
        pools.take()
