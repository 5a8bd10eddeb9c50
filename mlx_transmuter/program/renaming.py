"""Renames of values: a program with values of its nodes under other names, and nodes that read other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_transmuter.program.program import Node, Program


def rename_values(program: Program, names: Mapping[str, str]) -> Program:
    """Returns the program with values that its nodes compute renamed: old name -> new name. Inputs keep their names."""
    if not names:
        return program
    nodes = [
        replace(redirect_reads(node, names), outputs=tuple(names.get(name, name) for name in node.outputs))
        for node in program.nodes
    ]
    return replace(program, nodes=nodes)


def redirect_reads(node: Node, aliases: Mapping[str, str]) -> Node:
    """Returns the node, reading `aliases[name]` wherever it or one of its branches read `name`."""
    if not aliases or not any(name in aliases for name in node.all_inputs()):
        return node
    attrs = {
        key: replace(
            value,
            nodes=[redirect_reads(inner, aliases) for inner in value.nodes],
            outputs=tuple(replace(out, name=aliases.get(out.name, out.name)) for out in value.outputs),
        )
        if isinstance(value, Program)
        else value
        for key, value in node.attrs.items()
    }
    return replace(node, inputs=tuple(aliases.get(name, name) for name in node.inputs), attrs=attrs)
