"""A toy decoder with a quantized product between its embedding and its attention, for tests against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import toy
from onnx import helper, numpy_helper

DOMAINS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def with_product(nodes: list, arrays: dict[str, np.ndarray], columns: int, seed: int = 0) -> onnx.ModelProto:
    """The toy with a product after its embedding, added to the residual stream.

    The embedded tokens are projected to `wide` [..., columns]; `nodes` read `wide` and give `narrow` [..., 8].
    """
    model = toy.decoder(opset=21)
    draw = np.random.default_rng(seed)
    toy.node(model, "x").input[0] = "changed"
    inner = [
        helper.make_node("MatMul", ["embedded", "up.weight"], ["wide"], "/model/up/MatMul"), *nodes,
        helper.make_node("Add", ["embedded", "narrow"], ["changed"]),
    ]  # fmt: skip
    for i, node in enumerate(inner):
        model.graph.node.insert(1 + i, node)
    up = draw.normal(size=(toy.DIM, columns)).astype(np.float32) / np.float32(columns**0.5)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in ({"up.weight": up} | arrays).items()
    )
    del model.opset_import[:]
    model.opset_import.extend(DOMAINS)
    model.ir_version = 10
    return model


def with_floats(weight: np.ndarray, columns: int, bias: np.ndarray | None = None, seed: int = 0) -> onnx.ModelProto:
    """The same toy with the weight [columns, 8] in floats."""
    nodes = [helper.make_node("MatMul", ["wide", "down.weight"], ["narrow" if bias is None else "raw"])]
    arrays = {"down.weight": weight.astype(np.float32)}
    if bias is not None:
        nodes.append(helper.make_node("Add", ["raw", "down.bias"], ["narrow"]))
        arrays["down.bias"] = bias
    return with_product(nodes, arrays, columns, seed)
