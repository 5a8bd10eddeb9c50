"""The reader of ONNX models: a Program holds nothing of ONNX but the names of its operators and types."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto
from tqdm import tqdm

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader import tensor_protos
from mlx_transmuter.converters.onnx_reader.attribute_types import find_wrong_attribute
from mlx_transmuter.converters.onnx_reader.element_types import (
    depends_on_element_types,
    infer_element_types,
    resolve_result_type,
)
from mlx_transmuter.converters.onnx_reader.function_inlining import inline_functions
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.onnx_file import load_onnx_file
from mlx_transmuter.converters.onnx_reader.onnx_graphs import sort_topologically, walk_nodes
from mlx_transmuter.converters.onnx_reader.opsets import imported_opsets, normalize_domain, operator_name, resolve_node
from mlx_transmuter.converters.stages import advance
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS, Node, Program, ProgramError, Value

_EXPORT_AGAIN = "export the model again"
# The node's property in which torch.onnx lists the modules that it belongs to, the outermost first, and its own name.
_NAME_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
# Types whose small tensors are constants; of other types only a tensor of one element is.
_CONSTANT_TYPES = ("string", "bool", "int64", "int32", "uint64", "uint32")
_PLAIN_ATTRIBUTES: dict[int, Callable[[AttributeProto], Any]] = {
    AttributeProto.INT: lambda proto: proto.i,
    AttributeProto.FLOAT: lambda proto: proto.f,
    AttributeProto.STRING: lambda proto: proto.s.decode("utf-8", "replace"),
    AttributeProto.INTS: lambda proto: list(proto.ints),
    AttributeProto.FLOATS: lambda proto: list(proto.floats),
    AttributeProto.STRINGS: lambda proto: [text.decode("utf-8", "replace") for text in proto.strings],
    AttributeProto.TYPE_PROTO: lambda proto: None,  # no operator needs one
}


def read_onnx(source: Path | ModelProto, *, progress: bool = False) -> Program:
    """Returns the Program of an ONNX file, or of a ModelProto, whose external data then lies in the current folder.

    The program's `tensors` read the weights when they are used. Functions of the model are inlined, and an operator
    that is not declared but whose ONNX schema has a body is expanded into it. Raises ConvertError for a file that holds
    no complete ONNX model, for external data outside the file's folder, and for operators that are not supported, with
    all of them in one message. progress: whether to show a progress bar.
    """
    file = Path("model") if isinstance(source, ModelProto) else Path(source)
    model = source if isinstance(source, ModelProto) else load_onnx_file(file)
    # A model that names no version of ONNX's own operators means the newest, as in onnxruntime.
    opsets = {"": onnx.defs.onnx_opset_version()} | imported_opsets(model)
    try:
        model = inline_functions(model, opsets)
    except Exception as error:  # the inliner raises errors of many types, all of them the file's fault
        raise ConvertError(file, f"functions that cannot be inlined ({error})", "a valid model") from None
    opsets |= imported_opsets(model)
    _check_operators(model, opsets, file)
    element_types: dict[str, int] = {}
    if depends_on_element_types(model.graph.node):
        element_types = infer_element_types(model, sort_topologically(model.graph.node))
    return _GraphReader(file, opsets, element_types, progress).read_program(model.graph)


def _check_operators(model: ModelProto, opsets: Mapping[str, int], file: Path) -> None:
    """Raises ConvertError that lists the operators of the model that are not declared."""
    missing: dict[str, list[str]] = {}
    for node in walk_nodes(model.graph.node):
        if resolve_node(node, opsets) is None:
            missing.setdefault(operator_name(node), []).append(node.name or ", ".join(node.output))
    if missing:
        names = ", ".join(f"{name} ({len(nodes)}, such as {nodes[0]!r})" for name, nodes in sorted(missing.items()))
        raise ConvertError(
            file,
            f"operators that are not supported: {names}",
            do="convert another file of the model, or export it with other operators",
        )


class _GraphReader:
    """The reading of one model: the names of its values, its constants and its weights so far.

    A scope maps the names of values in a graph, and in those around it, to names that are unique in the program.
    """

    def __init__(self, file: Path, opsets: Mapping[str, int], element_types: Mapping[str, int], progress: bool):
        self.file, self.opsets, self.element_types = file, opsets, element_types
        self.used_names: set[str] = set()
        self.duplicate_counts: dict[str, int] = {}  # name -> the number after the last duplicate of it
        self.constants: dict[str, np.ndarray] = {}
        self.tensors: dict[str, LazyTensor] = {}
        self.progress_bar = tqdm(desc="reading", unit="node", disable=None if progress else True, leave=False)

    def read_program(self, graph: GraphProto) -> Program:
        """Returns the program of the outermost graph, whose values keep their names. Raises ConvertError."""
        self.used_names.update(proto.name for proto in (*graph.input, *graph.initializer))
        self.used_names.update(proto.values.name for proto in graph.sparse_initializer)
        self.used_names.update(name for node in graph.node for name in node.output)
        with self.progress_bar:
            program = self.read_graph(graph, ChainMap())
        program = replace(program, constants=self.constants).with_tensors(self.tensors)
        try:
            program.validate()
        except ProgramError as problem:
            raise ConvertError(self.file, problem.found, problem.expected, _EXPORT_AGAIN) from None
        return program

    def declare_name(self, name: str, scope: ChainMap[str, str]) -> str:
        """Enters a value of the graph into its scope. Returns its unique name: graphs inside others may reuse names."""
        if name in scope.maps[0]:
            raise ConvertError(self.file, f"the value {name!r} defined twice", "each value defined once", _EXPORT_AGAIN)
        unique = name
        while scope.parents and unique in self.used_names:
            self.duplicate_counts[name] = self.duplicate_counts.get(name, 1) + 1
            unique = f"{name}~{self.duplicate_counts[name]}"
        self.used_names.add(unique)
        scope[name] = unique
        return unique

    def read_graph(self, graph: GraphProto, outer_scope: ChainMap[str, str]) -> Program:
        """Returns the program of a graph without its constants and weights, which are added to those of the model."""
        scope = outer_scope.new_child()
        initializers = {proto.name for proto in graph.initializer}
        initializers |= {proto.values.name for proto in graph.sparse_initializer}
        inputs = tuple(
            self.read_value(info, self.declare_name(info.name, scope))
            for info in graph.input
            if info.name not in initializers
        )
        for proto in graph.initializer:
            self.add_tensor(self.declare_name(proto.name, scope), tensor_protos.tensor_from_proto(proto, self.file))
        for sparse in graph.sparse_initializer:
            name = self.declare_name(sparse.values.name, scope)
            self.add_tensor(name, tensor_protos.tensor_from_sparse_proto(sparse, self.file))
        nodes = []
        for proto in sort_topologically(graph.node):
            self.progress_bar.update()
            advance()
            nodes += self.read_node(proto, scope)
        for info in graph.output:
            if info.name not in scope:
                found = f"no node that computes the output {info.name!r}"
                raise ConvertError(self.file, found, "every output computed", _EXPORT_AGAIN)
        return Program(inputs, tuple(self.read_value(info, scope[info.name]) for info in graph.output), nodes)

    def add_tensor(self, name: str, tensor: LazyTensor) -> None:
        """Adds small integers, texts and scalars to the constants, which are read now, and the rest to the weights."""
        limit = MAX_CONSTANT_ELEMENTS if tensor.dtype in _CONSTANT_TYPES else 1
        if tensor.dtype == "string" or tensor.size <= limit:
            array = tensor.read()
            if array.dtype.kind in "biufU":
                self.constants[name] = np.array(array)
                return
        self.tensors[name] = tensor

    def read_value(self, info: ValueInfoProto, name: str) -> Value:
        """Returns an input or output; the element type of a sequence or an optional is that of its tensors."""
        tensor_type = _tensor_type(info.type)
        if tensor_type is None:
            return Value(name, "float32", None)
        shape = None
        if tensor_type.HasField("shape") and info.type.HasField("tensor_type"):
            shape = tuple(_axis_size(dim) for dim in tensor_type.shape.dim)
        return Value(name, ELEMENT_TYPE_NAMES.get(tensor_type.elem_type, "float32"), shape)

    def read_node(self, proto: NodeProto, scope: ChainMap[str, str]) -> list[Node]:
        """Returns the node of a NodeProto; no node for a Constant, which is added to the constants or weights."""
        for name in proto.input:
            if name and name not in scope:
                node_name = f"{proto.op_type} {proto.name!r}"
                expected = "a value that is defined before it is read"
                raise ConvertError(self.file, f"the input {name!r}", expected, _EXPORT_AGAIN, node_name)
        attrs = {attribute.name: self.read_attribute(attribute, proto, scope) for attribute in proto.attribute}
        proto, attrs = resolve_result_type(proto, attrs, self.element_types)
        op = resolve_node(proto, self.opsets)
        assert op is not None
        if wrong := find_wrong_attribute(proto, op, self.opsets.get(normalize_domain(proto.domain), 1)):
            raise ConvertError(self.file, *wrong, _EXPORT_AGAIN, f"{proto.op_type} {proto.name!r}")
        if op == "Constant":
            self.read_constant(proto, attrs, scope)
            return []
        inputs = tuple(scope[name] if name else "" for name in proto.input)
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        outputs = tuple(self.declare_name(name, scope) if name else "" for name in proto.output)
        attrs = {name: value for name, value in attrs.items() if value is not None}
        node = Node(op, inputs, outputs, attrs, _scoped_name(proto))
        try:
            ops.OPERATORS[op].check_input_count(node)
        except ops.OperatorError as problem:
            raise ConvertError(self.file, problem.found, problem.expected, _EXPORT_AGAIN, str(node)) from None
        return [node]

    def read_constant(self, proto: NodeProto, attrs: dict[str, Any], scope: ChainMap[str, str]) -> None:
        """Adds the value of a Constant node to the constants or weights."""
        if len(attrs) != 1 or len(proto.output) != 1:
            found = f"{len(attrs)} values for {len(proto.output)} outputs"
            raise ConvertError(self.file, found, "one value and one output", node=f"Constant {proto.name!r}")
        ((attribute, value),) = attrs.items()
        name = self.declare_name(proto.output[0], scope)
        if not isinstance(value, LazyTensor):  # value_int, value_floats, value_strings, …
            dtype = {"f": "float32", "i": "int64"}.get(attribute.removeprefix("value_")[0], "string")
            is_text = dtype == "string"
            array = tensor_protos.string_array(value, self.file, name) if is_text else np.array(value, dtype)
            value = LazyTensor(dtype, array.shape, lambda: array)
        self.add_tensor(name, value)

    def read_attribute(self, proto: AttributeProto, node: NodeProto, scope: ChainMap[str, str]) -> Any:
        """Returns the value of an attribute: a number, a text, a list of these, an array or a Program."""
        if read := _PLAIN_ATTRIBUTES.get(proto.type):
            return read(proto)
        if proto.type == AttributeProto.GRAPH:
            return self.read_graph(proto.g, scope)
        if proto.type == AttributeProto.TENSOR:
            tensor = tensor_protos.tensor_from_proto(proto.t, self.file, f"{node.name}.{proto.name}")
            return tensor if node.op_type == "Constant" else np.array(tensor.read())
        if proto.type == AttributeProto.SPARSE_TENSOR:
            return tensor_protos.tensor_from_sparse_proto(proto.sparse_tensor, self.file)
        found = f"the attribute {proto.name!r} of type {proto.type}"
        node_name = f"{node.op_type} {node.name!r}"
        raise ConvertError(self.file, found, "numbers, text, tensors or graphs", node=node_name)


def _tensor_type(proto: TypeProto) -> TypeProto.Tensor | None:
    """The type of a tensor, or of the tensors in a sequence or an optional; None for other types."""
    kind = proto.WhichOneof("value")
    while kind in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
        kind = proto.WhichOneof("value")
    return proto.tensor_type if kind == "tensor_type" else None


def _scoped_name(proto: NodeProto) -> str:
    """The node's name, after the path of its module where torch.onnx wrote that: "/model.layers.0.mlp/node_linear"."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == _NAME_SCOPES_KEY), "")
    scopes = re.findall(r"'([^']*)'", text)
    return f"/{scopes[-2]}/{proto.name}" if len(scopes) > 1 and scopes[-2] else proto.name


def _axis_size(dim: TensorShapeProto.Dimension) -> int | str | None:
    """The size of an axis, its symbol, or None where it has neither, or a size that no axis can have."""
    if dim.HasField("dim_value"):
        return dim.dim_value if 0 <= dim.dim_value < tensor_protos.AXIS_SIZE_LIMIT else None
    return dim.dim_param or None
