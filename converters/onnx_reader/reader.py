"""ModelProto to Program: nothing of ONNX survives past this file but the names of its operators and types."""

from __future__ import annotations

import heapq
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorShapeProto, ValueInfoProto, helper
from tqdm import tqdm

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader import tensor_protos
from mlx_transmuter.converters.onnx_reader.element_types import RESULT_TYPE_INPUT, infer_element_types
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS, Node, Program, ProgramError, Value, WeightInfo

_ONNX_DOMAINS = ("", "ai.onnx")
# Where torch.onnx says which modules a node is of, from the outermost on, and at last its own name.
_NAME_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
# Types that a zero point lies in bytes of, so that it doesn't tell them.
_SUB_BYTE_TYPES = ("int4", "uint4", "int2", "uint2")
# Functions that call functions can come to more nodes than memory holds. A decoder of many layers has a function for
# one and calls it: a node is written once for so many that run.
MAX_INLINING_FACTOR, INLINING_ALLOWANCE = 128, 2**14


def read_onnx(source: Path | ModelProto, *, progress: bool = False) -> Program:
    """The Program of an ONNX file (or of a ModelProto, whose external data is then looked for in the working folder).

    `arrays` of the result has the weights, read when used. Functions local to the model are inlined, and an operator
    that is not declared but whose ONNX schema has a function body is expanded into it. Raises ConvertError for a file
    that is not a whole ONNX model, for data outside its folder, and, in one list, for every operator that is not
    supported.
    """
    file = Path("model") if isinstance(source, ModelProto) else Path(source)
    model = source if isinstance(source, ModelProto) else _parse_file(file)
    # As onnxruntime has it, a model that names no version of ONNX's own operators means the newest.
    opsets = {"": onnx.defs.onnx_opset_version()}
    opsets |= {"" if o.domain in _ONNX_DOMAINS else o.domain: o.version for o in model.opset_import}
    try:
        model = _inline_functions(model, opsets)
    except Exception as error:  # the inliner raises what it likes; the file is at fault
        raise ConvertError(file, f"functions that cannot be inlined ({error})", "a valid model") from None
    opsets |= {"" if o.domain in _ONNX_DOMAINS else o.domain: o.version for o in model.opset_import}
    missing: dict[str, list[str]] = {}
    for node in _walk_nodes(model.graph.node):
        kind, form = _resolve_operator(node, opsets)
        if form is None:
            missing.setdefault(kind, []).append(node.name or ", ".join(node.output))
    if missing:
        names = ", ".join(f"{kind} ({len(nodes)}, such as {nodes[0]!r})" for kind, nodes in sorted(missing.items()))
        raise ConvertError(
            file,
            f"operators that are not supported: {names}",
            do="convert another file of the model, or export it with other operators",
        )
    typed = any(node.op_type in RESULT_TYPE_INPUT for node in _walk_nodes(model.graph.node))
    types = infer_element_types(model, _sort_topologically(model.graph.node)) if typed else {}
    return _GraphReader(file, opsets, types, progress).read_program(model.graph)


def _parse_file(file: Path) -> ModelProto:
    if not file.is_file():
        raise ConvertError(file, "no such file", "an ONNX model")
    try:
        model = onnx.load_model(str(file), load_external_data=False)
    except (DecodeError, ValueError, UnicodeDecodeError, RuntimeError) as error:
        raise ConvertError(
            file,
            f"{file.stat().st_size} bytes that are no ONNX model ({error})",
            "a whole ONNX file",
            "download it again, whole",
        ) from None
    if not model.graph.node or not model.opset_import:
        raise ConvertError(file, "a file without a graph", "an ONNX model", "download the file again, whole")
    for text in _text_fields(model):
        if isinstance(text, bytes):  # as protobuf gives text that is none
            raise ConvertError(file, f"the name {text!r}", "names in UTF-8", "download the file again, whole")
    return model


