"""Mixtures of experts in the toy decoder, in the spellings of exporters and some more."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import toy
from onnx import ModelProto, TensorProto, helper, numpy_helper

EXPERTS, K, WIDTH, INNER = 5, 2, 64, 32
# How exporters write a mixture. gathered: each expert over its own tokens, as transformers' loops; nd: with ScatterND;
# traced: over the experts that were chosen in a trace; sliced: as torch.export writes "gathered", and sliced_last_first
# with the index of tokens before that of choices; sorted: rows sorted by expert and split by their counts, as Granite's
# experts; weighed: all tokens, by a column of dense weights; stacked: likewise, concatenated first; at_once: all experts
# in one product.
SPELLINGS = (
    "gathered", "nd", "traced", "sliced", "sliced_last_first", "weighed", "stacked", "at_once", "at_once_bias",
)  # fmt: skip


class _Nodes:
    """Nodes of a graph, and their constants."""

    def __init__(self):
        self.nodes, self.arrays = [], {}

    def __call__(self, op: str, *inputs: Any, outputs: int = 1, name: str = "", **attrs: Any) -> Any:
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        place = len(self.nodes)
        results = [f"mixture.{op}_{place}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, names, results, name=name or f"/mixture/{op}_{place}", **attrs))
        return results[0] if outputs == 1 else results

    def constant(self, value: Any) -> str:
        name = f"mixture.constant_{len(self.arrays)}"
        self.arrays[name] = np.asarray(value)
        return name

    def weight(self, name: str, *shape: int) -> str:
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        self.arrays[name] = (draw.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)
        return name


def decoder(spelling: str, experts: int = EXPERTS, k: int = K, change=None, mixtures: int = 1) -> ModelProto:
    """The toy with a mixture after its embedding: silu(x · gate) · (x · up) · down, by softmax of the k best logits.

    change: a function of the expert's number (None for the sum), of its output, and of the nodes, which may return
    another value. mixtures: how many follow one another, all in one scope: experts 0 to 4 are of the first, 5 to 9 of
    the second.
    """
    n = _Nodes()
    wide = n("MatMul", "embedded", n.weight("wide.weight", toy.DIM, WIDTH))
    total = n("Reshape", wide, [-1, WIDTH])
    for first in range(0, mixtures * experts, experts):
        total = _mixture(n, spelling, total, range(first, first + experts), k, change)
    n.nodes.append(helper.make_node("Reshape", [total, n("Shape", wide)], ["mixture.sum"]))
    n.nodes.append(
        helper.make_node("MatMul", ["mixture.sum", n.weight("narrow.weight", WIDTH, toy.DIM)], ["embedded2"])
    )
    model = toy.embedding(toy.decoder(), *n.nodes)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in n.arrays.items())
    return model


def _mixture(n: _Nodes, spelling: str, x: str, numbers: range, k: int, change) -> str:
    """The sum of a mixture over x, whose experts have these numbers."""
    experts = len(numbers)
    router = f"router{numbers.start or ''}"
    logits = n("MatMul", x, n.weight(f"{router}.weight", WIDTH, experts), name=f"/{router}/MatMul")
    best, indices = n("TopK", logits, [k], outputs=2)
    scores = n("Softmax", best, axis=-1)
    weights = {
        part: [n.weight(f"experts.{number}.{part}_proj.weight", *shape) for number in numbers]
        for part, shape in (("gate", (WIDTH, INNER)), ("up", (WIDTH, INNER)), ("down", (INNER, WIDTH)))
    }
    flat = n("Shape", x)

    def expert(e: int, x: str) -> str:
        name = f"/experts.{numbers[e]}"
        gate, up = (n("MatMul", x, weights[part][e], name=f"{name}/{part}_proj/MatMul") for part in ("gate", "up"))
        inner = n("Mul", n("Mul", gate, n("Sigmoid", gate)), up)
        y = n("MatMul", inner, weights["down"][e], name=f"{name}/down_proj/MatMul")
        return change(e, y, n) if change else y

    zeros = n("Expand", np.array(0, np.float32), flat)
    if spelling.startswith("at_once"):
        dense = n("Transpose", _dense(n, indices, scores, logits), perm=[1, 0])
        total = _at_once(n, x, weights, spelling.endswith("bias"), experts)
        total = n("ReduceSum", n("Mul", total, n("Unsqueeze", dense, [2])), [0], keepdims=0)
    elif spelling == "sorted":
        total = _sorted(n, x, indices, scores, zeros, weights, experts, k)
    elif spelling == "stacked":
        dense = n("Transpose", _dense(n, indices, scores, logits), perm=[1, 0])
        parts = [n("Unsqueeze", expert(e, x), [0]) for e in range(experts)]
        total = n("ReduceSum", n("Mul", n("Concat", *parts, axis=0), n("Unsqueeze", dense, [2])), [0], keepdims=0)
    elif spelling == "weighed":
        dense, total = _dense(n, indices, scores, logits), zeros
        for e in range(experts):
            total = n("Add", total, n("Mul", expert(e, x), n("Gather", dense, [e], axis=1)))
    else:
        total = _gathered(n, spelling, x, indices, scores, zeros, expert, experts)
    return change(None, total, n) if change else total


def _dense(n: _Nodes, indices: str, scores: str, logits: str) -> str:
    """The scores [tokens, experts], 0 for experts that were not chosen."""
    zeros = n("Expand", np.array(0, np.float32), n("Shape", logits))
    return n("ScatterElements", zeros, indices, scores, axis=1)


def _at_once(n: _Nodes, x: str, weights: dict[str, list[str]], bias: bool, experts: int) -> str:
    """Every expert's output, [experts, tokens, width]. bias: whether each product has one."""
    copies = n("Reshape", n("Tile", x, [experts, 1]), [experts, -1, WIDTH])
    stacks = {}
    for part, names in weights.items():
        stacks[part] = f"experts.{part}_proj"
        n.arrays[stacks[part]] = np.stack([n.arrays.pop(name) for name in names])

    def product(x: str, part: str) -> str:
        y = n("MatMul", x, stacks[part])
        return n("Add", y, n.weight(f"experts.{part}_bias", experts, 1, n.arrays[stacks[part]].shape[2])) if bias else y

    gate = product(copies, "gate")
    return product(n("Mul", n("Mul", gate, n("Sigmoid", gate)), product(copies, "up")), "down")


