"""The types of a node's attributes: those of its ONNX schema, or of the operator's declaration."""

from __future__ import annotations

import typing
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.opsets import normalize_domain

_CODES: dict[Any, int] = {
    int: AttributeProto.INT,
    float: AttributeProto.FLOAT,
    str: AttributeProto.STRING,
    list[int]: AttributeProto.INTS,
    list[float]: AttributeProto.FLOATS,
    list[str]: AttributeProto.STRINGS,
    tuple[str, ...]: AttributeProto.STRINGS,
}


def find_wrong_attribute(node: NodeProto, op: str, opset: int) -> tuple[str, str] | None:
    """Returns what is found and what was expected of an attribute of another type than the operator's, or None.

    op: the name of the node's declared operator. An attribute that the operator lacks is none of this check.
    """
    expected = _schema_codes(node, opset) or attribute_codes(op)
    for attribute in node.attribute:
        code = expected.get(attribute.name, attribute.type)
        if attribute.type != code:
            found = f"the attribute {attribute.name!r} of type {_type_name(attribute.type)}"
            return found, f"the type {_type_name(code)}"
    return None


def _schema_codes(node: NodeProto, opset: int) -> dict[str, int]:
    """Returns the type of each attribute in ONNX's schema, {} for a node that has none."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, normalize_domain(node.domain))
    except (onnx.defs.SchemaError, TypeError):  # the latter for an opset beyond int32
        return {}
    return {name: attribute.type.value for name, attribute in schema.attributes.items()}  # type: ignore[attr-defined]


def attribute_codes(op: str) -> dict[str, int]:
    """Returns the types of the attributes of a declared operator, as far as annotations and defaults tell them."""
    codes: dict[str, int] = {}
    declared = ops.OPERATORS.get(op)
    if declared is None:
        return codes
    for name, annotation in declared.attribute_types.items():
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        is_optional = type(None) in typing.get_args(annotation)
        code = _CODES.get(kinds[0] if is_optional and len(kinds) == 1 else annotation)
        if code is not None:
            codes[name] = code
    return codes


def _type_name(code: int) -> str:
    names = {number: name for name, number in AttributeProto.AttributeType.items()}
    return names.get(code, str(code))
