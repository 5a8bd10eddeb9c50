"""Conversion: read, rewrite, write to a temporary folder, prove, and only then give the folder its name."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from converters import cast, changed, prove, quantize
from converters.branches import branch_taken
from converters.card import card
from converters.errors import ConvertError
from converters.match import Record, Rewrite
from converters.names import name_inputs, name_weights
from converters.observe import step
from converters.passes import BY_VALUES, IN_GRAPH, OVER_POOLS, rewrite
from converters.passes.hit import every_expert
from converters.passes.joined import joined
from converters.read import read
from converters.tensors import Tensor
from mlx_transmuter import ops, weights
from mlx_transmuter.changes import Changes
from mlx_transmuter.hub import COMPANIONS, TEMPLATES
from mlx_transmuter.model import PROGRAM, load_module, read_json
from mlx_transmuter.module import LARGEST, Module
from mlx_transmuter.plan import Plan
from mlx_transmuter.program import FORMAT, Program, ProgramError
from mlx_transmuter.signature import BRANCH, ENDS, INDEX, Signature, SignatureError
from mlx_transmuter.tokenizer import Tokenizer


def convert(
    source: Path,
    file: str,
    out: Path,
    *,
    progress: bool = True,
    base_model: str | None = None,
    changes: Changes = Changes(),  # noqa: B008 it is frozen
) -> Path:
    """Converts the ONNX decoder `file` of the folder `source` into the folder `out`, and gives `out`.

    `out` is replaced if it is a converted folder, and must be absent or empty otherwise. Until the converted module has
    been proved against the graph, everything lies in a temporary folder beside `out`; whatever ends a conversion, an
    error or Ctrl-C, leaves `out` as it was. base_model: the repository that the source is, for the card. changes: what
    the conversion changes about the graph's numbers.

    Raises ConvertError for a file that cannot be converted, for a module that disagrees with the graph, for a full
    disk.
    """
    source, out = Path(source), Path(out)
    path = source / file
    try:
        _check_target(out, path)
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as temporary:
            staged = Path(temporary) / "model"
            staged.mkdir()
            _convert_into(staged, source, path, progress, base_model, changes)
            _put_in_place(staged, out, Path(temporary) / "old")
    except ops.OperatorError as problem:
        raise ConvertError(path, problem.found, problem.expected, problem.do, problem.node) from problem
    except ProgramError as problem:
        raise ConvertError(problem.where, problem.found, problem.expected, problem.do) from problem
    except SignatureError as problem:
        raise ConvertError(path, problem.found, problem.expected, problem.do) from problem
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConvertError(
                out, "a full disk", "room for the converted model", "free some and convert again"
            ) from None
        found = f"{problem.strerror or problem} ({problem.filename or path})"
        raise ConvertError(out, found, "files that can be read and a folder that can be written") from problem
    except (MemoryError, RuntimeError) as problem:  # a RuntimeError is what MLX raises where it gets no memory or disk
        raise ConvertError(out, f"{type(problem).__name__}: {problem}", "memory and a disk for the model") from problem
    return out


def _check_target(out: Path, path: Path) -> None:
    """Raises ConvertError for a place that a conversion of `path` must not take: only a conversion is replaced."""
    if not (out.exists() or out.is_symlink()):
        return
    free = out.is_dir() and (not any(out.iterdir()) or _is_converted(out))
    if not free or path.resolve().is_relative_to(out.resolve()):
        raise ConvertError(out, "something that is no converted folder", "a new folder", "choose another one")
    if out.resolve() == Path.cwd() or out.is_mount():  # which cannot be renamed, or would leave a shell nowhere
        raise ConvertError(
            out, "the current folder, or a disk's", "a folder that can be replaced", "name one inside it"
        )


def _is_converted(folder: Path) -> bool:
    if not (folder / PROGRAM).is_file():
        return False
    with open(folder / PROGRAM, "rb") as file:
        return f'"{FORMAT}"'.encode() in file.read(256)


def _sweep(out: Path) -> None:
    """Removes what conversions to `out` left that were killed more than a day ago."""
    for left in out.parent.glob(f".{out.name}.*.partial"):
        if time.time() - left.stat().st_mtime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)


def _put_in_place(staged: Path, out: Path, old: Path) -> None:
    """Gives the whole folder its name; a folder of that name is moved away first and is back if that fails."""
    try:
        if out.exists():
            out.rename(old)
        staged.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise


def _convert_into(
    folder: Path, source: Path, path: Path, progress: bool, base_model: str | None, changes: Changes
) -> None:
    origins = _copy_companions(source, path, folder)
    said = (
        "config.json",
        "genai_config.json",
        "generation_config.json",
    )  # the last is only read to know that it can be
    config, genai, _ = (read_json(origins.get(name, path / "none")) for name in said)
    graph = name_inputs(read(path, progress=progress), genai)
    if changes.quantize:
        quantize.check(graph, path)
    signature = Signature.of(graph)
    graph = every_expert(name_weights(graph.select(signature.outputs)), path)
    given, meta = graph, dict[str, Any]()
    if changes.float_activations:
        graph, meta["float_activations"] = changed.in_float(graph, path)
    if signature.given:
        raise ConvertError(
            path,
            f"the inputs {', '.join(signature.given)}",
            "tokens, mask, positions and cache",
            "convert a causal decoder",
        )
    _check_weights(graph, path)
    most = _max_positions(config, genai)
    graph.meta["max_positions"] = most  # the proof's decoders read it too
    _check_tokenizer(folder, signature.vocab, path)
    lengths = _proof_lengths(config) if not prove.is_dynamic(graph) else [prove.ONE_PART]
    case = prove.Case.random(signature.vocab, lengths)
    limit = _tolerance(graph)
    # A recipe has its own bits for the values' projection, so it must not be one product with others.
    first = tuple(one for one in IN_GRAPH if one is not joined or not (changes.quantize and changes.quantize.recipe))
    found = _in_graph(folder, graph, path, case, limit, progress, first)
    found = _over_pools(folder, found, case, limit, progress)
    if changes.float_activations:
        assert found.module is not None
        meta["float_activations"] |= changed.difference(given, found.module)
    program, proof = found.program, (path, found.plan, case, found.wanted)

    def save(made: Program) -> Module:
        _save_weights(folder, made, progress)
        return Module(made, weights.load(folder, made))

    if changes.dtype and not cast.is_in(program, changes.dtype):
        found = replace(found, module=None)  # its weights are needed no more
        program, meta["cast"] = changed.in_type(program, changes.dtype, *proof, limit, save)
    if changes.quantize:
        found = replace(found, module=None)
        program, meta["quantization"] = changed.quantized(program, changes.quantize, *proof, save, progress)
    program.meta = {
        **found.plan.meta(),
        "max_positions": min((count for count in (most, _rows(program)) if count), default=None),
        "proof": {
            "error": found.errors[_form(program) or found.plan.name],
            "limit": limit,
            "tried": {name: far if far != math.inf else "infinite" for name, far in found.errors.items()},
            "prompts": lengths,
            "steps": prove.STEPS,
        },
        **({"branch": "both" if program.input(BRANCH) else "cached"} if signature.branch else {}),
        "nodes": {"read": sum(1 for _ in given.all_nodes()), "kept": len(program.nodes)},
        "rewrites": [{"name": r.name, "held": r.held, "declined": r.declined} for r in found.records],
        "source": {"file": path.name, **({"base_model": base_model} if base_model else {})},
        **meta,
    }
    program.save(folder / PROGRAM)
    load_module(folder)
    (folder / "README.md").write_text(card(program, config, folder), encoding="utf-8")


@dataclass(frozen=True)
class _Proved:
    """A program whose logits agreed with the graph's: its module, its plan, and how far off each trial was."""

    program: Program
    module: Module | None
    records: list[Record]
    plan: Plan
    errors: dict[str, Any]
    wanted: list[list[np.ndarray]]


