"""Norms: the root mean square norm that exporters write in seven nodes becomes one."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.patterns import (
    AnyOf,
    ConstantScalar,
    ConstantVector,
    Op,
    OptionalOp,
    Var,
    match_pattern,
)
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.ops import ELEMENT_TYPE_CODES
from mlx_transmuter.program import Node

_INPUT = Var("x")
_MEAN = Op("ReduceMean", AnyOf(Op("Pow", _INPUT, ConstantScalar(value=2.0)), Op("Mul", _INPUT, _INPUT)), name="mean")
_MEAN_PLUS_EPS = Op("Add", _MEAN, ConstantScalar("eps"))
_ROOT = Op("Sqrt", _MEAN_PLUS_EPS)
_NORMALIZED = AnyOf(
    Op(
        "Mul",
        _INPUT,
        AnyOf(
            Op("Div", ConstantScalar(value=1.0), _ROOT),
            Op("Reciprocal", _ROOT),
            Op("Pow", _MEAN_PLUS_EPS, ConstantScalar(value=-0.5)),
        ),
    ),
    Op("Div", _INPUT, _ROOT),
)
RMS_NORM_PATTERN = Op("Mul", OptionalOp("Cast", _NORMALIZED), ConstantVector("w"))


def fuse_rms_norm(graph: GraphView) -> Iterator[MatchOutcome]:
    """w · x / √(mean(x²) + eps) → mlx.rms_norm. Zhang & Sennrich 2019. Casts of x to float32 and back go with it."""
    seen = graph.shape_probe
    if seen is None:
        return
    for node in graph.nodes:
        if not is_op_type(node, "Mul") or (found := match_pattern(graph, node, RMS_NORM_PATTERN)) is None:
            continue
        mean = graph.producer(found["mean"])
        assert mean is not None
        axes = graph.constant(mean.inputs[1]) if len(mean.inputs) > 1 else mean.attrs.get("axes")
        if axes is None or list(axes) != [-1] or not mean.attrs.get("keepdims", 1):
            yield SkippedMatch(node, "the mean is not of the last axis alone")
            continue
        weight = graph.weight(found["w"])
        if weight is None or len(weight.shape) != 1:
            yield SkippedMatch(node, "the scale is no weight of rank 1")
            continue
        x = found["x"]
        before = graph.producer(x, "Cast")
        # mx.fast.rms_norm computes in float32 whatever the type of x, so the exporter's casts around the norm are not
        # needed.
        if before is not None and any(is_op_type(reader, "Cast") for reader in _input_producers(graph, node)):
            x = before.inputs[0]
        eps = graph.constant(found["eps"])
        assert eps is not None
        attrs = {"eps": float(eps.item())}
        out, wanted, given = node.outputs[0], seen.dtype(node.outputs[0]), {seen.dtype(x), seen.dtype(found["w"])}
        if wanted in ELEMENT_TYPE_CODES and given == {wanted}:
            yield Replacement(node, (Node("mlx.rms_norm", (x, found["w"]), (out,), attrs, node.name),))
        elif (
            wanted in ELEMENT_TYPE_CODES
        ):  # a stream in float32 and a scale in a half type: the norm is in float32, its result in half
            norm = Node("mlx.rms_norm", (x, found["w"]), (f"{out}.wide",), attrs, node.name)
            yield Replacement(
                node, (norm, Node("Cast-9", (f"{out}.wide",), (out,), {"to": ELEMENT_TYPE_CODES[wanted]}))
            )


def _input_producers(graph: GraphView, node: Node) -> list[Node]:
    """The nodes that give the inputs of `node`."""
    return [producer for name in node.inputs if (producer := graph.producer(name)) is not None]
