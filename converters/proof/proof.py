"""The proof of a conversion: the logits of a batch by the unrewritten graph and by the converted module, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.stages import advance, enter_stage
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks
from mlx_transmuter.runtime.step_inputs import StepInputs

DECODE_STEPS = 2
# The length of a prompt that runs in one chunk, for dynamic graphs: their scales, and so all logits, depend on what a
# step holds.
SINGLE_CHUNK_LENGTH = 8

# The logits [vocab] of each row, after its prompt and after each token that follows it.
Logits = list[list[np.ndarray]]


@dataclass(frozen=True)
class ProofBatch:
    """The prompts of a batch, [] for a padding row, and the DECODE_STEPS tokens that follow each of them."""

    prompts: list[list[int]]
    decode_tokens: list[list[int]]

    @staticmethod
    def random(vocab: int, lengths: Sequence[int]) -> ProofBatch:
        """Returns seeded tokens of the vocabulary's upper three quarters: special tokens stand at its beginning."""
        draw = np.random.default_rng(0)
        prompts = [draw.integers(vocab // 4, vocab, n).tolist() for n in lengths]
        return ProofBatch(prompts, [draw.integers(vocab // 4, vocab, DECODE_STEPS).tolist() for _ in lengths])


@dataclass(frozen=True)
class ProofCase:
    """What the logits of a module are compared with.

    path: the ONNX file, for errors. batch: the tokens. reference: the logits of the unrewritten graph. tolerance: the
    largest error that counts as agreement. plan: how the module runs.
    """

    path: Path
    batch: ProofBatch
    reference: Logits
    tolerance: float
    plan: RunPlan

    def logits(self, module: ProgramModule) -> Logits:
        """Returns the module's logits for the batch, run as generation runs it."""
        return decoder_logits(module, self.plan, self.batch)

    def error(self, module: ProgramModule) -> float:
        """Returns the error of the module's logits (see `logit_error`)."""
        return logit_error(self.logits(module), self.reference)


def reference_logits(
    module: ProgramModule,
    signature: DecoderSignature,
    batch: ProofBatch,
    eager: bool = False,
    *,
    token_by_token: bool = False,
) -> Logits:
    """Returns the logits of the graph run as its exporter meant it, one row at a time.

    A prompt runs at once, or token by token; the cache has exactly the tokens so far and there is no padding; a graph
    without a cache gets all tokens so far. eager: whether shapes may depend on values, as those of a mixture's experts
    do before their rewrite.
    """
    enter_stage("running the graph")
    rows: Logits = []
    for prompt, decode_tokens in zip(batch.prompts, batch.decode_tokens, strict=True):
        chunks = [[token] for token in prompt] if token_by_token else [prompt]
        steps = [*chunks, *([token] for token in decode_tokens)]
        rows.append(_reference_row_logits(module, signature, steps, eager)[len(chunks) - 1 :] if prompt else [])
    return rows


def _reference_row_logits(
    module: ProgramModule, signature: DecoderSignature, steps: list[list[int]], eager: bool
) -> list[np.ndarray]:
    """Returns the logits [vocab] after each of the steps of one row."""
    step_inputs = StepInputs.from_program(module.program, signature)
    past, past_length = step_inputs.empty_past(1), 0
    logits, row_tokens = [], []
    for tokens in steps:
        row_tokens += tokens
        if not signature.pairs:
            past_length, tokens = 0, row_tokens
        inputs = step_inputs.uniform(tokens=mx.array([tokens], mx.int32), past_length=past_length, past=past)
        outputs = (module.call_eagerly if eager else module)(**inputs)
        past = step_inputs.next_past(outputs)
        past_length += len(tokens)
        mx.eval(outputs)
        advance()
        step_logits = outputs[signature.logits_output]
        last = step_logits[0, -1] if step_logits.ndim == 3 and step_logits.size else step_logits
        logits.append(ops.to_host(last))
    return logits


def decoder_logits(module: ProgramModule, plan: RunPlan, batch: ProofBatch) -> Logits:
    """Returns the logits of the module run as generation runs it: in a batch over pools, in chunks by the plan.

    A module with length switches runs the batch on each side of them, whatever its lengths, one after the other.
    """
    enter_stage(f"running the converted module, {plan.label}")
    sides = DecoderSignature.from_program(module.program).length_switches.sides
    decoders = (Decoder(module, len(batch.prompts), plan=plan, fixed_side=side) for side in range(sides))
    return [row for decoder in decoders for row in _batch_logits(decoder, batch)]


def _batch_logits(decoder: Decoder, batch: ProofBatch) -> Logits:
    logits: Logits = [[] for _ in batch.prompts]
    for group in decoder.group_rows([len(prompt) for prompt in batch.prompts]):
        rows = [batch.prompts[r] + batch.decode_tokens[r] if r in group else [] for r in range(decoder.rows)]
        session = decoder.begin_session([len(row) for row in rows])
        prompt_lengths = [len(prompt) for prompt in batch.prompts]
        for tokens, counts, is_end in _batch_steps(rows, prompt_lengths, decoder.prompt_mode):
            step_logits = session.step(tokens, counts)
            session.evaluate(step_logits)
            advance()
            for r in group:
                if is_end[r]:
                    logits[r].append(ops.to_host(step_logits[r]))
    return logits


def _batch_steps(
    rows: list[list[int]], prompt_lengths: list[int], prompt_mode: str
) -> Iterator[tuple[np.ndarray, list[int], list[bool]]]:
    """Yields the steps of the rows: tokens, int32 [rows, n]; how many of them each row has; whether its logits count.

    The prompts run first, in the chunks of the longest of them; then each row decodes a token a step.
    """
    start = 0
    longest = max(length for row, length in zip(rows, prompt_lengths, strict=True) if row)
    for chunk in prefill_chunks(longest, prompt_mode=prompt_mode):
        pieces = [row[:length][start : start + chunk] for row, length in zip(rows, prompt_lengths, strict=True)]
        start += chunk
        tokens = np.array([piece + [0] * (chunk - len(piece)) for piece in pieces], np.int32)
        ends = [bool(piece) and length <= start for piece, length in zip(pieces, prompt_lengths, strict=True)]
        yield tokens, [len(piece) for piece in pieces], ends
    for step in range(DECODE_STEPS):
        tokens = [row[length + step] if row else 0 for row, length in zip(rows, prompt_lengths, strict=True)]
        yield np.array(tokens, np.int32)[:, None], [int(bool(row)) for row in rows], [bool(row) for row in rows]


def logit_error(logits: Logits, reference: Logits) -> float:
    """Returns the largest difference of two sets of logits, relative to the range (maximum − minimum) of the reference.

    It is infinite where one of the two has a finite logit and the other has not.
    """
    largest = 0.0
    for row, reference_row in zip(logits, reference, strict=True):
        for values, expected in zip(row, reference_row, strict=True):
            finite = np.isfinite(expected)
            logit_range = float(np.ptp(expected[finite])) if finite.any() else 0.0
            if (np.isfinite(values) != finite).any():
                return float("inf")
            errors = np.abs(values[finite].astype(np.float32) - expected[finite]) / (logit_range or 1.0)
            largest = max(largest, float(errors.max(initial=0.0)))
    return largest


def kl_divergence(logits: Logits, reference: Logits) -> float:
    """Returns the mean Kullback-Leibler divergence, in nats, of the next token's distribution from the reference's."""
    divergences = []
    for row, reference_row in zip(logits, reference, strict=True):
        for values, expected in zip(row, reference_row, strict=True):
            log_p, log_q = (_log_softmax(x.astype(np.float64)) for x in (expected, values))
            p = np.exp(log_p)
            divergences.append(float(np.sum(p * (log_p - log_q), where=p > 0)))
    return float(np.mean(divergences)) if divergences else 0.0


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)
