"""Inlining of functions: those of a model, and operators that are not declared but whose ONNX schema has a body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx.inliner
from onnx import FunctionProto, ModelProto, NodeProto, helper

from mlx_transmuter.converters.onnx_reader.onnx_graphs import walk_nodes
from mlx_transmuter.converters.onnx_reader.opsets import normalize_domain, resolve_node

# Functions that call functions may come to more nodes than memory holds. A decoder has one function for all of its
# layers, so a model may have this many nodes for each that it writes, and this many besides.
MAX_INLINING_FACTOR, INLINING_ALLOWANCE = 128, 2**14
# The size of a function that calls itself.
_ENDLESS = 2**62

OperatorKey = tuple[str, str]  # domain and operator


def inline_functions(model: ModelProto, opsets: Mapping[str, int]) -> ModelProto:
    """Returns the model without functions. The model that was passed is not changed.

    opsets: domain -> opset of the model. Raises ValueError for functions that come to too many nodes, and whatever
    ONNX's inliner raises.
    """
    if model.functions:
        _check_inlined_size(model)
        model = onnx.inliner.inline_local_functions(model)
    schemas = _schemas_with_bodies(model, opsets)
    if not schemas:
        return model
    model = ModelProto.FromString(model.SerializeToString())
    _write_default_attributes(model, schemas)
    _declare_initializer_types(model)
    return onnx.inliner.inline_selected_functions(model, sorted(schemas), inline_schema_functions=True)


def _check_inlined_size(model: ModelProto) -> None:
    """Raises ValueError for a model whose functions come to too many nodes."""
    functions = {(function.domain, function.name): function for function in model.functions}
    bodies = (model.graph.node, *(function.node for function in model.functions))
    written = sum(1 for nodes in bodies for _ in walk_nodes(nodes))
    limit = INLINING_ALLOWANCE + MAX_INLINING_FACTOR * written
    count = _count_inlined_nodes(model.graph.node, functions, {})
    if count > limit:
        raise ValueError(f"{count} nodes or more of {written} written ones, at most {limit} are read")


def _count_inlined_nodes(
    nodes: Iterable[NodeProto],
    functions: Mapping[OperatorKey, FunctionProto],
    function_sizes: dict[OperatorKey, int],
) -> int:
    """Returns how many nodes these come to once their functions are inlined; `function_sizes` is filled on the way."""
    count = 0
    for node in walk_nodes(nodes):
        key = node.domain, node.op_type
        if key in functions and key not in function_sizes:
            function_sizes[key] = _ENDLESS
            function_sizes[key] = _count_inlined_nodes(functions[key].node, functions, function_sizes)
        count += function_sizes.get(key, 1)
    return count


def _schemas_with_bodies(model: ModelProto, opsets: Mapping[str, int]) -> dict[OperatorKey, onnx.defs.OpSchema]:
    """The schemas of the operators that are not declared and can be expanded into the body that ONNX gives them."""
    schemas: dict[OperatorKey, onnx.defs.OpSchema] = {}
    for node in walk_nodes(model.graph.node):
        if resolve_node(node, opsets) is not None:
            continue
        domain = normalize_domain(node.domain)
        try:
            schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
        except onnx.defs.SchemaError:
            continue
        if schema.has_function or schema.has_context_dependent_function:  # pyright: ignore[reportAttributeAccessIssue]
            schemas[domain, node.op_type] = schema
    return schemas


def _write_default_attributes(model: ModelProto, schemas: Mapping[OperatorKey, onnx.defs.OpSchema]) -> None:
    """Adds to the nodes of those operators every attribute that they leave out: a body refers to all of them."""
    for node in walk_nodes(model.graph.node):
        schema = schemas.get((normalize_domain(node.domain), node.op_type))
        if schema is None:
            continue
        names = {attribute.name for attribute in node.attribute}
        for name, attribute in schema.attributes.items():
            if attribute.default_value.type and name not in names:
                node.attribute.append(attribute.default_value)


def _declare_initializer_types(model: ModelProto) -> None:
    """Adds the types of initializers to the values of the graph: they select a body that depends on types."""
    declared = {value.name for value in (*model.graph.input, *model.graph.value_info)}
    for tensor in model.graph.initializer:
        if tensor.name not in declared:
            model.graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
