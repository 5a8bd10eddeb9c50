"""NgramBans against a search of the whole sequence, with forks, and the work that it does."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from reference_loops import ends_with, ngrams

from mlx_transmuter.generation.logits.ngram_bans import NgramBans

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def banned_by_search(tokens: list[int], size: int) -> set[int]:
    return {gram[-1] for gram in ngrams(tokens, size) if ends_with(tokens, gram[:-1])}


@given(st.integers(2, 4), TOKENS, TOKENS)
def test_the_index_of_a_growing_sequence_bans_what_a_search_finds(size, prompt, new):
    index, tokens = NgramBans(size, prompt), list(prompt)
    assert index.banned_ids(tokens) == banned_by_search(tokens, size)
    for token in new:
        tokens.append(token)
        index.add(tokens)
        assert index.banned_ids(tokens) == banned_by_search(tokens, size)


@given(
    st.integers(2, 4),
    TOKENS,
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=8),
    st.data(),
)
def test_beams_ban_their_own_ngrams_after_every_fork(size, prompt, steps, data):
    index = NgramBans(size, prompt)
    beams = [list(prompt) for _ in range(3)]
    for step in steps:
        parents = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
        beams = [[*beams[parent], token] for parent, token in zip(parents, step, strict=True)]
        for beam in beams:
            index.add(beam)
        assert [index.banned_ids(beam) for beam in beams] == [banned_by_search(beam, size) for beam in beams]


@given(st.integers(2, 3), TOKENS, TOKENS)
def test_the_encoder_bans_its_own_ngrams_only(size, source, tokens):
    assert NgramBans(size, source).banned_ids(tokens) == {
        g[-1] for g in ngrams(source, size) if ends_with(tokens, g[:-1])
    }


class CountingList(list):
    """A list that counts the elements that are read from it."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountingList.read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_long_sequence_costs_linear_work():
    work = []
    for length in (1000, 4000):
        CountingList.read = 0
        rng = random.Random(0)
        index, sequence = NgramBans(3, [1, 2, 3]), CountingList([1, 2, 3])
        while len(sequence) < length:
            token = rng.randrange(100)
            if token not in index.banned_ids(sequence):
                sequence.append(token)
                index.add(sequence)
        work.append(CountingList.read)
    assert work[1] <= 5 * work[0]
