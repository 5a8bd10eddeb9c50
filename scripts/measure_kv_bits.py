"""Measures what 8- and 4-bit pools change, on the fixtures and the demo model, into the table of docs/caches.md.

Each text is followed token by token: the share of steps whose likeliest token stays, and the largest change of a logit
against the spread of the step's logits.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(ROOT := Path(__file__).parent.parent))
from mlx_transmuter import ops, text
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.runtime.decoder import Decoder

FIXTURES, DEMO, PAGE = ROOT / "tests" / "fixtures", ROOT / "mlx_transmuter" / "demo", ROOT / "docs" / "caches.md"


def logits(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """The logits [tokens, vocab] after each token."""
    run, found = decoder.begin_session([len(tokens)]), []
    for token in tokens:
        step = run.step(np.array([[token]], np.int32), [1])
        run.evaluate(step)
        found.append(ops.to_host(step[0].astype(mx.float32)))
    return np.stack(found)


def measured(source: Path) -> str | None:
    """The line of a model; None for one without keys and values."""
    with tempfile.TemporaryDirectory() as place:
        model = load_folder(convert(source, "model.onnx", Path(place) / "model", progress=False))
    if source == DEMO:
        checks = json.loads((DEMO / "checks.json").read_bytes())[::4]
        task = text.generation(model, do_sample=False)
        prompts = [task.encode(check.get("messages") or check["prompt"]) for check in checks]
        texts = [[*prompt, *task(prompt).tokens] for prompt in prompts]
    else:
        texts = [row["prompt"] + row["tokens"] for row in json.loads((source / "golden.json").read_bytes())["rows"]]
    plain = Decoder(model.decoder, 1)
    if not plain.signature.cache_pairs:
        return None
    wanted = [logits(plain, tokens) for tokens in texts]
    cells = [source.name, str(plain.signature.cache_pairs[0].head_dim), str(sum(map(len, texts)))]
    for bits in (8, 4):
        packed = Decoder(model.decoder, 1, kv_bits=bits)
        found = [logits(packed, tokens) for tokens in texts]
        same = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(found, wanted, strict=True)])
        off = max((np.abs(a - b).max(-1) / np.ptp(b, -1)).max() for a, b in zip(found, wanted, strict=True))
        size = packed.pool_specs[0].width * 4 / (plain.pool_specs[0].width * plain.pool_specs[0].dtype.size)
        cells += [f"{size:.2f}", f"{same.mean():.1%}", f"{off:.1%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sources = [DEMO, *sorted(path.parent for path in FIXTURES.glob("*/golden.json"))]
    lines = [line for line in map(measured, sources) if line is not None]
    head = "| model | head | steps | " + " | ".join(f"{b} bit: size | same token | logit" for b in (8, 4)) + " |"
    table = "\n".join([head, "|---" * 9 + "|", *lines])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"\| model \|.*(?:\n\|.*)*", lambda _: table, page), encoding="utf-8")
