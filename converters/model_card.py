"""The README of a converted folder: a model card that says where the model is from and what its conversion proved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_transmuter.errors import printable_text
from mlx_transmuter.program import Program
from mlx_transmuter.program.length_switches import LengthSwitches
from mlx_transmuter.program.metadata import Cast, FloatActivations, Metadata, QuantizationSummary, RewriteSummary
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature

_STREAMED_LINES = (
    "- the weights, more than the memory of the conversion, were read at each use, and the steps not compiled;",
)


def render_model_card(program: Program, config: dict[str, Any], folder: Path) -> str:
    """Returns the text of the card, from what the conversion recorded in the program's metadata.

    config: the model's config.json. folder: the converted folder, whose files tell whether the model has a tokenizer.
    """
    metadata = Metadata(program.metadata)
    signature = DecoderSignature.from_program(program)
    plan = RunPlan.from_program(program, signature)
    lines = [*_front_lines(metadata, config), *_proof_lines(metadata, plan, signature.length_switches)]
    if metadata.float_activations:
        lines += _float_activation_lines(metadata.float_activations)
    if metadata.cast:
        lines += _cast_lines(metadata.cast)
    if metadata.quantization:
        lines += _quantization_lines(metadata.quantization)
    if not (folder / "tokenizer.json").is_file():
        lines += ["", "The source has no tokenizer.json: the model takes and gives token ids."]
    return "\n".join(lines) + "\n"


def multiplies_exactly() -> bool:
    """Whether products of float32 are computed in float32: GPUs of the M5 generation round their inputs to TF32, unless
    the variable says otherwise.
    """
    return mx.default_device() == mx.cpu or os.environ.get("MLX_ENABLE_TF32") == "0"


def _front_lines(metadata: Metadata, config: dict[str, Any]) -> list[str]:
    source = metadata.source
    assert source is not None, "a conversion records its source"
    base_model = source.base_model
    return [
        "---",
        "library_name: mlx_transmuter",
        "pipeline_tag: text-generation",
        *([f"base_model: {base_model}"] if base_model else []),
        "tags:",
        "- mlx",
        "- onnx",
        "---",
        "",
        f"# {printable_text(base_model or config.get('model_type') or 'A decoder')} for MLX",
        "",
        f"Converted from `{printable_text(source.file)}` by mlx-transmuter. Run it with",
        "",
        "```",
        "mlx-transmuter generate --model <this folder> --prompt …",
        "```",
        "",
    ]


def _proof_lines(metadata: Metadata, plan: RunPlan, switches: LengthSwitches) -> list[str]:
    proof, nodes = metadata.proof, metadata.nodes
    assert proof is not None, "a conversion records its proof"
    assert nodes is not None, "a conversion counts its nodes"
    lengths = ", ".join(str(length) for length in proof.prompts if length)
    return [
        "What the conversion proved, on random tokens, against the unrewritten graph:",
        "",
        f"- prompts of {lengths} tokens in one batch, {proof.steps} steps:"
        f" logits within {proof.error:.1e} of their range (tolerance {proof.tolerance:.0e});",
        *(["- products of float32 were computed in float32, without TF32;"] if multiplies_exactly() else []),
        *(_STREAMED_LINES if proof.streamed else ()),
        *(_switch_line(length) for length in switches.lengths),
        f"- the cache works in the mode `{plan.cache_mode}`;",
        # A rewrite that replaced and skipped nothing found nothing to do.
        *(_rewrite_line(rewrite) for rewrite in metadata.rewrites if rewrite.replaced or rewrite.skipped),
        f"- {nodes.read} nodes were read, {nodes.remaining} are left.",
    ]


def _switch_line(length: int) -> str:
    return (
        f"- rows of more than {length} tokens are computed otherwise (longrope): the same prompts were proved on both"
        " sides of that switch, none so long;"
    )


def _rewrite_line(rewrite: RewriteSummary) -> str:
    count, skipped = rewrite.replaced, sum(rewrite.skipped.values())
    line = f"- the rewrite `{rewrite.name.replace('_', ' ')}` replaced {count} {'node' if count == 1 else 'nodes'}"
    return f"{line} and skipped {skipped};" if skipped else f"{line};"


def _float_activation_lines(record: FloatActivations) -> list[str]:
    return [
        "",
        f"The file rounds activations to 8 bits; here they stay in float ({record.replaced} nodes). On a prompt",
        f"of random tokens that moves the logits by up to {record.error:.1e} of their range.",
    ]


def _cast_lines(record: Cast) -> list[str]:
    return [
        "",
        f"Then converted to {record.dtype}: on the same prompts, logits within {record.error:.1e} of the",
        f"graph's range (tolerance {record.tolerance:.0e}).",
    ]


def _quantization_lines(record: QuantizationSummary) -> list[str]:
    layers = ", ".join(f"{count} in {bits} bits" for bits, count in record.layers.items())
    return [
        "",
        f"Then quantized (`{record.name}`, groups of {record.group_size}): {sum(record.layers.values())} "
        f"layers, {layers}. Each weight is within half a step of its float, at the ends of its group's range "
        "within a step.",
        f"On the same prompts that moves the logits by up to {record.error:.1e} of their range, and the next "
        f"token's distribution by {record.divergence:.1e} nats (Kullback-Leibler).",
        "",
        *(
            f"- `{printable_text(layer)}` stays as it is: {printable_text(reason)};"
            for layer, reason in record.unquantized.items()
        ),
    ]
