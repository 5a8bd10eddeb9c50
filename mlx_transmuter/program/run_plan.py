"""The Plan of a decoder: how generation runs it, as its conversion found by trial and its program's meta says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import CACHE_MODES, CacheMode, DecoderSignature, infer_cache_mode

PromptMode = Literal["parts", "whole", "single"]
PaddingSide = Literal["right", "left", "none"]
PROMPT_MODES: tuple[PromptMode, ...] = ("parts", "whole", "single")
PADDING_SIDES: tuple[PaddingSide, ...] = ("right", "left", "none")


@dataclass(frozen=True)
class RunPlan:
    """How a decoder runs.

    mode: of its cache (see `declared_mode`). prompts: in "parts" of powers of two; "whole", for a graph that takes
    several tokens only where its cache is empty; "single", for one that never does. padding: on which side of a row's
    tokens a step may have padding, which must not change what the row keeps: "right", "left" (of a graph that reads its
    whole prefix), or "none": the rows of a run then have one length. alone: whether the graph takes one row, so that a
    step runs it once a row.
    """

    cache_mode: CacheMode
    prompt_mode: PromptMode = "parts"
    padding_side: PaddingSide = "right"
    row_by_row: bool = False

    @staticmethod
    def from_program(program: Program, signature: DecoderSignature) -> RunPlan:
        """The plan that the conversion recorded; where it says nothing or nonsense, what the graph's form suggests."""
        meta = program.metadata
        mode, prompts, padding = meta.get("cache_mode"), meta.get("prompts"), meta.get("padding")
        rereads = not signature.pairs
        return RunPlan(
            mode if mode in CACHE_MODES else infer_cache_mode(program, signature),
            prompts if prompts in PROMPT_MODES else "whole" if rereads else "parts",
            padding if padding in PADDING_SIDES else "none" if signature.state_pairs else "right",
            meta.get("alone") is True,
        )

    @property
    def label(self) -> str:
        """The plan in a word or a few, for records of what was tried."""
        words = [self.cache_mode]
        words += [f"{self.prompt_mode} prompts"] if self.prompt_mode != "parts" else []
        words += [f"padding {self.padding_side}"] if self.padding_side != "right" else []
        return ", ".join([*words, "alone"] if self.row_by_row else words)

    def to_metadata(self) -> dict[str, Any]:
        """What a program's meta says of it; `of` reads it."""
        return {
            "cache_mode": self.cache_mode,
            "prompts": self.prompt_mode,
            "padding": self.padding_side,
            "alone": self.row_by_row,
        }
