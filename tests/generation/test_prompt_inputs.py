"""prompt_inputs and outputs: a decoder run once over padded rows, against onnxruntime's logits."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from conftest import golden

from mlx_transmuter import generation
from mlx_transmuter.program.signature import DecoderSignature


@pytest.mark.parametrize("name", ["llama", "gemma", "opt", "mistral_genai"])
def test_one_step_over_padded_rows_gives_the_logits_of_each_prompt(name, loaded):
    model, rows = loaded(name), golden(name)["rows"]
    length = max(len(row["prompt"]) for row in rows)
    tokens = np.zeros((len(rows), length), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row["prompt"])] = row["prompt"]
    inputs, static = generation.prompt_inputs(model, len(rows), length)
    given = {DecoderSignature.from_program(model.decoder.program).token_input: mx.array(tokens), **inputs, **static}
    logits = np.array(model.decoder(**given)["logits"].astype(mx.float32))
    for place, row in enumerate(rows):
        found = logits[place, len(row["prompt"]) - 1]
        assert np.abs(found - row["logits"]).max() <= 1e-4 * np.ptp(row["logits"])


def test_a_model_without_a_cache_has_no_such_inputs():
    value = SimpleNamespace(name="logits", dtype="float32", shape=("batch", "length", 8))
    tokens = SimpleNamespace(name="input_ids", dtype="int64", shape=("batch", "length"))
    program = SimpleNamespace(inputs=[tokens], outputs=[value], input=lambda name: None)
    assert generation.prompt_inputs(SimpleNamespace(decoder=SimpleNamespace(program=program)), 2, 3) == ({}, {})
    program.outputs = [SimpleNamespace(name="last_hidden_state", dtype="float32", shape=("batch", "length", 8))]
    assert generation.prompt_inputs(SimpleNamespace(decoder=SimpleNamespace(program=program)), 2, 3) == ({}, {})


def test_outputs_are_the_logits_and_the_presents():
    names = [
        "logits",
        "present.0.key",
        "attentions.0",
        "present.0.value",
        "hidden_states.3",
        "present_key_values.1.key",
    ]
    assert generation.outputs(names) == ["logits", "present.0.key", "present.0.value", "present_key_values.1.key"]