def _text_fields(message: Message) -> Iterator[str | bytes]:
    """Every name and text field of the message and of those in it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            yield from [value] if isinstance(value, str | bytes) else value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _text_fields(inner)


def _walk_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those of every graph in them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _walk_nodes(attribute.g.node)


def _resolve_operator(node: NodeProto, opsets: dict[str, int]) -> tuple[str, str | None]:
    """The operator as ONNX names it, with its domain, and the declared form that holds for the model, or None."""
    domain = "" if node.domain in _ONNX_DOMAINS else node.domain
    kind = f"{domain}.{node.op_type}" if domain else node.op_type
    if kind == "Constant":
        return kind, kind
    return kind, ops.resolve_operator(kind, opsets.get(domain, 1))


def _inline_functions(model: ModelProto, opsets: dict[str, int]) -> ModelProto:
    if model.functions:
        functions = {(function.domain, function.name): function for function in model.functions}
        written = sum(1 for nodes in (model.graph.node, *(f.node for f in model.functions)) for _ in _walk_nodes(nodes))
        most = INLINING_ALLOWANCE + MAX_INLINING_FACTOR * written
        if (count := _count_inlined_nodes(model.graph.node, functions, {})) > most:
            raise ValueError(f"{count} nodes or more of {written} written ones, at most {most} are read")
        model = onnx.inliner.inline_local_functions(model)
    schemas: dict[tuple[str, str], onnx.defs.OpSchema] = {}
    for node in _walk_nodes(model.graph.node):
        if _resolve_operator(node, opsets)[1] is None:
            domain = "" if node.domain in _ONNX_DOMAINS else node.domain
            try:
                schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
            except onnx.defs.SchemaError:
                continue
            if schema.has_function or schema.has_context_dependent_function:  # pyright: ignore[reportAttributeAccessIssue]
                schemas[domain, node.op_type] = schema
    if not schemas:
        return model
    model = ModelProto.FromString(model.SerializeToString())  # the caller's stays as it is
    for node in _walk_nodes(model.graph.node):
        schema = schemas.get(("" if node.domain in _ONNX_DOMAINS else node.domain, node.op_type))
        told = {attribute.name for attribute in node.attribute}
        for name, attribute in schema.attributes.items() if schema else ():
            if attribute.default_value.type and name not in told:  # a body refers to them all, also to those at rest
                node.attribute.append(attribute.default_value)
    told = {value.name for value in (*model.graph.input, *model.graph.value_info)}
    for tensor in model.graph.initializer:  # a body that depends on types is chosen by them
        if tensor.name not in told:
            model.graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    model = onnx.inliner.inline_selected_functions(model, sorted(schemas), inline_schema_functions=True)
    return model


def _count_inlined_nodes(
    nodes: Iterable[NodeProto], functions: dict, function_sizes: dict[tuple[str, str], int]
) -> int:
    """How many nodes these come to once their functions are inlined; `sizes` keeps that of each function."""
    count = 0
    for node in _walk_nodes(nodes):
        key = node.domain, node.op_type
        if key in functions and key not in function_sizes:
            function_sizes[key] = 2**62  # that of a function that calls itself
            function_sizes[key] = _count_inlined_nodes(functions[key].node, functions, function_sizes)
        count += function_sizes.get(key, 1)
    return count


def _sort_topologically(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes such that each comes after those whose outputs it reads, else in the order of the file.

    ONNX asks for that order, and onnxruntime, whose float16 converter breaks it, does without. Nodes on a cycle come
    last, where reading them fails.
    """
    givers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    before = [{givers[name] for name in _input_names(node) if name in givers} - {i} for i, node in enumerate(nodes)]
    after: dict[int, list[int]] = {}
    for i, needed in enumerate(before):
        for j in needed:
            after.setdefault(j, []).append(i)
    missing = [len(needed) for needed in before]
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in after.get(i, ()):
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(ready, j)
    done = set(order)
    return [nodes[i] for i in (*order, *(i for i in range(len(nodes)) if i not in done))]


def _input_names(node: NodeProto) -> Iterator[str]:
    """The names that the node reads, those of its branches included (a branch's own names among them do no harm)."""
    yield from node.input
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _input_names(inner)
            yield from (info.name for info in attribute.g.output)


