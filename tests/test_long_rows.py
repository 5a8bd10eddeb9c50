"""Rows up to and past the length that a model was made for: they go on, and a table of positions alone ends them."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES
from decoding import unrewritten_module

import mlx_transmuter as mt
from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import load_folder
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder

TRAINED_LENGTH, NEW_TOKENS = 256, 20
NAMES = sorted(path.stem for path in (FIXTURES / "long").glob("*.json"))


def long_rows(name: str) -> list[dict]:
    """The prompts of a fixture, and the tokens of transformers after them."""
    return json.loads((FIXTURES / "long" / f"{name}.json").read_bytes())["rows"]


def generate(model, prompts, *, decoder=None, prompt_cache=None, **options) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, **options}
    compiled = generation.compile(generation.context(model, **options), len(prompts), decoder=decoder)
    results = generation.generate(compiled, prompts, [0] * len(prompts), prompt_cache=prompt_cache)
    return [[token.id for token in result] for result in results]


def test_the_rows_cross_the_length():
    assert len(NAMES) >= 5
    for name in NAMES:
        assert [len(row["prompt"]) for row in long_rows(name)] == [250, 256, 300]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_past_the_trained_length_are_those_of_transformers(name, loaded):
    rows, model = long_rows(name), loaded(name)
    assert Decoder(model.decoder, 1).trained_length == (None if name == "bloom" else TRAINED_LENGTH)
    assert generate(model, [row["prompt"] for row in rows]) == [row["tokens"] for row in rows]


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"assistant": True}, {"cached": True}], ids=str)
def test_drafts_and_caches_go_past_it_too(options, loaded):
    rows, model = long_rows("llama"), loaded("llama")
    prompts, tokens = ([row[key] for row in rows] for key in ("prompt", "tokens"))
    if "cached" in options:
        cache = PromptCache(model)
        assert generate(model, prompts, prompt_cache=cache) == tokens
        assert cache.find(prompts[2]) == 299
        assert generate(model, prompts, prompt_cache=cache) == tokens
    elif "assistant" in options:
        assert generate(model, prompts, assistant_model=model) == tokens
    else:
        assert generate(model, prompts, **options) == tokens


@pytest.mark.parametrize("mode", ["append", "grow"])
def test_an_unrewritten_graph_goes_past_it_too(mode, loaded):
    """In buffers, of which those below the trained length stay below it, and over a past of its exact length."""
    decoder, rows = Decoder(unrewritten_module("llama"), 3, cache_mode=mode), long_rows("llama")
    assert generate(loaded("llama"), [row["prompt"] for row in rows], decoder=decoder) == [
        row["tokens"] for row in rows
    ]


def test_buffers_stay_below_the_trained_length_as_long_as_rows_do():
    decoder = Decoder(unrewritten_module("llama"), 1, cache_mode="append")
    assert decoder.past_columns(200, 8) == TRAINED_LENGTH - 8
    assert decoder.past_columns(255, 8) >= 255
    assert decoder.past_columns(300, 1) == 320


# Memory: rows without an end take what they need.


def generate_endlessly(decoder, model, prompts, **options) -> list[list[int]]:
    """The tokens of rows that end by a condition alone."""
    options = {"max_new_tokens": 10**9, "min_new_tokens": NEW_TOKENS, **options}
    compiled = generation.compile(generation.context(model, **options), len(prompts), decoder=decoder)
    stop = [lambda new_tokens: len(new_tokens) == NEW_TOKENS] * len(prompts)
    steps = generation.generate_steps(compiled, prompts, [0] * len(prompts), stop=stop)
    return [[token.id for token in result.tokens] for result in generation.run_to_end(steps)]


@pytest.fixture
def pool_bytes(monkeypatch) -> list[int]:
    """The bytes of the pools of every session that began, at its beginning and at its end."""
    sizes: list[int] = []
    begin, close = CacheSession.__init__, CacheSession.close

    def measure(session):
        if not session.pools.is_taken:
            sizes.append(sum(pool.nbytes for pool in session.pools.arrays))

    def begin_measured(session, *args, **more):
        begin(session, *args, **more)
        measure(session)

    def close_measured(session):
        measure(session)
        close(session)

    monkeypatch.setattr(CacheSession, "__init__", begin_measured)
    monkeypatch.setattr(CacheSession, "close", close_measured)
    return sizes


@pytest.mark.parametrize("mode", [None, "append", "grow"])
def test_pools_grow_with_rows_that_may_have_any_number_of_tokens(mode, loaded, pool_bytes):
    module = loaded("llama").decoder if mode is None else unrewritten_module("llama")
    rows, decoder = long_rows("llama"), Decoder(module, 3, cache_mode=mode)
    found = generate_endlessly(decoder, loaded("llama"), [row["prompt"] for row in rows])
    assert found == [row["tokens"] for row in rows]
    slot_nbytes = sum(spec.slot_nbytes for spec in decoder.pool_specs)
    # 256 tokens of each row, then 512.
    assert min(pool_bytes) < 3.1 * 256 * slot_nbytes
    assert max(pool_bytes) < 3.1 * 512 * slot_nbytes


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 4}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_blocks_grow_with_them(options, loaded, pool_bytes):
    model, prompts = loaded("llama"), [row["prompt"] for row in long_rows("llama")]
    expected = generate(model, prompts, **options)
    del pool_bytes[:]
    assert generate_endlessly(None, model, prompts, **options) == expected
    decoder = Decoder(model.decoder, 1)
    assert max(pool_bytes) < 4200 * sum(spec.slot_nbytes for spec in decoder.pool_specs)


# Notices.


def test_a_text_past_the_trained_length_has_a_notice_that_is_printed_once(loaded, capsys):
    task = mt.text.generation(loaded("llama"), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    prompts = [row["prompt"] for row in long_rows("llama")]
    short, *longer = task([prompts[0][:5], *prompts])
    assert short.notice is None
    for result in longer:
        assert (len(result.tokens), result.finish_reason) == (NEW_TOKENS, "length")
        assert "predefined maximum length of 256 tokens" in result.notice
    assert task(prompts[0]).notice == longer[0].notice
    assert capsys.readouterr().err == f"mlx-transmuter: {longer[0].notice}\n"
    last = list(task.stream(prompts[0]))[-1]
    assert (last.finish_reason, last.notice) == ("length", longer[0].notice)
    assert capsys.readouterr().err == ""  # who reads a stream shows what its last piece says


def test_the_notice_comes_with_the_first_token_past_the_length(loaded):
    prompt = long_rows("llama")[0]["prompt"]
    for count, has_notice in ((6, False), (7, True)):
        (result,) = mt.text.generation(loaded("llama"), max_new_tokens=count, min_new_tokens=count)([prompt])
        assert (result.notice is not None) == has_notice


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2}]
)
@pytest.mark.parametrize(("name", "table"), [("gpt2", "transformer.wpe"), ("llama_genai", "model.layers.0.attn.cos")])
def test_a_table_ends_a_text_and_the_notice_names_it(name, table, options, loaded):
    """The last token needs no position: of 256, a prompt of 250 leaves 7."""
    options = {"do_sample": "num_return_sequences" in options, "seed": 0} | options
    seed = options.pop("seed")
    task = mt.text.generation(loaded(name), max_new_tokens=20, min_new_tokens=20, **options)
    results = task([list(range(3, 103)) * 2 + list(range(3, 53)), list(range(3, 9))], seed=seed)
    ended, free = (result if isinstance(result, list) else [result] for result in results)
    for result in ended:
        assert (len(result.tokens), result.finish_reason) == (7, "length")
        assert result.notice == (
            f"the text ends at 256 tokens, where the model's table of positions ends ({table}); 13 more were allowed"
        )
    assert [(len(result.tokens), result.notice) for result in free] == [(20, None)] * len(free)


def test_a_prompt_longer_than_the_table_is_refused_by_its_name(loaded):
    with pytest.raises(GenerationError, match=r"300 tokens.*at most 256 tokens.*transformer\.wpe"):
        mt.text.generation(loaded("gpt2"), max_new_tokens=2)([5] * 300)
    assert len(mt.text.generation(loaded("gpt2"), max_new_tokens=2)([5] * 256).tokens) == 1


def test_an_assistant_whose_table_ends_drafts_as_far_as_it_goes(loaded, converted, tmp_path):
    """Any model of as many tokens may draft: one with a table for one without."""
    rows, model = [long_rows("qwen2")[0], long_rows("qwen2")[2]], loaded("qwen2")
    assistant = loaded("gpt2")
    assert generate(model, [row["prompt"] for row in rows], assistant_model=assistant) == [
        row["tokens"] for row in rows
    ]


def test_the_command_says_it_once(run, folder):
    code, out, err = run("generate", "--model", folder, "-p", "a " * 300, "-m", 4, "--temp", 0)
    assert (code, out[-1]) == (0, "\n")
    assert [line for line in err.splitlines() if "predefined maximum length of 256 tokens" in line] == err.splitlines()
    assert err.count("predefined") == 1


# Folders.


def changed_copy(folder, tmp_path, **meta):
    """A copy of a converted folder with other metadata."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    program = json.loads((copy / "program.json").read_bytes())
    program["meta"] |= meta
    (copy / "program.json").write_text(json.dumps(program))
    return copy


