"""The kinds of cases: each takes a case's random numbers and an empty folder, and gives a digest of what came out."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import toy

from fuzzing import extremes, json_edits, onnx_edits, recorded_nodes, safetensors_edits, templates
from mlx_transmuter import generation, ops
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.generation import SETTINGS, PromptCache
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import PrecisionOptions, Quantization
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.program_walk import evaluate_node
from mlx_transmuter.tasks import text
from mlx_transmuter.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEMO = Path(__file__).parents[3] / "mlx_transmuter" / "demo"
# Where things that all cases of a kind share are made once: converted folders, recorded nodes.
SHARED = Path(os.environ.get("FUZZ_SHARED", "/nonexistent"))


def digest(results: Iterable[Any]) -> str:
    """Returns a hash of arrays and of whatever else has a repr."""
    found = hashlib.sha256()
    for one in results:
        if isinstance(one, mx.array):
            mx.eval(one)
            one = ops.to_host(one)
        found.update(
            f"{one.dtype}{one.shape}".encode() + one.tobytes() if isinstance(one, np.ndarray) else repr(one).encode()
        )
    return found.hexdigest()[:16]


def first_logits(folder: Path) -> str:
    """Runs two chunks of a prompt of two rows through the folder's decoder."""
    model = load_folder(folder)
    assert model.cache_mode
    session = Decoder(model.decoder, 2).begin_session([5, 5])
    results = []
    for size in (4, 1):
        logits = session.step(np.full((2, size), 3, np.int32), [size, size])
        session.evaluate(logits)
        results.append(logits)
    return digest(results)


# Graphs.

GRAPHS = [
    *("llama", "llama_q4", "llama_genai", "mistral_genai", "gpt2_ort", "qwen3_genai_int4", "qwen3_genai_qdq", "lfm2"),
    *("qwen2_genai_tied4", "qwen2_genai_tied8", "deltanet_ort", "gpt2_merged", "granitemoe_dynamo", "gemma2", "bloom"),
    *("qwen3_moe", "gpt_oss", "qwen2_dynamo_raw", "gemma3_genai", "opt", "falcon", "deepseek_v3"),
]


@functools.cache
def graph_bytes(name: str) -> bytes:
    if name.startswith("toy"):
        return toy.decoder(opset=int(name[3:])).SerializeToString()
    return (FIXTURES / name / "model.onnx").read_bytes()


def graph(rng: Random, folder: Path) -> str:
    """An ONNX graph with edits converts and runs, or is refused; nothing else is written."""
    name = rng.choice(["toy11", "toy13", "toy18"]) if rng.random() < 0.5 else rng.choice(GRAPHS)
    source, out = folder / "source", folder / "out"
    source.mkdir()
    model = onnx.ModelProto.FromString(graph_bytes(name))
    onnx_edits.edit(model, rng)
    (source / "model.onnx").write_bytes(model.SerializeToString())
    if not name.startswith("toy"):
        for companion in ("config.json", "genai_config.json", "generation_config.json"):
            if (FIXTURES / name / companion).is_file():
                data = (FIXTURES / name / companion).read_bytes()
                data = json_edits.edited_text(data, rng) if rng.random() < 0.1 else data
                (source / companion).write_bytes(data)
    precision = PrecisionOptions()
    if rng.random() < 0.1:
        precision = rng.choice(
            [
                PrecisionOptions(dtype="float16"),
                PrecisionOptions(quantize=Quantization(8, 32)),
                PrecisionOptions(float_activations=True),
            ]
        )
    try:
        convert(source, "model.onnx", out, progress=False, precision=precision)
    finally:
        assert sorted(os.listdir(folder)) in (["source"], ["out", "source"]), f"{os.listdir(folder)} is left"
    return first_logits(out)


# Operators.


@functools.cache
def nodes() -> list[recorded_nodes.RecordedNode]:
    return recorded_nodes.load(SHARED / "nodes.npz")


