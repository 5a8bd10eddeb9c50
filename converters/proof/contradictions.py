"""Contradictions of a file: what its graph computes, where it is not what its inputs and outputs declare, or not what
the same graph computes in other steps. They explain a conversion that no rewrites and no plan make agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.proof.proof import Logits, ProofBatch
from mlx_transmuter.converters.proof.reference import UnrewrittenGraph
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.step_inputs import StepInputs

Step = Callable[[int], Mapping[str, mx.array]]


class Contradiction(NamedTuple):
    """What the graph computes, what it would have to, and the node at fault, "" where none is known."""

    found: str
    expected: str
    node: str = ""


def find_contradiction(
    graph: UnrewrittenGraph, batch: ProofBatch, reference: Logits | None, tolerance: float
) -> Contradiction | None:
    """Returns the first contradiction of the unrewritten graph, None where it has none.

    reference: its logits after whole prompts, None where it has none to compare.
    """
    prompt = next(prompt for prompt in batch.prompts if prompt)
    step_inputs = StepInputs.from_program(graph.module.program, graph.signature)

    def step(rows: int) -> Mapping[str, mx.array]:
        tokens = mx.array([prompt] * rows, mx.int32)
        inputs: dict[str, Any] = step_inputs.uniform(tokens=tokens, past_length=0, past=step_inputs.empty_past(rows))
        outputs = (graph.module.call_eagerly if graph.eager else graph.module)(**inputs)
        mx.eval(outputs)
        return outputs

    try:
        found = _check_step(graph, step(1), 1, len(prompt))
    except ops.OperatorError:
        return None  # its node is the error
    if found is None and not graph.signature.single_row:
        found = _check_two_rows(graph, step, len(prompt))
    if found is None and reference is not None:
        found = _check_single_tokens(graph, batch, reference, tolerance)
    return found


def _check_step(
    graph: UnrewrittenGraph, outputs: Mapping[str, mx.array], rows: int, length: int
) -> Contradiction | None:
    """Compares the shapes of a first step of `length` tokens with those that the graph declares."""
    signature = graph.signature
    step = f"after {length} tokens of {rows} row{'s' if rows > 1 else ''}"
    shape, vocab = tuple(outputs[signature.logits_output].shape), signature.vocab_size
    if len(shape) != 3 or shape[0] != rows or shape[2] != vocab:
        declared = [rows, length, vocab]
        return Contradiction(f"logits of shape {list(shape)} {step}", f"{declared}, as the file declares their axes")
    dtype = outputs[signature.logits_output].dtype
    if not mx.issubdtype(dtype, mx.floating):
        return Contradiction(f"logits of type {dtype}", "logits of a float type")
    for pair in signature.cache_pairs:
        shape = tuple(outputs[pair.present].shape)
        if len(shape) <= pair.length_axis or shape[pair.length_axis] != length:
            expected = f"{length} positions in axis {pair.length_axis}, as {pair.past!r} gets them in the next step"
            return Contradiction(f"the output {pair.present!r} of shape {list(shape)} {step}", expected)
    return None


def _check_two_rows(graph: UnrewrittenGraph, step: Step, length: int) -> Contradiction | None:
    try:
        return _check_step(graph, step(2), 2, length)
    except ops.OperatorError as error:
        return Contradiction(f"two rows that do not run: {error.found}", "any number of rows, as declared", error.node)


def _check_single_tokens(
    graph: UnrewrittenGraph, batch: ProofBatch, reference: Logits, tolerance: float
) -> Contradiction | None:
    """Compares the logits after whole prompts with those after their tokens one by one."""
    if not graph.signature.pairs or quantizes_dynamically(graph.module.program):
        return None
    try:
        error = proof.logit_error(graph.logits(batch, token_by_token=True), reference)
    except ops.OperatorError:
        return None
    if error <= tolerance:
        return None
    found = f"logits after a prompt in one step that differ from those token by token by {error:.2g} of their range"
    node = _causal_attention_without_past(graph.module.program)
    if not node:
        return Contradiction(found, "the same logits, as of a causal decoder with a cache")
    expected = "keys and values of the past as its own inputs: is_causal counts columns from its first query"
    return Contradiction(found, expected, node)


def _causal_attention_without_past(program: Program) -> str:
    """Returns the first Attention of ONNX whose is_causal knows nothing of the keys that were joined before it."""
    for node in program.all_nodes():
        if node.op_type == "Attention" and node.attrs.get("is_causal") and not any(node.inputs[4:7]):
            return str(node)
    return ""
