"""Attention in one operator, or with one tensor for keys and values, over pools: against onnxruntime, and skips."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from layers import DIM, HEADS, HIDDEN, VOCAB, Toy, onnxruntime_logits
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import SkippedMatch
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, apply_rewrites
from mlx_transmuter.converters.passes.attention.group_query_attention import lower_group_query_attention
from mlx_transmuter.converters.passes.attention.pooled_attention import fuse_pooled_attention
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.model import load_folder
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT

LOW, EPS = -1e9, 1e-3
SLOPES = -0.25 * np.arange(1, HEADS + 1)


def projected(toy: Toy, x: str) -> list[str]:
    """Queries, keys and values of x, [batch, seq, heads · size]."""
    return [toy.node("MatMul", [x, toy.weight(HIDDEN, count * DIM)]) for count in (HEADS, toy.kv, toy.kv)]


def padding(toy: Toy) -> str:
    """attention_mask as onnxruntime's operators take it, int32 [batch, total]."""
    return toy.node("Cast", ["attention_mask"], to=TensorProto.INT32)


def multi_head(mask: str, bias: bool = False, apart: bool = False, op: str = "MultiHeadAttention", **attrs):
    """MultiHeadAttention; mask: "causal" (its own, and padding), "bias" or "window"; apart: keys and values have heads."""

    def layer(toy: Toy, x: str, number: int, past: list[str], present: list[str]) -> str:
        q, k, v = projected(toy, x)
        if apart:
            k, v = toy.heads(k, HEADS), toy.heads(v, HEADS)
        biases = toy.weight(3 * HIDDEN) if bias else ""
        shown = padding(toy) if mask == "causal" else ""
        added = toy.mask(4 if mask == "window" else 0, LOW) if mask != "causal" else ""
        inputs = [q, k, v, biases, shown, added, *past]
        if op != "MultiHeadAttention":
            inputs = [q, k, v, shown, added, *past, "", "", "", biases]
        own = {"unidirectional": 1} if mask == "causal" else {}
        return toy.node(
            op, inputs, [f"mixed.{number}", *present], domain="com.microsoft", num_heads=HEADS, **own, **attrs
        )

    return Toy().model(layer)


def with_projections(**attrs) -> ModelProto:
    """onnxruntime's Attention, keys and values in one tensor."""

    def layer(toy: Toy, x: str, number: int, past: list[str], present: list[str]) -> str:
        inputs = [x, toy.weight(HIDDEN, 3 * HIDDEN), toy.weight(3 * HIDDEN), padding(toy), *past]
        own = {"unidirectional": 1, "num_heads": HEADS, **attrs}
        return toy.node("Attention", inputs, [f"mixed.{number}", *present], domain="com.microsoft", **own)

    return Toy(joined=True).model(layer)


def in_one_tensor() -> ModelProto:
    """Attention in plain nodes, keys and values in one tensor, as exporters wrote GPT-2 at first."""

    def layer(toy: Toy, x: str, number: int, past: list[str], present: list[str]) -> str:
        q, *news = (toy.heads(one, HEADS) for one in projected(toy, x))
        held = [toy.node("Gather", [past[0], toy.array(half, np.int64)], axis=0) for half in range(2)]
        keys, values = (toy.node("Concat", [old, new], axis=-2) for old, new in zip(held, news, strict=True))
        stacked = [toy.node("Unsqueeze", [one, toy.array([0], np.int64)]) for one in (keys, values)]
        toy.node("Concat", stacked, present, axis=0)
        scores = toy.node("MatMul", [q, toy.node("Transpose", [keys], perm=[0, 1, 3, 2])])
        scores = toy.node("Div", [toy.node("Add", [scores, toy.mask(0, LOW)]), toy.array(np.sqrt(DIM))])
        mixed = toy.node("MatMul", [toy.node("Softmax", [scores], axis=-1), values])
        turned = toy.node("Transpose", [mixed], perm=[0, 2, 1, 3])
        return toy.node("Reshape", [turned, toy.array([0, 0, HIDDEN], np.int64)])

    return Toy(joined=True).model(layer)


def standard(mask: str, flat: bool = False, outside: bool = False, kv: int = 2, **attrs) -> ModelProto:
    """ONNX's own Attention; mask: "causal", "seen", "added" or "window"; outside: it gets the whole present."""

    def layer(toy: Toy, x: str, number: int, past: list[str], present: list[str]) -> str:
        q, k, v = projected(toy, x)
        own = {"q_num_heads": HEADS, "kv_num_heads": kv} if flat else {}
        if not flat:
            q, k, v = (toy.heads(one, count) for one, count in ((q, HEADS), (k, kv), (v, kv)))
        if mask == "causal":
            own = own | {"is_causal": 1}  # and the mask alone what hides padding, [batch, 1, seq, total]
            shown = toy.node("Cast", ["attention_mask"], to=TensorProto.BOOL)
            shown = toy.node("Unsqueeze", [shown, toy.array([1, 2], np.int64)])
            seen = toy.node("And", [shown, toy.node("Or", [toy.mask(), toy.node("Not", [toy.mask()])])])
        else:
            seen = toy.mask(4 if mask == "window" else 0, LOW if mask == "added" else None)
        output = f"mixed.{number}"
        if outside:
            k, v = (toy.node("Concat", [p, new], [n], axis=2) for p, new, n in zip(past, (k, v), present, strict=True))
            toy.node("Attention", [q, k, v, seen], [output], **own, **attrs)
        else:
            toy.node("Attention", [q, k, v, seen, *past], [output, *present], **own, **attrs)
        if flat:
            return output
        turned = toy.node("Transpose", [output], perm=[0, 2, 1, 3])
        return toy.node("Reshape", [turned, toy.array([0, 0, HIDDEN], np.int64)])

    return Toy(kv).model(layer)


