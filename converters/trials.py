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

from converters import prove
from converters.branches import branch_taken
from converters.errors import ConvertError
from converters.match import Record, Rewrite
from converters.observe import step
from converters.passes import BY_VALUES, OVER_POOLS, rewrite
from converters.tensors import Tensor
from mlx_transmuter import ops, weights
from mlx_transmuter.module import Module
from mlx_transmuter.plan import Plan
from mlx_transmuter.program import Program, ProgramError
from mlx_transmuter.signature import ENDS, INDEX, Signature, SignatureError


@dataclass(frozen=True)
class Proved:
    """A program whose logits agreed with the graph's: its module, its plan, and how far off each trial was."""

    program: Program
    module: Module | None
    records: list[Record]
    plan: Plan
    errors: dict[str, Any]
    wanted: list[list[np.ndarray]]


def in_graph(
    folder: Path,
    graph: Program,
    path: Path,
    case: prove.Case,
    limit: float,
    progress: bool,
    rewrites: tuple[Rewrite, ...],
) -> Proved:
    """The graph after the `rewrites`, which leave its past and present, as many as agree; its weights are written.

    Of a merged decoder the branch with a cache alone, if it gives what both give.
    """
    signature, errors = Signature.of(graph), {}
    starts = [branch_taken(graph, signature.branch, True), graph] if signature.branch else [graph]
    wanted: list[list[np.ndarray]] | None = None
    single: bool | None = None  # whether prompts run token by token; None until it is known
    for start in starts:
        for order in _orders(rewrites):
            try:
                program, records = rewrite(start, order)
                save_weights(folder, program, progress)
                module = Module(program, weights.load(folder, program))
                tried = prove.plans(program, Signature.of(program))
            except (ProgramError, SignatureError, ops.OperatorError):
                if not order and start is graph:
                    raise  # the graph itself is at fault
                continue
            eager = any(record.name in BY_VALUES and record.held for record in records)
            if wanted is None:
                wanted, single = _wanted(_plain_module(graph, program, module), signature, case, eager, path)
            plan, errors = prove.best_plan(module, _for(tried, single), case, wanted, limit)
            if plan is None and single is None:
                wanted, single = _by_token(_plain_module(graph, program, module), signature, case, eager, wanted, limit)
                plan, again = prove.best_plan(module, _for(tried, True), case, wanted, limit) if single else (plan, {})
                errors |= again
            if plan is not None:
                records += [_dropped(one) for one in rewrites if one not in order]
                return Proved(program, module, records, plan, errors, wanted)
            if start is not graph:
                plain = _plain_module(start, program, module)
                if not _agrees(plain, Signature.of(start), case, eager, wanted, limit):
                    break  # fewer rewrites would not help
    found = f"a module that disagrees with its graph ({errors})"
    do = "report the model: its conversion is wrong and was thrown away"
    raise ConvertError(path, found, f"logits within {limit:g} of their spread", do)


def _for(tried: list[Plan], single: bool | None) -> list[Plan]:
    return [replace(plan, prompts="single") for plan in tried] if single else tried


def _agrees(
    module: Module, signature: Signature, case: prove.Case, eager: bool, wanted: list[list[np.ndarray]], limit: float
) -> bool:
    """Whether the program as it is gives the wanted logits."""
    try:
        return prove.error(prove.plain(module, signature, case, eager), wanted) <= limit
    except ops.OperatorError:
        return False


def _wanted(
    module: Module, signature: Signature, case: prove.Case, eager: bool, path: Path
) -> tuple[list[list[np.ndarray]], bool | None]:
    """The graph's logits, and whether it takes a prompt token by token alone; None where that is to be tried.

    What this raises is the graph's own fault.
    """
    try:
        wanted = prove.plain(module, signature, case, eager)
    except ops.OperatorError as problem:
        try:
            return prove.plain(module, signature, case, eager, single=True), True
        except ops.OperatorError:
            if not signature.entries or not _runs_over_a_past(module, signature, eager):
                raise problem from None
        found = f"a graph that takes no empty cache ({problem.node}: {problem.found})"
        do = "convert the merged decoder of the model, or the one without a past (decoder_model.onnx)"
        raise ConvertError(path, found, "a decoder that prompts can begin", do) from problem
    _check_logits(wanted, signature.vocab, path)
    # Of another graph whose cache gives something else than its prompt at once, nothing says which is right.
    shape = module.program.input(signature.tokens).shape  # type: ignore[union-attr]
    after = "with_past" in path.stem or (shape is not None and len(shape) > 1 and shape[1] == 1)
    tried = after and signature.carried and not signature.branch and not prove.is_dynamic(module.program)
    return wanted, None if tried else False


