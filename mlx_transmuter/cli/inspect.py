"""`mlx-transmuter inspect`: what a converted model is, and what its conversion recorded."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from typing import Any

from mlx_transmuter.cli.model import load
from mlx_transmuter.model import Model
from mlx_transmuter.plan import Plan
from mlx_transmuter.program import Value
from mlx_transmuter.signature import Signature


def run(args: argparse.Namespace) -> int:
    args.model = args.model or args.source
    found = facts(load(args))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def facts(model: Model) -> dict[str, Any]:
    """What inspect prints, as JSON values. size: bytes of the weights' files; parameters: by ONNX type."""
    program = model.decoder.program
    assert model.folder is not None
    parameters: Counter[str] = Counter()
    for weight in program.weights.values():
        parameters[weight.dtype] += math.prod(weight.shape)
    meta = program.meta
    return {
        "folder": str(model.folder),
        "source": meta.get("source"),
        "model_type": model.config.get("model_type"),
        "cache_mode": model.cache_mode,
        "plan": Plan.of(program, Signature.of(program)).name,
        "branch": meta.get("branch"),
        "max_positions": meta.get("max_positions"),
        "size": sum(file.stat().st_size for file in model.folder.glob("*.safetensors")),
        "parameters": dict(parameters.most_common()),
        "tokenizer": {"tokens": model.tokenizer.vocab_size, "chat_template": model.tokenizer.has_chat_template}
        if model.tokenizer
        else None,
        "inputs": [_value(value) for value in program.inputs],
        "outputs": [_value(value) for value in program.outputs],
        "operators": dict(Counter(node.op for node in program.all_nodes()).most_common()),
        "rewrites": meta.get("rewrites", []),
        "proof": meta.get("proof"),
        "float_activations": meta.get("float_activations"),
        "cast": meta.get("cast"),
        "quantization": meta.get("quantization"),
    }


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": None if value.shape is None else list(value.shape)}


def _lines(found: dict[str, Any]) -> list[str]:
    parameters = ", ".join(f"{count:,} {dtype}" for dtype, count in found["parameters"].items())
    source = " ".join(str(part) for part in (found["source"] or {}).values())
    tokenizer = found["tokenizer"]
    lines = [
        f"folder       {found['folder']}",
        f"source       {source or 'unknown'}",
        f"model type   {found['model_type'] or 'unknown'}",
        f"cache mode   {found['plan']}",
        *([f"branch       {found['branch']}"] if found["branch"] else []),
        f"positions    {found['max_positions'] or 'no limit known'}",
        f"weights      {found['size'] / 1e6:,.1f} MB: {parameters}",
        f"tokenizer    {_tokenizer_line(tokenizer)}",
        "inputs",
        *_values(found["inputs"]),
        "outputs",
        *_values(found["outputs"]),
        f"operators    {sum(found['operators'].values())} nodes",
        *(f"  {count:6} {op}" for op, count in found["operators"].items()),
        "rewrites",
    ]
    for rewrite in found["rewrites"]:
        lines.append(f"  {rewrite['held']:6} {rewrite['name']}")
        lines += [f"         declined {count}: {reason}" for reason, count in rewrite["declined"].items()]
    if proof := found["proof"]:
        lines.append(f"proof        logits within {proof['error']:.1e} of their spread (limit {proof['limit']:.0e})")
    if made := found["float_activations"]:
        lines.append(f"activations  in float where the file rounds them: logits move by {made['error']:.1e} of that")
    if made := found["cast"]:
        lines.append(f"converted    to {made['dtype']}: within {made['error']:.1e} of that (limit {made['limit']:.0e})")
    if made := found["quantization"]:
        layers = ", ".join(f"{count} in {bits} bits" for bits, count in made["layers"].items())
        lines.append(
            f"quantised    {layers}, groups of {made['group_size']}: logits move by {made['error']:.1e} of that"
        )
    return lines


def _tokenizer_line(tokenizer: dict[str, Any] | None) -> str:
    if tokenizer is None:
        return "none: the model takes and gives token ids"
    return f"{tokenizer['tokens']} tokens, {'with' if tokenizer['chat_template'] else 'without'} a chat template"


def _values(values: list[dict[str, Any]]) -> list[str]:
    """A line per value; those that differ in a layer's number share one."""
    alike: dict[tuple[str, str, str], int] = {}
    for value in values:
        shape = (
            "?" if value["shape"] is None else ", ".join("?" if axis is None else str(axis) for axis in value["shape"])
        )
        key = (re.sub(r"(?<=[._])\d+(?=[._]|$)", "*", value["name"]), value["dtype"], shape)
        alike[key] = alike.get(key, 0) + 1
    return [f"  {count:6} {name} {dtype} [{shape}]" for (name, dtype, shape), count in alike.items()]
