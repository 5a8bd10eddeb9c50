"""Conversion: read, rewrite, write to a temporary folder, prove, and only then give the folder its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_transmuter.converters.errors import convert_errors
from mlx_transmuter.converters.model_card import render_model_card
from mlx_transmuter.converters.passes import GRAPH_REWRITES
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.precision import cast_dtype, numeric_effects, quantize
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.proof.memory_budget import MemoryBudget
from mlx_transmuter.converters.proof.plan_search import recordable_errors
from mlx_transmuter.converters.proof.proof_modules import ProofModules, stream_source
from mlx_transmuter.converters.proof.staged_weights import StagedWeights
from mlx_transmuter.converters.proof.tolerances import tolerance
from mlx_transmuter.converters.proof.trials import (
    GraphTrials,
    ProvedProgram,
    prove_graph_rewrites,
    prove_pool_rewrites,
)
from mlx_transmuter.converters.source_graph import SourceGraph, read_source_graph
from mlx_transmuter.converters.stages import enter_stage
from mlx_transmuter.converters.staging import stage_folder
from mlx_transmuter.folder_format import PROGRAM_FILE
from mlx_transmuter.memory import usable_memory
from mlx_transmuter.model import load_module
from mlx_transmuter.precision_options import PrecisionOptions
from mlx_transmuter.program import Program, save_program
from mlx_transmuter.program.attention_nodes import find_attention_windows
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, USE_CACHE_BRANCH_INPUT


@dataclass(frozen=True)
class StagedFolder:
    """The temporary folder that becomes a converted folder."""

    path: Path
    weights: StagedWeights

    def save(self, program: Program) -> None:
        """Writes the program, and its weights where others lie there, and loads both as a user's process will.

        Raises ProgramError for a folder that does not load.
        """
        self.weights.save(program)
        save_program(program, self.path / PROGRAM_FILE)
        load_module(self.path)


def convert(
    source: Path,
    file: str,
    out: Path,
    *,
    progress: bool = True,
    base_model: str | None = None,
    precision: PrecisionOptions = PrecisionOptions(),  # noqa: B008 it is frozen
    replace_converted: bool = True,
    max_memory: int | None = None,
) -> Path:
    """Converts the ONNX decoder `file` of the folder `source` into the folder `out`, and returns `out`.

    `out` is replaced if it is a converted folder, and must be absent or empty otherwise. Until the converted module has
    been proved against the graph, everything lies in a temporary folder beside `out`; whatever ends a conversion, an
    error or Ctrl-C, leaves `out` as it was. progress: whether to show progress on stderr. base_model: the repository
    that the source is, for the card. precision: what the conversion changes about the graph's numbers. max_memory: the
    bytes that it may take in memory, by default three quarters of what there is; a larger model is proved with its
    weights read from its files at each use. replace_converted: whether it replaces a converted
    folder that another process put there meanwhile.

    All of it runs in this process; `child_process.convert` does the same in one of its own, whose end harms nobody.
    Raises ConvertError for a file that cannot be converted, for a module that disagrees with the graph, for a full
    disk.
    """
    source, out = Path(source), Path(out)
    path = source / file
    with convert_errors(path, out), stage_folder(out, path, replace_converted=replace_converted) as folder:
        fill_folder(
            folder,
            source,
            path,
            progress=progress,
            base_model=base_model,
            precision=precision,
            max_memory=max_memory or usable_memory(),
        )
    return out


def fill_folder(
    folder: Path,
    source: Path,
    path: Path,
    *,
    progress: bool,
    base_model: str | None,
    precision: PrecisionOptions,
    max_memory: int,
) -> None:
    """Writes the conversion of the ONNX file `path` of the folder `source` into the empty folder `folder`, proved.

    The other parameters are those of `convert`.
    """
    staged = StagedFolder(folder, StagedWeights(folder, progress=progress))
    graph = read_source_graph(source, path, folder, progress=progress)
    modules = ProofModules(staged.weights, MemoryBudget(max_memory))
    modules.budget.check_weights(graph.program, path)
    if precision.quantize:
        quantize.check_not_quantized(graph.program, path)
    proved, effects = prove_program(modules, graph, precision)
    program, more_effects = apply_precision(modules, proved, precision, progress=progress)
    metadata = record_metadata(program, graph, proved, base_model, streamed=modules.has_streamed)
    program.metadata = metadata | effects | more_effects
    enter_stage("writing the program")
    staged.save(program)
    card = render_model_card(program, graph.config, folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def prove_program(
    modules: ProofModules, source: SourceGraph, precision: PrecisionOptions
) -> tuple[ProvedProgram, dict[str, Any]]:
    """Returns the rewritten program that agrees with the source graph, and what to record of float activations."""
    effects: dict[str, Any] = {}
    graph = source
    if precision.float_activations:
        program, effects["float_activations"] = numeric_effects.apply_float_activations(source.program, source.path)
        graph = replace(source, program=program)
    batch = proof.ProofBatch.random(graph.signature.vocab_size, graph.proof_prompt_lengths())
    writes_weights = not (precision.dtype or precision.quantize)
    trials = GraphTrials(graph.program, graph.path, batch, tolerance(graph.program), modules, writes_weights)
    proved = prove_graph_rewrites(trials, _graph_rewrites(precision))
    if precision.float_activations:
        rounding, rewritten = stream_source(source.program), modules.module(proved.program)
        effects["float_activations"] |= numeric_effects.logit_difference(rounding, rewritten)
    return prove_pool_rewrites(proved, modules), effects


def _graph_rewrites(precision: PrecisionOptions) -> tuple[Any, ...]:
    """Returns the rewrites that leave past and present.

    A recipe has its own bits for the projection to values, which must then not be one product with others.
    """
    if precision.quantize is None or precision.quantize.recipe is None:
        return GRAPH_REWRITES
    return tuple(rewrite for rewrite in GRAPH_REWRITES if rewrite is not merge_projections)


def apply_precision(
    modules: ProofModules, proved: ProvedProgram, precision: PrecisionOptions, *, progress: bool
) -> tuple[Program, dict[str, Any]]:
    """Returns the program with its dtype and weights as the options say, and what to record of the two."""
    program, effects = proved.program, dict[str, Any]()
    modules.release()
    if precision.dtype and not cast_dtype.has_dtype(program, precision.dtype):
        program, effects["cast"] = numeric_effects.apply_dtype(program, precision.dtype, proved.case, modules)
    if precision.quantize:
        program, effects["quantization"] = numeric_effects.apply_quantization(
            program, precision.quantize, proved.case, modules, progress=progress
        )
    return program, effects


def record_metadata(
    program: Program, source: SourceGraph, proved: ProvedProgram, base_model: str | None, *, streamed: bool
) -> dict[str, Any]:
    """Returns what a converted program records of its conversion, but for the effects of precision options."""
    metadata: dict[str, Any] = {
        **proved.case.plan.to_metadata(),
        "trained_length": source.trained_length,
        "proof": {
            "error": proved.error,
            "limit": proved.case.tolerance,
            "tried": recordable_errors(proved.trial_errors),
            "prompts": [len(prompt) for prompt in proved.case.batch.prompts],
            "steps": proof.DECODE_STEPS,
            **({"streamed": True} if streamed else {}),
        },
    }
    if source.signature.use_cache_branch_input:
        metadata["branch"] = "both" if program.input(USE_CACHE_BRANCH_INPUT) else "cached"
    if program.input(CACHE_INDEX_INPUT):
        metadata["attention_windows"] = sorted(find_attention_windows(program))
    metadata["nodes"] = {"read": sum(1 for _ in source.program.all_nodes()), "kept": len(program.nodes)}
    metadata["rewrites"] = [
        {"name": record.name, "held": record.replaced_count, "declined": record.skip_reasons}
        for record in proved.rewrite_records
    ]
    metadata["source"] = {"file": source.path.name, **({"base_model": base_model} if base_model else {})}
    return metadata
