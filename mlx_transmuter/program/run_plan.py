"""RunPlan: how generation runs a decoder, as its conversion found by trial and its program's metadata say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_transmuter.program.metadata import Metadata
from mlx_transmuter.program.program import Program
from mlx_transmuter.program.signature import CACHE_MODES, CacheMode, DecoderSignature, infer_cache_mode

PromptMode = Literal["parts", "whole", "single"]
PaddingSide = Literal["right", "left", "none"]
PROMPT_MODES: tuple[PromptMode, ...] = ("parts", "whole", "single")
PADDING_SIDES: tuple[PaddingSide, ...] = ("right", "left", "none")


@dataclass(frozen=True)
class RunPlan:
    """How a decoder runs.

    cache_mode: see `infer_cache_mode`. prompt_mode: in chunks of powers of two ("parts"); at once ("whole"), for a
    graph that takes several tokens only where its cache is empty; token by token ("single"), for one that never does.
    padding_side: on which side of a row's tokens a step may have padding, which must not change what the row keeps:
    "right", "left" (of a graph that reads all tokens at each step), or "none": the rows of a session then have one
    length. row_by_row: whether the graph takes one row, so that a step runs it once a row.
    """

    cache_mode: CacheMode
    prompt_mode: PromptMode = "parts"
    padding_side: PaddingSide = "right"
    row_by_row: bool = False

    @staticmethod
    def from_program(program: Program, signature: DecoderSignature) -> RunPlan:
        """Returns the plan that the conversion recorded; for what is absent or malformed, what the graph's form
        suggests.
        """
        metadata = Metadata(program.metadata)
        return RunPlan(
            metadata.choice("cache_mode", CACHE_MODES, infer_cache_mode(program, signature)),
            metadata.choice("prompts", PROMPT_MODES, "parts" if signature.pairs else "whole"),
            metadata.choice("padding", PADDING_SIDES, "none" if signature.state_pairs else "right"),
            metadata.flag("alone"),
        )

    @property
    def label(self) -> str:
        """The plan in a word or a few, for records of what was tried."""
        words = [self.cache_mode]
        words += [f"{self.prompt_mode} prompts"] if self.prompt_mode != "parts" else []
        words += [f"padding {self.padding_side}"] if self.padding_side != "right" else []
        return ", ".join([*words, "alone"] if self.row_by_row else words)

    def to_metadata(self) -> dict[str, Any]:
        """Returns what a program's metadata say of the plan; `from_program` reads it."""
        return {
            "cache_mode": self.cache_mode,
            "prompts": self.prompt_mode,
            "padding": self.padding_side,
            "alone": self.row_by_row,
        }