def normed(toy: Toy, x: str, weight: str) -> str:
    """x [batch, seq, heads · size] with the norm of each head's vector."""
    apart = toy.node("Reshape", [x, toy.array([0, 0, -1, DIM], np.int64)])
    mean = toy.node("ReduceMean", [toy.node("Mul", [apart, apart]), toy.array([-1], np.int64)])
    root = toy.node("Sqrt", [toy.node("Add", [mean, toy.array(EPS)])])
    scaled = toy.node("Mul", [toy.node("Div", [apart, root]), weight])
    return toy.node("Reshape", [scaled, toy.array([0, 0, -1], np.int64)])


def grouped(added: str = "", sinks: bool = False, norms: str = "", packed: bool = False, **attrs) -> ModelProto:
    """GroupQueryAttention; added: "" or a bias, "causal" or "slopes" (ALiBi); norms: of queries and keys, "own", or by
    nodes before it."""

    def layer(toy: Toy, x: str, number: int, past: list[str], present: list[str]) -> str:
        q, k, v = projected(toy, x)
        if packed:
            q, k, v = toy.node("Concat", [q, k, v], axis=2), "", ""
        one = toy.array(1, np.int64)
        count = toy.node("ReduceSum", ["attention_mask", toy.array([1], np.int64)], keepdims=0)
        lengths = toy.node("Cast", [toy.node("Sub", [count, one])], to=TensorProto.INT32)
        total = toy.node("Gather", [toy.node("Shape", ["attention_mask"]), one])
        bias = toy.mask(0, LOW) if added else ""
        if added == "slopes":
            columns = toy.node("Cast", [toy.node("Range", [toy.array(0, np.int64), total, one])], to=TensorProto.FLOAT)
            sloped = toy.node("Mul", [columns, toy.array(-SLOPES.reshape(-1, 1, 1))])
            bias = toy.node("Add", [bias, sloped])
        total = toy.node("Cast", [total], to=TensorProto.INT32)
        angles = np.arange(64)[:, None] * 0.3 ** np.arange(DIM // 2)
        tables = [toy.array(np.cos(angles)), toy.array(np.sin(angles))] if attrs.get("do_rotary") else ["", ""]
        more = [bias, toy.weight(HEADS) if sinks else ""]
        weights = [toy.weight(DIM), toy.weight(DIM)] if norms else []
        more += ["", "", *weights] if norms == "own" else []
        if norms == "before":
            q, k = (normed(toy, one, weight) for one, weight in zip((q, k), weights, strict=True))
        inputs = [q, k, v, *past, lengths, total, *tables, "", *more]
        own = {"num_heads": HEADS, "kv_num_heads": 2}
        return toy.node(
            "GroupQueryAttention", inputs, [f"mixed.{number}", *present], domain="com.microsoft", **own, **attrs
        )

    return Toy(2).model(layer)


def numbered(past: str, constant: str = "") -> ModelProto:
    """A cache whose tensors are named by a number alone: keys and values of one layer, then those of the other.
    constant: of another name, a constant of the graph.
    """
    model = multi_head("causal")
    order = [(layer, part) for layer in range(2) for part in ("key", "value")]
    names = {f"past_key_values.{a}.{b}": f"{past}.{i}" for i, (a, b) in enumerate(order)}
    names |= {f"present.{a}.{b}": f"present.{i}" for i, (a, b) in enumerate(order)}
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
    if constant:
        first = model.graph.node[0].output[0]
        for node in model.graph.node[1:]:
            node.input[:] = [f"{first}.half" if name == first else name for name in node.input]
        model.graph.node.insert(1, helper.make_node("Mul", [first, constant], [f"{first}.half"]))
        model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), constant))
    return model