def _gathered(n: _Nodes, spelling: str, x: str, indices: str, scores: str, total: str, expert, experts: int) -> str:
    chosen = n("Transpose", n("OneHot", indices, experts, [0, 1], axis=-1), perm=[2, 1, 0])
    numbers: list[Any] = list(range(experts))
    if spelling == "traced":
        which = n("NonZero", n("Greater", n("ReduceSum", chosen, [-1, -2], keepdims=0), 0))
        numbers = n("Split", n("Transpose", which, perm=[1, 0]), [1] * experts, outputs=experts, axis=0)
        numbers = [n("Squeeze", n("Squeeze", number, [1]), [0]) for number in numbers]
    for e, number in enumerate(numbers):
        own = n("Cast", n("Gather", chosen, number, axis=0), to=TensorProto.BOOL)
        indices_of_tokens = n("Transpose", n("NonZero", own), perm=[1, 0])
        if spelling.startswith("sliced"):
            order = (1, 0) if spelling == "sliced_last_first" else (0, 1)
            slices = {i: n("Slice", indices_of_tokens, [i], [i + 1], [1], [1]) for i in order}
            columns = [slices[0], slices[1]]
        else:
            columns = n("Split", indices_of_tokens, outputs=2, axis=1, num_outputs=2)
        place, token = (n("Squeeze", column, [1]) for column in columns)
        score = n("GatherND", scores, n("Concat", n("Unsqueeze", token, [1]), n("Unsqueeze", place, [1]), axis=1))
        is_sliced = spelling.startswith("sliced")
        own = n("GatherND", x, n("Unsqueeze", token, [-1])) if is_sliced else n("Gather", x, token, axis=0)
        update = n("Mul", expert(e, own), n("Unsqueeze", score, [1]))
        if is_sliced or spelling == "nd":
            total = n("ScatterND", total, n("Unsqueeze", token, [1]), update, reduction="add")
        else:
            where = n("Expand", n("Unsqueeze", token, [1]), n("Shape", update))
            total = n("ScatterElements", total, where, update, axis=0, reduction="add")
    return total


def _sorted(
    n: _Nodes, x: str, indices: str, scores: str, total: str, weights: dict[str, list[str]], experts: int, k: int
) -> str:
    flat = n("Reshape", indices, [-1])
    order = n("TopK", flat, n("Shape", flat), outputs=2, largest=0)[1]
    token = n("Div", order, k)
    counts = n("ReduceSum", n("OneHot", indices, experts, [0, 1], axis=-1), [0, 1], keepdims=0)

    def product(x: str, part: str) -> str:
        rows = n("Split", x, counts, outputs=experts, axis=0)
        return n("Concat", *(n("MatMul", *inputs) for inputs in zip(rows, weights[part], strict=True)), axis=0)

    rows = n("Gather", x, token, axis=0)
    gate = product(rows, "gate")
    y = product(n("Mul", n("Mul", gate, n("Sigmoid", gate)), product(rows, "up")), "down")
    update = n("Mul", y, n("Unsqueeze", n("Gather", n("Reshape", scores, [-1]), order, axis=0), [1]))
    return n("ScatterND", total, n("Unsqueeze", token, [1]), update, reduction="add")
