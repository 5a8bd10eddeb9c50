"""The command line's caches: what a turn of a chat computes, files of prompt caches, keys and values in few bits."""

import itertools
import operator
import re

import pytest
from conftest import answer

from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.tasks import text

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def computed(monkeypatch):
    """How many tokens the steps had."""
    counts = []
    step = CacheSession.step
    monkeypatch.setattr(CacheSession, "step", lambda run, *args: counts.append(sum(args[1])) or step(run, *args))
    return counts


def test_a_turn_of_a_chat_computes_its_own_text_alone(run, folder, monkeypatch, computed):
    lines = iter(["Hello there", "And more", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    prompts = []
    encode = text.TextGeneration.encode
    monkeypatch.setattr(
        text.TextGeneration, "encode", lambda self, prompt: prompts.append(encode(self, prompt)) or prompts[-1]
    )
    assert run("chat", "--model", folder, "-m", 3)[0] == 0
    first, second = prompts
    known = sum(itertools.accumulate(map(operator.eq, first, second), operator.and_))
    assert known > 10
    # A turn makes 3 tokens, the first of which comes of the prompt. The second one may also know the first's answer.
    assert sum(computed) <= len(first) + len(second) - known + 2 * 2


def test_a_prompt_cache_file_is_made_once_and_used(run, folder, tmp_path, computed, monkeypatch):
    file = tmp_path / "system.safetensors"
    system = ["--system-prompt", "You answer briefly, always, and in one word where one word will do."]
    code, out, err = run("cache-prompt", "--model", folder, *system, "-p", "Hi", "--prompt-cache-file", file)
    assert (code, out) == (0, "")
    assert re.search(r"\d+ tokens in .*system\.safetensors, of (?!0\.0)[\d.]+ [kM]B", err)
    made = sum(computed)
    quiet = ["generate", "--model", folder, "-m", 3, "--verbose", "False", *system, "-p", "Hi, again"]
    computed.clear()
    plain = run(*quiet)
    whole = sum(computed)
    computed.clear()
    assert run(*quiet, "--prompt-cache-file", file) == plain
    assert sum(computed) <= whole - made + 12  # the message and the template after it
    assert sum(computed) < whole / 2
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    lines = iter(["Hi, again", "/exit"])
    computed.clear()
    assert run("chat", "--model", folder, "-m", 3, *system, "--prompt-cache-file", file)[:2] == (0, plain[1])
    assert sum(computed) < whole / 2


def test_keys_and_values_in_few_bits(run, folder, tmp_path, monkeypatch):
    file = tmp_path / "cache"
    quiet = ["generate", "--model", folder, "-m", 4, "--verbose", "False", "-p", "Hi"]
    packed = ["--kv-bits", 8, "--kv-group-size", 32]
    wanted = answer(folder, [{"role": "user", "content": "Hi"}], max_new_tokens=4, kv_bits=8, kv_group_size=32) + "\n"
    assert run(*quiet, *packed) == (0, wanted, "")
    assert run("cache-prompt", "--model", folder, "-p", "Hi", "--prompt-cache-file", file, *packed)[0] == 0
    assert run(*quiet, "--prompt-cache-file", file) == (0, wanted, "")  # the file says the bits
    code, _, err = run(*quiet, "--prompt-cache-file", file, "--kv-bits", 4)
    assert code == 1
    assert "8 bits in groups of 32" in err
    assert "4 bits in groups of 64, as the flags say" in err
    assert run("chat", "--model", folder, "-m", 4, "--prompt-cache-file", file, "--kv-bits", 4)[0] == 1
    lines = iter(["Hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert run("chat", "--model", folder, "-m", 4, *packed)[:2] == (0, wanted)


def test_a_prompt_cache_file_of_another_model_or_none_is_one_line(run, folder, converted, tmp_path):
    file = tmp_path / "cache"
    assert run("cache-prompt", "--model", folder, "-p", "Hi", "--prompt-cache-file", file)[0] == 0
    for model, name, message in [(converted("llama_q4"), file, "expected"), (folder, tmp_path / "no", "No such file")]:
        code, _, err = run("generate", "--model", model, "-p", "Hi", "--prompt-cache-file", name)
        assert code == 1
        assert message in err
        assert err.count("\n") == 1
    assert run("cache-prompt", "--model", folder, "-p", "Hi")[0] == 2
