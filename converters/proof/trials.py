"""Trials: which of the rewrites, and which plan, give the graph's own logits; a conversion keeps those."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import Rewrite, RewriteRecord
from mlx_transmuter.converters.passes import (
    POOL_REWRITES,
    apply_rewrites,
    graphs_by_side,
    had_data_dependent_shapes,
)
from mlx_transmuter.converters.passes.simplify.select_cache_branch import select_branch
from mlx_transmuter.converters.proof.contradictions import find_contradiction
from mlx_transmuter.converters.proof.plan_search import candidate_plans, first_agreeing_plan
from mlx_transmuter.converters.proof.proof import ProofBatch, ProofCase
from mlx_transmuter.converters.proof.proof_modules import ProofModules, stream_source
from mlx_transmuter.converters.proof.reference import Reference, UnrewrittenGraph
from mlx_transmuter.converters.proof.rewrite_search import REWRITE_ERRORS, RewriteSearch
from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, LOGIT_INDICES_INPUT, DecoderSignature

# The error of each plan that was tried by its label, or what was raised.
PlanErrors = dict[str, float | str]


class PlanTrial(NamedTuple):
    """The case with which a program agrees, its plan among it, and the error of each plan that was tried."""

    case: ProofCase
    errors: PlanErrors


@dataclass(frozen=True)
class ProvedProgram:
    """A program whose logits agreed with the graph's.

    rewrite_records: what each rewrite did. case: what it was compared with, with the plan by which it runs.
    trial_errors: the error of each plan and each form of the cache that was tried, or what was raised.
    """

    program: Program
    rewrite_records: list[RewriteRecord]
    case: ProofCase
    trial_errors: PlanErrors

    @property
    def error(self) -> float | str:
        """The error of the program as it is."""
        return self.trial_errors[cache_form(self.program) or self.case.plan.label]


@dataclass
class GraphTrials:
    """The trials of rewrites that leave the graph's past and present.

    The graph, whose logits are the reference, reads the weights of its file where it uses them. The weights of the
    first program after it are written, and it runs over what was written; other programs run over weights of the file.
    modules: makes the modules of the programs. writes_weights: False where the weights that a conversion writes are
    others.
    """

    graph: Program
    path: Path
    batch: ProofBatch
    tolerance: float
    modules: ProofModules
    writes_weights: bool = True
    eager: bool = False
    reference: Reference | None = None
    errors: PlanErrors = field(default_factory=dict)  # of the last program that was tried

    def try_program(self, program: Program, records: list[RewriteRecord]) -> PlanTrial | None:
        """Returns the case, for one of the plans, with which the program agrees, or None."""
        try:
            signature = DecoderSignature.from_program(program)
        except REWRITE_ERRORS:
            return None
        is_first = self.reference is None
        reference = self.reference or self.compute_reference(records)
        try:
            if is_first and self.writes_weights:
                self.modules.staged.save(program)
            module = self.modules.module(program)
            plans = candidate_plans(program, signature, token_by_token=reference.token_by_token)
        except REWRITE_ERRORS:
            return None
        cases = [ProofCase(self.path, self.batch, reference.logits, self.tolerance, plan) for plan in plans]
        case, self.errors = first_agreeing_plan(module, cases)
        return PlanTrial(case, self.errors) if case else None

    def runs_as_the_graph(self, start: Program) -> bool:
        """Returns whether the program, as yet without rewrites, gives the reference: if not, no rewrites of it do."""
        if self.reference is None:  # no rewrites could be applied to it
            return False
        return self._unrewritten_graph(start).agrees(self.batch, self.reference.logits, self.tolerance)

    def compute_reference(self, records: list[RewriteRecord]) -> Reference:
        """Returns the reference, computed over the file's weights. What it raises is the graph's own fault."""
        self.eager = had_data_dependent_shapes(records)
        try:
            self.reference = self._unrewritten_graph(self.graph).reference(self.batch, self.tolerance)
        except ConvertError:
            self.raise_contradiction()
            raise
        return self.reference

    def raise_contradiction(self) -> None:
        """Raises ConvertError where the unrewritten graph contradicts its own declarations or steps."""
        graph, reference = self._unrewritten_graph(self.graph), self.reference
        whole_prompts = None if reference is None or reference.token_by_token else reference.logits
        contradiction = find_contradiction(graph, self.batch, whole_prompts, self.tolerance)
        if contradiction is not None:
            raise ConvertError(
                self.path,
                f"a file that contradicts itself: {contradiction.found}",
                contradiction.expected,
                "export the model again",
                contradiction.node,
            )

    def _unrewritten_graph(self, program: Program) -> UnrewrittenGraph:
        modules = tuple(stream_source(graph) for graph in graphs_by_side(program))
        return UnrewrittenGraph(modules, DecoderSignature.from_program(program), self.eager, self.path)


def prove_graph_rewrites(trials: GraphTrials, rewrites: tuple[Rewrite, ...]) -> ProvedProgram:
    """Returns the graph after as many of the `rewrites`, which leave its past and present, as agree.

    Of a merged decoder this is the branch with a cache alone, if it gives what both give. Raises ConvertError where no
    rewrites and no plan agree: of the file, where it contradicts itself, else of its conversion.
    """
    branch = DecoderSignature.from_program(trials.graph).use_cache_branch_input
    starts = [select_branch(trials.graph, branch, True), trials.graph] if branch else [trials.graph]
    for start in starts:
        search = RewriteSearch(start, trials.try_program)
        agreeing = search.attempt(rewrites)
        if agreeing is None and (start is trials.graph or trials.runs_as_the_graph(start)):
            if trials.reference is not None and search.attempt(()) is None:
                trials.raise_contradiction()  # no rewrite is at fault then, and a search would take long
            agreeing = search.leave_out_wrong(rewrites)
        if agreeing is not None:
            (case, errors), records = agreeing.result, agreeing.all_records(rewrites)
            return ProvedProgram(agreeing.program, records, case, errors)
    if trials.reference is None:  # nothing could be built of the graph: this raises what is wrong with it
        program, records = apply_rewrites(trials.graph, ())
        DecoderSignature.from_program(program)
        trials.compute_reference(records)
    trials.raise_contradiction()
    errors = ", ".join(f"{plan}: {error}" for plan, error in trials.errors.items())
    raise ConvertError(
        trials.path,
        f"a module that disagrees with its graph ({errors})",
        f"logits within {trials.tolerance:g} of their range",
        "report the model to this project: its conversion is wrong, and was deleted",
    )


def prove_pool_rewrites(proved: ProvedProgram, modules: ProofModules) -> ProvedProgram:
    """Returns the program over pools, with as many of POOL_REWRITES as agree. The plan stays that of the graph.

    Of a program whose cache stays as it was only the last logits are computed.
    """
    start, case, errors = proved.program, proved.case, dict(proved.trial_errors)

    def try_program(program: Program, _: list[RewriteRecord]) -> float | None:
        form = cache_form(program)
        if not form:  # the program is taken as it was
            return 0.0
        try:
            error = case.error(modules.module(program))
        except Exception:  # whatever it raises, it does not run
            error = math.inf
        errors[form] = error
        return error if error <= case.tolerance else None

    search = RewriteSearch(start, try_program)
    agreeing = search.attempt(POOL_REWRITES) or search.leave_out_wrong(POOL_REWRITES)
    assert agreeing is not None, "the program without any of them agrees"
    form = cache_form(agreeing.program)
    if form:
        errors[form] = agreeing.result
    return replace(
        proved,
        program=agreeing.program if form else start,
        rewrite_records=proved.rewrite_records + agreeing.all_records(POOL_REWRITES),
        trial_errors=errors,
    )


def cache_form(program: Program) -> str:
    """Returns what POOL_REWRITES made of the program: "pools", "last logits", or "" for nothing."""
    if program.input(CACHE_INDEX_INPUT):
        return "pools"
    return "last logits" if program.input(LOGIT_INDICES_INPUT) else ""
