"""Text generation: the tokens of transformers, as text, in every form of prompt, whole and streamed."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, golden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tokenizer import TOKENIZERS

from mlx_transmuter import generation as loop
from mlx_transmuter.generation import GenerationError
from mlx_transmuter.tasks import text
from mlx_transmuter.tokenizer import TokenizerError

ROWS = golden("llama")["rows"]
NEW = golden("llama")["max_new_tokens"]
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llama(loaded):
    return loaded("llama")


@pytest.fixture(scope="module")
def task(llama):
    return text.generation(llama, max_new_tokens=NEW)


def test_tokens_are_those_of_transformers_alone_and_together(task):
    together = task([row["prompt"] for row in ROWS])
    for row, result in zip(ROWS, together, strict=True):
        assert result.tokens == row["tokens"]
        assert result.finish_reason == row["finish_reason"]
        assert result.logprobs is None
    assert task(ROWS[0]["prompt"]) == together[0]


def test_the_text_is_what_the_tokenizer_makes_of_the_tokens(task, llama):
    assert task(ROWS[0]["prompt"]).text == llama.tokenizer.decode(ROWS[0]["tokens"])


def test_every_form_of_prompt(task, llama):
    sample = json.loads((FIXTURES / "llama" / "tokenizer_golden.json").read_text(encoding="utf-8"))["samples"][0]
    ids = sample["ids"]
    assert [task.encode(prompt) for prompt in (sample["text"], ids, tuple(ids), np.array(ids))] == [ids] * 4
    short = text.generation(llama, max_new_tokens=2)
    assert [result.tokens for result in short([sample["text"], ROWS[0]["prompt"]])][1] == ROWS[0]["tokens"][:2]
    assert short(np.array(ids)) == short([sample["text"], CHAT])[0]
    assert short([]) == []


def test_a_chat_is_its_template_with_one_bos(task, llama):
    ids = task.encode(CHAT)
    assert ids == llama.tokenizer.encode("<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False)
    assert ids.count(llama.tokenizer.token_id("bos_token")) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "no tokens"),
        (["a", 7], "expected a str"),
        ([1.5, 2.5], "expected a str"),
        ([True], "expected a str"),
        ([384], "384.*ids from 0 to 383"),
        ([-1], "-1.*ids from 0 to 383"),
    ],
)
def test_a_prompt_that_cannot_be_is_one_clear_line(task, prompt, message):
    with pytest.raises(GenerationError, match=message) as error:
        task(prompt)
    assert "\n" not in str(error.value)


def test_a_prompt_without_tokens(task):
    with pytest.raises(TokenizerError, match="chat message"):
        task([{"content": "no role"}])
    with pytest.raises(GenerationError, match="several prompts"):
        task.stream(["one", "two"])


def test_pieces_are_text_with_the_numbers_of_the_stream(task):
    for row in ROWS[:2]:
        pieces = list(task.stream(row["prompt"]))
        result = task(row["prompt"])
        assert "".join(pieces) == "".join(piece.text for piece in pieces) == result.text
        assert [piece.token for piece in pieces if piece.token is not None] == row["tokens"]
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [row["finish_reason"]]
        assert {piece.prompt_tokens for piece in pieces} == {len(row["prompt"])}
        assert pieces[-1].generation_tokens == len(row["tokens"])
        assert pieces[-1].prompt_tps > 0
        assert pieces[-1].generation_tps > 0
        assert pieces[-1].peak_memory > 0


def test_a_stream_that_is_closed_ends(task):
    stream = task.stream(ROWS[1]["prompt"])
    next(stream)
    stream.close()
    assert list(stream) == []
    assert task(ROWS[1]["prompt"]).tokens == ROWS[1]["tokens"]


def test_logprobs_are_those_of_the_tokens(llama):
    task = text.generation(llama, max_new_tokens=NEW, token_logprobs=True)
    result = task(ROWS[1]["prompt"])
    logits = ROWS[1]["logits"].astype(np.float64)
    first = logits[result.tokens[0]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert result.logprobs[0] == pytest.approx(first, abs=1e-4)
    assert len(result.logprobs) == len(result.tokens)
    streamed = [piece.logprobs for piece in task.stream(ROWS[1]["prompt"]) if piece.token is not None]
    assert streamed == result.logprobs


@pytest.fixture
def replay(monkeypatch):
    """A function that makes text generation give these tokens, as `generation.run` does for one prompt."""

    def tokens(ids, ended):
        def run(gen, prompts, seeds, *, stop, **_):
            for n in range(1, len(ids) + 1):
                stopped = stop[0] is not None and stop[0](ids[:n])
                last = stopped or (n == len(ids) and not ended)
                yield loop.StepOutput(np.array([ids[n - 1]]), np.array([last]), None)
                if last:
                    return [loop.GenerationResult([loop.Token(id) for id in ids[:n]], "stop" if stopped else "length")]
            yield loop.StepOutput(np.array([-1]), np.array([True]), None)
            return [loop.GenerationResult([loop.Token(id) for id in ids], "stop")]

        monkeypatch.setattr(loop, "generate_steps", run)

    return tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_stop_string_ends_the_text_and_no_part_of_it_is_seen(llama, replay, name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=16))
    whole = tokenizer.decode(ids)
    begin = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[begin : begin + data.draw(st.integers(1, 6))] + data.draw(st.sampled_from(["", "", "never"]))
    replay(ids, ended=data.draw(st.booleans()))
    task = text.generation(replace(llama, tokenizer=tokenizer), stop_strings=["never there", *([stop] if stop else [])])
    prefixes = [ids[: n + 1] for n in range(len(ids))]
    tokens = next((prefix for prefix in prefixes if stop and stop in tokenizer.decode(prefix)), ids)
    result = task([1])
    assert result.tokens == tokens
    assert result.text == (tokenizer.decode(tokens).split(stop)[0] if stop else whole)
    seen = ""
    for piece in task.stream([1]):
        seen += piece
        assert result.text.startswith(seen)
    assert seen == result.text
    assert piece.finish_reason == result.finish_reason


def test_a_row_stops_at_its_stop_string_and_the_others_go_on(llama):
    whole = llama.tokenizer.decode(ROWS[1]["tokens"])
    task = text.generation(llama, max_new_tokens=NEW, stop_strings=whole[4:7])
    results = task([row["prompt"] for row in ROWS])
    assert results[1].text == whole[:4]
    assert [results[0].tokens, results[2].tokens] == [ROWS[0]["tokens"], ROWS[2]["tokens"]]


def test_eos_ids_of_the_files_and_the_tokenizer_are_joined(llama):
    config = {**llama.generation_config, "eos_token_id": ROWS[1]["tokens"][2]}
    model = replace(llama, generation_config=config)
    assert text.eos_token_ids(model)[0] == ROWS[1]["tokens"][2]
    assert set(llama.tokenizer.eos_token_ids) <= set(text.eos_token_ids(model))
    result = text.generation(model, max_new_tokens=NEW)(ROWS[1]["prompt"])
    assert (result.tokens, result.finish_reason) == (ROWS[1]["tokens"][:2], "stop")
    alone = text.generation(model, max_new_tokens=3, eos_token_id=[])(ROWS[1]["prompt"])
    assert (alone.tokens, alone.finish_reason) == (ROWS[1]["tokens"][:3], "length")


def test_config_json_names_the_eos_where_generation_config_does_not(llama):
    model = replace(llama, generation_config={}, tokenizer=None, config={"eos_token_id": 9})
    assert text.eos_token_ids(model) == [9]
    assert text.eos_token_ids(replace(model, config={})) == []


def test_a_seed_gives_a_text_alone_and_in_any_batch(llama):
    task = text.generation(llama, max_new_tokens=5, do_sample=True, temperature=2.0, top_k=0)
    prompts = [row["prompt"] for row in ROWS]
    together = task(prompts, seed=[5, 0, 7])
    assert [task(prompt, seed=seed) for prompt, seed in zip(prompts, [5, 0, 7], strict=True)] == together
    assert "".join(task.stream(prompts[1], seed=0)) == together[1].text
    same = task([prompts[1]] * 4, seed=0)
    assert same == [together[1]] * 4
    assert len({tuple(result.tokens) for result in task([prompts[1]] * 4, seed=range(4))}) > 1
    assert len({tuple(result.tokens) for result in task([prompts[1]] * 4)}) > 1
    with pytest.raises(GenerationError, match="2 seeds"):
        task(prompts, seed=[1, 2])


def test_several_texts_of_a_prompt(llama):
    task = text.generation(llama, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    prompts = [row["prompt"] for row in ROWS]
    assert [len(found) for found in task(prompts, seed=1)] == [2, 2, 2]
    assert task(prompts[0], seed=1) == task(prompts, seed=1)[0]
    with pytest.raises(GenerationError, match="several prompts or texts"):
        task.stream(prompts[0])


def test_without_a_tokenizer_ids_go_in_and_out(llama):
    model = replace(llama, tokenizer=None)
    task = text.generation(model, max_new_tokens=NEW)
    result = task(ROWS[0]["prompt"])
    assert (result.tokens, result.text) == (ROWS[0]["tokens"], "")
    assert [piece.token for piece in task.stream(ROWS[0]["prompt"])][: len(result.tokens)] == result.tokens
    for prompt in ["text", CHAT]:
        with pytest.raises(GenerationError, match="a model without a tokenizer"):
            task(prompt)
    with pytest.raises(GenerationError, match="stop_strings"):
        text.generation(model, stop_strings=["x"])


def test_batches_of_any_size_share_shapes(llama):
    task = text.generation(llama, max_new_tokens=2)
    task([[5, 6]] * 4)
    before = task.compilations
    task([[5, 6]] * 3)
    assert task.compilations == before


def test_an_unknown_setting_is_an_error(llama):
    with pytest.raises(GenerationError, match=r"temprature.*temperature"):
        text.generation(llama, temprature=1)


def test_template_variables_reach_the_template(llama):
    tokenizer = type(llama.tokenizer)(
        llama.tokenizer.backend, {}, templates={"default": "{{ messages[0].content }}{{ mood }}"}
    )
    task = text.generation(replace(llama, tokenizer=tokenizer), chat_template_vars={"mood": "calm"})
    assert tokenizer.decode(task.encode(CHAT)) == "Hicalm"


def test_drafts_change_no_text_and_are_counted(llama, task):
    prompts = [row["prompt"] for row in ROWS]
    plain = task(prompts)
    assert [result.draft_counts for result in plain] == [None] * len(ROWS)
    looking = text.generation(llama, max_new_tokens=NEW, prompt_lookup_num_tokens=3)
    helped = text.generation(llama, max_new_tokens=NEW, assistant_model=llama, assistant_confidence_threshold=0.0)
    for drafting in (looking, helped):
        found = drafting(prompts)
        assert [replace(result, draft_counts=None) for result in found] == plain
        pieces = list(drafting.stream(prompts[0]))
        assert "".join(pieces) == plain[0].text
        assert [piece.draft_counts for piece in pieces] == [None] * (len(pieces) - 1) + [found[0].draft_counts]
        assert found[0].draft_counts.passes >= 1
    assert helped(prompts)[0].draft_counts.tokens_per_pass > 2
    assert helped.compilations > looking.compilations > 0
