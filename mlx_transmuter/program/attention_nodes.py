"""The attention nodes of a program over pools: their inputs by name, their windows, and the form of their pools.

The operators are declared in ops/mlx, which this package may not import: a test compares the names with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_transmuter.program.metadata import Metadata
from mlx_transmuter.program.program import Node, Program

POOLED_ATTENTION = "mlx.attention"
VISIBILITY_MASK = "mlx.visible"
ALIBI_BIAS = "mlx.alibi"
INPUT_NAMES = {
    POOLED_ATTENTION: ("q", "k", "v", "key_pool", "value_pool", "head_index", "mask", "sinks"),
    ALIBI_BIAS: ("index", "mask"),
}


def input_of(node: Node, name: str) -> str:
    """Returns the value that one of these nodes has for the input of that name, "" where it has none."""
    number = INPUT_NAMES[node.op].index(name)
    return node.inputs[number] if number < len(node.inputs) else ""


def has_fused_kv_pools(program: Program) -> bool:
    """Whether pools hold the keys of all heads and, after them, the values."""
    return any(node.op == POOLED_ATTENTION and not input_of(node, "value_pool") for node in program.all_nodes())


def attention_windows(program: Program) -> set[int]:
    """Returns the windows of the attention of a program over pools, in positions; 0 where it sees all columns.

    A conversion records them in the metadata; for programs without that record they are read off the nodes.
    """
    recorded = Metadata(program.metadata).attention_windows
    return find_attention_windows(program) if recorded is None else set(recorded)


def find_attention_windows(program: Program) -> set[int]:
    """Returns the windows that the masks of a program's attention nodes have; 0 for all columns or an unknown mask."""
    nodes = list(program.all_nodes())
    producers = {name: node for node in nodes for name in node.outputs}
    return {_window_of(node, producers) for node in nodes if node.op == POOLED_ATTENTION}


def _window_of(attention: Node, producers: Mapping[str, Node]) -> int:
    mask = producers.get(input_of(attention, "mask"))
    if mask is not None and mask.op == ALIBI_BIAS:
        mask = producers.get(input_of(mask, "mask"))
    window = mask.attrs.get("window") if mask is not None and mask.op == VISIBILITY_MASK else None
    return window if isinstance(window, int) and window > 0 else 0
