"""The JSON form of a program, program.json: what is written, and what is read with every value checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mlx_transmuter.git_lfs import check_not_lfs_pointer
from mlx_transmuter.program.errors import ProgramError
from mlx_transmuter.program.onnx_dtypes import ONNX_DTYPES
from mlx_transmuter.program.program import Node, Program, Value, WeightInfo

PROGRAM_FORMAT = "mlx_transmuter"
PROGRAM_VERSION = 1
# The most bytes of a saved program: far above any decoder, far below what hurts a reader.
MAX_PROGRAM_BYTES = 512 * 2**20


def program_to_json(program: Program) -> dict[str, Any]:
    """Returns the program as JSON values; `program_from_json` is the inverse."""
    return {
        "format": PROGRAM_FORMAT,
        "version": PROGRAM_VERSION,
        "meta": program.metadata,
        "inputs": [_value_to_json(value) for value in program.inputs],
        "outputs": [_value_to_json(value) for value in program.outputs],
        "layers": program.layers,
        "weights": {name: {"dtype": w.dtype, "shape": list(w.shape)} for name, w in program.weights.items()},
        "constants": {name: _constant_to_json(array) for name, array in program.constants.items()},
        "nodes": [_node_to_json(node) for node in program.nodes],
    }


def program_from_json(data: Any, where: str = "program") -> Program:
    """Returns the Program of the values of `program_to_json`. Raises ProgramError naming `where` for anything else."""
    if not isinstance(data, dict) or data.get("format") != PROGRAM_FORMAT:
        raise ProgramError(where, "no program of mlx-transmuter", f'a JSON object with "format": "{PROGRAM_FORMAT}"')
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


def save_program(program: Program, path: Path) -> None:
    """Writes the program to `path` as JSON, a node a line."""
    data = program_to_json(program)
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


def load_program(path: Path) -> Program:
    """Returns the program of a program.json. Raises ProgramError for a file that is none."""
    if path.stat().st_size > MAX_PROGRAM_BYTES:
        raise ProgramError(str(path), f"{path.stat().st_size} bytes", f"at most {MAX_PROGRAM_BYTES}")
    check_not_lfs_pointer(path, ProgramError)
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ProgramError(str(path), f"no JSON ({error})", "a program.json as saved") from None
    return program_from_json(data, str(path))


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
        return {"program": program_to_json(value)}
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
            return program_from_json(item, where)
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
