"""A toy decoder with one product in few bits between its embedding and its attention, for tests against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import toy
from onnx import helper, numpy_helper

DOMAINS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]


def with_product(nodes: list, arrays: dict[str, np.ndarray], columns: int, seed: int = 0) -> onnx.ModelProto:
    """The toy, whose embedded tokens are spread over `columns`, multiplied back to the toy's 8 by `nodes`, which take
    `wide` and give `narrow`, and added to the stream.
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
    """The same toy with the weight [columns, 8] in floats: what one in few bits means."""
    nodes = [helper.make_node("MatMul", ["wide", "down.weight"], ["narrow" if bias is None else "raw"])]
    arrays = {"down.weight": weight.astype(np.float32)}
    if bias is not None:
        nodes.append(helper.make_node("Add", ["raw", "down.bias"], ["narrow"]))
        arrays["down.bias"] = bias
    return with_product(nodes, arrays, columns, seed)
