"""What precision options change about the numbers of a program, and how far that moves its logits."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.passes.layers.float_activations import drop_activation_quantization
from mlx_transmuter.converters.passes.simplify.select_cache_branch import select_branch
from mlx_transmuter.converters.precision import cast_dtype, quantize
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.proof.proof import ProofBatch, ProofCase
from mlx_transmuter.converters.proof.proof_modules import ProofModules, stream_source
from mlx_transmuter.converters.proof.tolerances import TOLERANCES
from mlx_transmuter.converters.stages import enter_stage
from mlx_transmuter.notices import print_notice
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule


def apply_float_activations(source: Program, path: Path) -> tuple[Program, dict[str, Any]]:
    """Returns the graph with the activations that it rounds to 8 bits in float, and what to record.

    Of a merged decoder this is its branch with a cache, which must do what both branches do. Raises ConvertError where
    it does not, and for a graph that rounds no activations.
    """
    branch = DecoderSignature.from_program(source).use_cache_branch_input
    graph = select_branch(source, branch, True) if branch else source
    program, record = apply_rewrite(graph, drop_activation_quantization)
    if not record.replaced_count:
        found = "no activations rounded to 8 bits" + "".join(f" ({reason})" for reason in record.skip_reasons)
        raise ConvertError(path, found, "a file that rounds them: dynamic 8-bit, or QDQ", "convert it as it is")
    if branch:
        # Before the change: after it, what the change does and what the branches do could not be told apart.
        error, tolerance = logit_difference(stream_source(source), stream_source(graph))["error"], TOLERANCES["dynamic"]
        if error > tolerance:
            raise ConvertError(
                path,
                f"two branches on {branch!r} whose logits differ by {error:.1e} of their range",
                f"at most {tolerance:g}, to keep activations in float",
                "convert it as it is",
            )
    return program, {"held": record.replaced_count, "declined": record.skip_reasons}


def logit_difference(source: ProgramModule, module: ProgramModule) -> dict[str, float]:
    """Returns the error and divergence of the module's logits from those of the source, on one prompt in one chunk."""
    signature = DecoderSignature.from_program(source.program)
    batch = ProofBatch.random(signature.vocab_size, [proof.SINGLE_CHUNK_LENGTH])
    reference = proof.reference_logits(source, signature, batch)
    logits = proof.reference_logits(module, DecoderSignature.from_program(module.program), batch)
    return {"error": proof.logit_error(logits, reference), "divergence": proof.kl_divergence(logits, reference)}


def apply_dtype(program: Program, dtype: str, case: ProofCase, modules: ProofModules) -> tuple[Program, dict[str, Any]]:
    """Returns the program in another float type, its weights written, and what to record: how far its logits are off.

    Raises ConvertError where they are further off than that type allows.
    """
    enter_stage(f"casting the graph to {dtype}")
    program = cast_dtype.cast_program(program, dtype, case.path)
    tolerance = max(case.tolerance, TOLERANCES[dtype])
    modules.staged.save(program)
    error = case.error(modules.module(program))
    if error > tolerance:
        raise ConvertError(
            case.path,
            f"logits that differ by {error:.1e} of their range in {dtype}",
            f"at most {tolerance:g}",
            "use bfloat16 or float32" if dtype == "float16" else "use float32",
        )
    return program, {"dtype": dtype, "error": error, "limit": tolerance}


def apply_quantization(
    program: Program, quantization: Quantization, case: ProofCase, modules: ProofModules, *, progress: bool
) -> tuple[Program, dict[str, Any]]:
    """Returns the program with its layers quantized, its weights written, and what to record.

    That is which layers were quantized, and how far that moves the logits of the proof. progress: whether to say it in
    a line on stderr, too. Raises ConvertError where the logits are not finite.
    """
    enter_stage(f"quantizing the graph, {quantization.name}")
    program, unquantized = quantize.quantize_layers(program, quantization, case.path)
    modules.staged.save(program)
    logits = case.logits(modules.module(program))
    error = proof.logit_error(logits, case.reference)
    if error == math.inf:
        raise ConvertError(
            case.path, f"no finite logits in {quantization.name}", "a model that can be quantized", "use more bits"
        )
    layers = Counter(layer["bits"] for layer in program.layers.values() if "bits" in layer)
    if progress:
        _print_quantized_layers(layers, unquantized, quantization.group_size)
    return program, {
        "name": quantization.name,
        "group_size": quantization.group_size,
        "layers": {str(bits): count for bits, count in sorted(layers.items())},
        "kept": unquantized,
        "error": error,
        "divergence": proof.kl_divergence(logits, case.reference),
    }


def _print_quantized_layers(layers: Counter[int], unquantized: dict[str, str], group_size: int) -> None:
    """Prints how many layers have how many bits, and for each reason how many stay in float, with one of them."""
    counts = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(layers.items()))
    line = f"quantized {sum(layers.values())} layers: {counts}, groups of {group_size}"
    for reason, count in Counter(unquantized.values()).items():
        example = next(layer for layer, other in unquantized.items() if other == reason)
        line += f"; {count} stay as they are ({example}): {reason}"
    print_notice(line)
