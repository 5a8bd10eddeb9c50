"""Files in the forms that tools make of exports, each against onnxruntime on the same file."""

from __future__ import annotations

import exporter_forms
import mlx.core as mx
import numpy as np
import pytest
from decoding import greedy, prefill

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT
from mlx_transmuter.runtime.decoder import Decoder

pytestmark = pytest.mark.slow

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")  # onnxruntime's quantizers to 4 bits need it

LENGTHS, NEW = (3, 11, 29), 12
# How far logits may be from onnxruntime's, and how far the best must be from the second in a prompt's tokens: 4-bit
# products accumulate in another order over dequantized blocks, half types round each sum.
FLOAT, FOUR, HALF = (1e-4, 2e-3), (1e-3, 4e-3), (2e-2, 8e-3)
LIMITS = {"q4": FOUR, "q4f16": HALF, "fp16": HALF, "O4": HALF}
# The operators that the tool puts into the file, and the nodes that may be left of it: a few more than of the export,
# since queries and keys that the tool has put in another order are not rotated at once.
FUSED = {
    ("llama", "O2"): {"SkipSimplifiedLayerNormalization", "QuickGelu"},
    ("llama", "O3"): {"SkipSimplifiedLayerNormalization", "QuickGelu"},
    ("llama", "O4"): {"SkipSimplifiedLayerNormalization", "RotaryEmbedding"},
    ("gpt2", "O2"): {"SkipLayerNormalization", "FastGelu"},
    ("gpt2", "O3"): {"SkipLayerNormalization", "FastGelu"},
    ("gpt2", "O4"): {"SkipLayerNormalization", "FastGelu"},
    ("bloom", "O2"): {"SkipLayerNormalization", "FastGelu"},
    ("llama", "q4"): {"MatMulNBits"},
    ("llama", "bnb4"): {"MatMulBnb4"},
}
MOST = {"llama": 60, "gpt2": 42, "bloom": 74}
CASES = [(name, form) for name in ("llama", "gpt2") for form in (*exporter_forms.LEVELS, *exporter_forms.TYPES)] + [
    ("bloom", "O2")
]


def prompts(row, margin: float) -> list[tuple[list[int], list[int], np.ndarray]]:
    """A prompt of each length with onnxruntime's tokens after it, all far from ties, and the logits of the first."""
    found = []
    for length in LENGTHS:
        for seed in range(100):
            prompt = np.random.default_rng([seed, length]).integers(3, 120, length).tolist()
            logits, tokens = row.greedy(prompt, NEW, [])
            best = np.sort(logits, axis=-1)
            if ((best[:, -1] - best[:, -2]) > margin * np.ptp(logits, axis=-1)).all():
                found.append((prompt, tokens, logits[0]))
                break
    assert len(found) == len(LENGTHS)
    return found


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_form_of_an_export_gives_what_onnxruntime_gives_of_it(name, form, tmp_path):
    from scripts.fixtures.onnx_rows import OnnxRow

    source = exporter_forms.make(name, form, tmp_path / "source")
    row = OnnxRow(source / "model.onnx")
    kinds = {node.op_type for node in row.model.graph.node}
    assert kinds >= FUSED.get((name, form), set())
    limit, margin = LIMITS.get(form, FLOAT)
    cases = prompts(row, margin)
    module = load_folder(convert(source, "model.onnx", tmp_path / "out", progress=False)).decoder
    mx.eval(module.parameters())
    assert module.program.input(CACHE_INDEX_INPUT) is not None
    assert len(module.program.nodes) <= MOST[name]
    alone = Decoder(module, 1)
    for prompt, tokens, wanted in cases:
        found = prefill(alone.begin_session([len(prompt)]), [prompt])[0]
        assert np.abs(found - wanted).max() <= limit * np.ptp(wanted)
        assert greedy(alone.begin_session([len(prompt) + NEW]), [prompt], [NEW]) == [tokens]
    batch = Decoder(module, len(cases)).begin_session([len(prompt) + NEW for prompt, _, _ in cases])
    assert greedy(batch, [prompt for prompt, _, _ in cases], [NEW] * len(cases)) == [tokens for _, tokens, _ in cases]
