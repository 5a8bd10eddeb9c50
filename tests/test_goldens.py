"""The fixtures' goldens: logits of onnxruntime and tokens of transformers, from conversion to generation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from conftest import NAMES, golden

from mlx_transmuter import generation, ops
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks

# How far logits may be from onnxruntime's on the same file, relative to their range: float32 sums in another order;
# 4-bit products accumulate in another order over dequantized blocks; half types round each sum.
LIMITS = {
    **dict.fromkeys(
        ("llama_q4", "qwen3_genai_int4", "qwen3_genai_qdq", "qwen2_genai_tied4", "qwen2_genai_tied8"), 1e-3
    ),
    **dict.fromkeys(("llama_fp16", "qwen3_genai_fp16"), 2e-2),
}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_onnxruntime(name, loaded):
    model = loaded(name)
    decoder = Decoder(model.decoder, 1)
    for row in golden(name)["rows"]:
        run = decoder.begin_session([len(row["prompt"])])
        logits, start = None, 0
        for part in prefill_chunks(len(row["prompt"]), prompt_mode=decoder.prompt_mode):
            logits = run.step(np.array([row["prompt"][start : start + part]], np.int32), [part])
            run.evaluate(logits)
            start += part
        assert logits is not None
        found = ops.to_host(logits[0].astype(mx.float32))
        far = np.abs(found - row["logits"]).max() / np.ptp(row["logits"])
        assert far <= LIMITS.get(name, 1e-4), f"{name}, prompt of {len(row['prompt'])}: {far:.1e}"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_reference_alone_and_in_a_ragged_batch(name, loaded):
    model, want = loaded(name), golden(name)
    rows = want["rows"]
    ctx = generation.context(model, max_new_tokens=want["max_new_tokens"], do_sample=False)
    together = generation.generate(generation.compile(ctx, len(rows)), [row["prompt"] for row in rows], [0] * len(rows))
    assert [[token.id for token in row] for row in together] == [row["tokens"] for row in rows]
    alone = generation.compile(ctx, 1)
    for row in rows:
        (tokens,) = generation.generate(alone, [row["prompt"]], [0])
        assert [token.id for token in tokens] == row["tokens"]
