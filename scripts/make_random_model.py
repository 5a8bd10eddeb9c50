"""Writes a decoder of Llama's shape with random weights as ONNX files, of any size, outside the repository.

The graph is the one that onnxruntime-genai's builder writes: GroupQueryAttention, SimplifiedLayerNormalization, MatMul.
Weights are written one at a time, so that a file may be larger than memory. `python scripts/make_random_model.py OUT
--shape 135m --dtype float32 --data one`; see `measure_conversion.py` for what it is made for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

MAX_POSITIONS = 2048
HEAD_SIZE = 64
# Weights repeat the elements of one random block, each from another place in it: drawing them all would take minutes.
BLOCK_ELEMENTS = 2**24
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; its head and its embedding are two matrices."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "tiny": Shape(512, 128, 256, 2, 2, 1),
    "135m": Shape(49152, 576, 1536, 30, 9, 3),
    "3b": Shape(65536, 3072, 8192, 26, 48, 12),
}


@dataclass
class Writer:
    """The model so far. data: where weights lie: "one" external file, "many", or "inline" in the ONNX file."""

    folder: Path
    dtype: str
    data: str
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: list[TensorProto] = field(default_factory=list)
    written: int = 0  # bytes of the one external file

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.block = (self.random.standard_normal(BLOCK_ELEMENTS, np.float32) * 0.03).astype(self.dtype)

    def node(self, op: str, inputs: list[str], outputs: list[str], **attributes) -> str:
        """Adds a node, named by its first output, which is returned."""
        domain = "com.microsoft" if op in ("GroupQueryAttention", "SkipSimplifiedLayerNormalization") else ""
        self.nodes.append(helper.make_node(op, inputs, outputs, f"/{outputs[0]}/{op}", domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, shape: tuple[int, ...], values: np.ndarray | None = None) -> str:
        """Adds a weight of those values, or of random ones."""
        data_type = DTYPES[self.dtype] if values is None else helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=data_type, dims=shape)
        file = self.folder / ("model.onnx.data" if self.data == "one" else f"{name}.bin")
        if self.data == "inline":
            tensor.raw_data = b"".join(self.pieces(shape, values))
        else:
            begin = self.written if self.data == "one" else 0
            with open(file, "ab") as stream:
                length = sum(stream.write(piece) for piece in self.pieces(shape, values))
            self.written += length
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in {"location": file.name, "offset": begin, "length": length}.items():
                tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name

    def pieces(self, shape: tuple[int, ...], values: np.ndarray | None) -> Iterator[bytes]:
        """Yields the bytes of a weight."""
        if values is not None:
            yield values.tobytes()
            return
        missing = int(np.prod(shape))
        while missing:
            begin = int(self.random.integers(BLOCK_ELEMENTS // 2))
            piece = self.block[begin : begin + missing]
            missing -= piece.size
            yield piece.tobytes()

    def linear(self, x: str, path: str, rows: int, columns: int) -> str:
        """Adds a product with a matrix [rows, columns]."""
        return self.node("MatMul", [x, self.weight(f"{path}.MatMul.weight", (rows, columns))], [f"{path}.out"])

    def norm_weight(self, path: str, size: int) -> str:
        return self.weight(f"{path}.weight", (size,), np.ones(size, self.dtype))


def build_model(shape: Shape, writer: Writer) -> ModelProto:
    """Writes the weights and returns the model."""
    element_type, kv_size = DTYPES[writer.dtype], shape.kv_heads * HEAD_SIZE
    constants = {"one": np.array([1], np.int64), "axis": np.array(1, np.int64)}
    writer.tensors += [helper.make_tensor(n, TensorProto.INT64, a.shape, a.ravel()) for n, a in constants.items()]
    lengths = writer.node("ReduceSum", ["attention_mask", "one"], ["mask_sum"], keepdims=0)
    lengths = writer.node("Sub", [lengths, "one"], ["last"])
    lengths = writer.node("Cast", [lengths], ["seqlens_k"], to=TensorProto.INT32)
    total = writer.node("Gather", [writer.node("Shape", ["attention_mask"], ["mask_shape"]), "axis"], ["total64"])
    total = writer.node("Cast", [total], ["total"], to=TensorProto.INT32)
    angles = np.arange(MAX_POSITIONS)[:, None] / 10000 ** (np.arange(HEAD_SIZE // 2) * 2 / HEAD_SIZE)
    for name, values in (("cos_cache", np.cos(angles)), ("sin_cache", np.sin(angles))):
        writer.weight(name, values.shape, values.astype(writer.dtype))
    table = writer.weight("model.embed_tokens.weight", (shape.vocab, shape.hidden))
    residual = writer.node("Gather", [table, "input_ids"], ["embedded"])
    norm = [residual, writer.norm_weight("model.layers.0.input_layernorm", shape.hidden)]
    x = writer.node("SimplifiedLayerNormalization", norm, ["normed"], axis=-1, epsilon=1e-5, stash_type=1)

    def add_and_norm(residual: str, x: str, path: str) -> tuple[str, str]:
        inputs = [residual, x, writer.norm_weight(path, shape.hidden)]
        outputs = [f"{path}.out", "", "", f"{path}.sum"]
        writer.node("SkipSimplifiedLayerNormalization", inputs, outputs, epsilon=1e-5)
        return outputs[3], outputs[0]

    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", t]) for n, t in
              (("input_ids", "s"), ("attention_mask", "t"))]  # fmt: skip
    outputs = [helper.make_tensor_value_info("logits", element_type, ["b", "s", shape.vocab])]
    for i in range(shape.layers):
        path = f"model.layers.{i}"
        q, k, v = (
            writer.linear(x, f"{path}.attn.{name}_proj", shape.hidden, size)
            for name, size in (("q", shape.heads * HEAD_SIZE), ("k", kv_size), ("v", kv_size))
        )
        pasts = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        presents = [f"present.{i}.key", f"present.{i}.value"]
        for names, values, axis in ((pasts, inputs, "p"), (presents, outputs, "t")):
            values += [
                helper.make_tensor_value_info(name, element_type, ["b", shape.kv_heads, axis, HEAD_SIZE])
                for name in names
            ]
        attended = writer.node(
            "GroupQueryAttention", [q, k, v, *pasts, lengths, total, "cos_cache", "sin_cache"],
            [f"{path}.attn.out", *presents],
            num_heads=shape.heads, kv_num_heads=shape.kv_heads, do_rotary=1, rotary_interleaved=0,
            scale=HEAD_SIZE**-0.5, local_window_size=-1,
        )  # fmt: skip
        x = writer.linear(attended, f"{path}.attn.o_proj", shape.heads * HEAD_SIZE, shape.hidden)
        residual, x = add_and_norm(residual, x, f"{path}.post_attention_layernorm")
        gate = writer.linear(x, f"{path}.mlp.gate_proj", shape.hidden, shape.intermediate)
        up = writer.linear(x, f"{path}.mlp.up_proj", shape.hidden, shape.intermediate)
        gate = writer.node("Mul", [gate, writer.node("Sigmoid", [gate], [f"{gate}.sigmoid"])], [f"{gate}.silu"])
        x = writer.node("Mul", [gate, up], [f"{path}.mlp.gated"])
        x = writer.linear(x, f"{path}.mlp.down_proj", shape.intermediate, shape.hidden)
        residual, x = add_and_norm(residual, x, f"model.layers.{i + 1}.input_layernorm")
    head = writer.weight("lm_head.MatMul.weight", (shape.hidden, shape.vocab))
    writer.node("MatMul", [x, head], ["logits"])
    graph = helper.make_graph(writer.nodes, "random llama", inputs, outputs, writer.tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def make_model(folder: Path, shape: Shape, dtype: str, data: str) -> Path:
    """Writes the model and its config.json into a new folder. Returns the path of the ONNX file."""
    folder.mkdir(parents=True)
    model = build_model(shape, Writer(folder, dtype, data))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    config = {"model_type": "llama", "vocab_size": shape.vocab, "max_position_embeddings": MAX_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.onnx"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--data", choices=("one", "many", "inline"), default="one")
    args = parser.parse_args()
    print(make_model(args.out, SHAPES[args.shape], args.dtype, args.data))
