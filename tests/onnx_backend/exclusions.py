"""The node cases that are not expected to pass, each with its reason and the error that it must end in."""

from __future__ import annotations

import re
from typing import NamedTuple

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.ops import OperatorError


class Exclusion(NamedTuple):
    """The cases whose full name matches `pattern`; each must end in `error`, so that one that passes fails the test."""

    pattern: str
    error: type[Exception]
    reason: str


EXCLUDED = (
    Exclusion(
        r"test_ai_onnx_ml_.*",
        ConvertError,
        "classical machine learning (ai.onnx.ml): no decoder has it",
    ),
    Exclusion(
        r"test_(adagrad|adam|momentum|nesterov_momentum).*",
        ConvertError,
        "training (ai.onnx.preview.training): a converted module is for inference",
    ),
    Exclusion(
        r"test_(cast|castlike)_.*(FLOAT8|FLOAT4|E8M0).*|test_(de)?quantizelinear_.*(e4m3|e5m2|float4).*",
        OperatorError,
        "MLX has no arrays of 4- or 8-bit floats",
    ),
    Exclusion(
        r"test_(cast|castlike)_(STRING_to|\w+_to_STRING).*|test_equal_string.*",
        OperatorError,
        "MLX has no arrays of strings",
    ),
    Exclusion(
        r"test_(strnormalizer|string_concat|string_split|regex_full_match).*",
        ConvertError,
        "MLX has no arrays of strings",
    ),
    Exclusion(
        r"test_image_decoder_.*",
        ConvertError,
        "decoding image files: MLX has no codec",
    ),
    Exclusion(
        r"test_bitcast_(float64_to_int64|int64_to_float64)",
        OperatorError,
        "Metal has no float64: a device holds both types in 32 bits, so their bits cannot be read",
    ),
    Exclusion(
        r"test_bernoulli.*|test_training_dropout(_default)?(_mask)?",
        AssertionError,
        "random numbers: ONNX fixes the distribution, the case expects those of one generator",
    ),
    Exclusion(
        r"test_attention_4d_causal_fp16(_expanded)?",
        AssertionError,
        "half precision: one rounding up and one down are two steps apart, and the case allows fewer",
    ),
)


def exclusion(name: str) -> Exclusion | None:
    """Returns the rule that excludes the case of that name, or None."""
    return next((rule for rule in EXCLUDED if re.fullmatch(rule.pattern, name)), None)
