"""Cache pairs and state pairs: the inputs and outputs by which a decoder carries its cache from step to step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transmuter.errors import TransmuterError, abbreviate
from mlx_transmuter.program import Value

# No axis that a graph fixes is larger.
MAX_FIXED_AXIS = 2**24

# Words of a name that do not tell which tensor it is, only that it is carried and in which direction.
_DIRECTION_WORDS = {
    *("past", "present", "prev", "previous", "new", "next", "in", "out", "input", "output", "updated"),
    *("cache", "caches", "cached", "kv", "pkv", "kvs", "state", "states"),
}
# Words that call a tensor a part of a cache, or a state.
_CACHE_WORDS = {"past", "present", "prev", "previous", "cache", "caches", "cached", "kv", "pkv", "kvs"}
_CACHE_WORDS |= {"kcache", "vcache"}
_STATE_WORDS = {"conv", "ssm", "recurrent", "rnn", "state", "states", "mamba", "deltanet"}
# Words that name the same tensor on both sides.
_WORD_SYNONYMS = {"keys": "key", "values": "value", "k": "key", "v": "value", "self": "", "decoder": ""}
_WORD_SYNONYMS |= {"kcache": "key", "vcache": "value"}


class SignatureError(TransmuterError):
    """A program that is no decoder which generation can run."""

    def __init__(self, found: str, expected: str, do: str = "choose the decoder among the model's files"):
        super().__init__("", found, expected, do)


@dataclass(frozen=True)
class CachePair:
    """One tensor of the cache, as an input and an output.

    past, present: the names of the input and of the output. dtype: its ONNX type. shape: of the past, with an int where
    the graph fixes the size. batch_axis, length_axis: the axes of rows and of positions; the graph fixes every other
    size.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    batch_axis: int
    length_axis: int

    @property
    def heads(self) -> int:
        """How many vectors a position has: the product of the fixed sizes before the last."""
        size = 1
        for axis in self._vector_axes[:-1]:
            size *= int(self.shape[axis])  # type: ignore[arg-type]
        return size

    @property
    def head_dim(self) -> int:
        """The size of a vector: the last fixed size."""
        return int(self.shape[self._vector_axes[-1]])  # type: ignore[arg-type]

    @property
    def _vector_axes(self) -> list[int]:
        return [axis for axis in range(len(self.shape)) if axis not in (self.batch_axis, self.length_axis)]

    @property
    def axis_order(self) -> list[int]:
        """The axes of the tensor in the order rows, vectors, positions, elements of a vector."""
        *vectors, dim = self._vector_axes
        return [self.batch_axis, *vectors, self.length_axis, dim]

    @property
    def key_value_axis(self) -> int | None:
        """The axis, of five, that has the keys at 0 and the values at 1; None where there is none."""
        fixed = (axis for axis in range(len(self.shape)) if axis not in (self.batch_axis, self.length_axis))
        axis = next((axis for axis in fixed if self.shape[axis] == 2), None)
        if axis is None or len(self.shape) != 5:
            return None
        return axis if axis < min(self.length_axis, len(self.shape) - 2) else None

    def shape_for(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the shape of the tensor for that many rows and positions."""
        sizes: dict[int, Any] = {self.batch_axis: rows, self.length_axis: length}
        return tuple(sizes.get(axis, size) for axis, size in enumerate(self.shape))


@dataclass(frozen=True)
class StatePair:
    """One tensor that a graph carries without an axis of positions: a convolution's last inputs (`past_conv.0` [rows,
    channels, width]), a recurrence's memory (`past_recurrent.0` [rows, heads, size, size]).

    past, present, dtype, shape, batch_axis: as of a CachePair. A row starts with zeros.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    batch_axis: int

    def shape_for(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of the tensor for that many rows."""
        return tuple(rows if axis == self.batch_axis else int(size) for axis, size in enumerate(self.shape))  # type: ignore[arg-type]


def find_pairs(inputs: Sequence[Value], outputs: Sequence[Value]) -> tuple[CachePair | StatePair, ...]:
    """Returns what the graph carries, each input with its output, in the order of the inputs.

    inputs, outputs: those with no other known use. Pairs are found by their names, whatever the words for past and
    present; where names don't tell, by the order, if there are as many inputs as outputs and each pair has one type and
    fixed sizes that agree. Inputs that are in no pair, and whose names don't call them a cache, are left out. Raises
    SignatureError for a past without a present, and for a shape that cannot be carried.
    """
    inputs = [value for value in inputs if _split_words(value.name)[:1] != ["encoder"]]
    pairs = _pair_by_name(inputs, outputs)
    unpaired_inputs = [value for value in inputs if value.name not in pairs]
    unpaired_outputs = [value for value in outputs if value.name not in set(pairs.values())]
    count_dtypes = ("int64", "int32", "bool")  # such as a length of the past
    named_caches = [
        value
        for value in unpaired_inputs
        if set(_split_words(value.name)) & _CACHE_WORDS and value.dtype not in count_dtypes
    ]
    # A tensor whose name tells nothing may be carried too; one that is called a cache must be.
    presents = [value for value in unpaired_outputs if _may_be_cache_or_state(value)]
    for pasts in ([value for value in unpaired_inputs if _may_be_cache_or_state(value)], named_caches):
        if pasts and len(pasts) == len(presents) and all(map(_may_be_pair, pasts, presents)):
            pairs |= {past.name: present.name for past, present in zip(pasts, presents, strict=True)}
            break
    if lacking := [value.name for value in named_caches if value.name not in pairs]:
        candidates = [value.name for value in unpaired_outputs]
        others = f"the outputs {abbreviate(candidates)}" if candidates else "no outputs left for them"
        raise SignatureError(
            f"the cache inputs {abbreviate([repr(name) for name in lacking])}, and {others}",
            "an output for each, of a like name, or as many outputs of like shapes in the same order",
            "export the model with names such as past_key_values.0.key and present.0.key",
        )
    return tuple(_make_pair(value, pairs[value.name]) for value in inputs if value.name in pairs)


def is_cache_or_state_name(name: str) -> bool:
    """Whether the name of an input or output calls it a part of a cache, or a state."""
    words = set(_split_words(name))
    return bool(words & _CACHE_WORDS) or (bool(words & _STATE_WORDS) and "hidden" not in words)


def _split_words(name: str) -> list[str]:
    """Returns the words and numbers of a name: past_key_values.0.key → past, key, values, 0, key; layer0Key → layer, 0,
    key.
    """
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower())


def _tensor_identity(name: str) -> tuple[str, ...]:
    """Returns the words of a name that tell which tensor it is, the same for a past and its present."""
    words = _split_words(re.sub(r"key_values?", "", name, flags=re.IGNORECASE))
    words = [_WORD_SYNONYMS.get(word, word) for word in words if word not in _DIRECTION_WORDS]
    return tuple(sorted(word for word in words if word))


def _pair_by_name(inputs: Sequence[Value], outputs: Sequence[Value]) -> dict[str, str]:
    """Returns input → output, where both names call them carried and only theirs name the same tensor."""
    sides: list[dict[tuple[str, ...], list[str]]] = []
    for values in (inputs, outputs):
        side: dict[tuple[str, ...], list[str]] = {}
        for value in values:
            if is_cache_or_state_name(value.name):
                side.setdefault(_tensor_identity(value.name), []).append(value.name)
        sides.append(side)
    pasts, presents = sides
    return {
        names[0]: presents[identity][0]
        for identity, names in pasts.items()
        if len(names) == 1 and len(presents.get(identity, ())) == 1
    }


def _may_be_cache_or_state(value: Value) -> bool:
    """Whether a tensor may be carried: its name says so, or does not exclude it and its dtype and rank fit."""
    uncarried_words = {
        "embeds",
        "embeddings",
        "hidden",
        "mask",
        "features",
        "attentions",
        "attention",
        "ids",
        "inputs",
        "logits",
    }
    return is_cache_or_state_name(value.name) or not (
        uncarried_words & set(_split_words(value.name))
        or not value.dtype.startswith(("float", "bfloat"))
        or len(value.shape or ()) < 3
    )


def _may_be_pair(past: Value, present: Value) -> bool:
    """Whether the two may be one tensor before and after a step: dtype, fixed sizes and numbers in names agree."""
    if past.dtype != present.dtype or past.shape is None:
        return False
    if (
        is_cache_or_state_name(past.name)
        and is_cache_or_state_name(present.name)
        and _name_numbers(past.name) != _name_numbers(present.name)
    ):
        return False
    if present.shape is None:
        return True
    return len(present.shape) == len(past.shape) and all(
        a == b for a, b in zip(past.shape, present.shape, strict=True) if isinstance(a, int) and isinstance(b, int)
    )


def _name_numbers(name: str) -> list[str]:
    return [word for word in _split_words(name) if word.isdigit()]


def _make_pair(value: Value, present: str) -> CachePair | StatePair:
    """Returns the pair of an input and the output `present`. Raises SignatureError for an unknown layout."""
    shape, what = value.shape, f"the cache input {value.name!r} of shape {list(value.shape or ()) or value.shape}"
    if shape is None or len(shape) < 2:
        raise SignatureError(what, "rows, heads, positions and a size per head")
    named = [i for i, size in enumerate(shape) if isinstance(size, str) and "batch" in size]
    batch = named[0] if named else 0
    joined = str(shape[batch]).replace("batch", "", 1) if named else ""
    if re.search(r"head|\*| x |·", joined):
        raise SignatureError(
            what,
            "rows and heads in axes of their own",
            "export the model with a newer exporter, whose caches have four axes",
        )
    fixed = [i for i, size in enumerate(shape) if i != batch and isinstance(size, int) and 0 < size <= MAX_FIXED_AXIS]
    free = [i for i in range(len(shape)) if i != batch and i not in fixed]
    if not free and (set(_split_words(value.name)) & _STATE_WORDS or not isinstance(shape[batch], int)):
        return StatePair(value.name, present, value.dtype, shape, batch)
    if not free:
        raise SignatureError(what, "an axis of positions that may grow", "export the model with a cache of any length")
    if len(free) != 1 or len(shape) < 3 or not isinstance(shape[free[0]], str | None):
        raise SignatureError(
            what,
            "one axis of rows, one of positions and fixed sizes elsewhere",
            "export the model with fixed head counts and sizes",
        )
    return CachePair(value.name, present, value.dtype, shape, batch, free[0])
