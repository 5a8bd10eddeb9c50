"""Opsets: the domain of a node's operator, and the declared version of it that holds for a model."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto

from mlx_transmuter import ops


def normalize_domain(domain: str) -> str:
    """Returns the domain of operators, with "" for ONNX's own, which "ai.onnx" names too."""
    return "" if domain == "ai.onnx" else domain


def imported_opsets(model: ModelProto) -> dict[str, int]:
    """The version of each domain's operators that the model is written in: domain -> opset."""
    return {normalize_domain(opset.domain): opset.version for opset in model.opset_import}


def operator_name(node: NodeProto) -> str:
    """The operator of a node with its domain: "Expand", "com.microsoft.Gelu"."""
    domain = normalize_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else node.op_type


def resolve_node(node: NodeProto, opsets: Mapping[str, int]) -> str | None:
    """Returns the declared version of a node's operator that holds for the model ("Expand-8"), or None.

    A Constant, which is read and not run, is "Constant".
    """
    name = operator_name(node)
    return name if name == "Constant" else ops.resolve_operator(name, opsets.get(normalize_domain(node.domain), 1))
