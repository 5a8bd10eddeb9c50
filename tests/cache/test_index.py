"""CacheIndex against the reference model of its laws, on random indices."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from index_cases import IndexCase, assert_same_bits, index_cases, random_array
from reference_index import ReferenceIndex, reference_attention

from mlx_transmuter.cache import CacheIndex

many_examples = settings(max_examples=2000)
some_examples = settings(max_examples=200)


def primitives_text(*arrays: mx.array) -> str:
    """The primitives that compute the arrays, as text."""
    out = StringIO()
    mx.export_to_dot(out, *arrays)
    return out.getvalue()


# Laws 1, 2, 3, 5 and 6, on every index


@many_examples
@given(case=index_cases())
def test_every_law_on_every_index(case: IndexCase):
    """Column is position; -1 addresses nothing; a token stores at its own column, padding nowhere; the rest is zero."""
    seen, pool = case.index.extend(case.values, case.pool)
    expected_seen, expected_pool = case.reference.extend(case.values, case.pool)
    assert_same_bits(pool, expected_pool)
    assert_same_bits(seen, expected_seen)
    assert_same_bits(case.index.mask(), case.reference.mask())
    assert_same_bits(case.index.visible(), case.reference.mask()[:, None])
    assert_same_bits(case.index.positions(), case.reference.positions())
    assert (case.index.batch, case.index.seq) == case.values.shape[:2]
    assert case.index.context == len(case.reference.columns_of(0))


@some_examples
@given(case=index_cases())
def test_write_then_read_is_extend(case: IndexCase):
    """The two halves of extend; a whole index and a draft cannot be read."""
    pool = case.index.write(case.values, case.pool)
    expected_seen, expected_pool = case.reference.extend(case.values, case.pool)
    assert_same_bits(pool, expected_pool)
    if case.reference.table is None or case.reference.slots is not None:
        with pytest.raises(ValueError, match=r"CacheIndex\.read"):
            case.index.read(pool)
    else:
        assert_same_bits(case.index.read(pool), expected_seen)


@some_examples
@given(case=index_cases())
def test_advance_is_one_past_the_greatest_position(case: IndexCase):
    """The next token of every row, at 0 in a row of padding; window and every stay, selection and draft do not."""
    if case.reference.table is None:
        with pytest.raises(ValueError, match=r"CacheIndex\.advance"):
            case.index.advance()
        return
    index, reference = case.index.advance(), case.reference.advance()
    assert_same_bits(index.positions(), reference.positions())
    assert_same_bits(index.mask(), reference.mask())
    targets = reference.target_slots(len(case.pool))
    assume(len(set(targets)) == len(targets))
    seen, pool = index.extend(case.values[:, :1], case.pool)
    expected_seen, expected_pool = reference.extend(case.values[:, :1], case.pool)
    assert_same_bits(pool, expected_pool)
    assert_same_bits(seen, expected_seen)


@some_examples
@given(case=index_cases(), seq=st.integers(1, 3))
def test_with_positions_places_other_tokens_in_the_same_rows(case: IndexCase, seq: int):
    """Window, every and contiguous slots stay, selection and draft do not; a whole index raises."""
    pos = np.random.default_rng(seq).permutation(seq * case.reference.batch).reshape(-1, seq) - 1
    if case.reference.table is None:
        with pytest.raises(ValueError, match=r"CacheIndex\.with_positions"):
            case.index.with_positions(pos)
        return
    index, reference = (
        case.index.with_positions(pos),
        replace(case.reference, pos=pos.tolist(), columns=None, slots=None, sees=None),
    )
    assert_same_bits(index.positions(), reference.positions())
    assert_same_bits(index.mask(), reference.mask())
    targets = reference.target_slots(len(case.pool))
    assume(len(set(targets)) == len(targets))
    values = random_array(np.random.default_rng(seq), (*pos.shape, *case.pool.shape[1:]), case.pool.dtype.type)
    seen, pool = index.extend(values, case.pool)
    expected_seen, expected_pool = reference.extend(values, case.pool)
    assert_same_bits(pool, expected_pool)
    assert_same_bits(seen, expected_seen)


@some_examples
@given(case=index_cases())
def test_the_index_is_its_walk(case: IndexCase):
    """from_walk(*walk()) returns what the index returns, and so does place."""
    signature, leaves = case.index.walk()
    assert hash(signature) == hash(case.index.walk()[0])
    expected_seen, expected_pool = case.reference.extend(case.values, case.pool)
    for rebuilt in (CacheIndex.from_walk(signature, leaves), case.index.place(mx.default_device())):
        assert rebuilt.walk()[0] == signature
        seen, pool = rebuilt.extend(case.values, case.pool)
        assert_same_bits(pool, expected_pool)
        assert_same_bits(seen, expected_seen)


# Law 4


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_two_stores_at_one_slot_leave_one_of_them_element_by_element(dtype):
    rng = np.random.default_rng(0)
    table = [[4, 1], [4, 2], [4, 3]]
    pool, values = random_array(rng, (6, 5), dtype), random_array(rng, (3, 1, 5), dtype)
    _, out = CacheIndex.make([[0], [0], [0]], table).extend(values, pool)
    out = np.array(out)
    for element, stores in zip(out[4], values[:, 0].T, strict=True):
        assert element.tobytes() in [store.tobytes() for store in stores]
    others = [0, 1, 2, 3, 5]
    assert out[others].tobytes() == pool[others].tobytes()


# Law 2, where the argument does not fit int32


def test_numbers_beyond_int32_address_nothing():
    """2**32 is neither slot 0 nor position 0, in a list, in numpy and in MLX."""
    pool = np.arange(4, dtype=np.float32)[:, None] + 1
    values = np.full((1, 1, 1), 9, np.float32)
    for big in (2**32, -(2**32), 2**63 - 1):
        for convert in (np.asarray, lambda x: mx.array(np.asarray(x)), list):
            assert_same_bits(CacheIndex.make([[0]], convert([[big, 1]])).extend(values, pool)[1], pool)
            assert_same_bits(CacheIndex.make(convert([[big]]), [[0, 1]]).extend(values, pool)[1], pool)
    assert_same_bits(CacheIndex.make([[0]], np.array([[2**32 - 1, 1]], np.uint32)).extend(values, pool)[1], pool)
    assert_same_bits(CacheIndex.make([[0]], mx.array([[2**32 - 1, 1]], mx.uint32)).extend(values, pool)[1], pool)


def test_bfloat16_rows_are_stored_bit_by_bit():
    """Any dtype is stored: also the one numpy lacks, in rows of an odd number of elements."""
    bits = np.arange(6 * 3, dtype=np.uint16).reshape(6, 3) * 3641
    pool, values = mx.array(bits).view(mx.bfloat16), mx.array(bits[None, :2] + 5).view(mx.bfloat16)
    _, out = CacheIndex.make([[1, -1]], [[5, 3]]).extend(values, pool)
    expected = bits.copy()
    expected[3] = bits[0] + 5
    assert_same_bits(out.view(mx.uint16), expected)


# Runs of slots


@st.composite
def contiguous_indices(draw):
    """(index of rows, the same index rebuilt from its table, context, rng), of a random window and number of rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    context, batch = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lens = rng.integers(0, context + 1, batch).tolist()
    index = CacheIndex.rows(context, lens)
    if draw(st.booleans()):
        index = index.advance()
    signature, leaves = index.walk()
    rebuilt = CacheIndex.from_walk(signature, leaves)
    if draw(st.booleans()):
        w = draw(st.integers(1, 9))
        index, rebuilt = index.window(w), rebuilt.window(w)
    if draw(st.booleans()):
        columns = draw(st.integers(1, context))
        index, rebuilt = index.limit_context(columns), rebuilt.limit_context(columns)
    return index, rebuilt, context, rng


