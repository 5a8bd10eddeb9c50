"""Generation, token for token as transformers 4.57.6: settings, processors, sampling, beams and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_transmuter.generation.batch import StepOutput
from mlx_transmuter.generation.drafts.draft_tree import DraftCounts
from mlx_transmuter.generation.errors import GenerationError, ScoreError
from mlx_transmuter.generation.float_bits import from_bits, to_bits
from mlx_transmuter.generation.generation_context import CompiledGeneration, GenerationContext, compile, context
from mlx_transmuter.generation.loop import generate_steps, run_to_end
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.prompt_inputs import prompt_inputs
from mlx_transmuter.generation.row import GenerationResult, Token
from mlx_transmuter.generation.settings import SETTINGS, Settings, max_new_tokens
from mlx_transmuter.program.signature import outputs

__all__ = [
    "SETTINGS",
    "CompiledGeneration",
    "DraftCounts",
    "GenerationContext",
    "GenerationError",
    "GenerationResult",
    "PromptCache",
    "ScoreError",
    "Settings",
    "StepOutput",
    "Token",
    "compile",
    "context",
    "from_bits",
    "generate",
    "generate_steps",
    "max_new_tokens",
    "outputs",
    "prompt_inputs",
    "run_to_end",
    "to_bits",
]


def generate(
    gen: CompiledGeneration,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    inputs: Mapping[str, Any] | None = None,
    on_token: Callable[[dict[str, Any]], Any] | None = None,
    *,
    prompt_cache: PromptCache | None = None,
) -> list[list[Token]]:
    """Returns the new tokens after each prompt, without the eos token; `generate_steps` also says why each row ended.

    prompts: batch_size lists of token ids; [] is a padding row. seeds: one int per prompt. inputs: the arrays of the
    decoder's extra inputs, with one row per prompt; `position_ids`, per prompt a list of its positions on each axis, []
    for the default; `encoder_input_ids`, per prompt the encoder's tokens, which the encoder_ settings read.
    prompt_cache: what earlier calls with it computed for prefixes of these prompts is not computed again.

    on_token gets a dict after each step of a group: `token` int32, -1 where a row has no new one, `finished` bool and,
    with token_logprobs, `logprob` float32, each with one entry per result. Raises GenerationError for wrong prompts,
    seeds or inputs, and ScoreError, once the other rows are done, for rows whose scores left no token to select.
    """
    steps = generate_steps(gen, prompts, seeds, inputs, prompt_cache=prompt_cache)

    def report(step: StepOutput) -> None:
        if on_token is not None:
            on_token({name: value for name, value in step._asdict().items() if value is not None})

    return [result.tokens for result in run_to_end(steps, report)]
