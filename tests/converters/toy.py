"""The smallest decoder that converts: one layer of causal attention with a cache, as ONNX, changed at will by the
tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

VOCAB, DIM = 16, 8


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of the toy by name."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return draw.normal(size=shape).astype(np.float32)

    return {
        "model.embed.weight": normal(VOCAB, DIM),
        "onnx::MatMul_1": normal(DIM, DIM),
        "head.weight": normal(DIM, VOCAB),
        "head.bias": normal(VOCAB),
    }


def decoder(opset: int = 18, seed: int = 0) -> ModelProto:
    """ids [batch, seq], position_ids, attention_mask [batch, total], past [batch, 1, past, 8] → logits, present.

    Softmax(q · present) · present over the columns that the mask shows and that are not later; q = (E[ids] + positions)
    · W.
    """
    i64, f32 = TensorProto.INT64, TensorProto.FLOAT

    def node(op, inputs, outputs, name=None, **attrs):
        return helper.make_node(op, inputs, outputs, name=name or f"/model/{op}_{outputs[0]}", **attrs)

    def axes(op, source, names, result):
        if opset < 13:  # axes were attributes
            return node(op, [source], [result], axes=constants[names].tolist())
        return node(op, [source, names], [result])

    constants = {
        "last": np.array([-1]), "one": np.array([1]), "heads": np.array([1, 2]), "two": np.array(2), "one0": np.array(1),
        "zero0": np.array(0), "tenth": np.array(0.1, np.float32), "low": np.array(-1e9, np.float32),
    }  # fmt: skip
    nodes = [
        node("Gather", ["model.embed.weight", "input_ids"], ["embedded"]),
        node("Cast", ["position_ids"], ["place"], to=f32),
        axes("Unsqueeze", "place", "last", "places"),
        node("Mul", ["places", "tenth"], ["rotated"]),
        node("Add", ["embedded", "rotated"], ["x"]),
        node("MatMul", ["x", "onnx::MatMul_1"], ["q"], "/model/layers.0/self_attn/q_proj/MatMul"),
        axes("Unsqueeze", "q", "one", "q4"),
        node("Concat", ["past_key_values.0.key", "q4"], ["present.0.key"], axis=2),
        node("Transpose", ["present.0.key"], ["keys"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q4", "keys"], ["scores"]),
        # The mask: column j of token i is seen where the mask shows it and j <= past + i.
        node("Shape", ["past_key_values.0.key"], ["past_shape"]),
        node("Gather", ["past_shape", "two"], ["past"]),
        node("Shape", ["attention_mask"], ["mask_shape"]),
        node("Gather", ["mask_shape", "one0"], ["total"]),
        node("Range", ["past", "total", "one0"], ["rows"]),
        axes("Unsqueeze", "rows", "one", "rows1"),
        node("Range", ["zero0", "total", "one0"], ["columns"]),
        node("Greater", ["columns", "rows1"], ["later"]),
        node("Not", ["later"], ["causal"]),
        node("Cast", ["attention_mask"], ["shown"], to=TensorProto.BOOL),
        axes("Unsqueeze", "shown", "heads", "shown4"),
        node("And", ["causal", "shown4"], ["seen"]),
        node("Where", ["seen", "scores", "low"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1 if opset >= 13 else 3),
        node("MatMul", ["weights", "present.0.key"], ["mixed4"]),
        axes("Squeeze", "mixed4", "one", "mixed"),
        node("MatMul", ["mixed", "head.weight"], ["product"], "/head/MatMul"),
        node("Add", ["product", "head.bias"], ["logits"], "/head/Add"),
    ]
    arrays = {**weights(seed), **constants}
    inputs = [
        helper.make_tensor_value_info("input_ids", i64, ["batch_size", "seq"]),
        helper.make_tensor_value_info("attention_mask", i64, ["batch_size", "total"]),
        helper.make_tensor_value_info("position_ids", i64, ["batch_size", "seq"]),
        helper.make_tensor_value_info("past_key_values.0.key", f32, ["batch_size", 1, "past_len", DIM]),
    ]
    results = [
        helper.make_tensor_value_info("logits", f32, ["batch_size", "seq", VOCAB]),
        helper.make_tensor_value_info("present.0.key", f32, ["batch_size", 1, "total", DIM]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "toy", inputs, results, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def write(folder: Path, model: ModelProto, name: str = "model.onnx", external: bool = False) -> Path:
    """The model in the folder, with its four weights in one external file if asked; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if external:
        model = type(model).FromString(model.SerializeToString())
        data = b""
        for tensor in model.graph.initializer:
            if tensor.name in weights():
                place(tensor, f"{name}_data", len(data), len(tensor.raw_data))
                data += tensor.raw_data
                tensor.ClearField("raw_data")
        (folder / f"{name}_data").write_bytes(data)
    (folder / name).write_bytes(model.SerializeToString())
    return folder


