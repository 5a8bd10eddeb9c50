"""What a conversion may change about a graph's numbers, by the names that mlx_lm gives them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_transmuter.errors import TransmuterError

# The widths and group sizes of MLX's affine quantization, and the recipes of mlx_lm's convert: the bits of most layers,
# and of those that more depends on.
QUANTIZATION_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
QUANTIZATION_RECIPES = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
QUANTIZATION_NAMES = (*(f"{bits}bit" for bits in QUANTIZATION_BITS), *QUANTIZATION_RECIPES)

# The float types that a graph can be converted to. What picks a file among several is spelled otherwise: fp32, fp16.
FLOAT_DTYPES = ("float16", "bfloat16", "float32")


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
        """What `of` takes for it: the recipe's name, or the bits."""
        return self.recipe or f"{self.bits}bit"

    @staticmethod
    def of(spec: str | Mapping[str, Any]) -> Quantization:
        """The quantization of a name ("4bit", "mixed_3_6") or of a mapping of `bits` or `recipe`, and `group_size`.

        What is not said is 4 bits in groups of 64, as in mlx_lm. Raises ChangeError for anything else.
        """
        given: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {}
        if isinstance(spec, str):
            given["recipe" if spec in QUANTIZATION_RECIPES else "name"] = spec
        name = given.pop("name", None)
        if name is not None:
            _check_known("quantize", name, QUANTIZATION_NAMES)
            given["bits"] = int(name.removesuffix("bit"))
        for key in given:
            _check_known("the key", key, ("bits", "group_size", "recipe"))
        recipe, group_size = given.get("recipe"), given.get("group_size") or 64
        if recipe is not None:
            _check_known("recipe", recipe, tuple(QUANTIZATION_RECIPES))
            if given.get("bits"):
                raise PrecisionError(
                    f"{given['bits']} bits and the recipe {recipe}", "one of the two: a recipe names its own bits"
                )
        bits = given.get("bits") or 4
        low, high = QUANTIZATION_RECIPES[recipe] if recipe else (bits, bits)
        for what, number, numbers in (
            ("bits", low, QUANTIZATION_BITS),
            ("group_size", group_size, QUANTIZATION_GROUP_SIZES),
        ):
            if type(number) is not int or number not in numbers:
                raise PrecisionError(f"{what} {number!r}", f"one of {', '.join(map(str, numbers))}, which MLX has")
        return Quantization(low, group_size, high, recipe)


@dataclass(frozen=True)
class PrecisionOptions:
    """quantize: how the weights are quantized, or None. dtype: the float type to convert to, or None.
    float_activations: whether a graph that rounds its activations to 8 bits keeps them in float instead.
    """

    quantize: Quantization | None = None
    dtype: str | None = None
    float_activations: bool = False


def did_you_mean(name: Any, names: Sequence[str]) -> str:
    """A question after the name that is most like `name`; "" where none is."""
    found = difflib.get_close_matches(str(name), names, n=1)
    return f"Did you mean {found[0]}?" if found else ""


def _check_known(what: str, name: Any, names: tuple[str, ...]) -> None:
    if name not in names:
        raise PrecisionError(f"{what} {name!r}", " ".join(names), did_you_mean(name, names))
