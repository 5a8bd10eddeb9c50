"""Norms: the root mean square norm that exporters write in seven nodes becomes one."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.patterns import Maybe, Op, Or, Scalar, Var, Weight, find
from mlx_transmuter.ops import CODES
from mlx_transmuter.program import Node

_X = Var("x")
_MEAN = Op("ReduceMean", Or(Op("Pow", _X, Scalar(value=2.0)), Op("Mul", _X, _X)), name="mean")
_MOMENT = Op("Add", _MEAN, Scalar("eps"))
_ROOT = Op("Sqrt", _MOMENT)
_NORMED = Or(
    Op(
        "Mul",
        _X,
        Or(Op("Div", Scalar(value=1.0), _ROOT), Op("Reciprocal", _ROOT), Op("Pow", _MOMENT, Scalar(value=-0.5))),
    ),
    Op("Div", _X, _ROOT),
)
RMS_NORM = Op("Mul", Maybe("Cast", _NORMED), Weight("w"))


def norms(graph: Graph) -> Iterator[Answer]:
    """w · x / √(mean(x²) + eps) → mlx.rms_norm. Zhang & Sennrich 2019. Casts of x to float32 and back go with it."""
    seen = graph.observation
    if seen is None:
        return
    for node in graph.nodes:
        if not is_kind(node, "Mul") or (found := find(graph, node, RMS_NORM)) is None:
            continue
        mean = graph.producer(found["mean"])
        assert mean is not None
        axes = graph.constant(mean.inputs[1]) if len(mean.inputs) > 1 else mean.attrs.get("axes")
        if axes is None or list(axes) != [-1] or not mean.attrs.get("keepdims", 1):
            yield Declined(node, "the mean is not of the last axis alone")
            continue
        weight = graph.weight(found["w"])
        if weight is None or len(weight.shape) != 1:
            yield Declined(node, "the scale is no weight of rank 1")
            continue
        x = found["x"]
        before = graph.producer(x, "Cast")
        # mx.fast.rms_norm computes in float32 whatever the type of x, so the exporter's casts around the norm are not
        # needed.
        if before is not None and any(is_kind(reader, "Cast") for reader in _between(graph, node)):
            x = before.inputs[0]
        eps = graph.constant(found["eps"])
        assert eps is not None
        attrs = {"eps": float(eps.item())}
        out, wanted, given = node.outputs[0], seen.dtype(node.outputs[0]), {seen.dtype(x), seen.dtype(found["w"])}
        if wanted in CODES and given == {wanted}:
            yield Become(node, (Node("mlx.rms_norm", (x, found["w"]), (out,), attrs, node.name),))
        elif (
            wanted in CODES
        ):  # a stream in float32 and a scale in a half type: the norm is in float32, its result in half
            norm = Node("mlx.rms_norm", (x, found["w"]), (f"{out}.wide",), attrs, node.name)
            yield Become(node, (norm, Node("Cast-9", (f"{out}.wide",), (out,), {"to": CODES[wanted]})))


def _between(graph: Graph, node: Node) -> list[Node]:
    """The nodes that give the inputs of `node`."""
    return [producer for name in node.inputs if (producer := graph.producer(name)) is not None]
