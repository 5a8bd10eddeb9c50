"""Trials: which of the rewrites, and which plan, give the graph's own logits; a conversion keeps those."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.graph.rewriting import Rewrite, RewriteRecord
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.passes import POOL_REWRITES, apply_rewrites, had_data_dependent_shapes
from mlx_transmuter.converters.passes.simplify.select_cache_branch import select_branch
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.program import Program, ProgramError, weights
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, LOGIT_INDICES_INPUT, DecoderSignature, SignatureError
from mlx_transmuter.runtime.module import ProgramModule


@dataclass(frozen=True)
class ProvedProgram:
    """A program whose logits agreed with the graph's: its module, its plan, and how far off each trial was."""

    program: Program
    module: ProgramModule | None
    rewrite_records: list[RewriteRecord]
    plan: RunPlan
    trial_errors: dict[str, Any]
    reference_logits: list[list[np.ndarray]]


def prove_graph_rewrites(
    folder: Path,
    graph: Program,
    path: Path,
    batch: proof.ProofBatch,
    limit: float,
    progress: bool,
    rewrites: tuple[Rewrite, ...],
) -> ProvedProgram:
    """The graph after the `rewrites`, which leave its past and present, as many as agree; its weights are written.

    Of a merged decoder the branch with a cache alone, if it gives what both give.
    """
    signature, errors = DecoderSignature.from_program(graph), {}
    starts = (
        [select_branch(graph, signature.use_cache_branch_input, True), graph]
        if signature.use_cache_branch_input
        else [graph]
    )
    wanted: list[list[np.ndarray]] | None = None
    single: bool | None = None  # whether prompts run token by token; None until it is known
    for start in starts:
        for order in _rewrite_subsets(rewrites):
            try:
                program, records = apply_rewrites(start, order)
                save_staged_weights(folder, program, progress)
                module = ProgramModule(program, weights.load(folder, program))
                tried = proof.candidate_plans(program, DecoderSignature.from_program(program))
            except (ProgramError, SignatureError, ops.OperatorError):
                if not order and start is graph:
                    raise  # the graph itself is at fault
                continue
            eager = had_data_dependent_shapes(records)
            if wanted is None:
                wanted, single = _compute_reference(
                    _unrewritten_module(graph, program, module), signature, batch, eager, path
                )
            plan, errors = proof.first_agreeing_plan(
                module, _with_token_by_token_prompts(tried, single), batch, wanted, limit
            )
            if plan is None and single is None:
                wanted, single = _compute_reference_by_token(
                    _unrewritten_module(graph, program, module), signature, batch, eager, wanted, limit
                )
                plan, again = (
                    proof.first_agreeing_plan(module, _with_token_by_token_prompts(tried, True), batch, wanted, limit)
                    if single
                    else (plan, {})
                )
                errors |= again
            if plan is not None:
                records += [_dropped_record(one) for one in rewrites if one not in order]
                return ProvedProgram(program, module, records, plan, errors, wanted)
            if start is not graph:
                plain = _unrewritten_module(start, program, module)
                if not _matches_reference(plain, DecoderSignature.from_program(start), batch, eager, wanted, limit):
                    break  # fewer rewrites would not help
    found = f"a module that disagrees with its graph ({errors})"
    do = "report the model: its conversion is wrong and was thrown away"
    raise ConvertError(path, found, f"logits within {limit:g} of their spread", do)


def _with_token_by_token_prompts(candidates: list[RunPlan], token_by_token: bool | None) -> list[RunPlan]:
    return [replace(plan, prompt_mode="single") for plan in candidates] if token_by_token else candidates


def _matches_reference(
    module: ProgramModule,
    signature: DecoderSignature,
    batch: proof.ProofBatch,
    eager: bool,
    reference: list[list[np.ndarray]],
    limit: float,
) -> bool:
    """Whether the program as it is gives the wanted logits."""
    try:
        return proof.logit_error(proof.reference_logits(module, signature, batch, eager), reference) <= limit
    except ops.OperatorError:
        return False


def _compute_reference(
    module: ProgramModule, signature: DecoderSignature, batch: proof.ProofBatch, eager: bool, path: Path
) -> tuple[list[list[np.ndarray]], bool | None]:
    """The graph's logits, and whether it takes a prompt token by token alone; None where that is to be tried.

    What this raises is the graph's own fault.
    """
    try:
        wanted = proof.reference_logits(module, signature, batch, eager)
    except ops.OperatorError as problem:
        try:
            return proof.reference_logits(module, signature, batch, eager, token_by_token=True), True
        except ops.OperatorError:
            if not signature.cache_pairs or not _runs_over_filled_cache(module, signature, eager):
                raise problem from None
        found = f"a graph that takes no empty cache ({problem.node}: {problem.found})"
        do = "convert the merged decoder of the model, or the one without a past (decoder_model.onnx)"
        raise ConvertError(path, found, "a decoder that prompts can begin", do) from problem
    _check_logits(wanted, signature.vocab_size, path)
    # Of another graph whose cache gives something else than its prompt at once, nothing says which is right.
    shape = module.program.input(signature.token_input).shape  # type: ignore[union-attr]
    after = "with_past" in path.stem or (shape is not None and len(shape) > 1 and shape[1] == 1)
    tried = (
        after and signature.pairs and not signature.use_cache_branch_input and not quantizes_dynamically(module.program)
    )
    return wanted, None if tried else False


