"""On a GPU the last chunk of a prompt has padding; the tokens are those of the reference."""

import mlx.core as mx
import pytest
from conftest import golden

from mlx_transmuter import generation
from mlx_transmuter.runtime.cache_session import CacheSession


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama_genai", "gpt2", "bloom"])
def test_a_prompt_of_31_tokens_is_one_step_on_a_gpu(name, loaded, monkeypatch):
    model, sizes = loaded(name), []
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": []}
    prompts = [row["prompt"] for row in golden(name)["rows"]]
    batches = [prompts[:1], [(prompt * 31)[:31] for prompt in prompts[:2]]]  # of one length: not packed

    def run():
        ctx = generation.context(model, **settings)
        return [generation.generate(generation.compile(ctx, len(b)), b, [0] * len(b)) for b in batches]

    expected = run()
    step = CacheSession.step

    def watched(self, tokens, counts, positions=None):
        sizes.append(tokens.shape[1])
        return step(self, tokens, counts, positions)

    monkeypatch.setattr(CacheSession, "step", watched)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert run() == expected
    assert [size for size in sizes if size > 1][-1:] == [32]
    assert sizes.count(32) == 1