@some_examples
@given(case=contiguous_indices())
def test_contiguous_rows_are_read_by_a_slice_with_the_values_of_a_gather(case):
    index, rebuilt, context, rng = case
    pool = random_array(rng, (index.batch * context, 2), np.float32)
    values = random_array(rng, (index.batch, index.seq, 2), np.float32)
    (seen, out), (expected_seen, expected) = index.extend(values, pool), rebuilt.extend(values, pool)
    assert_same_bits(out, np.array(expected))
    assert_same_bits(seen, np.array(expected_seen))
    assert "Gather" not in primitives_text(index.read(mx.array(pool)))
    assert "Gather" in primitives_text(rebuilt.read(mx.array(pool)))


def test_contiguous_rows_without_zeroing_are_a_view():
    """read(zero_unseen=False) allocates nothing, also with fewer columns and heads, and is exact in visible columns."""
    rng = np.random.default_rng(1)
    pool = mx.array(rng.standard_normal((2 * 3 * 512, 64)).astype(np.float32))
    index = CacheIndex.rows(512, [500, 130]).limit_context(256).for_heads(3, 512)
    mx.eval(pool, index.mask())
    before = mx.get_active_memory()
    seen = index.read(pool, zero_unseen=False)
    mx.eval(seen)
    assert mx.get_active_memory() - before < 4096
    assert seen.shape == (6, 256, 64)
    is_visible = np.array(index.mask()).any(axis=1)
    np.testing.assert_array_equal(np.array(seen)[is_visible], np.array(index.read(pool))[is_visible])


