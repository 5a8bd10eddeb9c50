"""The registry of operators: a function's signature declares everything that converter and runtime need to know.

Positional parameters are the ONNX inputs (a default of None marks an optional one, `*xs` a variadic one), keyword-only
parameters the attributes with their ONNX defaults. An input annotated `HostArray` must be known while a step is traced
and comes as a numpy array; one annotated `Indices` comes as such, with the range that its integers are known to be in;
one annotated `NNLayer` is an `mlx.nn` layer; any other comes as an `mx.array`. A keyword-only parameter named `outputs`
gets the number of outputs that the node has. A result that is a numpy array stays on the host.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.integer_ranges import RangeRule
from mlx_transmuter.program import Node


class HostArray(np.ndarray):
    """Annotation of an input whose value must be known while a step is traced; the function gets a numpy array."""


class NNLayer(nn.Module):
    """Annotation of an input that is a layer of the module; the function gets the `mlx.nn` layer and calls it."""


class OperatorError(TransmuterError):
    """An operator that cannot do what a node asks; `node` is "" until the walk over the graph knows it."""

    def __init__(self, found: str, expected: str = "", do: str = "", node: str = ""):
        super().__init__("", found, expected, do, node=node)


@dataclass(frozen=True)
class Operator:
    """A declared operator: `name` as programs spell it, its function, and what the function's signature says.

    `attribute_types` has an attribute's annotation, or the type of its default. `layer_input` is the name of the
    input that is a layer, or None. `is_rowwise` tells that each vector along the last axis of the output follows from
    the vector at the same place of each input, so that rows may be selected before the operator instead of after it.
    `range_rule` says in which range the integers of the outputs are.
    """

    name: str
    function: Callable[..., Any]
    input_names: tuple[str, ...]
    required_inputs: int
    variadic_name: str | None
    host_inputs: frozenset[int]
    host_variadic_inputs: bool
    index_inputs: frozenset[int]
    layer_input: str | None
    attribute_defaults: dict[str, Any]
    attribute_types: dict[str, Any]
    takes_output_count: bool
    is_rowwise: bool
    range_rule: RangeRule | None

    @property
    def docstring(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def is_variadic(self) -> bool:
        return self.variadic_name is not None

    def input_name(self, number: int) -> str:
        """Returns the name of an input by its number; the variadic ones are `xs[0]`, `xs[1]`, …."""
        if number < len(self.input_names):
            return self.input_names[number]
        return f"{self.variadic_name or 'input'}[{number - len(self.input_names)}]"

    def input_number(self, name: str) -> int:
        """Returns the number of the input of that name. Raises ValueError for a name that is not in the signature."""
        return self.input_names.index(name)

    def bind(self, node: Node) -> dict[str, str]:
        """Returns the name of an input -> the name of the value that the node gives it.

        Optional inputs that the node leaves out are not in it. The variadic inputs `*xs` are `xs[0]`, `xs[1]`, ….
        """
        return {self.input_name(number): value for number, value in enumerate(node.inputs) if value}

    def check_input_count(self, node: Node) -> None:
        """Raises OperatorError for a node with fewer or more inputs than the operator takes."""
        count = len(node.inputs)
        if count < self.required_inputs or (count > len(self.input_names) and not self.is_variadic):
            raise OperatorError(f"{count} inputs", f"the inputs {', '.join(self.input_names)}", node=str(node))

    def check_attributes(self, node: Node) -> None:
        """Raises OperatorError for an attribute that the operator lacks, and for a size that is not positive.

        MLX divides by sizes, which ends the process where one is 0. The default of the operator's own stays allowed.
        """
        if unknown := node.attrs.keys() - self.attribute_defaults.keys():
            raise OperatorError(f"the attribute {', '.join(sorted(unknown))}", "an attribute that the operator has")
        for name in POSITIVE_ATTRIBUTES & node.attrs.keys():
            value = node.attrs[name]
            sizes = value if isinstance(value, (list, tuple)) else [value]
            if value != self.attribute_defaults[name] and not all(0 < size < 2**31 for size in sizes):
                raise OperatorError(f"{name} {value}", "at least 1, and 31 bits")


# Numbers of parts, sizes and steps: attributes of which a value below 1 means nothing.
POSITIVE_ATTRIBUTES = frozenset(
    {
        *("num_heads", "q_num_heads", "kv_num_heads", "group", "groups", "num_outputs", "hidden_size"),
        *("kernel_shape", "kernel_size", "strides", "dilations", "dilation", "block_size", "blocksize", "bits"),
    }
)

OPERATORS: dict[str, Operator] = {}
_OPSETS_BY_OP_TYPE: dict[str, list[int]] = {}


def op(
    *names: str, rowwise: bool = False, integer_range: RangeRule | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that declares a function as the operators `names`.

    A name is the operator, with its domain if that is not ONNX's own, and the opset from which this version of it
    holds: `Expand-8`, `com.microsoft.FastGelu-1`; the operators of this project carry none: `mlx.rms_norm`. Raises
    OperatorError for a name that is declared already. rowwise, integer_range: see `Operator.is_rowwise` and
    `Operator.range_rule`.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        inputs = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        variadic = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        attributes = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        attribute_types = {
            p.name: type(p.default) if p.annotation is p.empty else p.annotation
            for p in parameters
            if p.kind is p.KEYWORD_ONLY
        }
        takes_output_count = "outputs" in attributes
        attributes.pop("outputs", None)
        for name in names:
            if name in OPERATORS:
                raise OperatorError(f"the operator {name} declared twice", "each operator version declared once")
            OPERATORS[name] = Operator(
                name=name,
                function=function,
                input_names=tuple(p.name for p in inputs),
                required_inputs=sum(p.default is p.empty for p in inputs),
                variadic_name=variadic.name if variadic else None,
                host_inputs=frozenset(i for i, p in enumerate(inputs) if p.annotation is HostArray),
                host_variadic_inputs=variadic is not None and variadic.annotation is HostArray,
                index_inputs=frozenset(i for i, p in enumerate(inputs) if p.annotation is Indices),
                layer_input=next((p.name for p in inputs if p.annotation is NNLayer), None),
                attribute_defaults=attributes,
                attribute_types=attribute_types,
                takes_output_count=takes_output_count,
                is_rowwise=rowwise,
                range_rule=integer_range,
            )
            op_type, _, since = name.rpartition("-")
            if op_type and since.isdigit():
                _OPSETS_BY_OP_TYPE.setdefault(op_type, []).append(int(since))
                _OPSETS_BY_OP_TYPE[op_type].sort()
        return function

    return declare


def resolve_operator(op_type: str, opset: int) -> str | None:
    """Returns the newest declared version of `op_type` ("Expand", "com.microsoft.Gelu") that is not newer than `opset`,
    or None.
    """
    versions = [version for version in _OPSETS_BY_OP_TYPE.get(op_type, ()) if version <= opset]
    return f"{op_type}-{versions[-1]}" if versions else None


def bind_inputs(node: Node) -> dict[str, str]:
    """Returns the inputs of a node by the names that its operator gives them (see `Operator.bind`)."""
    return OPERATORS[node.op].bind(node)


REQUIRED: Any = inspect.Parameter.empty
