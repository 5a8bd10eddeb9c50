"""The Program: the one form in which a graph is read, rewritten, compared, saved and run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.program.layer_arrays import LAYER_ARRAY_NAMES, array_owner

PROGRAM_FORMAT = "mlx_transmuter"
PROGRAM_VERSION = 1
# What a saved program may be at most: far above any decoder, far below what hurts a reader.
MAX_PROGRAM_BYTES = 512 * 2**20
MAX_CONSTANT_ELEMENTS = 4096

# Names of ONNX's tensor types. A value keeps its ONNX type here; what MLX holds of it is ops.types' business.
ONNX_DTYPES = frozenset(
    {
        *("float32", "float16", "bfloat16", "float64", "complex64", "complex128", "bool", "string"),
        *("int64", "int32", "int16", "int8", "int4", "int2", "uint64", "uint32", "uint16", "uint8", "uint4", "uint2"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0"),
        *("float6_e2m3", "float6_e3m2", "float4_e2m1"),
        "cache_index",  # no tensor: an input that is a CacheIndex
    }
)


class ProgramError(TransmuterError):
    """A program that is not whole; `where` is the file, the node or the weight."""

    def __init__(self, where: str, found: str, expected: str, do: str = "convert the model again"):
        super().__init__(where, found, expected, do)


@dataclass(frozen=True)
class Value:
    """A named input or output. `shape` has an int, a symbol or None (unknown) per axis; None where the rank is."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Node:
    """One application of an operator.

    `op` is the declared form, `Expand-8`, `com.microsoft.FusedMatMul-1` or `mlx.linear`. `inputs` and `outputs` are
    value names, "" where an optional one is left out. `attrs` holds ints, floats, strings, lists of these, numpy arrays
    and Programs. `name` is the exporter's name of the node, for errors and for naming weights.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}" if self.name else f"{self.op} -> {', '.join(self.outputs)}"

    @property
    def op_type(self) -> str:
        """The operator without the version of its form: `Expand` of `Expand-8`; `mlx.linear` as it is."""
        return self.op.rpartition("-")[0] or self.op

    def subprograms(self) -> Iterator[Program]:
        """The programs among the attributes: the branches of If, the bodies of Loop and Scan."""
        return (value for value in self.attrs.values() if isinstance(value, Program))

    def all_inputs(self) -> Iterator[str]:
        """Every outer value that the node needs, those of its branches included."""
        yield from (name for name in self.inputs if name)
        for branch in self.subprograms():
            yield from branch.free_values()


@dataclass(frozen=True)
class WeightInfo:
    """What a program says of a tensor that lies in the safetensors file: its ONNX type and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Program:
    """A graph in single assignment form; every name is given once, branches included.

    inputs, outputs: the graph's Values.
    nodes: in an order in which each value is given before it is read.
    constants: small arrays known on the host (shapes, axes, scalars), saved inside program.json.
    weights: names and types of the tensors in model.safetensors.
    layers: path -> {"kind": ..., options}: values that are an `mlx.nn` layer, so that MLX's tools find them.
    meta: what the conversion recorded (cache, proofs, rewrites, source).
    arrays: the data of the weights, only while a conversion is under way; never saved.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: list[Node]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, WeightInfo] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict, repr=False)

    def input(self, name: str) -> Value | None:
        """The input of that name, or None."""
        return next((value for value in self.inputs if value.name == name), None)

    def output(self, name: str) -> Value | None:
        """The output of that name, or None."""
        return next((value for value in self.outputs if value.name == name), None)

    def all_nodes(self) -> Iterator[Node]:
        """The nodes of the program and of every branch in it."""
        for node in self.nodes:
            yield node
            for branch in node.subprograms():
                yield from branch.all_nodes()

    def producers(self) -> dict[str, Node]:
        """Value name -> the node (of this level) that gives it."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    def consumers(self) -> dict[str, list[Node]]:
        """Value name -> the nodes (of this level) that read it, themselves or in a branch."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.all_inputs()):
                found.setdefault(name, []).append(node)
        return found

    def free_values(self) -> list[str]:
        """The names that the program reads and does not give: what a branch takes from the graph around it."""
        given = {value.name for value in self.inputs} | self.constants.keys() | self.weights.keys() | self.layers.keys()
        found: dict[str, None] = {}
        for node in self.nodes:
            found.update((name, None) for name in node.all_inputs() if name not in given)
            given.update(node.outputs)
        found.update((value.name, None) for value in self.outputs if value.name not in given)
        return list(found)

    def with_tensors(self, tensors: dict[str, Any]) -> Program:
        """The program with `tensors` as the data of its weights, whose types and shapes are those of the tensors."""
        weights = {name: WeightInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        return replace(self, tensors=tensors, weights=weights)

    def select_outputs(self, outputs: list[str]) -> Program:
        """The program that gives only those `outputs`, with the nodes, constants and weights that these need."""
        selected = tuple(value for value in self.outputs if value.name in set(outputs))
        needed = {value.name for value in selected}
        nodes = []
        for node in reversed(self.nodes):
            if needed & set(node.outputs):
                needed.update(node.all_inputs())
                nodes.append(replace(node, outputs=tuple(name if name in needed else "" for name in node.outputs)))

        def kept(table: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in table.items() if name in needed}

        def owned(name: str) -> bool:
            owner = array_owner(name, self.layers)
            return owner is not None and owner[0] in needed and owner[1] in LAYER_ARRAY_NAMES

        weights = {name: value for name, value in self.weights.items() if name in needed or owned(name)}
        return replace(
            self,
            outputs=selected,
            nodes=nodes[::-1],
            constants=kept(self.constants),
            weights=weights,
            layers=kept(self.layers),
            tensors={name: array for name, array in self.tensors.items() if name in weights},
        )

    def validate(
        self,
        where: str = "program",
        outer_values: frozenset[str] = frozenset(),
        is_known_operator: Callable | None = None,
    ) -> None:
        """Raises ProgramError unless each name is given once and before it is read.

        `given` are the values of the program around a branch; `known(op)` says whether an operator is declared.
        """
        seen = set(outer_values)

        def give(name: str, what: str) -> None:
            if name in seen:
                raise ProgramError(where, f"the value {name!r} given again by {what}", "each value given once")
            seen.add(name)

        for value in self.inputs:
            give(value.name, "an input")
            if value.dtype not in ONNX_DTYPES:
                raise ProgramError(where, f"the type {value.dtype!r} of input {value.name!r}", "an ONNX tensor type")
        for table, what in ((self.constants, "a constant"), (self.weights, "a weight"), (self.layers, "a layer")):
            for name in table:
                give(name, what)
        for node in self.nodes:
            if is_known_operator and not is_known_operator(node.op):
                raise ProgramError(where, f"the operator {node.op!r}", "an operator that this version declares")
            for name in node.inputs:
                if name and name not in seen:
                    raise ProgramError(where, f"node {node} reading {name!r}", "a value given before it is read")
            for branch in node.subprograms():
                if branch.weights or branch.layers:
                    raise ProgramError(
                        where, f"weights inside a branch of {node}", "weights in the outermost program only"
                    )
                branch.validate(f"{where}, a branch of {node}", frozenset(seen), is_known_operator)
            for name in node.outputs:
                if name:
                    give(name, f"node {node}")
        for value in self.outputs:
            if value.name not in seen or value.name in self.layers:
                raise ProgramError(where, f"no node that gives the output {value.name!r}", "every output given")

    def to_json(self) -> dict[str, Any]:
        """The program as JSON values; `from_json` is the inverse."""
        return {
            "format": PROGRAM_FORMAT,
            "version": PROGRAM_VERSION,
            "meta": self.metadata,
            "inputs": [_value_to_json(value) for value in self.inputs],
            "outputs": [_value_to_json(value) for value in self.outputs],
            "layers": self.layers,
            "weights": {name: {"dtype": w.dtype, "shape": list(w.shape)} for name, w in self.weights.items()},
            "constants": {name: _constant_to_json(array) for name, array in self.constants.items()},
            "nodes": [_node_to_json(node) for node in self.nodes],
        }

    @staticmethod
    def from_json(data: Any, where: str = "program") -> Program:
        """The Program of `to_json`'s values. Raises ProgramError naming `where` for anything else."""
        if not isinstance(data, dict) or data.get("format") != PROGRAM_FORMAT:
            raise ProgramError(
                where, "no program of mlx-transmuter", f'a JSON object with "format": "{PROGRAM_FORMAT}"'
            )
        if data.get("version") != PROGRAM_VERSION:
            raise ProgramError(where, f"version {data.get('version')!r}", f"version {PROGRAM_VERSION}")
        try:
            return Program(
                inputs=tuple(_value_from_json(value) for value in _parse_list(data["inputs"])),
                outputs=tuple(_value_from_json(value) for value in _parse_list(data["outputs"])),
                nodes=[_node_from_json(node, where) for node in _parse_list(data["nodes"])],
                constants={_parse_name(name): _constant_from_json(array) for name, array in data["constants"].items()},
                weights={
                    _parse_name(name): WeightInfo(
                        _parse_dtype(w["dtype"]), tuple(_parse_size(n) for n in _parse_list(w["shape"]))
                    )
                    for name, w in data["weights"].items()
                },
                layers={_parse_name(path): dict(layer) for path, layer in data["layers"].items()},
                metadata=dict(data["meta"]),
            )
        except ProgramError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ProgramError(
                where, f"a malformed program ({type(error).__name__}: {error})", "a program as saved"
            ) from None

    def save(self, path: Path) -> None:
        """Writes the program to `path` as JSON, a node a line."""
        data = self.to_json()
        lines = []
        for key, value in data.items():
            if key in ("nodes", "inputs", "outputs") and value:
                text = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
            elif key in ("weights", "constants", "layers") and value:
                rows = (f"{json.dumps(name)}: {json.dumps(item, allow_nan=False)}" for name, item in value.items())
                text = "{\n  " + ",\n  ".join(rows) + "\n }"
            else:
                text = json.dumps(value, allow_nan=False)
            lines.append(f" {json.dumps(key)}: {text}")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Program:
        """The program of a program.json. Raises ProgramError for a file that is none."""
        if path.stat().st_size > MAX_PROGRAM_BYTES:
            raise ProgramError(str(path), f"{path.stat().st_size} bytes", f"at most {MAX_PROGRAM_BYTES}")
        try:
            data = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ProgramError(str(path), f"no JSON ({error})", "a program.json as saved") from None
        return Program.from_json(data, str(path))