class _GraphReader:
    """Reads one file: its values' unique names, its constants and its weights."""

    def __init__(self, file: Path, opsets: dict[str, int], types: dict[str, int], progress: bool):
        self.file, self.opsets, self.element_types = file, opsets, types
        self.used_names: set[str] = set()
        self.duplicate_counts: dict[str, int] = {}  # the last number that a name was given with
        self.constants: dict[str, np.ndarray] = {}
        self.arrays: dict[str, LazyTensor] = {}
        self.progress_bar = tqdm(desc="reading", unit="node", disable=None if progress else True, leave=False)

    def read_program(self, graph: GraphProto) -> Program:
        # The outermost graph keeps its names, whatever its branches call theirs.
        self.used_names.update(one.name for one in (*graph.input, *graph.initializer))
        self.used_names.update(one.values.name for one in graph.sparse_initializer)
        self.used_names.update(name for node in graph.node for name in node.output)
        with self.progress_bar:
            program = self.read_graph(graph, ChainMap())
        program.constants, program.tensors = self.constants, self.arrays
        program.weights = {name: WeightInfo(array.dtype, array.shape) for name, array in self.arrays.items()}
        try:
            program.validate()
        except ProgramError as problem:
            raise ConvertError(self.file, problem.found, problem.expected, "export the model again") from None
        return program

    def declare_name(self, name: str, scope: ChainMap[str, str]) -> str:
        """A name that no other value of the file has, for `name` given in `scope`: branches may use a name again."""
        if name in scope.maps[0]:
            raise ConvertError(
                self.file, f"the value {name!r} given twice", "each value given once", "export the model again"
            )
        unique = name
        while scope.parents and unique in self.used_names:
            self.duplicate_counts[name] = self.duplicate_counts.get(name, 1) + 1
            unique = f"{name}~{self.duplicate_counts[name]}"
        self.used_names.add(unique)
        scope[name] = unique
        return unique

    def read_graph(self, graph: GraphProto, outer: ChainMap[str, str]) -> Program:
        scope = outer.new_child()
        stored = {proto.name for proto in graph.initializer} | {proto.values.name for proto in graph.sparse_initializer}
        inputs = tuple(
            self.read_value(info, self.declare_name(info.name, scope))
            for info in graph.input
            if info.name not in stored
        )
        for proto in graph.initializer:
            self.add_tensor(self.declare_name(proto.name, scope), tensor_protos.tensor_from_proto(proto, self.file))
        for sparse in graph.sparse_initializer:
            self.add_tensor(
                self.declare_name(sparse.values.name, scope), tensor_protos.tensor_from_sparse_proto(sparse, self.file)
            )
        nodes = []
        for proto in _sort_topologically(graph.node):
            self.progress_bar.update()
            nodes += self.read_node(proto, scope)
        for info in graph.output:
            if info.name not in scope:
                raise ConvertError(self.file, f"no node that gives the output {info.name!r}", "every output given")
        return Program(inputs, tuple(self.read_value(info, scope[info.name]) for info in graph.output), nodes)

    def add_tensor(self, name: str, data: LazyTensor) -> None:
        """Keeps a tensor: small integers and scalars as constants known on the host, the rest as weights."""
        integral = data.dtype in ("string", "bool", "int64", "int32", "uint64", "uint32")
        if data.dtype == "string" or data.size <= (MAX_CONSTANT_ELEMENTS if integral else 1):
            array = data.read()
            if array.dtype.kind in "biufU":
                self.constants[name] = np.array(array)
                return
        self.arrays[name] = data

    def read_value(self, info: ValueInfoProto, name: str) -> Value:
        kind = info.type.WhichOneof("value")
        proto = info.type
        while kind in ("sequence_type", "optional_type"):
            proto = getattr(proto, kind).elem_type
            kind = proto.WhichOneof("value")
        if kind != "tensor_type":
            return Value(name, "float32", None)
        tensor_type = proto.tensor_type
        shape = None
        if tensor_type.HasField("shape") and proto is info.type:
            shape = tuple(_axis_size(dim) for dim in tensor_type.shape.dim)
        return Value(name, ELEMENT_TYPE_NAMES.get(tensor_type.elem_type, "float32"), shape)

    def read_node(self, proto: NodeProto, scope: ChainMap[str, str]) -> list[Node]:
        for name in proto.input:
            if name and name not in scope:
                raise ConvertError(
                    self.file,
                    f"the input {name!r}",
                    "a value given before it is read",
                    node=f"{proto.op_type} {proto.name!r}",
                )
        attrs = {a.name: self.read_attribute(a, proto, scope) for a in proto.attribute}
        proto, attrs = self.resolve_result_type(proto, attrs)
        kind, form = _resolve_operator(proto, self.opsets)
        if kind == "Constant":
            return self.read_constant(proto, attrs, scope)
        assert form is not None
        inputs = tuple(scope[name] if name else "" for name in proto.input)
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        outputs = tuple(self.declare_name(name, scope) if name else "" for name in proto.output)
        attrs = {name: value for name, value in attrs.items() if value is not None}
        node, operator = Node(form, inputs, outputs, attrs, _scoped_name(proto)), ops.OPERATORS[form]
        try:
            operator.check_input_count(node)
        except ops.OperatorError as error:
            raise ConvertError(self.file, error.found, error.expected, "export the model again", str(node)) from None
        return [node]

    def resolve_result_type(self, proto: NodeProto, attrs: dict[str, Any]) -> tuple[NodeProto, dict[str, Any]]:
        """The node with the type of its result told, where it takes it from an input."""
        at = (
            RESULT_TYPE_INPUT.get(proto.op_type, len(proto.input))
            if proto.domain in _ONNX_DOMAINS
            else len(proto.input)
        )
        code = self.element_types.get(proto.input[at], 0) if at < len(proto.input) else 0
        if not code:
            return proto, attrs
        if proto.op_type == "CastLike":
            kept = {name: value for name, value in attrs.items() if name in ("saturate", "round_mode")}
            cast = NodeProto(op_type="Cast", name=proto.name, input=proto.input[:1], output=proto.output)
            return cast, {**kept, "to": code}
        return proto, attrs if attrs.get("output_dtype") or ELEMENT_TYPE_NAMES.get(code) not in _SUB_BYTE_TYPES else {
            **attrs,
            "output_dtype": code,
        }

    def read_constant(self, proto: NodeProto, attrs: dict[str, Any], scope: ChainMap[str, str]) -> list[Node]:
        if len(attrs) != 1 or len(proto.output) != 1:
            found = f"{len(attrs)} values for {len(proto.output)} outputs"
            raise ConvertError(self.file, found, "one value and one output", node=f"Constant {proto.name!r}")
        ((kind, value),) = attrs.items()
        name = self.declare_name(proto.output[0], scope)
        if not isinstance(value, LazyTensor):
            dtype = {"f": "float32", "i": "int64"}.get(kind.removeprefix("value_")[0], "string")
            array = tensor_protos.string_array(value, self.file, name) if dtype == "string" else np.array(value, dtype)
            value = LazyTensor(dtype, array.shape, lambda: array)
        self.add_tensor(name, value)
        return []

    def read_attribute(self, proto: AttributeProto, node: NodeProto, scope: ChainMap[str, str]) -> Any:
        kinds = AttributeProto
        match proto.type:
            case kinds.INT:
                return proto.i
            case kinds.FLOAT:
                return proto.f
            case kinds.STRING:
                return proto.s.decode("utf-8", "replace")
            case kinds.INTS:
                return list(proto.ints)
            case kinds.FLOATS:
                return list(proto.floats)
            case kinds.STRINGS:
                return [text.decode("utf-8", "replace") for text in proto.strings]
            case kinds.GRAPH:
                return self.read_graph(proto.g, scope)
            case kinds.TENSOR:
                data = tensor_protos.tensor_from_proto(proto.t, self.file, f"{node.name}.{proto.name}")
                return data if node.op_type == "Constant" else np.array(data.read())
            case kinds.SPARSE_TENSOR:
                return tensor_protos.tensor_from_sparse_proto(proto.sparse_tensor, self.file)
            case kinds.TYPE_PROTO:
                return None
        raise ConvertError(
            self.file,
            f"the attribute {proto.name!r} of type {proto.type}",
            "numbers, text, tensors or graphs",
            node=f"{node.op_type} {node.name!r}",
        )


def _scoped_name(proto: NodeProto) -> str:
    """The node's name, after the module it is of where torch.onnx says which: "/model.layers.0.mlp/node_linear"."""
    told = next((entry.value for entry in proto.metadata_props if entry.key == _NAME_SCOPES_KEY), "")
    scopes = re.findall(r"'([^']*)'", told)
    return f"/{scopes[-2]}/{proto.name}" if len(scopes) > 1 and scopes[-2] else proto.name


def _axis_size(dim: TensorShapeProto.Dimension) -> int | str | None:
    """The size of an axis, its symbol, or None; a size that no axis can have says nothing."""
    if dim.HasField("dim_value"):
        return dim.dim_value if 0 <= dim.dim_value < tensor_protos.AXIS_SIZE_LIMIT else None
    return dim.dim_param or None
