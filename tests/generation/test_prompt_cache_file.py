"""The file of a prompt cache: a loaded cache equals the saved one, and wrong files are refused before they are used."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import load_folder

TOKENS = np.random.default_rng(3).integers(3, 60, 40).tolist()


def generate_texts(model, prompts, cache=None):
    ctx = generation.context(model, eos_token_id=None, do_sample=False, max_new_tokens=4, token_logprobs=True)
    return generation.generate(generation.compile(ctx, len(prompts)), prompts, [0] * len(prompts), prompt_cache=cache)


@pytest.fixture
def saved_path(loaded, tmp_path):
    """The file of a cache of two prompts with a common prefix."""
    cache = PromptCache(loaded("llama"), block=2)
    generate_texts(loaded("llama"), [TOKENS[:21], [*TOKENS[:12], 7, 8, 9]], cache)
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


@pytest.mark.parametrize("name", ["llama", "llama_fp16", "gemma2", "bloom", "gpt2_ort"])
@pytest.mark.parametrize("block", [1, 3])
def test_a_loaded_cache_equals_the_saved_one(name, block, loaded, tmp_path):
    model, path = loaded(name), tmp_path / "a cache"
    cache = PromptCache(model, block=block)
    generate_texts(model, [TOKENS[:21], [*TOKENS[:12], 7, 8, 9]], cache)
    for _ in range(2):  # also a loaded cache, and over an existing file
        cache.save(path)
        assert os.listdir(tmp_path) == ["a cache"]
        reloaded = PromptCache.load(path, model)
        assert reloaded.tokens == cache.tokens > 0
        for prompt in (TOKENS, [*TOKENS[:12], 7, 8, 9, 9], [1]):
            assert reloaded.find(prompt) == cache.find(prompt)
        cache = reloaded
    prompts = [TOKENS[:30], [*TOKENS[:12], 7, 8, 9, 3]]
    found, expected = generate_texts(model, prompts, reloaded), generate_texts(model, prompts)
    assert [[token.id for token in text] for text in found] == [[token.id for token in text] for text in expected]
    tolerance = 2e-2 if name == "llama_fp16" else 2e-4
    for text, other in zip(found, expected, strict=True):
        np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=tolerance)


def test_an_empty_cache_can_be_saved_and_loaded(loaded, tmp_path):
    PromptCache(loaded("llama")).save(tmp_path / "cache")
    assert PromptCache.load(tmp_path / "cache", loaded("llama")).tokens == 0


def test_the_file_has_the_documented_format(saved_path, loaded):
    """Any reader of safetensors finds the tokens, each block after the one before it, and a row per token and pool."""
    contents: Any = mx.load(str(saved_path), format="safetensors", return_metadata=True)
    arrays, metadata = contents
    assert (metadata["format"], metadata["version"], metadata["block"]) == ("mlx-transmuter prompt cache", "1", "2")
    before, tokens = np.array(arrays["before"]), np.array(arrays["tokens"])
    leaves = set(range(len(before))) - set(before.tolist())
    found = set()
    for leaf in leaves:
        path, at = [], leaf
        while at >= 0:
            path = [*tokens[at].tolist(), *path]
            at = before[at]
        found.add(tuple(path))
    assert len(found) == 2
    assert all(any(list(path)[:12] == TOKENS[:12] for path in found) for _ in found)
    entries = [array for name, array in arrays.items() if name.startswith("past")]
    assert entries
    assert all(array.shape[0] == tokens.size for array in entries)


def test_another_model_is_refused(saved_path, loaded, converted, tmp_path):
    with pytest.raises(GenerationError, match="expected"):
        PromptCache.load(saved_path, loaded("mistral"))
    folder = tmp_path / "other"
    shutil.copytree(converted("llama"), folder)
    other = load_folder(folder)
    assert PromptCache.load(saved_path, other).tokens > 0  # the same model from another folder
    name, weight = next((n, w) for n, w in other.decoder.weights().items() if w.ndim == 2 and w.dtype == mx.float32)
    owner, key = other.decoder._leaf_locations[name]
    owner[key] = mx.where(mx.arange(weight.size).reshape(weight.shape) == 5, weight + 1, weight)
    with pytest.raises(GenerationError, match="fingerprint"):
        PromptCache.load(saved_path, other)


def test_a_limit_below_the_tokens_of_the_file_is_refused(saved_path, loaded):
    with pytest.raises(GenerationError, match="limit of 8"):
        PromptCache.load(saved_path, loaded("llama"), max_tokens=8)


def rewrite_header(path: Path, change) -> None:
    """Rewrites the file with the header that `change` returns or changes in place."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def set_header_key(name, key, value):
    return lambda header: header[name].__setitem__(key, value)


def first_pool_tensor(header) -> dict:
    return header[min(name for name in header if name.startswith("past"))]


