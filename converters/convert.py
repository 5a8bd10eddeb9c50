"""Conversion: read, rewrite, write to a temporary folder, prove, and only then give the folder its name."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters import cast, changed, prove, quantize
from converters.card import card
from converters.errors import ConvertError
from converters.names import name_inputs, name_weights
from converters.passes import IN_GRAPH
from converters.passes.hit import every_expert
from converters.passes.joined import joined
from converters.read import read
from converters.trials import form, in_graph, over_pools, save_weights
from mlx_transmuter import ops, weights
from mlx_transmuter.changes import Changes
from mlx_transmuter.hub import COMPANIONS, TEMPLATES
from mlx_transmuter.model import PROGRAM, load_module, read_json
from mlx_transmuter.module import LARGEST, Module
from mlx_transmuter.program import FORMAT, Program, ProgramError
from mlx_transmuter.signature import BRANCH, Signature, SignatureError
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
    limit = prove.tolerance(graph)
    # A recipe has its own bits for the values' projection, so it must not be one product with others.
    first = tuple(one for one in IN_GRAPH if one is not joined or not (changes.quantize and changes.quantize.recipe))
    found = in_graph(folder, graph, path, case, limit, progress, first)
    found = over_pools(folder, found, case, limit, progress)
    if changes.float_activations:
        assert found.module is not None
        meta["float_activations"] |= changed.difference(given, found.module)
    program, proof = found.program, (path, found.plan, case, found.wanted)

    def save(made: Program) -> Module:
        save_weights(folder, made, progress)
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
            "error": found.errors[form(program) or found.plan.name],
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