def operator(rng: Random, folder: Path) -> str:
    """A node with other attributes or other inputs runs on the host or on the device, or is refused."""
    recorded = rng.choice(nodes())
    node, arrays = recorded.node, list(recorded.arrays)
    attrs = dict(node.attrs)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.4:
            edit_attributes(attrs, ops.OPERATORS[node.op].attribute_defaults, rng)
        elif arrays:
            edit_inputs(arrays, rng)
    names = tuple("" if array is None else f"in{i}" for i, array in enumerate(arrays))
    node = replace(node, inputs=names, attrs=attrs)
    hosted = rng.random() < 0.3
    values: dict[str, Any] = {}
    for name, array in zip(names, arrays, strict=True):
        if array is not None:
            values[name] = array if hosted or rng.random() < 0.2 else ops.to_device(array)
    return digest(evaluate_node(node, values))


def edit_attributes(attrs: dict[str, Any], defaults: dict[str, Any], rng: Random) -> None:
    names = [*defaults, *attrs]
    if not names:
        return
    name = rng.choice(names)
    old = attrs.get(name, defaults.get(name))
    if rng.random() < 0.1:
        attrs.pop(name, None)
    elif isinstance(old, np.ndarray):
        attrs[name] = onnx_edits.edited_array(old, rng)
    elif isinstance(old, int) or (old is None and rng.random() < 0.5):
        attrs[name] = onnx_edits.clip(extremes.integer(rng, old))
    elif isinstance(old, float):
        attrs[name] = rng.choice(extremes.FLOATS)
    else:
        attrs[name] = json_edits.near(old, rng) if old is not None else rng.choice([[0], [1, -1], "x", 1.5])


def edit_inputs(arrays: list[np.ndarray | None], rng: Random) -> None:
    at = rng.randrange(len(arrays))
    kind = rng.randrange(10)
    if kind == 0:
        arrays[at] = None
    elif kind == 1:
        arrays[at] = rng.choice(arrays)
    elif kind == 2:
        arrays.append(rng.choice(arrays))
    elif kind == 3:
        del arrays[-1]
    else:
        array = arrays[at]
        arrays[at] = np.array(extremes.integer(rng) % 2**63) if array is None else onnx_edits.edited_array(array, rng)


# Converted folders.


@functools.cache
def shared_names(suffix: str = "") -> list[str]:
    """Returns the names of the converted folders that cases share, or of those with a file of a prompt cache."""
    return sorted(path.parent.name for path in SHARED.glob(f"*/{suffix or 'program.json'}"))


def copy_converted(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(SHARED / name, folder / "model"))


def program(rng: Random, folder: Path) -> str:
    """A converted folder whose program.json, weights or other files are changed loads and runs, or is refused."""
    place = copy_converted(rng.choice(shared_names()), folder)
    file = place / rng.choice(
        ["program.json"] * 6 + ["model.safetensors"] * 2 + ["config.json", "generation_config.json"]
    )
    if not file.is_file():
        file = place / "program.json"
    change = safetensors_edits.edited if file.suffix == ".safetensors" else json_edits.edited_text
    file.write_bytes(change(file.read_bytes(), rng))
    return first_logits(place) + generated(place, rng)


def generated(place: Path, rng: Random) -> str:
    """A few tokens of a folder's model."""
    model = load_folder(place)
    ctx = generation.context(model, max_new_tokens=3, token_logprobs=True)
    compiled = generation.compile(ctx, 2)
    return digest(generation.generate(compiled, [[3, 5, 7], [4]], [0, 1]))


@functools.cache
def model(name: str) -> Any:
    return load_folder(SHARED / name)


