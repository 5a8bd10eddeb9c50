"""The signature of a decoder: which of a program's inputs and outputs are tokens, mask, positions, cache and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_transmuter.entries import LARGEST, Entry, SignatureError, State, carried, is_carried, listed
from mlx_transmuter.program import Program, Value

Mode = Literal["in_place", "append", "grow"]
MODES: tuple[Mode, ...] = ("in_place", "append", "grow")

# Inputs of a program over pools: the index, the index over pools that keep heads apart, the tokens of
# each row whose logits are wanted.
INDEX, LANES, ENDS = "index", "lanes", "ends"
TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids")
MASK, POSITIONS, BRANCH = "attention_mask", "position_ids", "use_cache_branch"
KEEP = ("num_logits_to_keep", "logits_to_keep")
# What a graph may take of a step beside its tokens, and can do without where nothing reads it.
OPTIONAL = frozenset({MASK, POSITIONS, BRANCH, *KEEP})


@dataclass(frozen=True)
class Signature:
    """What generation gives to a decoder and reads from it. Names are None where the graph has no such input.

    tokens: input_ids or inputs_embeds. position_axes: 0 for position_ids [rows, seq], else the size of their first
    axis. keep: the input that says of how many last positions the graph gives logits (0: all), int64 of keep_shape.
    entries, states: what the graph carries from step to step, with and without an axis of positions; without either it
    reads its whole prefix at each step. index: whether the program reads and writes pools, by an index; its pasts are
    then pools and its presents the new ones. both: whether each of these pools has the keys of all heads and, after
    them, the values. ends: whether it gives logits of the tokens that are asked for alone,
    [rows, k, vocab]. vocab: the size of the vocabulary, the last axis of the logits. one_row: whether the graph says
    that it takes one row. given: the other inputs, which a task gives (the outputs of an encoder).
    """

    tokens: str
    embeds: bool
    mask: str | None
    positions: str | None
    position_axes: int
    branch: str | None
    keep: str | None
    keep_shape: tuple[int, ...]
    entries: tuple[Entry, ...]
    states: tuple[State, ...]
    logits: str
    vocab: int
    index: bool
    both: bool
    ends: bool
    one_row: bool
    given: tuple[str, ...]

    @staticmethod
    def of(program: Program) -> Signature:
        """The signature of the program. Raises SignatureError for a program without logits or with an unknown cache."""
        inputs = {value.name: value for value in program.inputs}
        logits = _logits(program.outputs)
        shape = logits.shape or ()
        vocab = shape[-1] if len(shape) == 3 else None
        if not isinstance(vocab, int) or not 2 <= vocab <= LARGEST:
            do = "export the model with a vocabulary of a fixed size"
            raise SignatureError(f"logits of shape {list(shape)}", "rows, positions and the size of the vocabulary", do)
        tokens = next((name for name in TOKENS if name in inputs), None)
        if tokens is None:
            raise SignatureError(f"the inputs {listed(inputs)}", "input_ids or inputs_embeds")
        positions = inputs.get(POSITIONS)
        keep = next((name for name in KEEP if name in inputs), None)
        axes = 0
        if positions is not None and positions.shape is not None and len(positions.shape) == 3:
            axes = positions.shape[0] if isinstance(positions.shape[0], int) else 3
        known = {tokens, INDEX, LANES, ENDS, *OPTIONAL}
        others = [value for value in program.inputs if value.name not in known]
        parts = carried(others, [value for value in program.outputs if value.name != logits.name])
        pasts = {part.past for part in parts}
        return Signature(
            tokens=tokens,
            embeds=tokens == "inputs_embeds",
            mask=MASK if MASK in inputs else None,
            positions=POSITIONS if positions is not None else None,
            position_axes=axes,
            keep=keep,
            keep_shape=(1,) * len(inputs[keep].shape or ()) if keep else (),
            branch=BRANCH if BRANCH in inputs else None,
            entries=tuple(part for part in parts if isinstance(part, Entry)),
            states=tuple(part for part in parts if isinstance(part, State)),
            logits=logits.name,
            vocab=vocab,
            index=INDEX in inputs,
            both=INDEX in inputs
            and any(node.op == "mlx.attention" and not node.inputs[4] for node in program.all_nodes()),
            ends=ENDS in inputs,
            one_row=(inputs[tokens].shape or (None,))[0] == 1 or any(part.shape[part.batch] == 1 for part in parts),
            given=tuple(value.name for value in others if value.name not in pasts),
        )

    @property
    def carried(self) -> tuple[Entry | State, ...]:
        """What steps carry: the cache and the states."""
        return (*self.entries, *self.states)

    @property
    def outputs(self) -> list[str]:
        """The outputs that a decoder needs of the program: the logits and what is carried."""
        return [self.logits, *(part.present for part in self.carried)]


def outputs(names: Iterable[str]) -> list[str]:
    """Those of the output `names` of a decoder that generation reads: logits and the present cache."""
    return [name for name in names if name == "logits" or name.startswith("present")]


def declared_mode(program: Program, signature: Signature) -> Mode:
    """The cache mode that the graph's form suggests; a conversion tries it before it counts.

    in_place: GroupQueryAttention writes into a buffer. append: position_ids are given, so a buffer may have free
    columns. grow: positions come from the length of the cache.
    """
    if any(node.op.startswith("com.microsoft.GroupQueryAttention") for node in program.all_nodes()):
        return "in_place"
    return "append" if signature.positions else "grow"


def _logits(outputs: Iterable[Value]) -> Value:
    """The output named logits, or the only one of three axes that is no part of a cache."""
    outputs = list(outputs)
    for value in outputs:
        if value.name == "logits":
            return value
    found = [value for value in outputs if len(value.shape or ()) == 3 and not is_carried(value.name)]
    found = [value for value in found if "hidden" not in value.name]
    if len(found) != 1:
        names = listed(value.name for value in outputs)
        raise SignatureError(f"the outputs {names}", "an output named logits, or one alone of three axes")
    return found[0]