HEADER_CHANGES = {
    "no metadata": lambda header: header.pop("__metadata__") and None,
    "another format": set_header_key("__metadata__", "format", "mlx"),
    "a later version": set_header_key("__metadata__", "version", "2"),
    "no fingerprint": lambda header: header["__metadata__"].pop("fingerprint") and None,
    "another block": set_header_key("__metadata__", "block", "4"),
    "blocks of none": set_header_key("__metadata__", "block", "0"),
    "blocks of words": set_header_key("__metadata__", "block", "many"),
    "bits of no pool": lambda header: header["__metadata__"].update(kv_bits="3", kv_group_size="64"),
    "other bits than the rows": lambda header: header["__metadata__"].update(kv_bits="8", kv_group_size="64"),
    "bits of words": lambda header: header["__metadata__"].update(kv_bits="few", kv_group_size="64"),
    "an endless block": set_header_key("__metadata__", "block", float("inf")),
    "a block that is a number": set_header_key("__metadata__", "block", 2),
    "a tensor less": lambda header: header.pop("tokens") and None,
    "a tensor that is a list": lambda header: header.__setitem__("tokens", [1]),
    "an unknown dtype": set_header_key("tokens", "dtype", "F64"),
    "another dtype": set_header_key("tokens", "dtype", "F32"),
    "a larger shape": set_header_key("tokens", "shape", [2**40, 2]),
    "a negative size": set_header_key("tokens", "shape", [-1, -2]),
    "a size that is a word": set_header_key("tokens", "shape", ["2", 2]),
    "a size that is true": set_header_key("before", "shape", [True]),
    "an endless shape": set_header_key("tokens", "shape", [2**62, 2**62]),
    "offsets past the end": set_header_key("tokens", "data_offsets", [0, 2**50]),
    "offsets that overlap": lambda header: first_pool_tensor(header).__setitem__(
        "data_offsets", header["tokens"]["data_offsets"]
    ),
    "offsets of words": set_header_key("tokens", "data_offsets", ["a", "b"]),
    "one offset": set_header_key("tokens", "data_offsets", [0]),
    "a list": lambda header: [header],
    "a name more": lambda header: header.__setitem__("x", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
}


@pytest.mark.parametrize("change", HEADER_CHANGES.values(), ids=HEADER_CHANGES)
def test_a_wrong_header_is_refused(change, saved_path, loaded):
    rewrite_header(saved_path, change)
    with pytest.raises(GenerationError, match=r"cache\.safetensors"):
        PromptCache.load(saved_path, loaded("llama"))


BYTE_CHANGES = {
    "empty": lambda data: b"",
    "short": lambda data: data[:5],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "cut in the header": lambda data: data[:40],
    "a header of 2^64": lambda data: b"\xff" * 8 + data[8:],
    "no JSON": lambda data: data[:8] + b"x" + data[9:],
    "no text": lambda data: data[:8] + b"\xff\xfe" + data[10:],
    "deep JSON": lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("change", BYTE_CHANGES.values(), ids=BYTE_CHANGES)
def test_a_file_that_is_not_whole_is_refused(change, saved_path, loaded):
    saved_path.write_bytes(change(saved_path.read_bytes()))
    with pytest.raises(GenerationError, match="saved whole"):
        PromptCache.load(saved_path, loaded("llama"))


TENSOR_CHANGES = {
    "a token past the vocabulary": ("tokens", lambda a: a + 10_000, "token ids"),
    "a negative token": ("tokens", lambda a: a - 100, "token ids"),
    "a block after a later one": ("before", lambda a: mx.concatenate([a[1:], a[:1]]), "integer"),
    "a block after none": ("before", lambda a: a - 1, "integer"),
    "a block twice": ("tokens", lambda a: mx.zeros_like(a) + 5, "stored once"),
}


@pytest.mark.parametrize(("name", "change", "match"), TENSOR_CHANGES.values(), ids=TENSOR_CHANGES)
def test_wrong_tokens_are_refused(name, change, match, saved_path, loaded):
    contents: Any = mx.load(str(saved_path), format="safetensors", return_metadata=True)
    arrays, metadata = contents
    arrays[name] = change(arrays[name])
    if "twice" in match or "once" in match:
        arrays["before"] = mx.zeros_like(arrays["before"]) - 1
    mx.eval(arrays)
    mx.save_safetensors(str(saved_path), arrays, metadata=metadata)
    with pytest.raises(GenerationError, match=match):
        PromptCache.load(saved_path, loaded("llama"))


def test_missing_files_and_folders_are_errors(loaded, tmp_path):
    with pytest.raises(GenerationError, match="No such file"):
        PromptCache.load(tmp_path / "none", loaded("llama"))
    with pytest.raises(GenerationError, match="a place to write to"):
        PromptCache(loaded("llama")).save(tmp_path / "no folder" / "cache")
    with pytest.raises(GenerationError, match="found a folder"):
        PromptCache(loaded("llama")).save(tmp_path)


def test_a_failed_save_leaves_the_old_file(saved_path, loaded, monkeypatch):
    before = saved_path.read_bytes()

    def failing(path, *args, **more):
        Path(path).write_bytes(b"half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", failing)
    with pytest.raises(GenerationError, match="disk full"):
        PromptCache(loaded("llama")).save(saved_path)
    assert saved_path.read_bytes() == before
    assert os.listdir(saved_path.parent) == [saved_path.name]