# Fewer columns, and pools of several heads


@some_examples
@given(case=index_cases(), data=st.data())
def test_limit_context_reads_only_the_first_columns(case: IndexCase, data):
    """The table is cut to `context` columns and its entries to those they need; a whole index raises."""
    if case.reference.table is None:
        with pytest.raises(ValueError, match=r"CacheIndex\.limit_context"):
            case.index.limit_context(1)
        return
    context = data.draw(st.integers(1, len(case.reference.table[0])))
    case.reference.table = [slots[:context] for slots in case.reference.table]
    case.reference.entries = {m: [s[: -(-context // m)] for s in t] for m, t in case.reference.entries.items()}
    index = case.index.limit_context(context)
    seen, pool = index.extend(case.values, case.pool)
    expected_seen, expected_pool = case.reference.extend(case.values, case.pool)
    assert_same_bits(pool, expected_pool)
    assert_same_bits(seen, expected_seen)
    assert_same_bits(index.mask(), case.reference.mask())
    with pytest.raises(ValueError, match=r"CacheIndex\.limit_context"):
        index.limit_context(context + 1)


@some_examples
@given(case=index_cases(), n=st.integers(1, 3), data=st.data())
def test_each_head_of_a_pool_is_a_pool_of_its_own(case: IndexCase, n: int, data):
    """With head h of slot s in row (s // span · n + h) · span + s mod span, for a head_span of `span`."""
    span = data.draw(st.integers(1, len(case.pool) + 1))
    slots = -(-max(1, len(case.pool)) // span) * span
    rng = np.random.default_rng(7)
    tail, dtype = case.pool.shape[1:], case.pool.dtype.type
    pools = random_array(rng, (n, slots, *tail), dtype)
    values = random_array(rng, (case.reference.batch, n, case.reference.seq, *tail), dtype)
    rows = [(h, s) for start in range(0, slots, span) for h in range(n) for s in range(start, start + span)]
    pool = np.stack([pools[row] for row in rows])
    index = case.index.for_heads(n, span)
    seen, out = index.extend(values.reshape(-1, case.reference.seq, *tail), pool)
    seen = seen.reshape(case.reference.batch, n, *seen.shape[1:])
    out = np.array(out).reshape(slots // span, n, span, *tail).swapaxes(0, 1).reshape(n, slots, *tail)
    for h in range(n):
        expected_seen, expected = case.reference.extend(values[:, h], pools[h])
        assert out[h].tobytes() == expected.tobytes()
        assert_same_bits(seen[:, h], expected_seen)
    assert_same_bits(index.mask(), np.repeat(case.reference.mask(), n, axis=0))
    assert_same_bits(index.positions(), np.repeat(case.reference.positions(), n, axis=0))


def test_contiguous_rows_of_several_heads_are_read_by_a_slice():
    """With the context of contiguous rows as head_span the pool is [batch, n, context, dim]; its first columns are read by a view."""
    index = CacheIndex.rows(8, [5, 3]).limit_context(4)
    pool = mx.arange(2 * 3 * 8 * 2, dtype=mx.float32).reshape(-1, 2)
    seen = index.for_heads(3, 8).read(pool, zero_unseen=False)
    assert_same_bits(seen.reshape(2, 3, 4, 2), np.array(pool).reshape(2, 3, 8, 2)[:, :, :4])
    assert "Gather" not in primitives_text(seen)
    assert "Gather" in primitives_text(index.for_heads(3, 16).read(pool))


@some_examples
@given(case=index_cases(), n=st.integers(1, 2), has_spare_pool_row=st.booleans(), data=st.data())
def test_a_key_value_pool_is_two_pools_one_after_the_other(case: IndexCase, n: int, has_spare_pool_row: bool, data):
    """Each half reads and stores as a pool of its own; a slot outside one half is not in the other."""
    span = data.draw(st.integers(1, len(case.pool) + 1))
    slots = -(-max(1, len(case.pool)) // span) * span
    rng = np.random.default_rng(7)
    tail, dtype = case.pool.shape[1:], case.pool.dtype.type
    pools = random_array(rng, (2, n * slots, *tail), dtype)
    spare_pool_row = random_array(rng, (int(has_spare_pool_row), *tail), dtype)
    heads_index = case.index.for_heads(n, span)
    values = random_array(rng, (2, heads_index.batch, heads_index.seq, *tail), dtype)
    if case.index.walk()[0][0][3]:
        with pytest.raises(ValueError, match=r"CacheIndex\.for_key_value_pool"):
            heads_index.for_key_value_pool(n * slots)
        return
    index = heads_index.for_key_value_pool(n * slots)
    index = index.with_spare_pool_row(2 * n * slots) if has_spare_pool_row else index
    seen, out = index.extend(values.reshape(-1, heads_index.seq, *tail), np.concatenate([*pools, spare_pool_row]))
    for half in range(2):
        expected_seen, expected = heads_index.extend(values[half], pools[half])
        assert np.array(out[half * n * slots : (half + 1) * n * slots]).tobytes() == np.array(expected).tobytes()
        assert_same_bits(seen[half * heads_index.batch : (half + 1) * heads_index.batch], np.array(expected_seen))
    assert_same_bits(index.mask(), np.concatenate([np.array(heads_index.mask())] * 2))
    assert_same_bits(index.positions(), np.concatenate([np.array(heads_index.positions())] * 2))


def test_contiguous_rows_of_a_key_value_pool_are_read_by_a_slice():
    """Keys of all rows, then values: one view reads both, and each half is laid out as a pool of its own."""
    index = CacheIndex.rows(8, [5, 3]).limit_context(4).for_heads(3, 8)
    pool = mx.arange(2 * 2 * 3 * 8 * 2 + 2, dtype=mx.float32).reshape(-1, 2)
    seen = index.for_key_value_pool(2 * 3 * 8).with_spare_pool_row(2 * 2 * 3 * 8).read(pool, zero_unseen=False)
    assert_same_bits(seen.reshape(2, 2, 3, 4, 2), np.array(pool)[:-1].reshape(2, 2, 3, 8, 2)[:, :, :, :4])
    assert "Gather" not in primitives_text(seen)
    assert "Gather" in primitives_text(index.for_key_value_pool(2 * 3 * 8 - 1).read(pool, zero_unseen=False))


# What the kinds of an index mean


def _attend(index: CacheIndex, query, keys, values, pools):
    """MLX's attention of one head over the index, and the new pools."""
    seen_k, k = index.extend(keys, pools[0])
    seen_v, v = index.extend(values, pools[1])
    q = mx.array(query)[:, None]
    out = mx.fast.scaled_dot_product_attention(q, seen_k[:, None], seen_v[:, None], scale=1.0, mask=index.visible())
    return np.array(out)[:, 0], (k, v)


@some_examples
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(1, 4), w=st.sampled_from([None, 1, 3]))
def test_a_sequence_in_chunks_and_blocks_attends_as_in_one_call(seed: int, block: int, w: int | None):
    """With NaN and infinity in every other slot; chunks, blocks, windows and left padding do not change the output."""
    rng = np.random.default_rng(seed)
    length, d = int(rng.integers(1, 12)), 3
    q, k, v = rng.standard_normal((3, length, d)).astype(np.float32)
    positions = np.arange(length)
    mask = positions[None] <= positions[:, None]
    if w is not None:
        mask &= positions[None] > positions[:, None] - w
    expected = reference_attention(q, k, v, mask)
    blocks = -(-length // block)
    block_numbers = rng.permutation(blocks + 3)[:blocks]
    table = (block_numbers[:, None] * block + np.arange(block)).reshape(1, -1)
    slots = (blocks + 3) * block
    pools = (np.full((slots, d), np.nan, np.float32), np.full((slots, d), np.inf, np.float32))
    start = 0
    while start < length:
        n = int(rng.integers(1, length - start + 1))
        pad = int(rng.integers(0, 3))
        pos = np.array([[-1] * pad + list(range(start, start + n))])
        index = CacheIndex.make(pos, table)
        index = index if w is None else index.window(w)
        chunk = [np.pad(x[None, start : start + n], ((0, 0), (pad, 0), (0, 0)), constant_values=5) for x in (q, k, v)]
        out, pools = _attend(index, *chunk, pools)
        np.testing.assert_allclose(out[0, pad:], expected[start : start + n], rtol=2e-4, atol=2e-5)
        start += n


def test_two_rows_of_one_sequence_attend_to_each_other_as_in_one_row():
    rng = np.random.default_rng(2)
    pool = random_array(rng, (6, 2), np.float32)
    values = rng.standard_normal((3, 1, 2)).astype(np.float32)
    table = [[4, 0, 5, 1]]
    three_rows, out = CacheIndex.make([[1], [2], [3]], table, row=[0, 0, 0]).extend(values, pool)
    one_row, expected = CacheIndex.make([[1, 2, 3]], table).extend(values.reshape(1, 3, 2), pool)
    assert_same_bits(out, np.array(expected))
    for row in range(3):
        assert_same_bits(three_rows[row, : row + 2], np.array(one_row)[0, : row + 2])


def test_an_accepted_path_of_a_draft_is_the_chain_run_alone():
    """A draft tree in free slots: the next table names the accepted ones and reads the chain's keys, without a copy."""
    rng = np.random.default_rng(3)
    d = 3
    pool = rng.standard_normal((12, d)).astype(np.float32)
    table = np.array([[7, 2, 9, -1, -1, -1]])
    parents, pos = [-1, 0, 0, 2], np.array([[3, 4, 4, 5]])  # two tokens at position 4, one after the second of them
    sees = np.zeros((1, 4, 4), bool)
    for i, parent in enumerate(parents):
        sees[0, i] = sees[0, parent] if parent >= 0 else False
        sees[0, i, i] = True
    tokens = rng.standard_normal((1, 4, d)).astype(np.float32)
    slots = np.array([[0, 11, 5, 3]])
    draft = CacheIndex.make(pos, table).draft(slots, sees)
    seen, out = draft.extend(tokens, pool)
    path = [0, 2, 3]
    chain = CacheIndex.make(pos[:, path], np.array([[7, 2, 9, 0, 5, 3]]))
    chain_seen, chain_out = chain.extend(tokens[:, path], pool)
    mask, chain_mask = np.array(draft.mask()), np.array(chain.mask())
    for token, i in enumerate(path):
        np.testing.assert_array_equal(np.array(seen)[0][mask[0, i]], np.array(chain_seen)[0][chain_mask[0, token]])
    accepted = np.array(table)
    accepted[0, pos[0, path]] = slots[0, path]
    after = CacheIndex.make([[6]], np.pad(accepted, ((0, 0), (0, 1)), constant_values=4))
    new = rng.standard_normal((1, 1, d)).astype(np.float32)
    assert_same_bits(after.extend(new, out)[0], np.array(after.extend(new, chain_out)[0]))


@some_examples
@given(seed=st.integers(0, 2**32 - 1))
def test_a_packed_sequence_attends_as_it_does_alone(seed: int):
    rng = np.random.default_rng(seed)
    lens = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(2)]
    seq = max(1, *map(sum, lens)) + int(rng.integers(0, 2))
    q, k, v = rng.standard_normal((3, 2, seq, 3)).astype(np.float32)
    index = CacheIndex.packed(seq, lens)
    out, _ = _attend(index, q, k, v, (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)))
    for b, row_lens in enumerate(lens):
        start = seq - sum(row_lens)
        for n in row_lens:
            part = slice(start, start + n)
            expected = reference_attention(q[b, part], k[b, part], v[b, part], np.tril(np.ones((n, n), bool)))
            np.testing.assert_allclose(out[b, part], expected, rtol=2e-4, atol=2e-5)
            np.testing.assert_array_equal(np.array(index.positions())[b, part], np.arange(n))
            start += n


@some_examples
@given(lens=st.lists(st.integers(0, 4), min_size=1, max_size=3), m=st.integers(1, 3), w=st.integers(1, 4))
def test_packed_with_one_sequence_per_row_is_whole(lens: list[int], m: int, w: int):
    packed, whole = CacheIndex.packed(4, [[n] for n in lens]).window(w), CacheIndex.whole(len(lens), 4, lens).window(w)
    assert_same_bits(packed.mask(), np.array(whole.mask()))
    assert_same_bits(packed.positions(), np.array(whole.positions()))
    columns = np.random.default_rng(sum(lens)).integers(-1, 5, (len(lens), 4, m))
    values = np.random.default_rng(m).standard_normal((len(lens), 4, 2)).astype(np.float32)
    (seen, _), (expected, _) = (i.select(columns).extend(values, np.zeros((0, 2), np.float32)) for i in (packed, whole))
    assert_same_bits(seen, np.array(expected))


# walk


def _expected_signature(reference: ReferenceIndex) -> tuple:
    """What a walk reports, by the specification."""
    return (
        reference.kind,
        reference.row is not None,
        tuple(reference.entries),
        reference.every,
        reference.window,
        reference.columns is not None,
        reference.slots is not None,
    )


def _expected_leaves(reference: ReferenceIndex) -> list:
    arrays = [
        reference.row,
        reference.pos,
        reference.table,
        *reference.entries.values(),
        reference.columns,
        reference.slots,
        reference.sees,
    ]
    return [leaf for leaf in arrays if leaf is not None]


@settings(max_examples=400)
@given(a=index_cases(), b=index_cases())
def test_signatures_agree_exactly_when_the_structures_do(a: IndexCase, b: IndexCase):
    """The structure, no values: kind, row, entries, every, window, selection, draft. Leaves in the order of the walk."""
    (signature_a, leaves), (signature_b, _) = a.index.walk(), b.index.walk()
    assert (signature_a == signature_b) == (_expected_signature(a.reference) == _expected_signature(b.reference))
    assert len(leaves) == len(_expected_leaves(a.reference))
    for leaf, expected in zip(leaves, _expected_leaves(a.reference), strict=True):
        assert leaf.dtype == (mx.bool_ if np.asarray(expected).dtype == np.bool_ else mx.int32)
        np.testing.assert_array_equal(np.array(leaf), np.asarray(expected))


def test_contiguous_rows_with_a_limited_context_walk_as_such():
    """limit_context makes contiguous slots part of the structure; an index of rows alone walks as any table."""
    rows = CacheIndex.rows(6, [2, 3])
    tabled = CacheIndex.make(rows.walk()[1][0], rows.walk()[1][1])
    assert rows.walk()[0] == tabled.walk()[0]
    assert rows.limit_context(4).walk()[0] != tabled.limit_context(4).walk()[0]
    assert rows.limit_context(4).walk()[0] != CacheIndex.rows(5, [2, 3]).limit_context(4).walk()[0]
    rebuilt = CacheIndex.from_walk(*rows.limit_context(4).walk())
    assert "Gather" not in primitives_text(rebuilt.read(mx.zeros((12, 2))))
    with pytest.raises(ValueError, match=r"CacheIndex\.from_walk"):
        CacheIndex.from_walk(rows.walk()[0], [])
