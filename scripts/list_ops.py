"""Writes docs/operators.md, the table of the operators, from the registry."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_transmuter.ops import OPERATORS, Operator

TARGET = Path(__file__).parent.parent / "docs" / "operators.md"
HEAD = """# Operators

Written by `scripts/list_ops.py` from the registry. An operator version holds from the opset in its name until the next
version of its operator. *ONNX versions*: the versions of ONNX's schema that it covers. *host*: it runs while a step is
traced, on values that are known then, and leaves nothing in the step; *device*: it runs in the step (or on the host,
where all its inputs are known). *known*: the inputs that must be known while a step is traced, as shapes, axes and
constants are.

Operators of ONNX that are not here but whose schema has a function body (CenterCropPad, SequenceMap,
SoftmaxCrossEntropyLoss) are expanded into it when a file is read. Left out are those of strings (StringConcat,
StringNormalizer, StringSplit, RegexFullMatch) and ImageDecoder, for which MLX has no arrays and no codec, ai.onnx.ml
and ai.onnx.preview.training.
"""
DOMAINS = {"": "ONNX", "com.microsoft": "com.microsoft (onnxruntime's)", "mlx": "This project's own, made by rewrites"}


def domain(name: str) -> str:
    """Returns the domain of an operator's name: "" for ONNX's own."""
    return name.rpartition("-")[0].rpartition(".")[0] if "-" in name else name.partition(".")[0]


def row(operator: Operator) -> str:
    """Returns the operator's row of the table."""
    known = [operator.input_names[i] for i in sorted(operator.host_inputs)]
    hosted = "on the host" in operator.docstring or (
        operator.input_names and len(operator.host_inputs) == len(operator.input_names)
    )
    text = operator.docstring.split("\n\n")[0]
    # A docstring ends with the versions of ONNX's schema that the operator version covers.
    versions = re.search(r"\bONNX \w+-([\d, to]+)\.", " ".join(operator.docstring.split()))
    text = " ".join(re.sub(r"\s*ONNX \w+-[\d, to]+\.", "", text).split()).replace("|", "&#124;")
    place, opsets = "host" if hosted else "device", versions[1] if versions else ""
    return f"| {operator.name} | {opsets} | {place} | {', '.join(known)} | {text} |"


def order(name: str) -> tuple[str, int]:
    kind, _, since = name.rpartition("-")
    return (kind.lower(), int(since)) if kind else (name.lower(), 0)


def table() -> str:
    """Returns the document."""
    parts = [HEAD]
    for key, title in DOMAINS.items():
        rows = [
            row(operator)
            for name, operator in sorted(OPERATORS.items(), key=lambda item: order(item[0]))
            if domain(name) == key
        ]
        parts.append(
            f"\n## {title}\n\n{len(rows)} operator versions.\n\n"
            "| operator version | ONNX versions | runs on | known | |\n|---|---|---|---|---|\n"
        )
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(table(), encoding="utf-8")
