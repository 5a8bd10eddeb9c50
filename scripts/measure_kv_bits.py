"""Measures what quantized keys and values change, on the fixtures and the demo model: the table of docs/caches.md.

Each text is repeated token by token, which gives the share of steps whose most likely token is the same, and the
largest change of a logit relative to the range of the step's logits.
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
    session, logits_after = decoder.begin_session([len(tokens)]), []
    for token in tokens:
        step_logits = session.step(np.array([[token]], np.int32), [1])
        session.evaluate(step_logits)
        logits_after.append(ops.to_host(step_logits[0].astype(mx.float32)))
    return np.stack(logits_after)


def table_line(source: Path) -> str | None:
    """The table's line of a model; None for one without keys and values."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_folder(convert(source, "model.onnx", Path(folder) / "model", progress=False))
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
    expected = [logits(plain, tokens) for tokens in texts]
    cells = [source.name, str(plain.signature.cache_pairs[0].head_dim), str(sum(map(len, texts)))]
    for bits in (8, 4):
        quantized = Decoder(model.decoder, 1, kv_bits=bits)
        pairs = [(logits(quantized, tokens), other) for tokens, other in zip(texts, expected, strict=True)]
        same_token = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
        largest_change = max((np.abs(a - b).max(-1) / np.ptp(b, -1)).max() for a, b in pairs)
        size = quantized.pool_specs[0].width * 4 / (plain.pool_specs[0].width * plain.pool_specs[0].dtype.size)
        cells += [f"{size:.2f}", f"{same_token.mean():.1%}", f"{largest_change:.1%}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sources = [DEMO, *sorted(path.parent for path in FIXTURES.glob("*/golden.json"))]
    lines = [line for line in map(table_line, sources) if line is not None]
    head = "| model | head | steps | " + " | ".join(f"{b} bit: size | same token | logit" for b in (8, 4)) + " |"
    table = "\n".join([head, "|---" * 9 + "|", *lines])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"\| model \|.*(?:\n\|.*)*", lambda _: table, page), encoding="utf-8")
