"""The Plan of a decoder: how generation runs it, as its conversion found by trial and its program's meta says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mlx_transmuter.program import Program
from mlx_transmuter.signature import MODES, Mode, Signature, declared_mode

Prompts = Literal["parts", "whole", "single"]
Padding = Literal["right", "left", "none"]
PROMPTS: tuple[Prompts, ...] = ("parts", "whole", "single")
PADDINGS: tuple[Padding, ...] = ("right", "left", "none")


@dataclass(frozen=True)
class Plan:
    """How a decoder runs.

    mode: of its cache (see `declared_mode`). prompts: in "parts" of powers of two; "whole", for a graph that takes
    several tokens only where its cache is empty; "single", for one that never does. padding: on which side of a row's
    tokens a step may have padding, which must not change what the row keeps: "right", "left" (of a graph that reads its
    whole prefix), or "none": the rows of a run then have one length. alone: whether the graph takes one row, so that a
    step runs it once a row.
    """

    mode: Mode
    prompts: Prompts = "parts"
    padding: Padding = "right"
    alone: bool = False

    @staticmethod
    def of(program: Program, signature: Signature) -> Plan:
        """The plan that the conversion recorded; where it says nothing or nonsense, what the graph's form suggests."""
        meta = program.meta
        mode, prompts, padding = meta.get("cache_mode"), meta.get("prompts"), meta.get("padding")
        rereads = not signature.carried
        return Plan(
            mode if mode in MODES else declared_mode(program, signature),
            prompts if prompts in PROMPTS else "whole" if rereads else "parts",
            padding if padding in PADDINGS else "none" if signature.states else "right",
            meta.get("alone") is True,
        )

    @property
    def name(self) -> str:
        """The plan in a word or a few, for records of what was tried."""
        words = [self.mode]
        words += [f"{self.prompts} prompts"] if self.prompts != "parts" else []
        words += [f"padding {self.padding}"] if self.padding != "right" else []
        return ", ".join([*words, "alone"] if self.alone else words)

    def meta(self) -> dict[str, Any]:
        """What a program's meta says of it; `of` reads it."""
        return {"cache_mode": self.mode, "prompts": self.prompts, "padding": self.padding, "alone": self.alone}
