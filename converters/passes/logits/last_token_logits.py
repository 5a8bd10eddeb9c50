"""Last-token logits: the head computes the logits of each row's last real token alone."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import HEAD_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import LOGIT_INDICES_INPUT, DecoderSignature, SignatureError

# What may follow the head, on each logit: a softcap, a scale, a cast.
_LOGIT_OPS = ("Mul", "Div", "Tanh", "Cast", "Identity")


def gather_last_token_logits(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces logits = head(x) by head(mlx.last(x, logit_indices)).

    A prompt of n tokens then computes one row of the vocabulary, not n.
    """
    try:
        signature = DecoderSignature.from_program(graph.program)
    except SignatureError:
        return
    head = _find_head(graph, signature.logits_output)
    if head is None or "residual" in bind_inputs(head):  # what is added to the logits would have to be gathered, too
        return
    last = f"{head.inputs[0]}.last"
    yield Replacement(
        head,
        (
            Node("mlx.last", (head.inputs[0], LOGIT_INDICES_INPUT), (last,)),
            Node(head.op, (last, *head.inputs[1:]), head.outputs, head.attrs, head.name),
        ),
        program_inputs=(Value(LOGIT_INDICES_INPUT, "int32", ("batch_size", "ends")),),
    )


def _find_head(graph: GraphView, logits: str) -> Node | None:
    """Returns the layer that computes the logits; None for another operator, or where its output is read elsewhere."""
    node = graph.producer(logits)
    while node is not None and not is_op_type(node, *HEAD_OPS):
        computed = [name for name in node.inputs if graph.constant(name) is None]
        if not is_op_type(node, *_LOGIT_OPS) or len(computed) != 1:
            return None
        node = graph.producer(computed[0])
    if node is None or (node.outputs[0] != logits and graph.only_consumer(node.outputs[0]) is None):
        return None
    return node