def place(tensor: TensorProto, location: str, offset: int | None = None, length: int | None = None) -> None:
    """Says of the tensor that its data lies in an external file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


def initializer(model: ModelProto, name: str) -> TensorProto:
    """The initializer of that name."""
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def node(model: ModelProto, output: str) -> onnx.NodeProto:
    """The node that gives that value."""
    return next(one for one in model.graph.node if output in one.output)


def replace(model: ModelProto, name: str, array: TensorProto) -> None:
    """The initializer of that name becomes `array`, under the same name."""
    array.name = name
    initializer(model, name).CopyFrom(array)


def embedding(model: ModelProto, *nodes: onnx.NodeProto) -> ModelProto:
    """The toy with `nodes`, which make "embedded2" of "embedded", after its embedding."""
    node(model, "x").input[0] = "embedded2"
    others = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([others[0], *nodes, *others[1:]])
    return model


def without_cache() -> ModelProto:
    """The toy as a graph for prompts, whose past is nothing."""
    model = decoder()
    joined, past = node(model, "present.0.key"), node(model, "past")
    joined.op_type, past.op_type = "Identity", "Identity"
    del joined.input[0], joined.attribute[:], past.input[:]
    past.input.append("zero0")
    model.graph.node.remove(node(model, "past_shape"))
    del model.graph.input[-1]
    return model


def onnxruntime_logits(model: ModelProto | Path, ids: list[int]) -> np.ndarray:
    """onnxruntime's logits [vocab] after ids."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.array([ids], np.int64), "attention_mask": np.ones((1, len(ids)), np.int64),
        "position_ids": np.arange(len(ids))[None], "past_key_values.0.key": np.zeros((1, 1, 0, DIM), np.float32),
    }  # fmt: skip
    return session.run(["logits"], {value.name: feeds[value.name] for value in session.get_inputs()})[0][0, -1]


def steps(model: ModelProto, parts: list[list[int]]) -> list[np.ndarray]:
    """onnxruntime's logits [vocab] after each part of one row: what is carried is fed back, or all tokens are again."""
    import onnxruntime as ort

    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {value.name: value.shape for value in session.get_inputs()}
    names = list(shapes)
    presents = {name: name.replace("past_key_values", "present").replace("past_", "present_") for name in names}
    kept = {name: present for name, present in presents.items() if name != present}
    sizes = {name: [n if isinstance(n, int) else int("batch" in n) for n in shapes[name]] for name in kept}
    past = {name: np.zeros(sizes[name], np.float32) for name in kept}
    text, length, results = [], 0, []
    for part in parts:
        text += part
        length = length if kept else 0
        read = part if kept else text
        feeds = {
            "input_ids": np.array([read]), "attention_mask": np.ones((1, length + len(read)), np.int64),
            "position_ids": np.arange(length, length + len(read))[None], "use_cache_branch": np.array([length > 0]),
        } | past  # fmt: skip
        logits, *new = session.run(["logits", *kept.values()], {name: feeds[name] for name in names})
        past = dict(zip(kept, new, strict=True))
        length += len(read)
        results.append(logits[0, -1])
    return results


def converted_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """The converted folder's logits [vocab] after ids, one token a step."""
    from mlx_transmuter import ops
    from mlx_transmuter.model import load_folder
    from mlx_transmuter.runtime.decoder import Decoder

    run = Decoder(load_folder(folder).decoder, 1).begin_session([len(ids)])
    for token in ids:
        logits = run.step(np.array([[token]], np.int32), [1])
        run.evaluate(logits)
    return ops.to_host(logits[0])
