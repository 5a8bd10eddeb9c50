"""`mlx-transmuter inspect`: what a converted model is, and what its conversion recorded."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from typing import Any

from mlx_transmuter.cli.model_loading import load_model
from mlx_transmuter.errors import printable_text
from mlx_transmuter.model import Model
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.metadata import Metadata, ProofSummary
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature


def run(args: argparse.Namespace) -> int:
    args.model = args.source if args.model is None else args.model
    model = load_model(args)
    description = describe_model(model)
    if args.json:
        print(json.dumps(description, indent=2))
    else:
        lines = _report_lines(description) + _conversion_lines(Metadata(model.decoder.program.metadata))
        print("\n".join(printable_text(line) for line in lines))
    return 0


def describe_model(model: Model) -> dict[str, Any]:
    """What inspect prints, as JSON values. size: bytes of the weights' files; parameters: by ONNX type."""
    program = model.decoder.program
    assert model.folder is not None
    parameters: Counter[str] = Counter()
    for weight in program.weights.values():
        parameters[weight.dtype] += math.prod(weight.shape)
    meta, limit = program.metadata, model.decoder.position_limit
    return {
        "folder": str(model.folder),
        "source": meta.get("source"),
        "model_type": model.config.get("model_type"),
        "cache_mode": model.cache_mode,
        "plan": describe_plan(program),
        "branch": meta.get("branch"),
        "max_positions": limit.tokens if limit else None,
        "position_table": limit.table if limit else None,
        "trained_length": Metadata(meta).trained_length,
        "size": sum(file.stat().st_size for file in model.folder.glob("*.safetensors")),
        "parameters": dict(parameters.most_common()),
        "tokenizer": {"tokens": model.tokenizer.vocab_size, "chat_template": model.tokenizer.has_chat_template}
        if model.tokenizer
        else None,
        "inputs": [_describe_value(value) for value in program.inputs],
        "outputs": [_describe_value(value) for value in program.outputs],
        "operators": dict(Counter(node.op for node in program.all_nodes()).most_common()),
        "rewrites": meta.get("rewrites", []),
        "proof": meta.get("proof"),
        "float_activations": meta.get("float_activations"),
        "cast": meta.get("cast"),
        "quantization": meta.get("quantization"),
    }


def describe_plan(program: Program) -> str:
    """Returns how the decoder runs in a few words, its cache mode first."""
    return RunPlan.from_program(program, DecoderSignature.from_program(program)).label


def describe_proof(proof: ProofSummary) -> str:
    """Returns how near the converted graph's logits are to those of the source, and how near they had to be."""
    return f"logits within {proof.error:.1e} of their range (tolerance {proof.tolerance:.0e})"


def _describe_value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": None if value.shape is None else list(value.shape)}


def _report_lines(description: dict[str, Any]) -> list[str]:
    parameters = ", ".join(f"{count:,} {dtype}" for dtype, count in description["parameters"].items())
    source = " ".join(str(part) for part in (description["source"] or {}).values())
    tokenizer = description["tokenizer"]
    lines = [
        f"folder       {description['folder']}",
        f"source       {source or 'unknown'}",
        f"model type   {description['model_type'] or 'unknown'}",
        f"cache mode   {description['plan']}",
        *([f"branch       {description['branch']}"] if description["branch"] else []),
        f"positions    {_positions_line(description)}",
        f"weights      {description['size'] / 1e6:,.1f} MB: {parameters}",
        f"tokenizer    {_tokenizer_line(tokenizer)}",
        "inputs",
        *_value_lines(description["inputs"]),
        "outputs",
        *_value_lines(description["outputs"]),
        f"operators    {sum(description['operators'].values())} nodes",
        *(f"  {count:6} {op}" for op, count in description["operators"].items()),
        "rewrites",
    ]
    return lines


def _conversion_lines(metadata: Metadata) -> list[str]:
    """Returns what the conversion recorded: the rewrites, the proof, and the precision options."""
    lines = []
    for rewrite in metadata.rewrites:
        lines.append(f"  {rewrite.replaced:6} {rewrite.name.replace('_', ' ')}")
        lines += [f"         skipped {count}: {reason}" for reason, count in rewrite.skipped.items()]
    if proof := metadata.proof:
        lines.append(f"proof        {describe_proof(proof)}")
    if floats := metadata.float_activations:
        lines.append(
            f"activations  in float where the file rounds them: logits move by {floats.error:.1e} of their range"
        )
    if cast := metadata.cast:
        bound = f"logits within {cast.error:.1e} of their range (tolerance {cast.tolerance:.0e})"
        lines.append(f"converted    to {cast.dtype}: {bound}")
    if quantization := metadata.quantization:
        layers = ", ".join(f"{count} in {bits} bits" for bits, count in quantization.layers.items())
        error = f"logits move by {quantization.error:.1e} of their range"
        lines.append(f"quantized    {layers}, groups of {quantization.group_size}: {error}")
    return lines


def _positions_line(description: dict[str, Any]) -> str:
    limit, length = description["max_positions"], description["trained_length"]
    ends = f"at most {limit:,}, the rows of {description['position_table']}" if limit else "no limit"
    return f"{ends}; trained for {length:,}" if length else ends


def _tokenizer_line(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none: the model takes and gives token ids"
    return f"{tokenizer['tokens']} tokens, {'with' if tokenizer['chat_template'] else 'without'} a chat template"


def _value_lines(values: list[dict[str, Any]]) -> list[str]:
    """A line per value; those that differ in a layer's number share one."""
    alike: dict[tuple[str, str, str], int] = {}
    for value in values:
        shape = (
            "?" if value["shape"] is None else ", ".join("?" if axis is None else str(axis) for axis in value["shape"])
        )
        key = (re.sub(r"(?<=[._])\d+(?=[._]|$)", "*", value["name"]), value["dtype"], shape)
        alike[key] = alike.get(key, 0) + 1
    return [f"  {count:6} {name} {dtype} [{shape}]" for (name, dtype, shape), count in alike.items()]
