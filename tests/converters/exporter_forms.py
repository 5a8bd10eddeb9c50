"""The forms that tools make of an optimum export: onnxruntime's optimizer by optimum's levels, transformers.js's types.

The tools themselves, which come with onnxruntime, make them when a test asks for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import onnx
from conftest import FIXTURES

LEVELS = ("O1", "O2", "O3", "O4")
TYPES = ("q4", "q4f16", "bnb4", "fp16")
EIGHT_BITS = ("int8", "uint8")


def make(name: str, form: str, folder: Path) -> Path:
    """A folder with the fixture `name` in that form: model.onnx beside its configurations."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("golden.json", "model.onnx", "*token*"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form in EIGHT_BITS:
            _eight_bits(FIXTURES / name / "model.onnx", folder / "model.onnx", form)
            return folder
        model = _optimized(name, form) if form in LEVELS else _typed(onnx.load(FIXTURES / name / "model.onnx"), form)
        onnx.save(model, folder / "model.onnx")
    return folder


def _optimized(name: str, level: str) -> onnx.ModelProto:
    """The model after optimum's ORTOptimizer at that level, which treats every decoder as a GPT-2."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    config = json.loads((FIXTURES / name / "config.json").read_bytes())
    options = FusionOptions("gpt2")
    options.enable_gelu_approximation = level in ("O3", "O4")
    with _torch():
        optimizer = optimize_model(
            str(FIXTURES / name / "model.onnx"),
            "gpt2",
            config.get("num_attention_heads") or config["n_head"],
            config.get("hidden_size") or config["n_embd"],
            options,
            opt_level=1 if level == "O1" else 2,
            use_gpu=level == "O4",
            only_onnxruntime=level == "O1",
        )
    if level == "O4":
        optimizer.convert_float_to_float16(use_symbolic_shape_infer=True, keep_io_types=True)
    return optimizer.model


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    """The optimizer asks torch for which GPUs it was built; a stand-in for a missing torch answers for none."""
    if importlib.util.find_spec("torch") is not None:
        yield
        return
    stand_in = types.ModuleType("torch")
    stand_in.version = types.SimpleNamespace(hip=None)  # type: ignore[attr-defined]
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch"]


def _typed(model: onnx.ModelProto, form: str) -> onnx.ModelProto:
    """The model after transformers.js's quantize script, without the script's last clean-up."""
    if form == "bnb4":
        from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

        quantizer = MatMulBnb4Quantizer(model, MatMulBnb4Quantizer.NF4, 64)
        quantizer.process()
        return quantizer.model.model
    if form.startswith("q4"):
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
        quantizer.process()
        model = quantizer.model.model  # pyright: ignore[reportAttributeAccessIssue]
    if form.endswith("16"):
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(model, keep_io_types=True)
    return model


def _eight_bits(source: Path, target: Path, form: str) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.registry import IntegerOpsRegistry

    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=list(IntegerOpsRegistry),
        weight_type=QuantType.QUInt8 if form == "uint8" else QuantType.QInt8,
        extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
    )
