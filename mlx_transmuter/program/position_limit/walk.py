"""The walk over a program that finds where the first of its tables ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlx_transmuter.program.layer_arrays import array_name
from mlx_transmuter.program.length_switches import TOTAL_LENGTH_INPUT
from mlx_transmuter.program.position_limit.accesses import accesses_of
from mlx_transmuter.program.position_limit.bounds import UNKNOWN, Bounds, join, sizes
from mlx_transmuter.program.position_limit.lengths import ONE, PAST, ROW, STEP, ZERO, Length, TokenRange
from mlx_transmuter.program.position_limit.node_bounds import NodeBounds
from mlx_transmuter.program.position_limit.rules import apply_rule
from mlx_transmuter.program.program import Node, Program
from mlx_transmuter.program.signature import DecoderSignature, infer_cache_mode

# The most parts into which comparisons with the tokens of a row divide a program's rows.
_MAX_RANGES = 8


class PositionLimit(NamedTuple):
    """The most tokens of a row of a program, and the weight, layer or value that has no rows for more."""

    tokens: int
    table: str


def find_position_limit(program: Program, signature: DecoderSignature) -> PositionLimit | None:
    """Returns where the first table ends that positions or lengths index; None for a program without one.

    A table counts for the rows that reach it: one that an If chooses for short rows ends none that are longer. What
    goes through an operator without a rule reaches no table that is known.
    """
    inputs = _input_bounds(program, signature)
    ranges, walked = [TokenRange()], dict[TokenRange, _Walk]()
    while True:
        new = [tokens for tokens in ranges if tokens not in walked]
        for tokens in new:
            walked[tokens] = _Walk(program, dict(inputs), tokens)
        splits = {split for tokens in ranges for split in walked[tokens].splits}
        parts = ranges
        for split in sorted(splits):
            parts = [part for tokens in parts for part in tokens.split_after(split)]
        if len(parts) > _MAX_RANGES or parts == ranges:
            return _first_limit([(tokens, walked[tokens].limit) for tokens in ranges])
        ranges = parts


def _first_limit(limits: list[tuple[TokenRange, PositionLimit | None]]) -> PositionLimit | None:
    """Returns the limit of the first rows that cannot be as long as their range goes."""
    for tokens, limit in limits:
        if limit is not None and (tokens.last is None or limit.tokens < tokens.last):
            return limit._replace(tokens=max(limit.tokens, tokens.first - 1, 1))
    return None


def _input_bounds(program: Program, signature: DecoderSignature) -> dict[str, Bounds]:
    """Returns what is known of a program's inputs in a step."""
    inputs: dict[str, Bounds] = {}
    ranks = {value.name: None if value.shape is None else len(value.shape) for value in program.inputs}
    inputs[signature.token_input] = Bounds(shape=(None, STEP, *[None] * signature.takes_embeddings))
    if signature.positions_input:
        axes = [Length(constant=signature.position_axes)] if signature.position_axes else []
        inputs[signature.positions_input] = Bounds(ZERO, ROW.minus(ONE), (*axes, None, STEP))
    if signature.mask_input and ranks[signature.mask_input] in (2, None):
        inputs[signature.mask_input] = Bounds(ZERO, ONE, (None, ROW))
    if signature.length_switches:
        inputs[TOTAL_LENGTH_INPUT] = Bounds.from_elements([ROW], scalar=True)
    if signature.uses_pools:
        return inputs
    # GroupQueryAttention writes into a buffer, which is longer than the past.
    past = None if infer_cache_mode(program, signature) == "in_place" else PAST
    for pair in signature.cache_pairs:
        shape: list[Length | None] = [Length(constant=n) if isinstance(n, int) else None for n in pair.shape]
        shape[pair.batch_axis], shape[pair.length_axis] = None, past
        inputs[pair.past] = Bounds(shape=tuple(shape))
    return inputs


class _Walk:
    """A walk over a program in rows of some numbers of tokens; limit: where the first table ends."""

    def __init__(self, program: Program, values: dict[str, Bounds], tokens: TokenRange):
        self.values, self.tokens, self.splits = values, tokens, set[int]()
        self.limit: PositionLimit | None = None
        self._producers: dict[str, Node] = {}
        self._run(program)

    def _run(self, program: Program) -> None:
        self._add_constants(program)
        for node in program.nodes:
            view = NodeBounds(
                node,
                [self._bounds_of(name) for name in node.inputs],
                self._bounds_of,
                self.tokens,
                self.splits,
            )
            self._note_limits(view)
            results = self._run_branches(view) if any(node.subprograms()) else apply_rule(view)
            for name, bounds in zip(node.outputs, results, strict=False):
                self.values[name] = bounds
                self._producers[name] = node

    def _add_constants(self, program: Program) -> None:
        self.values |= {name: Bounds.from_array(array) for name, array in program.constants.items()}
        self.values |= {name: Bounds(shape=sizes(weight.shape)) for name, weight in program.weights.items()}
        for path in program.layers:
            weight = program.weights.get(array_name(path, "weight"))
            self.values[path] = Bounds(shape=None if weight is None else sizes(weight.shape))

    def _bounds_of(self, name: str) -> Bounds:
        return self.values.get(name, UNKNOWN)

    def _note_limits(self, view: NodeBounds) -> None:
        for access in accesses_of(view):
            if access.needed is None or access.available is None:
                continue
            tokens = access.needed.most_tokens_at_most(access.available)
            if tokens is not None and (self.limit is None or tokens < self.limit.tokens):
                self.limit = PositionLimit(tokens, self._table_name(access.table))

    def _table_name(self, name: str) -> str:
        """Returns the weight, layer or constant that a table is made of, or the table's own name."""
        while (producer := self._producers.get(name)) is not None and producer.inputs and producer.inputs[0]:
            if producer.op_type == "If":
                break
            name = producer.inputs[0]
        return name

    def _run_branches(self, view: NodeBounds) -> Iterator[Bounds]:
        """Walks the branches of a node that may run, and returns what is known of its results."""
        branches = list(view.node.subprograms())
        if view.node.op_type != "If":
            for branch in branches:
                self._run(branch)
            return iter([UNKNOWN] * len(view.node.outputs))
        condition = view.input(0).as_constant
        if condition is not None:
            branches = [view.node.attrs["then_branch" if condition else "else_branch"]]
        outputs = []
        for branch in branches:
            self._run(branch)
            outputs.append([self._bounds_of(value.name) for value in branch.outputs])
        first, *others = outputs
        return (join(bounds, *more) if more else bounds for bounds, *more in zip(first, *others, strict=False))
