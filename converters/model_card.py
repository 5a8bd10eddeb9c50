"""The README of a converted folder: a model card that says where the model is from and what its conversion proved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_transmuter.program import Program


def render_model_card(program: Program, config: dict[str, Any], folder: Path) -> str:
    """The card's text. folder: the converted folder, whose files say whether the model has a tokenizer."""
    meta = program.metadata
    base = meta["source"].get("base_model")
    proof = meta["proof"]
    rows = [
        "---",
        "library_name: mlx_transmuter",
        "pipeline_tag: text-generation",
        *([f"base_model: {base}"] if base else []),
        "tags:",
        "- mlx",
        "- onnx",
        "---",
        "",
        f"# {base or config.get('model_type') or 'A decoder'} for MLX",
        "",
        f"Converted from `{meta['source']['file']}` by mlx-transmuter. Run it with",
        "",
        "```",
        "mlx-transmuter generate --model <this folder> --prompt …",
        "```",
        "",
        "What the conversion proved, on random tokens, against the unrewritten graph:",
        "",
        f"- prompts of {', '.join(str(n) for n in proof['prompts'] if n)} tokens in one batch, {proof['steps']} steps:"
        f" logits within {proof['error']:.1e} of their spread (limit {proof['limit']:.0e});",
        f"- the cache works in the mode `{meta['cache_mode']}`;",
        *(
            f"- the rewrite `{r['name'].replace('_', ' ')}` replaced"
            f" {r['held']} {'node' if r['held'] == 1 else 'nodes'}"
            + (f" and left {sum(r['declined'].values())}" if r["declined"] else "")
            + ";"
            for r in meta["rewrites"]
            if r["held"] or r["declined"]  # the others found nothing to do
        ),
        f"- {meta['nodes']['read']} nodes were read, {meta['nodes']['kept']} are left.",
    ]
    if made := meta.get("float_activations"):
        rows += [
            "",
            f"The file rounds activations to 8 bits; here they stay in float ({made['held']} nodes). On a prompt",
        ]
        rows += [f"of random tokens that moves the logits by up to {made['error']:.1e} of their spread."]
    if made := meta.get("cast"):
        rows += [
            "",
            f"Then converted to {made['dtype']}: on the same prompts, logits within {made['error']:.1e} of the",
        ]
        rows += [f"graph's spread (limit {made['limit']:.0e})."]
    if quantization := meta.get("quantization"):
        rows += ["", *_quantization_lines(quantization)]
    if not (folder / "tokenizer.json").is_file():
        rows += ["", "The source has no tokenizer.json: the model takes and gives token ids."]
    return "\n".join(rows) + "\n"


def _quantization_lines(record: dict[str, Any]) -> list[str]:
    layers = ", ".join(f"{count} in {bits} bits" for bits, count in record["layers"].items())
    rows = [
        f"Then quantized (`{record['name']}`, groups of {record['group_size']}): {sum(record['layers'].values())} "
        f"layers, {layers}. Each weight is within half a step of its float, at the ends of its group's range "
        "within a step.",
        f"On the same prompts that moves the logits by up to {record['error']:.1e} of their spread, and the next "
        f"token's distribution by {record['divergence']:.1e} nats (Kullback-Leibler).",
    ]
    return [*rows, "", *(f"- `{layer}` stays as it is: {why};" for layer, why in record["kept"].items())]
