"""The language model of `fake_decoder` as a model of Python transformers: the truth that generation is compared with.

Import it only after `pytest.importorskip("transformers")`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from fake_decoder import logits_after
from reference_loops import id_list
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel  # pyright: ignore[reportMissingImports]
from transformers.modeling_outputs import CausalLMOutputWithPast  # pyright: ignore[reportMissingImports]


class FakeConfig(PretrainedConfig):
    model_type = "fake"


class FakeTransformersModel(PreTrainedModel, GenerationMixin):
    """`logits_after` behind `generate` of transformers."""

    config_class = FakeConfig

    def __init__(self, vocab: int = 16, salt: int = 0):
        super().__init__(FakeConfig(vocab_size=vocab))
        self.vocab, self.salt = vocab, salt
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        rows = [logits_after(row, self.vocab, self.salt) for row in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.tensor(np.stack(rows))[:, None])  # type: ignore[arg-type]

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def generate_results(self, prompt: list[int], **settings: Any) -> list[tuple[list[int], list[float], float | None]]:
        """Returns the new tokens without eos, their log-probabilities and the score of each result of a prompt alone."""
        with _quiet():
            output = self.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                use_cache=False,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                **settings,
            )
            beams = getattr(output, "beam_indices", None)
            logs = self.compute_transition_scores(output.sequences, output.scores, beams, normalize_logits=True)
        eos = id_list(settings.get("eos_token_id"))
        scores = getattr(output, "sequences_scores", None)
        results = []
        for row, sequence in enumerate(output.sequences[:, len(prompt) :].tolist()):
            end = next((place for place, token in enumerate(sequence) if token in eos), len(sequence))
            results.append((sequence[:end], logs[row, :end].tolist(), None if scores is None else float(scores[row])))
        return results


@contextlib.contextmanager
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
