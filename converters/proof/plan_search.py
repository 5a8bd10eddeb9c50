"""The search for the plan by which a module runs: the first one whose logits agree with those of the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlx_transmuter.converters.proof.proof import ProofCase
from mlx_transmuter.program import Program
from mlx_transmuter.program.run_plan import PaddingSide, RunPlan
from mlx_transmuter.program.signature import CacheMode, DecoderSignature, infer_cache_mode
from mlx_transmuter.runtime.module import ProgramModule


def candidate_plans(program: Program, signature: DecoderSignature, *, token_by_token: bool = False) -> list[RunPlan]:
    """Returns the plans to try, the fastest first.

    A graph that counts its positions from the mask runs over a buffer although it declares no positions; without a mask
    nothing hides free columns, however little they weigh in a trial. token_by_token: whether the graph takes its
    prompts one token at a time.
    """
    modes: tuple[CacheMode, ...] = ("grow",)
    padding_sides: tuple[PaddingSide, ...] = ("right", "none")
    if signature.mask_input:
        in_place = infer_cache_mode(program, signature) == "in_place"
        modes, padding_sides = ("in_place" if in_place else "append", "grow"), ("right", "left", "none")
    if not signature.pairs:
        plans = [RunPlan("grow", "whole", padding) for padding in padding_sides]
    elif signature.use_cache_branch_input:  # the branch without a cache has no columns to leave free
        plans = [RunPlan("grow", "chunks"), RunPlan("grow", "whole")]
    elif signature.state_pairs:
        padded = [RunPlan(modes[0])] if signature.mask_input else []
        plans = [*padded, *(RunPlan(mode, "chunks", "none") for mode in modes)]
    else:
        plans = [RunPlan(mode) for mode in modes]
    if signature.single_row:
        plans += [replace(plan, row_by_row=True) for plan in plans]
    return [replace(plan, prompt_mode="token by token") for plan in plans] if token_by_token else plans


def first_agreeing_plan(
    module: ProgramModule, cases: Sequence[ProofCase]
) -> tuple[ProofCase | None, dict[str, float | str]]:
    """Returns the first of the cases, each for another plan, with which the module agrees, or None, and their errors.

    The error of each plan that was tried, by its label, is a number, or the message of what was raised.
    """
    errors: dict[str, float | str] = {}
    for case in cases:
        try:
            error = case.error(module)
        except Exception as problem:  # whatever a graph raises over this cache, it does not run over it
            errors[case.plan.label] = str(problem)
            continue
        errors[case.plan.label] = error
        if error <= case.tolerance:
            return case, errors
    return None, errors


def recordable_errors(errors: dict[str, float | str]) -> dict[str, float | str]:
    """Returns the errors with a word in place of infinity, which JSON lacks."""
    return {name: "infinite" if error == math.inf else error for name, error in errors.items()}
