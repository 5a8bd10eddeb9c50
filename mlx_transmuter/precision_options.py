"""Precision options: what a conversion may change about a graph's numbers, by the names that mlx_lm gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transmuter.errors import TransmuterError, did_you_mean

# The bits and group sizes of MLX's affine quantization, and the recipes of mlx_lm's convert: the bits of most layers,
# and those of the layers on which more depends.
QUANTIZATION_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
QUANTIZATION_RECIPES = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
QUANTIZATION_NAMES = (*(f"{bits}bit" for bits in QUANTIZATION_BITS), *QUANTIZATION_RECIPES)

# The float types that a graph can be converted to. (A file is chosen among several by other names: fp32, fp16.)
HALF_DTYPES = ("float16", "bfloat16")
FLOAT_DTYPES = (*HALF_DTYPES, "float32")


class PrecisionError(TransmuterError):
    """A precision option that no conversion has."""

    def __init__(self, found: str, expected: str, do: str = ""):
        super().__init__("", found, expected, do)


@dataclass(frozen=True)
class Quantization:
    """Affine quantization in groups of `group_size` weights of a row.

    bits: of a layer's weights. more_bits: of the layers that a recipe gives more; the same number without a recipe.
    recipe: its name, or None.
    """

    bits: int = 4
    group_size: int = 64
    more_bits: int = 4
    recipe: str | None = None

    @property
    def name(self) -> str:
        """The name by which `of` makes it: the recipe's, or that of the bits ("4bit")."""
        return self.recipe or f"{self.bits}bit"

    @staticmethod
    def of(spec: str | Mapping[str, Any]) -> Quantization:
        """Returns the quantization of a name ("4bit", "mixed_3_6"), or of a mapping of `bits` or `recipe`, and
        `group_size`.

        What the mapping leaves out is 4 bits in groups of 64, as in mlx_lm. Raises PrecisionError for anything else.
        """
        options: dict[str, Any] = {}
        if isinstance(spec, Mapping):
            options |= spec
        elif isinstance(spec, str) and spec in QUANTIZATION_RECIPES:
            options["recipe"] = spec
        else:
            _check_known("quantize", spec, QUANTIZATION_NAMES)
            options["bits"] = int(spec.removesuffix("bit"))
        for key in options:
            _check_known("the key", key, ("bits", "group_size", "recipe"))
        bits, recipe, group_size = options.get("bits"), options.get("recipe"), options.get("group_size")
        if recipe is None:
            low = high = 4 if bits is None else bits
        else:
            _check_known("recipe", recipe, tuple(QUANTIZATION_RECIPES))
            if bits is not None:
                raise PrecisionError(
                    f"{bits} bits and the recipe {recipe}", "one of the two: a recipe names its own bits"
                )
            low, high = QUANTIZATION_RECIPES[recipe]
        _check_number("bits", low, QUANTIZATION_BITS)
        group_size = 64 if group_size is None else group_size
        _check_number("group_size", group_size, QUANTIZATION_GROUP_SIZES)
        return Quantization(low, group_size, high, recipe)


@dataclass(frozen=True)
class PrecisionOptions:
    """What a conversion changes about the numbers; by default nothing.

    quantize: how the weights are quantized, or None. dtype: the float type to convert to, or None. float_activations:
    whether a graph that rounds its activations to 8 bits keeps them in float instead.
    """

    quantize: Quantization | None = None
    dtype: str | None = None
    float_activations: bool = False


def _check_known(label: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise PrecisionError(f"{label} {name!r}", " ".join(known), did_you_mean(name, known))


def _check_number(label: str, number: Any, known: Sequence[int]) -> None:
    if type(number) is not int or number not in known:
        raise PrecisionError(f"{label} {number!r}", f"one of {', '.join(map(str, known))}, which MLX has")
