"""What a conversion changes about the numbers of a proved program, and how far that moves its logits."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from converters import cast, prove, quantize
from converters.branches import branch_taken
from converters.errors import ConvertError
from converters.match import apply
from converters.passes.integers import float_activations
from mlx_transmuter.changes import Quantization
from mlx_transmuter.module import Module
from mlx_transmuter.plan import Plan
from mlx_transmuter.program import Program
from mlx_transmuter.signature import Signature

Logits = list[list[np.ndarray]]
# Writes the weights of a program into the folder, and gives the module over them.
Save = Callable[[Program], Module]


def in_float(graph: Program, path: Path) -> tuple[Program, dict[str, Any]]:
    """The graph with the activations that it rounds to 8 bits in float, and what to record.

    Of a merged decoder this is its branch with a cache, which must do what both do.
    """
    given, branch = graph, Signature.of(graph).branch
    if branch:
        graph = branch_taken(graph, branch, True)
    one, (graph, record) = graph, apply(graph, float_activations)
    if record.held and branch:
        # Before the change: after it, what the change does and what the branches do could not be told apart.
        far = difference(given, Module(one, {name: tensor.array() for name, tensor in one.arrays.items()}))["error"]
        limit = prove.TOLERANCES["dynamic"]
        if far > limit:
            found = f"two branches on {branch!r} whose logits differ by {far:.1e} of their spread"
            raise ConvertError(path, found, f"at most {limit:g}, to keep activations in float", "convert it as it is")
    if not record.held:
        found = "no activations rounded to 8 bits" + "".join(f" ({reason})" for reason in record.declined)
        raise ConvertError(path, found, "a file that rounds them: dynamic 8-bit, or QDQ", "convert it as it is")
    return graph, {"held": record.held, "declined": record.declined}


def difference(given: Program, module: Module) -> dict[str, float]:
    """How far the module's logits are from those of the graph as it was given, on one prompt in one part."""
    signature = Signature.of(given)
    case = prove.Case.random(signature.vocab, [prove.ONE_PART])
    graph = Module(given, {name: tensor.array() for name, tensor in given.arrays.items()})
    wanted = prove.plain(graph, signature, case)
    logits = prove.plain(module, Signature.of(module.program), case)
    return {"error": prove.error(logits, wanted), "divergence": prove.divergence(logits, wanted)}


def in_type(
    program: Program, dtype: str, path: Path, plan: Plan, case: prove.Case, wanted: Logits, limit: float, save: Save
) -> tuple[Program, dict[str, Any]]:
    """The program in another float type, and what to record: how far its logits are from the wanted ones.

    Raises ConvertError where they are further than that type allows.
    """
    program = cast.cast(program, dtype, path)
    limit = max(limit, prove.TOLERANCES[dtype])
    far = prove.error(prove.run(save(program), plan, case), wanted)
    if far > limit:
        logits = f"logits that differ by {far:.1e} of their spread in {dtype}"
        do = "use bfloat16 or float32" if dtype == "float16" else "use float32"
        raise ConvertError(path, logits, f"at most {limit:g}", do)
    return program, {"dtype": dtype, "error": far, "limit": limit}


def quantized(
    program: Program, how: Quantization, path: Path, plan: Plan, case: prove.Case, wanted: Logits, save: Save, say: bool
) -> tuple[Program, dict[str, Any]]:
    """The program with its layers quantised, and what to record: what was quantised, and how far that moves the logits
    of the proof. say: in a line on stderr, too.
    """
    program, kept = quantize.quantize(program, how, path)
    logits = prove.run(save(program), plan, case)
    far = prove.error(logits, wanted)
    if far == math.inf:
        raise ConvertError(path, f"no finite logits in {how.name}", "a model that can be quantised", "use more bits")
    layers = Counter(layer["bits"] for layer in program.layers.values() if "bits" in layer)
    if say:
        line = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(layers.items()))
        line = f"quantised {sum(layers.values())} layers: {line}, groups of {how.group_size}"
        for why, count in Counter(kept.values()).items():
            line += f"; {count} stay as they are ({next(one for one in kept if kept[one] == why)}): {why}"
        print(f"mlx-transmuter: {line}", file=sys.stderr)
    return program, {
        "name": how.name,
        "group_size": how.group_size,
        "layers": {str(bits): count for bits, count in sorted(layers.items())},
        "kept": kept,
        "error": far,
        "divergence": prove.divergence(logits, wanted),
    }
