"""Decoders of two layers whose attention is one operator, as ONNX, and what onnxruntime says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

VOCAB, HEADS, DIM, POSITIONS = 32, 4, 16, 64
HIDDEN = HEADS * DIM


class Toy:
    """A decoder as it is made: `node` adds a node and gives its output's name, `array` a weight or constant."""

    def __init__(self, kv: int = HEADS, joined: bool = False, layers: int = 2, opset: int = 23):
        self.kv, self.joined, self.layers, self.opset = kv, joined, layers, opset
        self.first = "past_key_values.0" if joined else "past_key_values.0.key"
        self.nodes, self.arrays, self.draw = [], {}, np.random.default_rng(0)

    def node(self, op: str, inputs: list[str], outputs: list[str] | None = None, **attrs) -> str:
        outputs = outputs or [f"{op}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{op}_{len(self.nodes)}", **attrs))
        return outputs[0]

    def array(self, value, dtype=np.float32) -> str:
        name = f"array_{len(self.arrays)}"
        self.arrays[name] = np.asarray(value, dtype)
        return name

    def weight(self, *shape: int) -> str:
        return self.array(self.draw.normal(size=shape) / np.sqrt(shape[0]))

    def heads(self, value: str, count: int) -> str:
        """[batch, seq, count · size] as [batch, count, seq, size]."""
        apart = self.node("Reshape", [value, self.array([0, 0, count, -1], np.int64)])
        return self.node("Transpose", [apart], perm=[0, 2, 1, 3])

    def mask(self, window: int = 0, low: float | None = None) -> str:
        """What tokens see, bool [batch, 1, seq, total]: columns up to their own, of the last `window`, that the
        attention_mask shows; with `low`, as a number to add."""
        one, zero = self.array(1, np.int64), self.array(0, np.int64)
        past = self.node("Gather", [self.node("Shape", [self.first]), self.array(3 if self.joined else 2, np.int64)])
        total = self.node("Gather", [self.node("Shape", ["attention_mask"]), one])
        rows = self.node("Unsqueeze", [self.node("Range", [past, total, one]), self.array([1], np.int64)])
        columns = self.node("Range", [zero, total, one])
        seen = self.node("LessOrEqual", [columns, rows])
        if window:
            first = self.node("Sub", [rows, self.array(window, np.int64)])
            seen = self.node("And", [seen, self.node("Greater", [columns, first])])
        shown = self.node("Cast", ["attention_mask"], to=TensorProto.BOOL)
        seen = self.node("And", [seen, self.node("Unsqueeze", [shown, self.array([1, 2], np.int64)])])
        return seen if low is None else self.node("Where", [seen, self.array(0.0), self.array(low)])

    def model(self, layer: Callable[[Toy, str, int, list[str], list[str]], str]) -> ModelProto:
        """The decoder: `layer(toy, x, number, pasts, presents)` gives attention's output [batch, seq, HIDDEN]."""
        x = self.node("Gather", [self.weight(VOCAB, HIDDEN), "input_ids"])
        x = self.node("Add", [x, self.node("Gather", [self.weight(POSITIONS, HIDDEN), "position_ids"])])
        shape = ["batch_size", self.kv, "past_len", DIM]
        pasts, presents = [], []
        for i in range(self.layers):
            names = [""] if self.joined else [".key", ".value"]
            past, present = ([f"{kind}.{i}{name}" for name in names] for kind in ("past_key_values", "present"))
            pasts += past
            presents += present
            x = self.node(
                "Add", [x, self.node("MatMul", [layer(self, x, i, past, present), self.weight(HIDDEN, HIDDEN)])]
            )
        self.node("MatMul", [x, self.weight(HIDDEN, VOCAB)], ["logits"])
        shape = [2, *shape] if self.joined else shape
        i64, f32, info = TensorProto.INT64, TensorProto.FLOAT, helper.make_tensor_value_info
        inputs = [
            info("input_ids", i64, ["batch_size", "seq"]), info("attention_mask", i64, ["batch_size", "total"]),
            info("position_ids", i64, ["batch_size", "seq"]), *(info(name, f32, shape) for name in pasts),
        ]  # fmt: skip
        after = ["total" if size == "past_len" else size for size in shape]
        results = [info("logits", f32, ["batch_size", "seq", VOCAB]), *(info(name, f32, after) for name in presents)]
        read = {name for node in self.nodes for name in node.input}
        inputs = [value for value in inputs if value.name in read or value.name.startswith("past")]
        initializers = [numpy_helper.from_array(array, name) for name, array in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "toy", inputs, results, initializers)
        domains = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10)


def onnxruntime_logits(path: Path, parts: list[list[int]]) -> list[np.ndarray]:
    """onnxruntime's logits [vocab] after each part of one row, the cache of exactly the tokens so far."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {value.name: value for value in session.get_inputs()}
    sizes = {
        name: [{"batch_size": 1, "past_len": 0}.get(size, size) for size in value.shape]
        for name, value in names.items()
    }
    cache = {name: np.zeros(sizes[name], np.float32) for name in names if name.startswith("past")}
    length, found = 0, []
    for part in parts:
        places = np.arange(length, length + len(part))
        length += len(part)
        feed = {"input_ids": [part], "position_ids": [places], "attention_mask": np.ones((1, length))}
        feed = {name: np.asarray(value, np.int64) for name, value in feed.items() if name in names} | cache
        logits, *presents = session.run(None, feed)
        cache = dict(zip(cache, presents, strict=True))
        found.append(logits[0, -1])
    return found
