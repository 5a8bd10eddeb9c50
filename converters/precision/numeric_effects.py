"""What a conversion changes about the numbers of a proved program, and how far that moves its logits."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.passes.layers.float_activations import drop_activation_quantization
from mlx_transmuter.converters.passes.simplify.select_cache_branch import select_branch
from mlx_transmuter.converters.precision import cast_dtype, quantize
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.precision_options import Quantization
from mlx_transmuter.program import Program
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule

Logits = list[list[np.ndarray]]
# Writes the weights of a program into the folder, and gives the module over them.
SaveProgram = Callable[[Program], ProgramModule]


def apply_float_activations(graph: Program, path: Path) -> tuple[Program, dict[str, Any]]:
    """The graph with the activations that it rounds to 8 bits in float, and what to record.

    Of a merged decoder this is its branch with a cache, which must do what both do.
    """
    given, branch = graph, DecoderSignature.from_program(graph).use_cache_branch_input
    if branch:
        graph = select_branch(graph, branch, True)
    one, (graph, record) = graph, apply_rewrite(graph, drop_activation_quantization)
    if record.replaced_count and branch:
        # Before the change: after it, what the change does and what the branches do could not be told apart.
        far = logit_difference(
            given, ProgramModule(one, {name: tensor.to_device() for name, tensor in one.tensors.items()})
        )["error"]
        limit = proof.TOLERANCES["dynamic"]
        if far > limit:
            found = f"two branches on {branch!r} whose logits differ by {far:.1e} of their spread"
            raise ConvertError(path, found, f"at most {limit:g}, to keep activations in float", "convert it as it is")
    if not record.replaced_count:
        found = "no activations rounded to 8 bits" + "".join(f" ({reason})" for reason in record.skip_reasons)
        raise ConvertError(path, found, "a file that rounds them: dynamic 8-bit, or QDQ", "convert it as it is")
    return graph, {"held": record.replaced_count, "declined": record.skip_reasons}


def logit_difference(source: Program, module: ProgramModule) -> dict[str, float]:
    """How far the module's logits are from those of the graph as it was given, on one prompt in one part."""
    signature = DecoderSignature.from_program(source)
    case = proof.ProofBatch.random(signature.vocab_size, [proof.SINGLE_CHUNK_LENGTH])
    graph = ProgramModule(source, {name: tensor.to_device() for name, tensor in source.tensors.items()})
    wanted = proof.reference_logits(graph, signature, case)
    logits = proof.reference_logits(module, DecoderSignature.from_program(module.program), case)
    return {"error": proof.logit_error(logits, wanted), "divergence": proof.kl_divergence(logits, wanted)}


def apply_dtype(
    program: Program,
    dtype: str,
    path: Path,
    plan: RunPlan,
    batch: proof.ProofBatch,
    reference: Logits,
    limit: float,
    save: SaveProgram,
) -> tuple[Program, dict[str, Any]]:
    """The program in another float type, and what to record: how far its logits are from the wanted ones.

    Raises ConvertError where they are further than that type allows.
    """
    program = cast_dtype.cast_program(program, dtype, path)
    limit = max(limit, proof.TOLERANCES[dtype])
    far = proof.logit_error(proof.decoder_logits(save(program), plan, batch), reference)
    if far > limit:
        logits = f"logits that differ by {far:.1e} of their spread in {dtype}"
        do = "use bfloat16 or float32" if dtype == "float16" else "use float32"
        raise ConvertError(path, logits, f"at most {limit:g}", do)
    return program, {"dtype": dtype, "error": far, "limit": limit}


def apply_quantization(
    program: Program,
    quantization: Quantization,
    path: Path,
    plan: RunPlan,
    batch: proof.ProofBatch,
    reference: Logits,
    save: SaveProgram,
    progress: bool,
) -> tuple[Program, dict[str, Any]]:
    """The program with its layers quantised, and what to record: what was quantised, and how far that moves the logits
    of the proof. say: in a line on stderr, too.
    """
    program, kept = quantize.quantize_layers(program, quantization, path)
    logits = proof.decoder_logits(save(program), plan, batch)
    far = proof.logit_error(logits, reference)
    if far == math.inf:
        raise ConvertError(
            path, f"no finite logits in {quantization.name}", "a model that can be quantised", "use more bits"
        )
    layers = Counter(layer["bits"] for layer in program.layers.values() if "bits" in layer)
    if progress:
        line = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(layers.items()))
        line = f"quantised {sum(layers.values())} layers: {line}, groups of {quantization.group_size}"
        for why, count in Counter(kept.values()).items():
            line += f"; {count} stay as they are ({next(one for one in kept if kept[one] == why)}): {why}"
        print(f"mlx-transmuter: {line}", file=sys.stderr)
    return program, {
        "name": quantization.name,
        "group_size": quantization.group_size,
        "layers": {str(bits): count for bits, count in sorted(layers.items())},
        "kept": kept,
        "error": far,
        "divergence": proof.kl_divergence(logits, reference),
    }