def _parse_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name {name!r}")
    return name


def _parse_names(names: Any) -> tuple[str, ...]:
    if not all(isinstance(name, str) for name in _parse_list(names)):
        raise TypeError(f"the names {names!r}")
    return tuple(names)


def _parse_dtype(dtype: Any) -> str:
    if dtype not in ONNX_DTYPES:
        raise ValueError(f"the type {dtype!r}")
    return dtype


def _parse_list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} in place of a list")
    return values


def _parse_size(size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**48:
        raise ValueError(f"the size {size!r}")
    return size


def _value_to_json(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": None if value.shape is None else list(value.shape)}


def _value_from_json(data: Any) -> Value:
    shape = data["shape"]
    if shape is not None:
        shape = tuple(
            axis if axis is None or isinstance(axis, str) else _parse_size(axis) for axis in _parse_list(shape)
        )
    return Value(_parse_name(data["name"]), _parse_dtype(data["dtype"]), shape)


# JSON has no infinite numbers, so they go as these strings.
_NON_FINITE = ("inf", "-inf", "nan")
# What JSON may hold of an element of a constant, by the kind of numpy's type.
_ELEMENT_TYPES: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": (int, float), "U": str}
_CONSTANT_DTYPES = {
    "bool",
    "str",
    "float16",
    "float32",
    "float64",
    *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)),
}


