"""Generation, token for token as transformers 4.57.6: settings, processors, sampling, beams and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_transmuter.generation.batch import StepOutput
from mlx_transmuter.generation.drafts.draft_tree import DraftCounts
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.float_bits import from_bits, to_bits
from mlx_transmuter.generation.generation_context import CompiledGeneration, GenerationContext, compile, context
from mlx_transmuter.generation.loop import generate_steps
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.row import GenerationResult, Token
from mlx_transmuter.generation.settings import SETTINGS, Settings, max_new_tokens
from mlx_transmuter.generation.single_pass_inputs import prompt_inputs
from mlx_transmuter.program.signature import outputs

__all__ = [
    "SETTINGS",
    "CompiledGeneration",
    "DraftCounts",
    "GenerationContext",
    "GenerationError",
    "GenerationResult",
    "PromptCache",
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
    """The new tokens after each prompt, without the eos token; `run` also tells why each text ended.

    prompts: batch_size lists of token ids; [] is a padding row. seeds: one int per prompt. inputs: the arrays that the
    context names in `given`, with one row per prompt; `position_ids`, per prompt a list of its positions on each axis,
    [] for the default; `encoder_input_ids`, per prompt the encoder's tokens, which the encoder_ settings read.
    prompt_cache: what earlier calls with it computed for the beginnings of these prompts.

    on_token gets a dict after each step of a group: `token` int32, -1 where a text has no new one, `finished` bool and,
    with token_logprobs, `logprob` float32, each with one entry per text. Raises GenerationError for wrong prompts,
    seeds or inputs.
    """
    steps = generate_steps(gen, prompts, seeds, inputs, prompt_cache=prompt_cache)
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return [result.tokens for result in end.value]
        if on_token is not None:
            on_token({name: value for name, value in step._asdict().items() if value is not None})
