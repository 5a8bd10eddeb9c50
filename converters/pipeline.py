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

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.model_card import render_model_card
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import apply_genai_names, name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.passes.moe.traced_experts import restore_traced_experts
from mlx_transmuter.converters.precision import cast_dtype, numeric_effects, quantize
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.proof.trials import (
    cache_form,
    prove_graph_rewrites,
    prove_pool_rewrites,
    save_staged_weights,
)
from mlx_transmuter.folder_format import (
    CHAT_TEMPLATE_FOLDER,
    COMPANION_FILES,
    PROGRAM_FILE,
    FolderError,
    read_json_object,
)
from mlx_transmuter.model import load_module
from mlx_transmuter.precision_options import PrecisionOptions
from mlx_transmuter.program import PROGRAM_FORMAT, Program, ProgramError, weights
from mlx_transmuter.program.signature import USE_CACHE_BRANCH_INPUT, DecoderSignature, SignatureError
from mlx_transmuter.runtime.module import MAX_VALUE_BYTES, ProgramModule
from mlx_transmuter.tokenizer import Tokenizer


def convert(
    source: Path,
    file: str,
    out: Path,
    *,
    progress: bool = True,
    base_model: str | None = None,
    precision: PrecisionOptions = PrecisionOptions(),  # noqa: B008 it is frozen
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
        check_output_folder(out, path)
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_folders(out)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as temporary:
            staged = Path(temporary) / "model"
            staged.mkdir()
            _convert_staged(staged, source, path, progress, base_model, precision)
            move_into_place(staged, out, Path(temporary) / "old")
    except ops.OperatorError as problem:
        raise ConvertError(path, problem.found, problem.expected, problem.do, problem.node) from problem
    except (ProgramError, FolderError) as problem:
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


def check_output_folder(out: Path, path: Path) -> None:
    """Raises ConvertError for a place that a conversion of `path` must not take: only a conversion is replaced."""
    if not (out.exists() or out.is_symlink()):
        return
    free = out.is_dir() and (not any(out.iterdir()) or is_converted_folder(out))
    if not free or path.resolve().is_relative_to(out.resolve()):
        raise ConvertError(out, "something that is no converted folder", "a new folder", "choose another one")
    if out.resolve() == Path.cwd() or out.is_mount():  # which cannot be renamed, or would leave a shell nowhere
        raise ConvertError(
            out, "the current folder, or a disk's", "a folder that can be replaced", "name one inside it"
        )


def is_converted_folder(folder: Path) -> bool:
    if not (folder / PROGRAM_FILE).is_file():
        return False
    with open(folder / PROGRAM_FILE, "rb") as file:
        return f'"{PROGRAM_FORMAT}"'.encode() in file.read(256)


def remove_stale_folders(out: Path) -> None:
    """Removes what conversions to `out` left that were killed more than a day ago."""
    for left in out.parent.glob(f".{out.name}.*.partial"):
        if time.time() - left.stat().st_mtime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)


def move_into_place(staged: Path, out: Path, backup: Path) -> None:
    """Gives the whole folder its name; a folder of that name is moved away first and is back if that fails."""
    try:
        if out.exists():
            out.rename(backup)
        staged.rename(out)
    except BaseException:
        if backup.exists() and not out.exists():
            backup.rename(out)
        raise