def _number_to_json(number: Any) -> Any:
    return number if not isinstance(number, float) or math.isfinite(number) else str(number)


def _constant_to_json(array: np.ndarray) -> dict[str, Any]:
    return {
        "dtype": "str" if array.dtype.kind == "U" else array.dtype.name,
        "shape": list(array.shape),
        "data": [_number_to_json(number) for number in array.ravel().tolist()],
    }


def _constant_from_json(data: Any) -> np.ndarray:
    if data["dtype"] not in _CONSTANT_DTYPES:
        raise ValueError(f"the type {data['dtype']!r} of a constant")
    dtype = np.dtype(data["dtype"])
    shape = tuple(_parse_size(size) for size in _parse_list(data["shape"]))
    if math.prod(shape) != len(_parse_list(data["data"])):
        raise ValueError(f"no {math.prod(shape)} elements for the shape {list(shape)}")
    with np.errstate(over="ignore"):
        return np.array([_parse_element(item, dtype.kind) for item in data["data"]], dtype=dtype).reshape(shape)


def _parse_element(item: Any, kind: str) -> Any:
    if kind == "f" and item in _NON_FINITE:
        return float(item)
    if not isinstance(item, _ELEMENT_TYPES[kind]) or (isinstance(item, bool) and kind != "b"):
        raise TypeError(f"the element {item!r}")
    return item


def _attr_to_json(value: Any) -> Any:
    if isinstance(value, Program):
        return {"program": value.to_json()}
    if isinstance(value, np.ndarray):
        return {"array": _constant_to_json(value)}
    if isinstance(value, (list, tuple)):
        return [_attr_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _attr_from_json(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_attr_from_json(item, where) for item in value]
    if isinstance(value, dict):
        ((kind, item),) = value.items()
        if kind == "program":
            return Program.from_json(item, where)
        if kind == "array":
            return _constant_from_json(item)
        if kind != "float" or item not in _NON_FINITE:
            raise ValueError(f"the attribute {value!r}")
        return float(item)
    return value


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"op": node.op, "inputs": list(node.inputs), "outputs": list(node.outputs)}
    if node.attrs:
        data["attrs"] = {name: _attr_to_json(value) for name, value in node.attrs.items()}
    if node.name:
        data["name"] = node.name
    return data


def _node_from_json(data: Any, where: str) -> Node:
    attrs = {_parse_name(name): _attr_from_json(value, where) for name, value in data.get("attrs", {}).items()}
    return Node(
        _parse_name(data["op"]),
        _parse_names(data["inputs"]),
        _parse_names(data["outputs"]),
        attrs,
        str(data.get("name", "")),
    )