def _in_graph(
    folder: Path,
    graph: Program,
    path: Path,
    case: prove.Case,
    limit: float,
    progress: bool,
    rewrites: tuple[Rewrite, ...],
) -> _Proved:
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
                _save_weights(folder, program, progress)
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
                return _Proved(program, module, records, plan, errors, wanted)
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


def _over_pools(folder: Path, found: _Proved, case: prove.Case, limit: float, progress: bool) -> _Proved:
    """The program over pools, if it agrees, else as it was. The mode stays that of the graph as it is.

    Of one that stays as it was only the last logits are computed.
    """
    assert found.module is not None
    program, records = rewrite(found.program, OVER_POOLS)
    if program.input(INDEX) is None and program.input(ENDS) is None:
        return replace(found, records=found.records + records)
    far = _error_over_pools(found.module, program, found.plan, case, found.wanted)
    errors = {**found.errors, _form(program): far}
    if far > limit:
        return replace(found, records=found.records + [_dropped(one) for one in OVER_POOLS], errors=errors)
    if program.weights.keys() != found.program.weights.keys():
        _save_weights(folder, program, progress)
    return replace(found, program=program, records=found.records + records, errors=errors)


def _form(program: Program) -> str:
    """What the rewrites of OVER_POOLS made of the program; "" for nothing."""
    return "pools" if program.input(INDEX) else "last logits" if program.input(ENDS) else ""


def _copy_companions(source: Path, path: Path, folder: Path) -> dict[str, Path]:
    """Copies what a converted folder keeps of its source: configuration, tokenizer and templates, nothing that holds
    code.

    A file beside the graph comes before one at the source's root. Gives where each file came from.
    """
    origins: dict[str, Path] = {}
    for place in (source, path.parent):
        for name in COMPANIONS:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
                origins[name] = place / name
        for template in (place / TEMPLATES).glob("*.jinja"):
            (folder / TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / TEMPLATES / template.name)
    return origins


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


