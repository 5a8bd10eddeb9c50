"""RunPlan: how generation runs a decoder, as its conversion found by trial and its program's metadata say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_transmuter.program.metadata import Metadata
from mlx_transmuter.program.program import Program
from mlx_transmuter.program.signature import CACHE_MODES, CacheMode, DecoderSignature, infer_cache_mode

PromptMode = Literal["chunks", "whole", "token by token"]
PaddingSide = Literal["right", "left", "none"]
# The saved names of the prompt modes.
PROMPT_MODES: dict[str, PromptMode] = {"parts": "chunks", "whole": "whole", "single": "token by token"}
PADDING_SIDES: tuple[PaddingSide, ...] = ("right", "left", "none")


@dataclass(frozen=True)
class RunPlan:
    """How a decoder runs.

    cache_mode: see `infer_cache_mode`. prompt_mode: in "chunks" of powers of two; at once ("whole"), for a
    graph that takes several tokens only where its cache is empty; "token by token", for one that never does.
    padding_side: on which side of a row's tokens a step may have padding, which must not change what the row keeps:
    "right", "left" (of a graph that reads all tokens at each step), or "none": the rows of a session then have one
    length. row_by_row: whether the graph takes one row, so that a step runs it once a row.
    """

    cache_mode: CacheMode
    prompt_mode: PromptMode = "chunks"
    padding_side: PaddingSide = "right"
    row_by_row: bool = False

    @staticmethod
    def from_program(program: Program, signature: DecoderSignature) -> RunPlan:
        """Returns the plan that the conversion recorded; for what is absent or malformed, what the graph's form
        suggests.
        """
        metadata = Metadata(program.metadata)
        saved_prompt_mode = metadata.choice("prompts", tuple(PROMPT_MODES), "parts" if signature.pairs else "whole")
        return RunPlan(
            metadata.choice("cache_mode", CACHE_MODES, infer_cache_mode(program, signature)),
            PROMPT_MODES[saved_prompt_mode],
            metadata.choice("padding", PADDING_SIDES, "none" if signature.state_pairs else "right"),
            metadata.flag("alone"),
        )

    @property
    def label(self) -> str:
        """The plan in a word or a few, for records of what was tried."""
        words = [self.cache_mode]
        words += ["whole prompts"] if self.prompt_mode == "whole" else []
        words += ["prompts token by token"] if self.prompt_mode == "token by token" else []
        words += [f"padding {self.padding_side}"] if self.padding_side != "right" else []
        return ", ".join([*words, "one row at a time"] if self.row_by_row else words)

    def to_metadata(self) -> dict[str, Any]:
        """Returns what a program's metadata say of the plan; `from_program` reads it."""
        return {
            "cache_mode": self.cache_mode,
            "prompts": next(name for name, mode in PROMPT_MODES.items() if mode == self.prompt_mode),
            "padding": self.padding_side,
            "alone": self.row_by_row,
        }
