"""Last: logits of the last real token of each row alone, where the graph computes them token by token."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import LOGIT_INDICES_INPUT, DecoderSignature, SignatureError

# Operators that give each token's row from that token's row alone.
_ROWWISE_OPS = ("mlx.linear", "mlx.as_linear", "mlx.quantized_linear")


def gather_last_token_logits(graph: GraphView) -> Iterator[MatchOutcome]:
    """logits = head(x) → head(mlx.last(x, ends)): a prompt of n tokens then costs one row of the vocabulary, not n."""
    try:
        signature = DecoderSignature.from_program(graph.program)
    except SignatureError:
        return
    node = graph.producer(signature.logits_output)
    after: list[Node] = []
    while node is not None and node.op not in _ROWWISE_OPS:
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
    yield Replacement(
        node,
        (
            Node("mlx.last", (node.inputs[0], LOGIT_INDICES_INPUT), (rows,)),
            Node(node.op, (rows, *node.inputs[1:]), node.outputs, node.attrs, node.name),
        ),
        program_inputs=(Value(LOGIT_INDICES_INPUT, "int32", ("batch_size", "ends")),),
    )
