"""The signature of a decoder: which of a program's inputs and outputs are tokens, mask, positions, cache and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mlx_transmuter.program import Program, Value

Mode = Literal["in_place", "append", "grow"]
MODES: tuple[Mode, ...] = ("in_place", "append", "grow")

# No axis that a graph fixes, and no vocabulary, is larger.
_LARGEST = 2**24

# Spellings of a past's name and the present's that belongs to it; the first that the outputs have is taken.
_PRESENTS = (("past_key_values", "present"), ("past_key_values", "present_key_values"), ("past", "present"))


# Inputs of a program over pools: the index, the index over pools that keep heads apart, the tokens of
# each row whose logits are wanted.
INDEX, LANES, ENDS = "index", "lanes", "ends"


class SignatureError(ValueError):
    """A program that is no decoder that generation can run: what was `found` and what was `expected`."""

    def __init__(self, found: str, expected: str, do: str = "choose the decoder among the model's files"):
        self.found, self.expected, self.do = found, expected, do
        super().__init__(f"found {found}; expected {expected}. To mend it: {do}.")


@dataclass(frozen=True)
class Entry:
    """One tensor of the cache.

    past, present: the names of the input and of the output. dtype: its ONNX type. shape: of the past, with an int where
    the graph fixes the size. batch, length: the axes of rows and of positions; every other size is fixed by the graph.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    batch: int
    length: int

    @property
    def heads(self) -> int:
        """How many vectors a position has: the product of the sizes before the last, rows and positions aside."""
        size = 1
        for axis in self._others[:-1]:
            size *= int(self.shape[axis])  # type: ignore[arg-type]
        return size

    @property
    def dim(self) -> int:
        """The size of a vector."""
        return int(self.shape[self._others[-1]])  # type: ignore[arg-type]

    @property
    def _others(self) -> list[int]:
        return [axis for axis in range(len(self.shape)) if axis not in (self.batch, self.length)]

    @property
    def order(self) -> list[int]:
        """The axes of the tensor in the order rows, vectors, positions, elements of a vector."""
        *vectors, dim = self._others
        return [self.batch, *vectors, self.length, dim]

    def sizes(self, rows: int, length: int) -> tuple[int, ...]:
        """The shape of the tensor for that many rows and positions."""
        sizes: dict[int, Any] = {self.batch: rows, self.length: length}
        return tuple(sizes.get(axis, size) for axis, size in enumerate(self.shape))


@dataclass(frozen=True)
class Signature:
    """What generation gives to a decoder and reads from it. Names are None where the graph has no such input.

    tokens: input_ids or inputs_embeds. position_axes: 0 for position_ids [rows, seq], else the size of their first
    axis. keep: the input that says of how many last positions the graph gives logits (0: all). index: whether the
    program reads and writes pools, by an index; its pasts are then pools and its presents the new ones. ends: whether
    it gives logits of the tokens that are asked for alone, [rows, k, vocab]. vocab: the size of the vocabulary, the
    last axis of the logits. given: the other inputs, which a task gives (the outputs of an encoder).
    """

    tokens: str
    embeds: bool
    mask: str | None
    positions: str | None
    position_axes: int
    branch: str | None
    keep: str | None
    entries: tuple[Entry, ...]
    logits: str
    vocab: int
    index: bool
    ends: bool
    given: tuple[str, ...]

    @staticmethod
    def of(program: Program) -> Signature:
        """The signature of the program. Raises SignatureError for a program without logits or with an unknown cache."""
        inputs = {value.name: value for value in program.inputs}
        outputs = {value.name: value for value in program.outputs}
        if "logits" not in outputs:
            raise SignatureError(f"the outputs {_list(outputs)}", "an output named logits")
        shape = outputs["logits"].shape or ()
        vocab = shape[-1] if len(shape) == 3 else None
        if not isinstance(vocab, int) or not 2 <= vocab <= _LARGEST:
            do = "export the model with a vocabulary of a fixed size"
            raise SignatureError(f"logits of shape {list(shape)}", "rows, positions and the size of the vocabulary", do)
        tokens = next((name for name in ("input_ids", "inputs_embeds", "decoder_input_ids") if name in inputs), None)
        if tokens is None:
            raise SignatureError(f"the inputs {_list(inputs)}", "input_ids or inputs_embeds")
        pasts = [value for value in program.inputs if value.name.startswith("past")]
        entries = tuple(_entry(value, outputs) for value in pasts)
        positions = inputs.get("position_ids")
        axes = 0
        if positions is not None and positions.shape is not None and len(positions.shape) == 3:
            axes = positions.shape[0] if isinstance(positions.shape[0], int) else 3
        keep = next((name for name in ("num_logits_to_keep", "logits_to_keep") if name in inputs), None)
        known = {
            tokens,
            keep,
            INDEX,
            LANES,
            ENDS,
            "attention_mask",
            "position_ids",
            "use_cache_branch",
            *(value.name for value in pasts),
        }
        return Signature(
            tokens=tokens,
            embeds=tokens == "inputs_embeds",
            mask="attention_mask" if "attention_mask" in inputs else None,
            positions="position_ids" if positions is not None else None,
            position_axes=axes,
            keep=keep,
            branch="use_cache_branch" if "use_cache_branch" in inputs else None,
            entries=entries,
            logits="logits",
            vocab=vocab,
            index=INDEX in inputs,
            ends=ENDS in inputs,
            given=tuple(name for name in inputs if name not in known),
        )


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


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _entry(value: Value, given: dict[str, Value]) -> Entry:
    presents = [value.name.replace(past, present, 1) for past, present in _PRESENTS if past in value.name]
    present = next((name for name in presents if name in given), None)
    if present is None:
        raise SignatureError(
            f"the cache input {value.name!r} and no output for it among {_list(given)}",
            f"an output named {' or '.join(presents)}",
        )
    shape = value.shape
    if shape is None or len(shape) < 3:
        raise SignatureError(
            f"the cache input {value.name!r} of shape {shape}", "rows, heads, positions and a size per head"
        )
    batch = next((i for i, size in enumerate(shape) if isinstance(size, str) and size.startswith("batch")), None)
    length = next(
        (
            i
            for i, size in enumerate(shape)
            if i != batch and isinstance(size, str) and ("seq" in size or "len" in size or "past" in size)
        ),
        None,
    )
    if batch is None and len(shape) == 4:
        batch = 0
    if length is None and len(shape) == 4:
        length = 2
    fixed = [i for i, size in enumerate(shape) if isinstance(size, int) and 0 < size <= _LARGEST]
    if batch is None or length is None or len(fixed) != len(shape) - 2 or set(fixed) & {batch, length}:
        raise SignatureError(
            f"the cache input {value.name!r} of shape {list(shape)}",
            "one axis of rows, one of positions and fixed sizes elsewhere",
            "export the model with fixed head counts and sizes",
        )
    return Entry(value.name, present, value.dtype, shape, batch, length)