def _convert_staged(
    folder: Path, source: Path, path: Path, progress: bool, base_model: str | None, precision: PrecisionOptions
) -> None:
    origins = copy_companions(source, path, folder)
    said = (
        "config.json",
        "genai_config.json",
        "generation_config.json",
    )  # the last is only read to know that it can be
    config, genai, _ = (read_json_object(origins.get(name, path / "none")) for name in said)
    graph = apply_genai_names(read_onnx(path, progress=progress), genai)
    if precision.quantize:
        quantize.check_not_quantized(graph, path)
    signature = DecoderSignature.from_program(graph)
    graph = restore_traced_experts(name_weights(graph.select_outputs(signature.required_outputs)), path)
    given, meta = graph, dict[str, Any]()
    if precision.float_activations:
        graph, meta["float_activations"] = numeric_effects.apply_float_activations(graph, path)
    if signature.extra_inputs:
        raise ConvertError(
            path,
            f"the inputs {', '.join(signature.extra_inputs)}",
            "tokens, mask, positions and cache",
            "convert a causal decoder",
        )
    _check_device_types(graph, path)
    most = _configured_max_positions(config, genai)
    graph.metadata["max_positions"] = most  # the proof's decoders read it too
    _check_tokenizer_vocabulary(folder, signature.vocab_size, path)
    lengths = _proof_prompt_lengths(config) if not quantizes_dynamically(graph) else [proof.SINGLE_CHUNK_LENGTH]
    case = proof.ProofBatch.random(signature.vocab_size, lengths)
    limit = proof.tolerance(graph)
    # A recipe has its own bits for the values' projection, so it must not be one product with others.
    first = tuple(
        one
        for one in GRAPH_REWRITES
        if one is not merge_projections or not (precision.quantize and precision.quantize.recipe)
    )
    found = prove_graph_rewrites(folder, graph, path, case, limit, progress, first)
    found = prove_pool_rewrites(folder, found, case, limit, progress)
    if precision.float_activations:
        assert found.module is not None
        meta["float_activations"] |= numeric_effects.logit_difference(given, found.module)
    program, reference = found.program, (path, found.plan, case, found.reference_logits)

    def save(made: Program) -> ProgramModule:
        save_staged_weights(folder, made, progress)
        return ProgramModule(made, weights.load(folder, made))

    if precision.dtype and not cast_dtype.has_dtype(program, precision.dtype):
        found = replace(found, module=None)  # its weights are needed no more
        program, meta["cast"] = numeric_effects.apply_dtype(program, precision.dtype, *reference, limit, save)
    if precision.quantize:
        found = replace(found, module=None)
        program, meta["quantization"] = numeric_effects.apply_quantization(
            program, precision.quantize, *reference, save, progress
        )
    program.metadata = {
        **found.plan.to_metadata(),
        "max_positions": min((count for count in (most, _position_table_rows(program)) if count), default=None),
        "proof": {
            "error": found.trial_errors[cache_form(program) or found.plan.label],
            "limit": limit,
            "tried": {name: far if far != math.inf else "infinite" for name, far in found.trial_errors.items()},
            "prompts": lengths,
            "steps": proof.DECODE_STEPS,
        },
        **(
            {"branch": "both" if program.input(USE_CACHE_BRANCH_INPUT) else "cached"}
            if signature.use_cache_branch_input
            else {}
        ),
        "nodes": {"read": sum(1 for _ in given.all_nodes()), "kept": len(program.nodes)},
        "rewrites": [
            {"name": r.name, "held": r.replaced_count, "declined": r.skip_reasons} for r in found.rewrite_records
        ],
        "source": {"file": path.name, **({"base_model": base_model} if base_model else {})},
        **meta,
    }
    program.save(folder / PROGRAM_FILE)
    load_module(folder)
    (folder / "README.md").write_text(render_model_card(program, config, folder), encoding="utf-8")


def copy_companions(source: Path, path: Path, folder: Path) -> dict[str, Path]:
    """Copies what a converted folder keeps of its source: configuration, tokenizer and templates, nothing that holds
    code.

    A file beside the graph comes before one at the source's root. Gives where each file came from.
    """
    origins: dict[str, Path] = {}
    for place in (source, path.parent):
        for name in COMPANION_FILES:
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
                origins[name] = place / name
        for template in (place / CHAT_TEMPLATE_FOLDER).glob("*.jinja"):
            (folder / CHAT_TEMPLATE_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(template, folder / CHAT_TEMPLATE_FOLDER / template.name)
    return origins


def _check_device_types(graph: Program, path: Path) -> None:
    """Raises ConvertError for a weight or input of a type that MLX lacks, or a weight that this machine cannot hold."""
    given = [(f"the weight {name!r}", tensor.dtype, tensor.size) for name, tensor in graph.tensors.items()]
    given += [(f"the input {value.name!r}", value.dtype, 0) for value in graph.inputs]
    for what, kind, size in given:
        try:
            count = ops.device_dtype(kind).size * size
        except ValueError as problem:
            raise ConvertError(path, f"{what}: {problem}", "a type that MLX has") from None
        if count > MAX_VALUE_BYTES:
            raise ConvertError(path, f"{what} of {count} bytes", f"at most {MAX_VALUE_BYTES}, half of the memory here")


def _check_tokenizer_vocabulary(folder: Path, vocab: int, path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise ConvertError(
            path, f"a vocabulary of {vocab} tokens and a tokenizer with {tokenizer.vocab_size}",
            "a tokenizer without tokens that the model lacks", "use the tokenizer files of this model",
        )  # fmt: skip


def _proof_prompt_lengths(config: dict[str, Any]) -> list[int]:
    """Prompt lengths of the proof: ragged, a padding row among them, and past the sliding window where it is short."""
    window = config.get("sliding_window") or config.get("window_size") or 0
    limit = _configured_max_positions(config, {}) or 2**20
    longest = window + 5 if isinstance(window, int) and 8 <= window <= 128 else 13
    return [max(1, min(longest, limit - proof.DECODE_STEPS)), max(1, min(5, limit - proof.DECODE_STEPS)), 0]


def _configured_max_positions(config: dict[str, Any], genai: dict[str, Any]) -> int | None:
    """The most tokens that a sequence may have, from config.json or genai_config.json; None where they say nothing, or
    fewer than the proof decodes, which no decoder means.
    """
    for place in (config, config.get("text_config"), genai.get("model")):
        if not isinstance(place, dict):
            continue
        for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "context_length"):
            if isinstance(place.get(name), int) and place[name] > proof.DECODE_STEPS:
                return place[name]
    return None


def _position_table_rows(program: Program) -> int | None:
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