def _check_weights(graph: Program, path: Path) -> None:
    """Raises ConvertError for a weight or input of a type that MLX lacks, or a weight that this machine cannot hold."""
    given = [(f"the weight {name!r}", tensor.dtype, tensor.size) for name, tensor in graph.arrays.items()]
    given += [(f"the input {value.name!r}", value.dtype, 0) for value in graph.inputs]
    for what, dtype, size in given:
        try:
            count = ops.device_dtype(dtype).size * size
        except ValueError as problem:
            raise ConvertError(path, f"{what}: {problem}", "a type that MLX has") from None
        if count > LARGEST:
            raise ConvertError(path, f"{what} of {count} bytes", f"at most {LARGEST}, half of the memory here")


def _check_logits(wanted: list[list[np.ndarray]], vocab: int, path: Path) -> None:
    for logits in (logits for row in wanted for logits in row):
        if logits.shape != (vocab,) or not np.isfinite(logits).any():
            found = f"logits {list(logits.shape)}, {int(np.isfinite(logits).sum())} of them finite"
            raise ConvertError(path, found, f"{vocab} logits a token, as the graph declares", "export the model again")


def _check_tokenizer(folder: Path, vocab: int, path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise ConvertError(
            path, f"a vocabulary of {vocab} tokens and a tokenizer with {tokenizer.vocab_size}",
            "a tokenizer without tokens that the model lacks", "use the tokenizer files of this model",
        )  # fmt: skip


def _proof_lengths(config: dict[str, Any]) -> list[int]:
    """Prompt lengths of the proof: ragged, a padding row among them, and past the sliding window where it is short."""
    window = config.get("sliding_window") or config.get("window_size") or 0
    limit = _max_positions(config, {}) or 2**20
    longest = window + 5 if isinstance(window, int) and 8 <= window <= 128 else 13
    return [max(1, min(longest, limit - prove.STEPS)), max(1, min(5, limit - prove.STEPS)), 0]


def _max_positions(config: dict[str, Any], genai: dict[str, Any]) -> int | None:
    """The most tokens that a sequence may have, from config.json or genai_config.json; None where they say nothing, or
    fewer than the proof decodes, which no decoder means.
    """
    for place in (config, config.get("text_config"), genai.get("model")):
        if not isinstance(place, dict):
            continue
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length"):
            if isinstance(place.get(name), int) and place[name] > prove.STEPS:
                return place[name]
    return None


def _rows(program: Program) -> int | None:
    """The most positions that the graph's own tables have rows for; past a table MLX would read whatever lies there."""
    reached, rows = {"position_ids": 0}, []
    for node in program.nodes:
        shift = next((reached[name] for name in node.inputs if name in reached), None)
        if shift is None:
            continue
        if node.op == "mlx.embedding":
            rows.append(program.weights[f"{node.inputs[1]}.weight"].shape[0] - shift)
        elif node.op.startswith("Add-"):
            other = [program.constants[name] for name in node.inputs if name in program.constants]
            reached |= dict.fromkeys(node.outputs, shift + int(other[0].max())) if other and other[0].size else {}
        elif node.op.startswith(("Cast-", "Reshape-", "Unsqueeze-", "Squeeze-", "Identity-")):
            reached |= dict.fromkeys(node.outputs, shift)
    return min(rows, default=None)


def _tolerance(program: Program) -> float:
    """How far logits may be off, by the lowest float type that the weights or the cache have."""
    kinds = {weight.dtype for weight in program.weights.values() if math.prod(weight.shape) > 1}
    kinds |= {value.dtype for value in (*program.inputs, *program.outputs)}
    kinds |= {"dynamic"} if prove.rounds(program) else set()
    return max(limit for kind, limit in prove.TOLERANCES.items() if kind in kinds or kind == "float32")


def _save_weights(folder: Path, program: Program, progress: bool) -> None:
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


def _plain_module(graph: Program, program: Program, module: Module) -> Module:
    """The unrewritten graph over the converted module's own arrays, so that no weight is in memory twice."""
    by_tensor: dict[int, str] = {id(tensor): name for name, tensor in program.arrays.items()}
    turned = {id(tensor.turned): name for name, tensor in program.arrays.items() if tensor.turned is not None}
    arrays = dict(module.weights())

    def array(tensor: Tensor) -> mx.array:
        if id(tensor) in by_tensor:
            return arrays[by_tensor[id(tensor)]]
        if id(tensor) in turned:
            return arrays[turned[id(tensor)]].T
        return tensor.array()

    return Module(replace(graph), {name: array(tensor) for name, tensor in graph.arrays.items()})
