"""Metadata: what a conversion recorded in its program, read with a type.

The JSON object stays as it was read: unknown keys and values of no use are written again unchanged, for a prompt cache
knows its model by the program's JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_origin, get_type_hints

Record = TypeVar("Record")


@dataclass(frozen=True)
class SourceFile:
    """The ONNX file that was converted, and the repository that it is from."""

    file: str
    base_model: str = ""


@dataclass(frozen=True)
class NodeCounts:
    """How many nodes were read from the file, and how many are in the program."""

    read: int
    remaining: int


@dataclass(frozen=True)
class ProofSummary:
    """How far logits were from those of the unrewritten graph, relative to their range, and how far they could be.

    tried: the error of each plan and form that was tried, or why it cannot run. prompts: the lengths of the prompts.
    steps: how many tokens followed each. streamed: whether weights were read at each use, for lack of memory.
    """

    error: float
    tolerance: float
    tried: dict[str, Any]
    prompts: list[int]
    steps: int
    streamed: bool = False


@dataclass(frozen=True)
class RewriteSummary:
    """How many matches a rewrite replaced, and how many it skipped, by reason."""

    name: str
    replaced: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class FloatActivations:
    """How many nodes keep activations in float that the file rounds, and what that does to logits."""

    replaced: int
    error: float
    divergence: float


@dataclass(frozen=True)
class Cast:
    """The dtype that the weights were converted to, how far logits moved, and how far they could."""

    dtype: str
    error: float
    tolerance: float


@dataclass(frozen=True)
class QuantizationSummary:
    """How the weights were quantized and what that does to logits.

    name: of the format or recipe. layers: how many by their bits. unquantized: the layers that stay as they are, and
    why.
    """

    name: str
    group_size: int
    layers: dict[str, int]
    error: float
    divergence: float
    unquantized: dict[str, str]


# The saved names of fields, where they are others.
_JSON_NAMES = {
    "tolerance": "limit",
    "replaced": "held",
    "skipped": "declined",
    "remaining": "kept",
    "unquantized": "kept",
}


@dataclass(frozen=True)
class Metadata:
    """The metadata of a program; a property is None for what is absent or malformed."""

    values: Mapping[str, Any]

    @property
    def trained_length(self) -> int | None:
        """The tokens of a row that the model was trained for, as its configuration says (max_position_embeddings).

        Rows may go on past them: what ends rows are the tables of the program, see find_position_limit. Older folders
        have the smaller of the two, by another name.
        """
        length = self.values.get("trained_length", self.values.get("max_positions"))
        return length if _has_type(length, int) and 0 < length < 2**31 else None

    @property
    def branch(self) -> str | None:
        """Of a merged decoder, the branches that the program has: "cached" or "both"."""
        return self._text("branch")

    @property
    def attention_windows(self) -> tuple[int, ...] | None:
        """The windows of the attention nodes of a program over pools, 0 for none; absent in older folders."""
        windows = self.values.get("attention_windows")
        if not isinstance(windows, list) or not all(_has_type(window, int) and window >= 0 for window in windows):
            return None
        return tuple(windows)

    @property
    def source(self) -> SourceFile | None:
        """The converted file."""
        return _parse(SourceFile, self.values.get("source"))

    @property
    def nodes(self) -> NodeCounts | None:
        """The number of nodes."""
        return _parse(NodeCounts, self.values.get("nodes"))

    @property
    def proof(self) -> ProofSummary | None:
        """The proof of the conversion."""
        return _parse(ProofSummary, self.values.get("proof"))

    @property
    def rewrites(self) -> list[RewriteSummary]:
        """The rewrites that were tried, in their order."""
        rewrites = self.values.get("rewrites")
        parsed = [_parse(RewriteSummary, record) for record in rewrites] if isinstance(rewrites, list) else []
        return [record for record in parsed if record is not None]

    @property
    def float_activations(self) -> FloatActivations | None:
        """The activations that stay in float, where the conversion was asked to."""
        return _parse(FloatActivations, self.values.get("float_activations"))

    @property
    def cast(self) -> Cast | None:
        """The conversion to another dtype."""
        return _parse(Cast, self.values.get("cast"))

    @property
    def quantization(self) -> QuantizationSummary | None:
        """The quantization of the weights."""
        return _parse(QuantizationSummary, self.values.get("quantization"))

    def choice(self, key: str, choices: tuple[Any, ...], default: Any) -> Any:
        """Returns the value of a key, if it is one of the choices, else the default."""
        value = self.values.get(key)
        return value if isinstance(value, str) and value in choices else default

    def flag(self, key: str) -> bool:
        """Returns whether the value of a key is true."""
        return self.values.get(key) is True

    def _text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None


def _parse(record: type[Record], data: Any) -> Record | None:
    """Returns a record of a JSON object; None where a field is absent or of another type."""
    if not isinstance(data, dict):
        return None
    hints, values = get_type_hints(record), {}
    for field in fields(record):  # type: ignore[arg-type]
        name = _JSON_NAMES.get(field.name, field.name)
        if name in data or field.default is MISSING:
            values[field.name] = data.get(name)
            if not _has_type(values[field.name], hints[field.name]):
                return None
    return record(**values)


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field, as far as its outermost type."""
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind)