def prompt_cache(rng: Random, folder: Path) -> str:
    """A file of a prompt cache that is changed is taken or refused."""
    name = rng.choice(shared_names(CACHE_FILE))
    (folder / "cache").write_bytes(safetensors_edits.edited((SHARED / name / CACHE_FILE).read_bytes(), rng))
    cache = PromptCache.load(folder / "cache", model(name))
    ctx = generation.context(model(name), max_new_tokens=2, token_logprobs=True, eos_token_id=None)
    return digest(generation.generate(generation.compile(ctx, 1), [PROMPT], [0], prompt_cache=cache))


CACHE_FILE = "prompts.cache"
PROMPT = [3, 5, 7, 9, 3, 5, 7, 9, 4, 4]


# Texts.


def tokenizer(rng: Random, folder: Path) -> str:
    """A tokenizer whose files are changed encodes and decodes, or is refused."""
    base = rng.choice([FIXTURES / "llama", FIXTURES / "mistral", DEMO, *sorted((SHARED / "tokenizers").iterdir())])
    files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    present = [file for file in files if (base / file).is_file()]
    edited = rng.choice([present[0]] * 3 + present)
    for file in present:
        data = (base / file).read_bytes()
        (folder / file).write_bytes(json_edits.edited_text(data, rng) if file == edited else data)
    made = Tokenizer.from_folder(folder)
    if made is None:
        return "none"
    texts = ["Hello wörld", "", " a  b\n\t", "<s></s><unk>", "🙂\u202e\0", rng.choice(extremes.TEXTS)]
    results: list[Any] = []
    for line in texts:
        ids = made.encode(line, rng.random() < 0.5)
        results += [ids, made.decode(ids), made.decode(ids, skip_special_tokens=False)]
    stream = made.stream()
    results += [stream.push(token) for token in ids]
    ids = [extremes.integer(rng) for _ in range(3)]
    try:
        results.append(made.decode(ids))
    finally:
        results.append(made.vocab_size)
    if made.has_chat_template:
        results.append(made.apply_chat_template([{"role": "user", "content": "Hi"}]))
    return digest(results)


def template(rng: Random, folder: Path) -> str:
    """A chat template that is changed or made up renders, or is refused; in time."""
    shutil.copy(FIXTURES / "llama" / "tokenizer.json", folder)
    folders = [FIXTURES / "llama", FIXTURES / "llama_genai", DEMO]
    base = rng.choice([*templates.BASES, *((one / "chat_template.jinja").read_text() for one in folders)])
    (folder / "chat_template.jinja").write_text(templates.edited(base, rng), errors="surrogatepass")
    made = Tokenizer.from_folder(folder)
    assert made is not None
    messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": rng.choice(extremes.TEXTS)}]
    for _ in range(rng.choice([0, 0, 1])):
        messages = json_edits.edit(messages, rng)
    return digest([made.apply_chat_template(messages)])


# Settings.


def settings(rng: Random, folder: Path) -> str:
    """Generation with settings at their edges, by the caller or by generation_config.json, or an error."""
    loaded = model(rng.choice(["toy", "toy", *shared_names()[:2]]))
    options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 3, 5, 0, -1, 2.0, "3", True])}
    for _ in range(rng.choice([1, 2, 3, 4])):
        name = rng.choice(list(SOUND_SETTINGS) if rng.random() < 0.9 else list(SETTINGS))
        sound = SOUND_SETTINGS.get(name, [None])
        options[name] = rng.choice(sound) if rng.random() < 0.7 else setting_value(rng)
    if rng.random() < 0.3:
        options.setdefault("num_beams", rng.choice([2, 3]))
    if rng.random() < 0.4:
        options["do_sample"] = True
    if type(options["max_new_tokens"]) is int and options["max_new_tokens"] > 64:
        options["max_new_tokens"] = 3  # is sound, and takes long
    if rng.random() < 0.3:
        loaded = replace(loaded, generation_config=options)
        options = {"max_new_tokens": 3}
    if rng.random() < 0.3:
        results = text.generation(loaded, **options)([3, 5, 7], seed=1)
        return digest([one.tokens for one in (results if isinstance(results, list) else [results])])
    ctx = generation.context(loaded, token_logprobs=rng.random() < 0.5, **options)
    rows = rng.choice([1, 2, 3])
    prompts = [[rng.randrange(16) for _ in range(rng.choice([0, 1, 5, 12]))] for _ in range(rows)]
    if rng.random() < 0.2:
        prompts[0] = [rng.choice([extremes.integer(rng), -1, 16, 2**31, 3.0, "x", None])]
    seeds = [extremes.integer(rng) if rng.random() < 0.1 else 1 for _ in range(rows)]
    return digest(generation.generate(generation.compile(ctx, rows), prompts, seeds))