def test_no_folder_reads_past_a_table_whatever_it_says(converted, tmp_path):
    """A raised limit, and a table of fewer rows."""
    folder = changed_copy(converted("gpt2"), tmp_path, max_positions=100_000, trained_length=100_000)
    assert Decoder(load_folder(folder).decoder, 1).max_positions == 256
    (file,) = folder.glob("*.safetensors")
    weights, metadata = mx.load(str(file), return_metadata=True)
    weights["transformer.wpe.weight"] = mx.array(np.array(weights["transformer.wpe.weight"])[:16])
    mx.save_safetensors(str(file), weights, metadata)
    program = json.loads((folder / "program.json").read_bytes())
    for name, weight in program["weights"].items():
        if name == "transformer.wpe.weight":
            weight["shape"][0] = 16
    (folder / "program.json").write_text(json.dumps(program))
    model = load_folder(folder)
    assert len(mt.text.generation(model, max_new_tokens=30, min_new_tokens=30)(list(range(3, 13))).tokens) == 7
    with pytest.raises(GenerationError, match="at most 16 tokens"):
        mt.text.generation(model)([5] * 17)


def test_a_folder_of_an_earlier_version_goes_past_its_recorded_limit():
    """It recorded the smaller of the configuration's length and the table's rows, by another name."""
    decoder = Decoder(load_folder(FIXTURES.parent / "converted_folders" / "llama_q4").decoder, 1)
    assert (decoder.max_positions, decoder.trained_length) == (None, 256)
