"""The registry of operators: a function's signature declares everything that the converter and the walker need to know.

Positional parameters are the ONNX inputs (a default of None marks an optional one, `*xs` a variadic one), keyword-only
parameters the attributes with their ONNX defaults. An input annotated `Host` must be known while a step is traced and
comes as a numpy array; one annotated `Known` comes as a numpy array where it is known then; one annotated `Layer` is an
`mlx.nn` layer; any other comes as an `mx.array`. A keyword-only parameter named `outputs` gets the number of outputs
that the node asks for. A result that is a numpy array stays on the host.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np


class HostArray(np.ndarray):
    """Annotation of an input whose value must be known while a step is traced; the function gets a numpy array."""


class HostArrayIfKnown(np.ndarray):
    """Annotation of an input that comes as a numpy array where it is known while a step is traced, else as an
    `mx.array`.
    """


class NNLayer(nn.Module):
    """Annotation of an input that is a layer of the module; the function gets the `mlx.nn` layer and calls it."""


class OperatorError(ValueError):
    """An operator that cannot do what a node asks: `node`, what was `found`, what was `expected`, what to `do`."""

    def __init__(self, found: str, expected: str = "", do: str = "", node: str = ""):
        self.found, self.expected, self.do, self.node = found, expected, do, node
        parts = [f"{node}: found {found}" if node else f"found {found}"]
        parts += [f"expected {expected}"] if expected else []
        parts += [f"to mend it: {do}"] if do else []
        super().__init__("; ".join(parts) + ".")


@dataclass(frozen=True)
class Operator:
    """A declared operator: `name` as programs spell it, its function, and what the function's signature says."""

    name: str
    function: Callable[..., Any]
    input_names: tuple[str, ...]
    required_inputs: int
    is_variadic: bool
    host_inputs: frozenset[int]
    host_variadic_inputs: bool
    host_if_known_inputs: frozenset[int]
    attribute_defaults: dict[str, Any]
    takes_output_count: bool

    @property
    def docstring(self) -> str:
        return inspect.getdoc(self.function) or ""


OPERATORS: dict[str, Operator] = {}
_OPSETS_BY_OP_TYPE: dict[str, list[int]] = {}


def op(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares the function as the operators `names`.

    A name is the operator, with its domain if that is not ONNX's own, and the opset from which the form holds:
    `Expand-8`, `com.microsoft.FastGelu-1`; the operators of this project carry none: `mlx.rms_norm`. A name declared
    twice is an error.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        inputs = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        variadic = [p for p in parameters if p.kind is p.VAR_POSITIONAL]
        keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        wants_outputs = "outputs" in keywords
        keywords.pop("outputs", None)
        for name in names:
            if name in OPERATORS:
                raise OperatorError(f"the operator {name} declared twice", "each form declared once")
            OPERATORS[name] = Operator(
                name,
                function,
                tuple(p.name for p in inputs),
                sum(p.default is p.empty for p in inputs),
                bool(variadic),
                frozenset(i for i, p in enumerate(inputs) if p.annotation is HostArray),
                bool(variadic) and variadic[0].annotation is HostArray,
                frozenset(i for i, p in enumerate(inputs) if p.annotation is HostArrayIfKnown),
                keywords,
                wants_outputs,
            )
            kind, _, since = name.rpartition("-")
            if kind and since.isdigit():
                _OPSETS_BY_OP_TYPE.setdefault(kind, []).append(int(since))
                _OPSETS_BY_OP_TYPE[kind].sort()
        return function

    return declare


def resolve_operator(op_type: str, opset: int) -> str | None:
    """The declared form of `kind` ("Expand", "com.microsoft.Gelu") that holds at `opset`: the newest not newer; or
    None.
    """
    since = [version for version in _OPSETS_BY_OP_TYPE.get(op_type, ()) if version <= opset]
    return f"{op_type}-{since[-1]}" if since else None


REQUIRED: Any = inspect.Parameter.empty
