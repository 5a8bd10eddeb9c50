"""The tables of a decoder that its token ids index. One with fewer rows than the vocabulary is not of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mlx_transmuter.program.cache_pairs import SignatureError
from mlx_transmuter.program.layer_arrays import array_name
from mlx_transmuter.program.program import Node, Program
from mlx_transmuter.program.signature import DecoderSignature

# Operators whose result has the integers of their first input, and those whose result has its rows.
_SAME_INTEGERS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Flatten")
_SAME_ROWS = ("Cast", "Identity", "DequantizeLinear")
# Operators that read rows of a table: the numbers of the inputs that are the table and the ids, and the attribute that
# says of which axis the rows are, "" for one that takes the first alone.
_TABLE_READS: Mapping[str, tuple[int, int, str]] = {
    "Gather": (0, 1, "axis"),
    "mlx.embedding": (1, 0, ""),
    "com.microsoft.GatherBlockQuantized": (0, 1, "gather_axis"),
    "com.microsoft.TorchEmbedding": (0, 1, ""),
    "com.microsoft.EmbedLayerNormalization": (2, 0, ""),
    "com.microsoft.QEmbedLayerNormalization": (2, 0, ""),
}


class TokenTable(NamedTuple):
    """A table that the token ids index: its name, and how many rows it has."""

    name: str
    rows: int


def check_token_tables(program: Program, signature: DecoderSignature) -> None:
    """Raises SignatureError for a table of the token ids that has no row for some token of the vocabulary."""
    for table in token_tables(program, signature.token_input):
        if table.rows < signature.vocab_size and not signature.takes_embeddings:
            found = f"logits of {signature.vocab_size} tokens, and a table of {table.rows} tokens ({table.name!r})"
            raise SignatureError(found, "a row of the table for each token", "export the model again")


def token_tables(program: Program, token_input: str) -> list[TokenTable]:
    """Returns the tables, of those with a size of their own, that the ids of the token input index as they are."""
    ids, tables = {token_input}, []
    sources = {node.outputs[0]: node.inputs[0] for node in program.nodes if _keeps(node, _SAME_ROWS)}
    for node in program.nodes:
        if _keeps(node, _SAME_INTEGERS) and node.inputs[0] in ids:
            ids.add(node.outputs[0])
        table = _table_read_by(node, ids)
        while table in sources:
            table = sources[table]
        shape = _array_shape(program, table)
        if shape:
            tables.append(TokenTable(table, shape[0]))
    return tables


def _keeps(node: Node, op_types: tuple[str, ...]) -> bool:
    return node.op_type in op_types and bool(node.inputs) and bool(node.outputs)


def _table_read_by(node: Node, ids: set[str]) -> str:
    """Returns the table of which a node reads the rows that the ids name; "" for a node that reads none."""
    table, indices, axis = _TABLE_READS.get(node.op_type, (0, 0, ""))
    if node.op_type not in _TABLE_READS or len(node.inputs) <= max(table, indices) or node.inputs[indices] not in ids:
        return ""
    return "" if axis and node.attrs.get(axis, 0) != 0 else node.inputs[table]


def _array_shape(program: Program, name: str) -> tuple[int, ...]:
    """Returns the shape of a weight, a constant or the weight of a layer; () for another value."""
    for weight in (name, array_name(name, "weight")):
        if weight in program.weights:
            return program.weights[weight].shape
    return program.constants[name].shape if name in program.constants else ()
