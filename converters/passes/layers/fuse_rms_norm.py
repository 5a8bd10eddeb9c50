"""RMS normalization that exporters write in several nodes becomes one."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import cast_output
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
    probe = graph.shape_probe
    if probe is None:
        return
    for node in graph.nodes:
        if not is_op_type(node, "Mul") or (match := match_pattern(graph, node, RMS_NORM_PATTERN)) is None:
            continue
        x, scale, eps = match["x"], match["w"], graph.scalar(match["eps"])
        assert eps is not None
        if not _is_mean_of_last_axis(graph, match["mean"]):
            yield SkippedMatch(node, "the mean is not of the last axis alone")
            continue
        weight = graph.weight(scale)
        if weight is None or len(weight.shape) != 1:
            yield SkippedMatch(node, "the scale is no weight of rank 1")
            continue
        # mx.fast.rms_norm computes in float32 whatever the type of x: the exporter's casts around the norm can go.
        cast = graph.producer(x, "Cast")
        if cast is not None and any(graph.producer(name, "Cast") for name in node.inputs):
            x = cast.inputs[0]
        dtype = probe.dtype(node.outputs[0])
        if dtype not in ELEMENT_TYPE_CODES:
            continue
        norm = Node("mlx.rms_norm", (x, scale), node.outputs, {"eps": float(eps)}, node.name)
        # Of a stream in float32 and a scale in a half type the norm is in float32, its result in the half type.
        is_of_one_dtype = probe.dtype(x) == probe.dtype(scale) == dtype
        yield Replacement(node, (norm,) if is_of_one_dtype else cast_output(norm, dtype))


def _is_mean_of_last_axis(graph: GraphView, value: str) -> bool:
    """Whether the ReduceMean that gives the value is of the last axis alone, which it keeps as an axis of size 1."""
    mean = graph.producer(value)
    assert mean is not None
    axes = graph.constant(mean.inputs[1]) if len(mean.inputs) > 1 else mean.attrs.get("axes")
    return axes is not None and list(axes) == [-1] and bool(mean.attrs.get("keepdims", 1))
