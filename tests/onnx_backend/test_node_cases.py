"""The node cases of the operators that decoders use; scripts/onnx_backend.py runs all of them."""

import re

import node_cases
import pytest
from exclusions import EXCLUDED, exclusion

from scripts import onnx_backend

# onnx's modules of cases, by their names, which are those of operators.
MODULES = [
    "add",
    "and_",
    "argmax",
    "attention",
    "cast",
    "castlike",
    "causal_conv_with_state",
    "ceil",
    "clip",
    "concat",
    "constant",
    "constantofshape",
    "conv",
    "cos",
    "cumsum",
    "div",
    "dropout",
    "einsum",
    "equal",
    "erf",
    "exp",
    "expand",
    "eyelike",
    "flatten",
    "floor",
    "gather",
    "gatherelements",
    "gathernd",
    "gelu",
    "gemm",
    "greater",
    "greater_or_equal",
    "identity",
    "if_",
    "isinf",
    "isnan",
    "layernormalization",
    "less",
    "less_or_equal",
    "linear_attention",
    "log",
    "logsoftmax",
    "loop",
    "matmul",
    "max",
    "mean",
    "min",
    "mod",
    "mul",
    "neg",
    "nonzero",
    "not_",
    "onehot",
    "or_",
    "pad",
    "pow",
    "rangeop",
    "reciprocal",
    "reducel2",
    "reducemax",
    "reducemean",
    "reducemin",
    "reduceprod",
    "reducesum",
    "reducesumsquare",
    "relu",
    "reshape",
    "rmsnormalization",
    "rotaryembedding",
    "round",
    "scatterelements",
    "scatternd",
    "shape",
    "sigmoid",
    "sign",
    "sin",
    "size",
    "slice",
    "softmax",
    "softplus",
    "split",
    "sqrt",
    "squeeze",
    "sub",
    "sum",
    "swiglu",
    "swish",
    "tanh",
    "tensorscatter",
    "tile",
    "topk",
    "transpose",
    "trilu",
    "unsqueeze",
    "where",
    "xor",
]

CASES = {case.name: case for case in node_cases.load(MODULES)}


def _parameter(name: str):
    excluded = exclusion(name)
    marks = [pytest.mark.xfail(raises=excluded.error, reason=excluded.reason, strict=True)] if excluded else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_parameter(name) for name in CASES])
def test_node_case(name, tmp_path):
    node_cases.run(CASES[name], tmp_path)


def test_exclusions_have_one_reason_each():
    # With two rules for one case, it would be unclear which of them applies.
    for name in CASES:
        assert sum(bool(re.fullmatch(rule.pattern, name)) for rule in EXCLUDED) <= 1, name


def test_the_document_agrees_with_the_cases_and_the_exclusions():
    counts = onnx_backend.count_results(
        node_cases.load(), lambda case: "excluded" if exclusion(case.name) else "passed"
    )
    text = onnx_backend.TARGET.read_text(encoding="utf-8")
    assert text == onnx_backend.document(*counts), "run scripts/onnx_backend.py"