MODELS: dict[str, Callable[[], ModelProto]] = {
    "a numbered cache": lambda: numbered("past_key_values"),
    "a numbered cache, other pasts": lambda: numbered("past"),
    "a numbered cache, and a constant": lambda: numbered("past_key_values", constant="present.both.1"),
    "MultiHeadAttention, its own mask": lambda: multi_head("causal"),
    "MultiHeadAttention, a bias as mask": lambda: multi_head("bias", scale=0.5),
    "MultiHeadAttention, a window": lambda: multi_head("window"),
    "MultiHeadAttention, biases": lambda: multi_head("causal", bias=True),
    "MultiHeadAttention, heads apart": lambda: multi_head("bias", apart=True),
    "DecoderMaskedMultiHeadAttention": lambda: multi_head("bias", op="DecoderMaskedMultiHeadAttention"),
    "DecoderMaskedMultiHeadAttention, biases": lambda: multi_head(
        "bias", bias=True, op="DecoderMaskedMultiHeadAttention"
    ),
    "Attention of com.microsoft": lambda: with_projections(),
    "Attention of com.microsoft, scaled": lambda: with_projections(scale=0.5),
    "plain nodes, keys and values in one tensor": in_one_tensor,
    "Attention": lambda: standard("causal"),
    "Attention, heads joined": lambda: standard("seen", flat=True),
    "Attention, a mask to add": lambda: standard("added", scale=0.5),
    "Attention, a window": lambda: standard("window", softcap=2.0),
    "Attention over the whole present": lambda: standard("seen", outside=True, kv=HEADS),
    "GroupQueryAttention, a bias": lambda: grouped("causal"),
    "GroupQueryAttention, slopes": lambda: grouped("slopes"),
    "GroupQueryAttention, sinks": lambda: grouped(sinks=True, packed=True),
    "GroupQueryAttention, a smooth softmax": lambda: grouped(smooth_softmax=1, softcap=2.0),
    "GroupQueryAttention, a window": lambda: grouped(local_window_size=4, sinks=True, do_rotary=1),
    "GroupQueryAttention, norms": lambda: grouped(norms="own", **ROTATED, qk_norm_epsilon=EPS),
}
ROTATED = {"do_rotary": 1, "rotary_interleaved": 1}
# What onnxruntime has on no CPU, and a graph of the same logits that it has.
LIKE: dict[str, Callable[[], ModelProto]] = {
    "DecoderMaskedMultiHeadAttention": lambda: multi_head("bias"),
    "DecoderMaskedMultiHeadAttention, biases": lambda: multi_head("bias", bias=True),
    "GroupQueryAttention, norms": lambda: grouped(norms="before", **ROTATED),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_runs_over_pools_as_onnxruntime_runs_it(name, tmp_path):
    onnx.save(MODELS[name](), tmp_path / "model.onnx")
    program = load_folder(convert(tmp_path, "model.onnx", tmp_path / "out", progress=False)).decoder
    kinds = {node.op.rpartition("-")[0] or node.op for node in program.program.nodes}
    assert program.program.input(CACHE_INDEX_INPUT) is not None, program.program.metadata["rewrites"]
    assert not kinds & {"Softmax", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention", "Attention"}
    case = proof.ProofBatch.random(VOCAB, [11, 5, 0])
    found = proof.decoder_logits(program, RunPlan("append"), case)
    onnx.save(LIKE.get(name, MODELS[name])(), tmp_path / "model.onnx")
    for row, (prompt, following) in enumerate(zip(case.prompts[:2], case.decode_tokens, strict=False)):
        wanted = onnxruntime_logits(tmp_path / "model.onnx", [prompt, *([token] for token in following)])
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)


def reasons(model: ModelProto, one, tmp_path) -> list[str]:
    """Returns why the rewrite skipped each match that it skipped in the model."""
    onnx.save(model, tmp_path / "model.onnx")
    program = apply_rewrites(name_weights(read_onnx(tmp_path / "model.onnx")), GRAPH_REWRITES)[0]
    return [answer.reason for answer in one(GraphView(program)) if isinstance(answer, SkippedMatch)]


def test_onnx_attention_whose_own_mask_ignores_the_past_is_skipped(tmp_path):
    model = standard("causal", outside=True, kv=HEADS)
    assert reasons(model, fuse_pooled_attention, tmp_path) == [
        "its keys and values are not cached, or its own mask does not count the past"
    ]


def test_group_query_attention_with_a_bias_that_is_not_linear_is_skipped(tmp_path):
    model = grouped("slopes")
    node = next(node for node in model.graph.node if node.op_type == "Mul")
    squared = onnx.helper.make_node("Mul", [node.input[0]] * 2, ["squared"])
    model.graph.node.insert(list(model.graph.node).index(node), squared)
    node.input[0] = "squared"
    assert reasons(model, lower_group_query_attention, tmp_path) == [
        "the mask adds numbers that are not a slope on the distance (ALiBi)"
    ]


def test_attention_without_a_mask_is_skipped(tmp_path):
    model = multi_head("causal")
    for node in model.graph.node:
        if node.op_type == "MultiHeadAttention":
            node.input[4] = ""
            del node.attribute[:]
            node.attribute.append(onnx.helper.make_attribute("num_heads", HEADS))
    found = reasons(model, fuse_pooled_attention, tmp_path)
    assert found == ["there is no mask, so a token attends to later tokens too"]


def test_attention_whose_scores_are_an_output_is_skipped(tmp_path):
    model = multi_head("bias")
    node = next(node for node in model.graph.node if node.op_type == "MultiHeadAttention")
    node.output.append("scores")
    model.graph.output.append(onnx.helper.make_tensor_value_info("scores", TensorProto.FLOAT, None))
    found = reasons(model, fuse_pooled_attention, tmp_path)
    assert found == ["its cache is a buffer with a length, or its scores are an output"]