SOUND_SETTINGS: dict[str, list[Any]] = {
    "do_sample": [True],
    "num_beams": [2, 3],
    "num_return_sequences": [1, 2],
    "length_penalty": [0.0, 1.5, -1.0],
    "early_stopping": [True, False, "never"],
    "temperature": [0.1, 1.7],
    "top_k": [1, 3, 15, 16, 99],
    "top_p": [0.0, 0.3, 0.99],
    "min_p": [0.05, 0.9],
    "typical_p": [0.2, 0.9],
    "epsilon_cutoff": [0.01, 0.2],
    "eta_cutoff": [0.01, 0.2],
    "repetition_penalty": [0.5, 1.3],
    "encoder_repetition_penalty": [0.6, 2.0],
    "no_repeat_ngram_size": [1, 2, 3],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[3], [4, 5]], [[15, 15, 15, 15]]],
    "sequence_bias": [[[[9], 2.5], [[9, 9], -6.0]]],
    "min_length": [1, 9],
    "min_new_tokens": [1, 2],
    "forced_bos_token_id": [0, 15],
    "forced_eos_token_id": [1, [1, 9]],
    "suppress_tokens": [[0, 15], list(range(16))],
    "begin_suppress_tokens": [[3, 5], list(range(15))],
    "exponential_decay_length_penalty": [(0, 1.5), (2, 1.01)],
    "eos_token_id": [0, 15, [1, 2], None],
    "pad_token_id": [0, 15],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
}


def setting_value(rng: Random) -> Any:
    kind = rng.randrange(8)
    if kind <= 1:
        return rng.choice([0, 1, 2, 3, 5, 15, 16, 17, -1])
    if kind == 2:
        return rng.choice([0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0, 1e-8, *extremes.FLOATS])
    if kind == 3:
        return [rng.choice([0, 1, 3, 15, 16, -1]) for _ in range(rng.randrange(4))]
    if kind == 4:
        return [[rng.randrange(18) for _ in range(rng.randrange(3))] for _ in range(rng.randrange(4))]
    if kind == 5:
        return rng.choice([True, False, None, "never"])
    if kind == 6:
        return [[[rng.randrange(16)], rng.choice([*extremes.FLOATS, 1, "x"])] for _ in range(rng.randrange(3))]
    return extremes.json_value(rng)


def defect(rng: Random, folder: Path) -> str:
    """What FUZZ_DEFECTS says of this case ("3 exit, 5 sleep"): it tests the fuzzer itself."""
    number = next(n for n in range(1000) if Random(f"defect {n}").getstate() == rng.getstate())
    defects = dict(one.split() for one in os.environ["FUZZ_DEFECTS"].split(", "))
    what = defects.get(str(number))
    if what == "exit":
        os._exit(3)
    elif what == "sleep":
        time.sleep(600)
    elif what == "file":
        Path("left").touch()
    elif what == "memory":
        return digest([np.empty(100, np.uint8)])
    elif what:
        raise KeyError(what)
    return ""


KINDS: dict[str, Callable[[Random, Path], str]] = {
    "graph": graph,
    "operator": operator,
    "program": program,
    "prompt_cache": prompt_cache,
    "tokenizer": tokenizer,
    "template": template,
    "settings": settings,
    "defect": defect,
}