def _by_token(
    module: Module, signature: Signature, case: prove.Case, eager: bool, wanted: list[list[np.ndarray]], limit: float
) -> tuple[list[list[np.ndarray]], bool]:
    """The logits wanted of a graph that agrees over no cache, and whether it takes a prompt token by token alone.

    A graph that was exported for tokens after a cache, as its name or its shapes say, may hide nothing of a step's
    later tokens from its earlier ones: then its logits after a prompt at once are not those after the prompt's tokens
    one by one, and these are right.
    """
    steps = prove.plain(module, signature, case, eager, single=True)
    single = prove.error([row[:1] for row in steps], [row[:1] for row in wanted]) > limit
    return (steps, True) if single else (wanted, False)


def _runs_over_a_past(module: Module, signature: Signature, eager: bool) -> bool:
    """Whether the graph runs over a cache that is not empty."""
    try:
        (module.eagerly if eager else module)(**step(module.program, signature, 1, 4, 1))
    except ops.OperatorError:
        return False
    return True


def over_pools(folder: Path, found: Proved, case: prove.Case, limit: float, progress: bool) -> Proved:
    """The program over pools, if it agrees, else as it was. The mode stays that of the graph as it is.

    Of one that stays as it was only the last logits are computed.
    """
    assert found.module is not None
    program, records = rewrite(found.program, OVER_POOLS)
    if program.input(INDEX) is None and program.input(ENDS) is None:
        return replace(found, records=found.records + records)
    far = _error_over_pools(found.module, program, found.plan, case, found.wanted)
    errors = {**found.errors, form(program): far}
    if far > limit:
        return replace(found, records=found.records + [_dropped(one) for one in OVER_POOLS], errors=errors)
    if program.weights.keys() != found.program.weights.keys():
        save_weights(folder, program, progress)
    return replace(found, program=program, records=found.records + records, errors=errors)


def form(program: Program) -> str:
    """What the rewrites of OVER_POOLS made of the program; "" for nothing."""
    return "pools" if program.input(INDEX) else "last logits" if program.input(ENDS) else ""


def _orders(rewrites: tuple[Rewrite, ...]) -> Iterator[tuple[Rewrite, ...]]:
    """The rewrites to try: all; without one, a late one first; then fewer and fewer, since each builds on those before
    it.
    """
    yield rewrites
    for one in reversed(rewrites):
        yield tuple(other for other in rewrites if other is not one)
    for count in range(len(rewrites) - 2, -1, -1):
        yield rewrites[:count]


def _dropped(one: Rewrite) -> Record:
    return Record(one.__name__, 0, {"the module disagreed with the graph": 1})


def _error_over_pools(
    module: Module, pooled: Program, plan: Plan, case: prove.Case, wanted: list[list[np.ndarray]]
) -> float:
    """The error of the program over pools, on the arrays that `module` holds; infinite where it cannot run."""
    arrays = module.weights()
    try:
        over = Module(pooled, {name: arrays[name] for name in pooled.weights})
        return prove.error(prove.run(over, plan, case), wanted)
    except Exception:  # whatever it raises, it does not run
        return math.inf


def _check_logits(wanted: list[list[np.ndarray]], vocab: int, path: Path) -> None:
    for logits in (logits for row in wanted for logits in row):
        if logits.shape != (vocab,) or not np.isfinite(logits).any():
            found = f"logits {list(logits.shape)}, {int(np.isfinite(logits).sum())} of them finite"
            raise ConvertError(path, found, f"{vocab} logits a token, as the graph declares", "export the model again")


def _plain_module(graph: Program, program: Program, module: Module) -> Module:
    """The unrewritten graph over the converted module's own arrays, so that no weight is in memory twice."""
    held: dict[int, Callable[[], mx.array]] = {}

    def note(tensor: Tensor, array: Callable[[], mx.array]) -> None:
        held[id(tensor)] = array
        for part, view in tensor.holds:
            note(part, lambda view=view: view(array()))

    for name, array in module.weights().items():
        note(program.arrays[name], lambda array=array: array)
    arrays = {name: held[id(one)]() if id(one) in held else one.array() for name, one in graph.arrays.items()}
    return Module(replace(graph), arrays)


def save_weights(folder: Path, program: Program, progress: bool) -> None:
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    with tqdm(
        total=len(program.arrays), desc="converting", unit="weight", disable=None if progress else True, leave=False
    ) as bar:

        def item(name: str, tensor: Tensor):
            def read_() -> mx.array:
                bar.update()
                return tensor.array()

            return name, ops.device_dtype(tensor.dtype).size * tensor.size, read_

        weights.save(folder, [item(name, tensor) for name, tensor in program.arrays.items()])
