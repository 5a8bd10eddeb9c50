"""Edits of an ONNX graph that know its structure: nodes, attributes, tensors, declarations, versions, external data."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from fuzzing import extremes

_TYPES = list(range(27))
_OP_TYPES = [
    *(
        "Add",
        "MatMul",
        "Gather",
        "Reshape",
        "Concat",
        "Slice",
        "Split",
        "Cast",
        "Softmax",
        "Where",
        "Identity",
        "Shape",
    ),
    *("Transpose", "Expand", "ScatterND", "GatherND", "ScatterElements", "CumSum", "ReduceSum", "TopK", "If", "Loop"),
    *("Unsqueeze", "Squeeze", "Range", "ConstantOfShape", "Pad", "Tile", "OneHot", "LayerNormalization", "Attention"),
    *(
        "DequantizeLinear",
        "QuantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "Conv",
        "Einsum",
        "LSTM",
        "Resize",
    ),
]
_CONTRIB_TYPES = [
    *("GroupQueryAttention", "MultiHeadAttention", "Attention", "RotaryEmbedding", "MatMulNBits", "QMoE", "MoE"),
    *("GatherBlockQuantized", "SkipSimplifiedLayerNormalization", "FusedMatMul", "PackedAttention", "BiasGelu"),
]


def graphs(graph: GraphProto) -> list[GraphProto]:
    """Returns the graph and the graphs in its nodes."""
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                found += graphs(attribute.g)
    return found


def all_nodes(model: ModelProto) -> list[NodeProto]:
    return [node for graph in graphs(model.graph) for node in graph.node]


def all_tensors(model: ModelProto) -> list[TensorProto]:
    """Returns the initializers, and the tensors of nodes."""
    found = [tensor for graph in graphs(model.graph) for tensor in graph.initializer]
    for node in all_nodes(model):
        found += [attribute.t for attribute in node.attribute if attribute.type == AttributeProto.TENSOR]
    return found


def value_names(model: ModelProto) -> list[str]:
    names = [value.name for value in (*model.graph.input, *model.graph.initializer)]
    return names + [name for node in all_nodes(model) for name in node.output]


# Nodes.


def edit_attribute(model: ModelProto, rng: Random) -> None:
    nodes = [node for node in all_nodes(model) if node.attribute]
    if not nodes:
        return
    node = rng.choice(nodes)
    attribute = rng.choice(node.attribute)
    kind = rng.randrange(10)
    if kind == 0:
        node.attribute.remove(attribute)
    elif kind == 1:
        setattr(attribute, "type", rng.choice(AttributeProto.AttributeType.values()))  # noqa: B010 its type is a stub's
    elif kind == 2:
        attribute.name = rng.choice([one.name for other in all_nodes(model) for one in other.attribute])
    else:
        edit_attribute_value(attribute, rng)


def edit_attribute_value(attribute: AttributeProto, rng: Random) -> None:
    if attribute.type == AttributeProto.INT:
        attribute.i = clip(extremes.integer(rng, attribute.i))
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice(extremes.FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice([*extremes.TEXTS, "reflect", "SAME_UPPER", "bhd,bkd->bhk"]).encode()
    elif attribute.type == AttributeProto.INTS:
        ints = list(attribute.ints)
        if ints and rng.random() < 0.7:
            at = rng.randrange(len(ints))
            ints[at] = clip(extremes.integer(rng, ints[at]))
        else:
            ints = rng.choice([ints[:-1], [*ints, 1], ints[::-1], [*ints, *ints], [], [0] * 9])
        attribute.ints[:] = ints
    elif attribute.type == AttributeProto.TENSOR:
        edit_tensor(attribute.t, rng)
    elif attribute.type == AttributeProto.GRAPH:
        graph = attribute.g
        if graph.output and rng.random() < 0.5:
            del graph.output[-1]
        elif graph.node:
            del graph.node[rng.randrange(len(graph.node))]


def clip(number: int) -> int:
    return max(-(2**63), min(2**63 - 1, number))


def add_attribute(model: ModelProto, rng: Random) -> None:
    """Gives a node an attribute that others have, or one of its schema that it left out."""
    node = rng.choice(all_nodes(model))
    name = rng.choice(
        ["axis", "axes", "to", "keepdims", "perm", "num_heads", "kv_num_heads", "local_window_size", "K", "N", "bits",
         "block_size", "scale", "softcap", "epsilon", "allowzero", "start", "end", "batch_dims", "group", "mode", "dilations",
         "num_outputs", "rotary_interleaved", "do_rotary", "smooth_softmax", "k", "quantize_axis", "gather_axis", "saturate"]
    )  # fmt: skip
    value: Any = rng.choice(
        [extremes.integer(rng), [extremes.integer(rng) for _ in range(2)], rng.choice(extremes.FLOATS)]
    )
    node.attribute.append(helper.make_attribute(name, value))


def rewire(model: ModelProto, rng: Random) -> None:
    node = rng.choice(all_nodes(model))
    kind = rng.randrange(7)
    if kind <= 2 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(value_names(model))
    elif kind == 3 and node.input:
        node.input[rng.randrange(len(node.input))] = ""
    elif kind == 4 and node.input:
        del node.input[-1]
    elif kind == 5:
        node.input.append(rng.choice(value_names(model)))
    elif len(node.input) > 1:
        a, b = rng.sample(range(len(node.input)), 2)
        node.input[a], node.input[b] = node.input[b], node.input[a]


def edit_outputs(model: ModelProto, rng: Random) -> None:
    node = rng.choice(all_nodes(model))
    kind = rng.randrange(4)
    if kind == 0 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(["", *value_names(model)])
    elif kind == 1:
        node.output.append(f"more{rng.randrange(99)}")
    elif kind == 2 and len(node.output) > 1:
        node.output[:] = node.output[::-1]
    elif node.output:
        del node.output[-1]


def change_operator(model: ModelProto, rng: Random) -> None:
    node = rng.choice(all_nodes(model))
    if rng.random() < 0.3:
        node.op_type, node.domain = rng.choice(_CONTRIB_TYPES), "com.microsoft"
    else:
        node.op_type = rng.choice(_OP_TYPES + [other.op_type for other in all_nodes(model)])
        node.domain = "" if rng.random() < 0.8 else node.domain


def move_nodes(model: ModelProto, rng: Random) -> None:
    graph = rng.choice(graphs(model.graph))
    if not graph.node:
        return
    at = rng.randrange(len(graph.node))
    kind = rng.randrange(3)
    node = NodeProto.FromString(graph.node[at].SerializeToString())
    if kind == 0:
        del graph.node[at]
    elif kind == 1:
        graph.node.insert(rng.randrange(len(graph.node)), node)
    else:
        del graph.node[at]
        graph.node.append(node)


def insert_node(model: ModelProto, rng: Random) -> None:
    """Puts an operator between a value and one of its readers."""
    node = rng.choice(all_nodes(model))
    if not node.input:
        return
    at, name = rng.randrange(len(node.input)), f"inserted{rng.randrange(10**6)}"
    attributes = rng.choice([{}, {"axis": extremes.integer(rng)}, {"perm": [1, 0]}, {"to": rng.choice(_TYPES)}])
    names = [node.input[at], *rng.sample(value_names(model), rng.choice([0, 0, 1, 2]))]
    new = helper.make_node(rng.choice(_OP_TYPES), names, [name], **attributes)
    node.input[at] = name
    model.graph.node.insert(0, new)


# Tensors.


def edit_tensor(tensor: TensorProto, rng: Random) -> None:
    kind = rng.randrange(9)
    if kind == 0 and tensor.dims:
        at = rng.randrange(len(tensor.dims))
        tensor.dims[at] = clip(extremes.integer(rng, tensor.dims[at]))
    elif kind == 1:
        tensor.data_type = rng.choice(_TYPES)
    elif kind == 2:
        tensor.raw_data = rng.choice(
            [tensor.raw_data[:-1], tensor.raw_data * 2, b"", tensor.raw_data[: len(tensor.raw_data) // 2]]
        )
    elif kind == 3:
        edit_external_data(tensor, rng)
    else:
        edit_array(tensor, rng)


def edit_external_data(tensor: TensorProto, rng: Random) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    location = rng.choice(["model.onnx", "data", "../data", "/etc/passwd", "", ".", "model.onnx/", "config.json", "\0"])
    entries = [("location", location), ("offset", str(extremes.integer(rng))), ("length", str(extremes.integer(rng)))]
    for key, value in rng.sample(entries, rng.randint(1, 3)):
        tensor.external_data.add(key=key, value=value)
    if rng.random() < 0.7:
        tensor.ClearField("raw_data")


def edit_array(tensor: TensorProto, rng: Random) -> None:
    """Changes shape or elements of a tensor that stays whole."""
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:  # an earlier edit broke it
        return
    name = tensor.name
    array = edited_array(array, rng)
    try:
        tensor.CopyFrom(numpy_helper.from_array(array, name))
    except Exception:  # of a type that ONNX writes otherwise
        return


def edited_array(array: np.ndarray, rng: Random) -> np.ndarray:
    """Returns the array with another shape or other elements."""
    kind = rng.randrange(9)
    if kind == 0 and array.ndim:
        axis = rng.randrange(array.ndim)
        return np.take(array, range(array.shape[axis] - 1), axis) if array.shape[axis] else array
    if kind == 1 and array.ndim:
        return np.concatenate([array, array], rng.randrange(array.ndim))
    if kind == 2:
        return array.reshape(rng.choice([(-1,), (1, *array.shape), (*array.shape, 1), array.shape[::-1]]))
    if kind == 3 and array.ndim:
        return array[rng.choice([0, slice(0, 0), slice(0, 1), slice(None, None, 2)])] if array.shape[0] else array
    if kind == 4 and array.ndim > 1:
        return np.ascontiguousarray(array.swapaxes(*rng.sample(range(array.ndim), 2)))
    if kind == 5:
        return array.astype(
            rng.choice([np.float32, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_]), copy=True
        )
    array = array.copy()
    if array.size and array.dtype.kind in "iufb":
        flat = array.reshape(-1)
        for _ in range(rng.choice([1, 1, 4, 64])):
            at = rng.randrange(flat.size)
            with np.errstate(all="ignore"):
                flat[at] = element(array.dtype, flat[at], rng)
    return array


def element(dtype: np.dtype, old: Any, rng: Random) -> Any:
    if dtype.kind == "f":
        return np.float64(rng.choice(extremes.FLOATS)).astype(dtype)
    if dtype.kind == "b":
        return not old
    info = np.iinfo(dtype)
    number = extremes.integer(rng, int(old))
    return rng.choice([info.min, info.max]) if not info.min <= number <= info.max else number


def edit_any_tensor(model: ModelProto, rng: Random) -> None:
    if tensors := all_tensors(model):
        edit_tensor(rng.choice(tensors), rng)


def edit_small_tensor(model: ModelProto, rng: Random) -> None:
    """Changes an axis, a shape, an index or a scalar."""
    if tensors := [tensor for tensor in all_tensors(model) if len(tensor.raw_data) <= 64]:
        edit_array(rng.choice(tensors), rng)


def exchange_tensors(model: ModelProto, rng: Random) -> None:
    tensors = all_tensors(model)
    if len(tensors) > 1:
        one, other = rng.sample(tensors, 2)
        name = one.name
        one.CopyFrom(other)
        one.name = name


# The rest of the model.


def edit_declaration(model: ModelProto, rng: Random) -> None:
    values = [*model.graph.input, *model.graph.output]
    if not values:
        return
    value = rng.choice(values)
    kind = rng.randrange(7)
    dims = value.type.tensor_type.shape.dim
    if kind <= 2 and dims:
        dim = rng.choice(dims)
        dim.Clear()
        if rng.random() < 0.7:
            dim.dim_value = clip(extremes.integer(rng))
        else:
            dim.dim_param = rng.choice(["batch_size", "sequence_length", "x", ""])
    elif kind == 3:
        value.type.tensor_type.elem_type = rng.choice(_TYPES)
    elif kind == 4:
        value.name = rng.choice([*value_names(model), "past_key_values.9.key", "logits", "position_ids", "x"])
    elif kind == 5:
        side = rng.choice([model.graph.input, model.graph.output])
        if side:
            del side[rng.randrange(len(side))]
    elif rng.random() < 0.5:
        if dims:
            del dims[rng.randrange(len(dims))]
        else:
            value.type.tensor_type.shape.dim.add(dim_value=1)
    else:
        rng.choice([model.graph.input, model.graph.output]).append(ValueInfoProto.FromString(value.SerializeToString()))


def edit_versions(model: ModelProto, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        model.ir_version = max(-(2**63), min(2**63 - 1, rng.choice([0, 3, 99, 2**40, -1])))
    elif kind == 1 and model.opset_import:
        rng.choice(model.opset_import).version = rng.choice(
            [0, -1, 1, 7, 10, 12, 13, 14, 18, 20, 23, 25, 99, 2**31, 2**62]
        )
    elif kind == 2:
        model.opset_import.append(helper.make_opsetid(rng.choice(["", "com.microsoft", "x"]), rng.choice([1, 11, 24])))
    elif model.opset_import:
        del model.opset_import[-1]


EDITS: list[tuple[int, Callable[[ModelProto, Random], None]]] = [
    (6, edit_attribute),
    (2, add_attribute),
    (4, rewire),
    (1, edit_outputs),
    (3, change_operator),
    (2, move_nodes),
    (2, insert_node),
    (6, edit_any_tensor),
    (4, edit_small_tensor),
    (1, exchange_tensors),
    (3, edit_declaration),
    (1, edit_versions),
]


def edit(model: ModelProto, rng: Random) -> list[str]:
    """Changes the model by one to three edits, and returns their names."""
    weights, edits = zip(*EDITS, strict=True)
    chosen = rng.choices(edits, weights, k=rng.choice([1, 1, 1, 2, 3]))
    for change in chosen:
        change(model, rng)
    return [change.__name__ for change in chosen]