def _compute_reference_by_token(
    module: ProgramModule,
    signature: DecoderSignature,
    batch: proof.ProofBatch,
    eager: bool,
    reference: list[list[np.ndarray]],
    limit: float,
) -> tuple[list[list[np.ndarray]], bool]:
    """The logits wanted of a graph that agrees over no cache, and whether it takes a prompt token by token alone.

    A graph that was exported for tokens after a cache, as its name or its shapes say, may hide nothing of a step's
    later tokens from its earlier ones: then its logits after a prompt at once are not those after the prompt's tokens
    one by one, and these are right.
    """
    steps = proof.reference_logits(module, signature, batch, eager, token_by_token=True)
    single = proof.logit_error([row[:1] for row in steps], [row[:1] for row in reference]) > limit
    return (steps, True) if single else (reference, False)


def _runs_over_filled_cache(module: ProgramModule, signature: DecoderSignature, eager: bool) -> bool:
    """Whether the graph runs over a cache that is not empty."""
    try:
        (module.call_eagerly if eager else module)(**make_step_inputs(module.program, signature, 1, 4, 1))
    except ops.OperatorError:
        return False
    return True


def prove_pool_rewrites(
    folder: Path, proved: ProvedProgram, batch: proof.ProofBatch, limit: float, progress: bool
) -> ProvedProgram:
    """The program over pools, if it agrees, else as it was. The mode stays that of the graph as it is.

    Of one that stays as it was only the last logits are computed.
    """
    assert proved.module is not None
    program, records = apply_rewrites(proved.program, POOL_REWRITES)
    if program.input(CACHE_INDEX_INPUT) is None and program.input(LOGIT_INDICES_INPUT) is None:
        return replace(proved, rewrite_records=proved.rewrite_records + records)
    far = _pooled_error(proved.module, program, proved.plan, batch, proved.reference_logits)
    errors = {**proved.trial_errors, cache_form(program): far}
    if far > limit:
        return replace(
            proved,
            rewrite_records=proved.rewrite_records + [_dropped_record(one) for one in POOL_REWRITES],
            trial_errors=errors,
        )
    if program.weights.keys() != proved.program.weights.keys():
        save_staged_weights(folder, program, progress)
    return replace(proved, program=program, rewrite_records=proved.rewrite_records + records, trial_errors=errors)


def cache_form(program: Program) -> str:
    """What the rewrites of OVER_POOLS made of the program; "" for nothing."""
    return "pools" if program.input(CACHE_INDEX_INPUT) else "last logits" if program.input(LOGIT_INDICES_INPUT) else ""


def _rewrite_subsets(rewrites: tuple[Rewrite, ...]) -> Iterator[tuple[Rewrite, ...]]:
    """The rewrites to try: all; without one, a late one first; then fewer and fewer, since each builds on those before
    it.
    """
    yield rewrites
    for one in reversed(rewrites):
        yield tuple(other for other in rewrites if other is not one)
    for count in range(len(rewrites) - 2, -1, -1):
        yield rewrites[:count]


def _dropped_record(rewrite: Rewrite) -> RewriteRecord:
    return RewriteRecord(rewrite.__name__, 0, {"the module disagreed with the graph": 1})


def _pooled_error(
    module: ProgramModule, pooled: Program, plan: RunPlan, batch: proof.ProofBatch, reference: list[list[np.ndarray]]
) -> float:
    """The error of the program over pools, on the arrays that `module` holds; infinite where it cannot run."""
    arrays = module.weights()
    try:
        over = ProgramModule(pooled, {name: arrays[name] for name in pooled.weights})
        return proof.logit_error(proof.decoder_logits(over, plan, batch), reference)
    except Exception:  # whatever it raises, it does not run
        return math.inf


def _check_logits(reference: list[list[np.ndarray]], vocab: int, path: Path) -> None:
    for logits in (logits for row in reference for logits in row):
        if logits.shape != (vocab,) or not np.isfinite(logits).any():
            found = f"logits {list(logits.shape)}, {int(np.isfinite(logits).sum())} of them finite"
            raise ConvertError(path, found, f"{vocab} logits a token, as the graph declares", "export the model again")


def _unrewritten_module(graph: Program, program: Program, module: ProgramModule) -> ProgramModule:
    """The unrewritten graph over the converted module's own arrays, so that no weight is in memory twice."""
    held: dict[int, Callable[[], mx.array]] = {}

    def note(tensor: LazyTensor, array: Callable[[], mx.array]) -> None:
        held[id(tensor)] = array
        for part, view in tensor.components:
            note(part, lambda view=view: view(array()))

    for name, array in module.weights().items():
        note(program.tensors[name], lambda array=array: array)
    arrays = {name: held[id(one)]() if id(one) in held else one.to_device() for name, one in graph.tensors.items()}
    return ProgramModule(replace(graph), arrays)


def save_staged_weights(folder: Path, program: Program, progress: bool) -> None:
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    with tqdm(
        total=len(program.tensors), desc="converting", unit="weight", disable=None if progress else True, leave=False
    ) as bar:

        def item(name: str, tensor: LazyTensor):
            def read_() -> mx.array:
                bar.update()
                return tensor.to_device()

            return name, ops.device_dtype(tensor.dtype).size * tensor.size, read_

        weights.save(folder, [item(name, tensor) for name, tensor in program.tensors.items()])
