"""The tree of a module: a program's weights and layers under their dotted names, as MLX's own models have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_transmuter import ops
from mlx_transmuter.program import Program, ProgramError, WeightInfo
from mlx_transmuter.program.layer_arrays import array_name, array_owner

# No exporter nests scopes deeper.
MAX_SCOPE_DEPTH = 64


class LeafLocation(NamedTuple):
    """The container of a leaf and its key in it, so that a layer swapped by MLX's tools is read where it is."""

    container: Any
    key: Any

    @property
    def leaf(self) -> Any:
        """The leaf, as it is now."""
        return self.container[self.key]


def attach_weights(root: nn.Module, program: Program, weights: dict[str, mx.array]) -> dict[str, LeafLocation]:
    """Attaches the weights and layers of a program under `root`, and returns the location of each by its name.

    Raises ProgramError for weights that are not the program's, names that are not a tree, and layers that MLX lacks or
    whose arrays are not all weights.
    """
    owners = {name: owner for name in program.weights if (owner := array_owner(name, program.layers))}
    _check_names(program, set(owners))
    _check_weights(program, weights)
    leaves: dict[str, Any] = {name: weights[name] for name in program.weights if name not in owners}
    leaves |= {path: _make_layer(path, options, program) for path, options in program.layers.items()}
    for name, (path, array) in owners.items():
        leaves[path][array] = weights[name]
    _attach_leaves(root, leaves)
    return {name: _find_leaf(root, name) for name in (*leaves, *owners)}


def read_leaf(name: str, program: Program, read_weight: Callable[[str], mx.array]) -> Any:
    """Returns the weight or the layer of that name, which is no part of a tree, its arrays read by `read_weight`.

    Raises ProgramError as `attach_weights` does.
    """

    def read(name: str) -> mx.array:
        array = read_weight(name)
        _check_weight(name, program.weights[name], array)
        return array

    if name not in program.layers:
        return read(name)
    layer = _make_layer(name, program.layers[name], program)
    for array in layer.parameters():
        layer[array] = read(array_name(name, array))
    return layer


def _check_names(program: Program, layer_arrays: set[str]) -> None:
    """Raises ProgramError unless each weight and layer has its own place: no name is a path into another's value."""
    leaves = program.layers.keys() | (program.weights.keys() - layer_arrays)
    for name in (*program.weights, *program.layers):
        scopes = name.split(".")
        # The array of a layer is inside its layer, which is a leaf.
        outer = range(1, len(scopes) - (name in layer_arrays))
        is_hidden = any(not scope or scope.startswith("_") for scope in scopes)
        is_too_deep = len(scopes) > MAX_SCOPE_DEPTH
        # Joining the outer scopes takes quadratic time, so names that are too deep are left out.
        is_nested = not is_too_deep and any(".".join(scopes[:count]) in leaves for count in outer)
        if is_hidden or is_nested or is_too_deep:
            expected = "dotted paths, none inside another and none hidden"
            raise ProgramError("the weights", f"the name {name[:200]!r}", expected)


def _make_layer(path: str, options: dict[str, Any], program: Program) -> nn.Module:
    """Returns the layer at `path`. Raises ProgramError for an unknown one, or one whose arrays are not all weights."""
    try:
        layer = ops.make_layer(**options)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise ProgramError(f"the layer {path!r}", f"{options} ({error})", "a layer of mlx.nn and its options") from None
    expected = {array_name(path, array) for array in layer.parameters()}
    arrays = {name for name in program.weights if name.rpartition(".")[0] == path}
    if arrays != expected:
        raise ProgramError(f"the layer {path!r}", f"the weights {sorted(arrays)}", f"{sorted(expected)}")
    _check_layer_rows(path, {name.rpartition(".")[2]: program.weights[name].shape for name in arrays})
    return layer


def _check_layer_rows(path: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ProgramError unless each array of a layer has a vector, or a bias a number, for each row of its weight.

    MLX compares the widths alone, and would read the rows that are missing from what lies behind the array.
    """
    rows = shapes["weight"][:-1]
    for array, shape in shapes.items():
        if (shape if array == "bias" else shape[:-1]) != rows:
            found = f"{array} {list(shape)} beside the weight {list(shapes['weight'])}"
            raise ProgramError(f"the layer {path!r}", found, f"one for each of the weight's rows {list(rows)}")


def _check_weights(program: Program, weights: dict[str, mx.array]) -> None:
    """Raises ProgramError unless each weight of the program has an array of its dtype and shape."""
    if missing := sorted(program.weights.keys() - weights.keys()):
        found = f"none named {missing[0]!r} ({len(missing)} missing)"
        raise ProgramError("the weights", found, "every weight of the program")
    for name, weight in program.weights.items():
        _check_weight(name, weight, weights[name])


def _check_weight(name: str, weight: WeightInfo, array: mx.array) -> None:
    """Raises ProgramError unless the array has the weight's dtype and shape."""
    try:
        dtype = ops.device_dtype(weight.dtype)
    except ops.OperatorError as error:
        raise ProgramError(f"the weight {name!r}", error.found, error.expected) from None
    # MLX counts a size modulo 2^64: the product of a shape may differ from it.
    if tuple(array.shape) != weight.shape or array.dtype != dtype or math.prod(weight.shape) != array.size:
        found, expected = f"{array.dtype} {list(array.shape)}", f"{dtype} {list(weight.shape)}"
        raise ProgramError(f"the weight {name!r}", found, expected)


def _attach_leaves(root: nn.Module, leaves: dict[str, Any]) -> None:
    """Attaches the leaves under `root` by their dotted names, numbered children as lists."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *scopes, last = name.split(".")
        branch = tree
        for scope in scopes:
            branch = branch.setdefault(scope, {})
        branch[last] = leaf
    for key, value in tree.items():
        root[key] = _as_modules(value)


def _as_modules(node: Any) -> Any:
    """Returns a nested dict as modules, and as a list where its keys are 0, 1, …; a leaf as it is."""
    if not isinstance(node, dict) or isinstance(node, nn.Module):
        return node
    if node and all(str(i) in node for i in range(len(node))):
        return [_as_modules(node[str(i)]) for i in range(len(node))]
    module = nn.Module()
    for key, value in node.items():
        module[key] = _as_modules(value)
    return module


def _find_leaf(root: nn.Module, name: str) -> LeafLocation:
    *scopes, last = name.split(".")
    container: Any = root
    for scope in scopes:
        container = container[int(scope)] if isinstance(container, list) else container[scope]
    return LeafLocation(container, int(last) if isinstance(container, list) else last)
