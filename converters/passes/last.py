"""Last: logits of the last real token of each row alone, where the graph computes them token by token."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Graph
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import ENDS, Signature, SignatureError

# Operators that give each token's row from that token's row alone.
_ROWWISE = ("mlx.linear", "mlx.as_linear", "mlx.quantized_linear")


def last(graph: Graph) -> Iterator[Answer]:
    """logits = head(x) → head(mlx.last(x, ends)): a prompt of n tokens then costs one row of the vocabulary, not n."""
    try:
        signature = Signature.of(graph.program)
    except SignatureError:
        return
    node = graph.producer(signature.logits)
    after: list[Node] = []
    while node is not None and node.op not in _ROWWISE:
        # What follows the head works on each logit: a softcap, a scale, a cast.
        named = [name for name in node.inputs if graph.constant(name) is None]
        if (
            not any(node.op.startswith(kind) for kind in ("Mul-", "Div-", "Tanh-", "Cast-", "Identity-"))
            or len(named) != 1
        ):
            return
        after.append(node)
        node = graph.producer(named[0])
    if node is None or (after and graph.only_consumer(node.outputs[0]) is None):
        return
    if node.inputs[2:]:  # what the logits are added to would have to be cut, too
        return
    rows = f"{node.inputs[0]}.last"
    yield Become(
        node,
        (
            Node("mlx.last", (node.inputs[0], ENDS), (rows,)),
            Node(node.op, (rows, *node.inputs[1:]), node.outputs, node.attrs, node.name),
        ),
        inputs=(Value(ENDS, "int32", ("batch_size", "ends")),),
    )
