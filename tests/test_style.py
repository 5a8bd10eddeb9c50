"""What the code of the tree keeps to beyond what the linters check: names, and expressions that read in one go."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted(
    path.relative_to(ROOT)
    for folder in ("mlx_transmuter", "converters", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "mlx_transmuter" / "converters")  # a link to the folder `converters`
)
PACKAGE = [path for path in PATHS if path.parts[0] in ("mlx_transmuter", "converters")]

# Participles and adjectives: alone they name neither a thing nor what a function does.
INCOMPLETE_NAMES = frozenset(
    [
        "asked",
        "changed",
        "declined",
        "dropped",
        "flat",
        "found",
        "given",
        "held",
        "hit",
        "kept",
        "made",
        "one",
        "packed",
        "parted",
        "read_back",
        "said",
        "same",
        "seen",
        "settle",
        "settled",
        "taken",
        "together",
        "told",
        "wanted",
        "whole",
    ]
)
PUBLIC_API = {"CacheIndex.packed", "CacheIndex.whole"}  # names that users call


def definitions(tree: ast.AST, prefix: str = "") -> list[str]:
    """Returns the dotted names of all classes and functions of a tree, nested ones included."""
    names = []
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(prefix + node.name)
            inner = f"{prefix}{node.name}."
        names += definitions(node, inner)
    return names


def nested_conditionals(tree: ast.AST) -> list[int]:
    """Returns the lines of conditional expressions that are a branch of another."""
    conditionals = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    return [
        branch.lineno for node in conditionals for branch in (node.body, node.orelse) if isinstance(branch, ast.IfExp)
    ]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse((ROOT / path).read_bytes()) for path in PATHS}


def test_no_conditional_expression_is_a_branch_of_another(trees):
    assert nested_conditionals(ast.parse("a if b else c if d else e")) == [1]
    assert {path: lines for path, tree in trees.items() if (lines := nested_conditionals(tree))} == {}


def test_no_two_public_classes_have_one_name(trees):
    places = defaultdict(list)
    for path in PACKAGE:
        for name in definitions(trees[path]):
            if name[0].isupper():
                places[name].append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and "." not in name} == {}


def test_no_class_or_function_is_named_by_a_participle_or_adjective_alone(trees):
    names = {(str(path), name) for path, tree in trees.items() for name in definitions(tree)}
    assert {
        (path, name)
        for path, name in names
        if name.rpartition(".")[2].strip("_").lower() in INCOMPLETE_NAMES and name not in PUBLIC_API
    } == set()
