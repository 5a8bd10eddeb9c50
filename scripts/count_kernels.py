"""Counts the kernels that a token takes on Metal, beside those of mlx-lm on the same weights.

    python scripts/count_kernels.py MODEL [--peer FOLDER] [--json]

MODEL: a converted folder, or what `mlx_transmuter.load` takes. --peer: a folder that mlx-lm loads (extra `bench`).
No Mac is needed: the step is traced in the form that it has on Metal, fused as mx.compile fuses it, and counted by the
rules of MLX's Metal backend (scripts/kernels/). Views cost no kernel; a function of mx.fast is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.kernels import decode_steps
from scripts.kernels.metal_kernels import Kernel

# How a token is chosen: the settings of this project, and the arguments of mlx-lm's make_sampler.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"do_sample": False}, {"temp": 0.0}),
    "top-k and top-p": (
        {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temp": 0.7, "top_k": 40, "top_p": 0.9},
    ),
    "greedy with log-probabilities": ({"do_sample": False, "token_logprobs": True}, {"temp": 0.0}),
}


def count(source: str, peer: Path | None) -> dict[str, dict[str, Any]]:
    """Returns the counts of kernels, {"ours": {"per_layer", "fixed", "choice"}}, and "peer" where there is one.

    choice: by the names of CHOICES; "copies": which of a step's kernels only bring an input into another layout.
    """
    import mlx_transmuter

    model = mlx_transmuter.load(source)
    counts: dict[str, dict[str, Any]] = {"ours": {"choice": {}}}
    for name, (settings, _) in CHOICES.items():
        step, choice = decode_steps.own_graphs(model, **settings)
        counts["ours"] |= _step_counts(decode_steps.step_kernels(step))
        counts["ours"]["choice"][name] = len(decode_steps.step_kernels(choice))
    if peer is not None:
        counts["peer"] = {"choice": {}}
        for name, (_, settings) in CHOICES.items():
            step, choice = decode_steps.peer_graphs(peer, **settings)
            counts["peer"] |= _step_counts(decode_steps.step_kernels(step, regions_alone=True))
            counts["peer"]["choice"][name] = len(decode_steps.step_kernels(choice, regions_alone=True))
    return counts


def _step_counts(kernels: list[Kernel]) -> dict[str, Any]:
    per_layer, fixed = decode_steps.layer_kernels(kernels)
    copies = Counter(kernel.name.split(" of ")[0] for kernel in kernels if kernel.is_copy)
    return {"per_layer": per_layer, "fixed": fixed, "copies": dict(copies)}


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", type=Path, help="the same model as mlx-lm loads it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="print each kernel of a step")
    args = parser.parse_args()
    if args.list:
        import mlx_transmuter

        step, choice = decode_steps.own_graphs(mlx_transmuter.load(args.model))
        for kernel in (*decode_steps.step_kernels(step), *decode_steps.step_kernels(choice)):
            print("copy: " * kernel.is_copy + kernel.name)
        return
    counts = count(args.model, args.peer)
    if args.json:
        print(json.dumps(counts))
        return
    for side, values in counts.items():
        print(
            f"{side}: {values['per_layer']} a layer, {values['fixed']} besides; copies among them: {values['copies']}"
        )
        for name, kernels in values["choice"].items():
            print(f"  the choice of a token, {name}: {kernels}")


if __name__ == "__main__":
    main()
