"""Rows are alone, whatever their neighbors hold: beside a row whose keys and values are NaN, and after it in a prompt cache,
each row gives what it gives alone, and the error names the row of the NaN."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES
from mlx.utils import tree_flatten, tree_unflatten

from mlx_transmuter import generation
from mlx_transmuter.api import convert
from mlx_transmuter.generation import PromptCache, ScoreError
from mlx_transmuter.generation.drafts import speculative_decoding
from mlx_transmuter.generation.drafts.draft_tree import DraftTree
from mlx_transmuter.model import load_folder

DRAW = np.random.default_rng(17)
BAD = 61  # the token whose embedding is NaN
GOOD_PROMPTS = [DRAW.integers(3, 60, n).tolist() for n in (37, 5, 12)]
BAD_PROMPTS = [[4, 5, BAD, 6, 7, 8], [BAD]]
BATCH = [GOOD_PROMPTS[0], BAD_PROMPTS[0], GOOD_PROMPTS[1], [], BAD_PROMPTS[1], GOOD_PROMPTS[2]]
GOOD_ROWS, BAD_ROWS = [0, 2, 5], (1, 4)
# bfloat16 rounds to 8 bits: a log-probability near -5 to 2 ** -7, and the logits of which it is the difference too.
TOLERANCES = {"float32": 3e-4, "float16": 3e-2, "bfloat16": 2.5e-1}


def with_bad_embedding(model, value: float, token: int = BAD):
    """The model with the embedding of a token filled with `value`."""
    parameters = dict(tree_flatten(model.decoder.parameters()))
    (name,) = (name for name in parameters if name.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    rows = mx.arange(parameters[name].shape[0])[:, None] == token
    table = mx.where(rows, mx.array(value, parameters[name].dtype), parameters[name])
    mx.eval(table)
    model.decoder.update(tree_unflatten([(name, table)]))
    return model


@pytest.fixture(scope="module")
def bad_model(tmp_path_factory):
    """A function of a fixture's name, a dtype and a value that gives its model with a bad embedding."""
    root = tmp_path_factory.mktemp("bad")

    @functools.cache
    def load(name: str = "llama", dtype: str | None = None, value: float = np.nan):
        out = root / f"{name}-{dtype}-{value}"
        return with_bad_embedding(
            load_folder(convert(FIXTURES / name, out, file="model.onnx", dtype=dtype, progress=False)), value
        )

    return load


def compiled(model, batch_size: int, **options):
    defaults = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 5, "token_logprobs": True}
    # The selection never adds a bad token to a good row.
    return generation.compile(generation.context(model, **defaults | {"suppress_tokens": [BAD]} | options), batch_size)


def results_and_error(gen, prompts, **more):
    steps = generation.generate_steps(gen, prompts, list(range(len(prompts))), **more)
    try:
        return generation.run_to_end(steps), None
    except ScoreError as error:
        return error.results, error


def alone(gen_of_one, row: int, prompt):
    return generation.run_to_end(generation.generate_steps(gen_of_one, [prompt], [row]))


def assert_same(found, expected, tolerance: float) -> None:
    assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
    assert found.finish_reason == expected.finish_reason
    np.testing.assert_allclose(
        [token.logprob for token in found.tokens], [token.logprob for token in expected.tokens], rtol=0, atol=tolerance
    )


MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "8 bits": {"kv_bits": 8},
    "4 bits": {"kv_bits": 4, "kv_group_size": 32},
    "chunks of 4": {"prefill_step_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
def test_rows_beside_one_of_nan_are_those_alone(mode, bad_model):
    options = MODES[mode]
    model = bad_model()
    per_prompt = options.get("num_return_sequences", 1)
    results, error = results_and_error(compiled(model, len(BATCH), **options), BATCH)
    one = compiled(model, 1, **options)
    for row in GOOD_ROWS:
        for place, expected in enumerate(alone(one, row, BATCH[row])):
            assert_same(results[row * per_prompt + place], expected, TOLERANCES["float32"])
    assert error is not None
    first_results = {row * per_prompt for row in BAD_ROWS}
    assert first_results <= set(error.rows) <= {first + place for first in first_results for place in range(per_prompt)}
    assert set(error.steps) == {0}
    assert {results[row].finish_reason for row in error.rows} == {"error"}
    assert f"row {BAD_ROWS[0] * per_prompt}, step 0" in str(error)


@pytest.mark.parametrize("value", [np.nan, np.inf, 6e4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_beside_numbers_too_large_are_those_alone(name, dtype, value, bad_model):
    """Invalid scores are replaced, so that the bad rows go on; 6e4 overflows in float16 and is a number like any other in the
    other types."""
    model = bad_model(name, dtype, value)
    options = {"remove_invalid_values": True, "max_new_tokens": 4}
    results, error = results_and_error(compiled(model, len(BATCH), **options), BATCH)
    assert error is None
    one = compiled(model, 1, **options)
    for row in GOOD_ROWS:
        assert_same(results[row], alone(one, row, BATCH[row])[0], TOLERANCES[dtype])


class BadDrafter:
    """Drafts the token of NaN, a token after it, and two others beside it."""

    def propose(self, rows, max_nodes, max_depths, *_):
        trees = {index: DraftTree(row.token_ids[-1]) for index, row in rows.items()}
        for index, tree in trees.items():
            paths = ([BAD, 7], [5], [6]) if max_depths[index] > 1 else ()
            for path in paths:
                node = 0
                for token in path:
                    node = tree.add(node, token)
        return trees

    def close(self):
        pass


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"remove_invalid_values": True}], ids=str)
def test_drafts_of_nan_change_no_result(name, options, bad_model, monkeypatch):
    model = bad_model(name)
    expected, _ = results_and_error(compiled(model, 3, **options), GOOD_PROMPTS)
    monkeypatch.setattr(speculative_decoding, "_make_drafter", lambda group: BadDrafter())
    results, error = results_and_error(compiled(model, 3, prompt_lookup_num_tokens=4, **options), GOOD_PROMPTS)
    assert error is None
    for found, plain in zip(results, expected, strict=True):
        assert_same(found, plain, TOLERANCES["float32"])


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"kv_bits": 8}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_a_prompt_cache_that_had_rows_of_nan_gives_what_a_new_one_gives(options, block, bad_model):
    """Calls with rows of NaN in a cache so small that their blocks are used again, between calls of other prompts."""
    model = bad_model()
    kv_bits = options.get("kv_bits")
    cache = PromptCache(model, max_tokens=120, block=block, kv_bits=kv_bits)
    gen, one = (compiled(model, size, **options) for size in (3, 1))
    order = np.random.default_rng(5)
    for _ in range(3):
        good = [order.integers(3, 60, n).tolist() for n in order.integers(1, 30, 2)]
        prompts = [good[0], [*order.integers(3, 60, int(order.integers(0, 9))).tolist(), BAD, 5], good[1]]
        results, error = results_and_error(gen, prompts, prompt_cache=cache)
        assert error is not None
        assert set(error.rows) == {1}
        assert cache.find([*prompts[1], 7]) == 0
        for row in (0, 2):
            assert_same(results[row], alone(one, row, prompts[row])[0], TOLERANCES["float32"])
        again = [[*good[0], 9], [], good[1]]
        results, error = results_and_error(gen, again, prompt_cache=cache)
        assert error is None
        for row in (0, 2):
            assert_same(results[row], alone(one, row, again[row])[0], TOLERANCES["float32"])


@pytest.mark.parametrize("padding_token", [0])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_the_padding_of_steps_brings_no_nan(options, padding_token, tmp_path):
    """Steps pad with token 0, whose embedding is NaN here."""
    model = load_folder(convert(FIXTURES / "llama", tmp_path / "m", file="model.onnx", progress=False))
    model = with_bad_embedding(model, np.nan, padding_token)
    options = {"suppress_tokens": [padding_token], **options}
    results, error = results_and_error(compiled(model, 3, **options), GOOD_PROMPTS)
    assert error is None
    for row, prompt in enumerate(GOOD_PROMPTS):
        assert_same(results[row], alone(compiled(model, 1, **options), row, prompt)[0], TOLERANCES["float32"])
