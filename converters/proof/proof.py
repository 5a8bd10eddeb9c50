"""The proof of a conversion: the converted module, run as generation runs it, against the unrewritten graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.activation_quantization import quantizes_activations
from mlx_transmuter.program import Program
from mlx_transmuter.program.run_plan import PaddingSide, RunPlan
from mlx_transmuter.program.signature import CacheMode, DecoderSignature, infer_cache_mode
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule

DECODE_STEPS = 2
# How far logits may differ, relative to their spread, by the type that the graph computes in. The rewrites keep the
# graph's arithmetic up to its order of summation; two orders of a sum differ by some 1e-6 of it in float32 and 1e-2 in
# half types.
# A dynamic graph rounds its activations to 8 bits by a scale of the whole step: a sum in another order can move a value
# by one of 255 steps, and the next layers by more.
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "dynamic": 5e-2, "bfloat16": 1e-1}
# A prompt that runs in one part, for dynamic graphs: their scales, and so all logits, depend on what a step holds.
SINGLE_CHUNK_LENGTH = 8


def tolerance(program: Program) -> float:
    """How far logits may be off, by the lowest float type that the weights or the cache have."""
    kinds = {weight.dtype for weight in program.weights.values() if math.prod(weight.shape) > 1}
    kinds |= {value.dtype for value in (*program.inputs, *program.outputs)}
    kinds |= {"dynamic"} if quantizes_activations(program) else set()
    return max(limit for kind, limit in TOLERANCES.items() if kind in kinds or kind == "float32")


@dataclass(frozen=True)
class ProofBatch:
    """Prompts of a batch, [] for a padding row, and the tokens that follow each: STEPS decode steps."""

    prompts: list[list[int]]
    decode_tokens: list[list[int]]

    @staticmethod
    def random(vocab: int, lengths: Sequence[int]) -> ProofBatch:
        """Seeded tokens, from the upper three quarters of the vocabulary: special tokens stand at its beginning."""
        draw = np.random.default_rng(0)
        prompts = [draw.integers(vocab // 4, vocab, n).tolist() for n in lengths]
        return ProofBatch(prompts, [draw.integers(vocab // 4, vocab, DECODE_STEPS).tolist() for _ in lengths])


def reference_logits(
    module: ProgramModule,
    signature: DecoderSignature,
    batch: ProofBatch,
    eager: bool = False,
    *,
    token_by_token: bool = False,
) -> list[list[np.ndarray]]:
    """The logits [vocab] of each row after its prompt and after each following token, one row at a time.

    The graph runs as its exporter meant it: the prompt at once (single: token by token), a cache of exactly the tokens
    so far, no padding; a graph without a cache gets all tokens so far.
    eager: shapes may depend on values, as a mixture's experts have them before their rewrite.
    """
    found = []
    for prompt, following in zip(batch.prompts, batch.decode_tokens, strict=True):
        parts = [[token] for token in prompt] if token_by_token else [prompt]
        logits = (
            _reference_row_logits(module, signature, [*parts, *([token] for token in following)], eager)
            if prompt
            else []
        )
        found.append(logits[len(parts) - 1 :] if prompt else [])
    return found


def _reference_row_logits(
    module: ProgramModule, signature: DecoderSignature, chunks: list[list[int]], eager: bool
) -> list[np.ndarray]:
    inputs = {value.name: value for value in module.program.inputs}
    cache = {e.past: mx.zeros(e.shape_for(1, 0), ops.device_dtype(e.dtype)) for e in signature.cache_pairs}
    cache |= {s.past: mx.zeros(s.shape_for(1), ops.device_dtype(s.dtype)) for s in signature.state_pairs}
    length, found, text = 0, [], []
    for part in chunks:
        text += part
        if not signature.pairs:
            length, part = 0, text
        feed: dict[str, mx.array | np.ndarray] = dict(cache)
        feed[signature.token_input] = mx.array([part], mx.int32)
        if signature.mask_input:
            feed[signature.mask_input] = mx.ones(
                (1, length + len(part)), ops.device_dtype(inputs[signature.mask_input].dtype)
            )
        if signature.positions_input:
            place = mx.arange(length, length + len(part), dtype=mx.int32)[None]
            axes = signature.position_axes
            feed[signature.positions_input] = mx.broadcast_to(place, (axes, *place.shape)) if axes else place
        if signature.use_cache_branch_input:
            feed[signature.use_cache_branch_input] = np.array([length > 0])
        if signature.logits_to_keep_input:
            feed[signature.logits_to_keep_input] = np.zeros(signature.logits_to_keep_shape, np.int64)
        given = (module.call_eagerly if eager else module)(**feed)
        cache = {one.past: given[one.present] for one in signature.pairs}
        length += len(part)
        mx.eval(given)
        logits = given[signature.logits_output]
        found.append(ops.to_host(logits[0, -1] if logits.ndim == 3 and logits.size else logits))
    return found


def decoder_logits(module: ProgramModule, plan: RunPlan, batch: ProofBatch) -> list[list[np.ndarray]]:
    """The same logits from a batch over pools, the prompts in parts as the plan says, as generation runs them."""
    decoder = Decoder(module, len(batch.prompts), plan=plan)
    found: list[list[np.ndarray]] = [[] for _ in batch.prompts]
    for group in decoder.group_rows([len(prompt) for prompt in batch.prompts]):
        rows = [batch.prompts[r] + batch.decode_tokens[r] if r in group else [] for r in range(decoder.rows)]
        session = decoder.begin_session([len(row) for row in rows])
        lengths = [len(batch.prompts[r]) if r in group else 0 for r in range(decoder.rows)]
        at = [0] * decoder.rows
        while any(at[r] < len(rows[r]) for r in group):
            left = [
                (lengths[r] if at[r] < lengths[r] else at[r] + 1) - at[r] if r in group else 0
                for r in range(decoder.rows)
            ]
            prompting = max((lengths[r] - at[r] for r in group), default=0)
            left = [n if (at[r] < lengths[r]) == (prompting > 0) else 0 for r, n in enumerate(left)]
            seq = {"whole": max(left), "single": 1}.get(plan.prompt_mode, 1 << (max(left).bit_length() - 1))
            counts = [min(seq, n) for n in left]
            tokens = [rows[r][at[r] : at[r] + n] + [0] * (seq - n) for r, n in enumerate(counts)]
            logits = session.step(np.array(tokens, np.int32), counts)
            session.evaluate(logits)
            for r, n in enumerate(counts):
                at[r] += n
                if n and at[r] >= lengths[r]:
                    found[r].append(ops.to_host(logits[r]))
    return found


def logit_error(logits: list[list[np.ndarray]], reference: list[list[np.ndarray]]) -> float:
    """The largest difference of two sets of logits, relative to the spread of the wanted ones; infinite for NaN."""
    worst = 0.0
    for row, truth in zip(logits, reference, strict=True):
        for one, other in zip(row, truth, strict=True):
            finite = np.isfinite(other)
            spread = float(np.ptp(other[finite])) if finite.any() else 0.0
            if (np.isfinite(one) != finite).any():
                return float("inf")
            far = np.abs(one[finite].astype(np.float32) - other[finite]) / (spread or 1.0)
            worst = max(worst, float(far.max(initial=0.0)))
    return worst


def kl_divergence(logits: list[list[np.ndarray]], reference: list[list[np.ndarray]]) -> float:
    """How far the next token's distribution is from the wanted one's: the mean Kullback-Leibler divergence in nats."""
    far = []
    for one, other in (
        (o, t) for row, truth in zip(logits, reference, strict=True) for o, t in zip(row, truth, strict=True)
    ):
        logs = [x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (one, other)]
        chance = np.exp(logs[1])
        far.append(float(np.sum(chance * (logs[1] - logs[0]), where=chance > 0)))
    return float(np.mean(far)) if far else 0.0


def candidate_plans(program: Program, signature: DecoderSignature) -> list[RunPlan]:
    """The plans to try, the fastest first. A graph that counts its positions from the mask runs over a buffer
    undeclared; without a mask nothing hides free columns, however little they weigh in a trial.
    """
    modes: tuple[CacheMode, ...] = ("grow",)
    paddings: tuple[PaddingSide, ...] = ("right", "none")
    if signature.mask_input:
        in_place = infer_cache_mode(program, signature) == "in_place"
        modes, paddings = ("in_place" if in_place else "append", "grow"), ("right", "left", "none")
    if not signature.pairs:
        tried = [RunPlan("grow", "whole", padding) for padding in paddings]
    elif signature.use_cache_branch_input:  # the branch without a cache has no columns to leave free
        tried = [RunPlan("grow", "parts"), RunPlan("grow", "whole")]
    elif signature.state_pairs:
        first = [RunPlan(modes[0])] if signature.mask_input else []
        tried = [*first, *(RunPlan(mode, "parts", "none") for mode in modes)]
    else:
        tried = [RunPlan(mode) for mode in modes]
    if signature.single_row:
        tried += [replace(plan, row_by_row=True) for plan in tried]
    return tried


def first_agreeing_plan(
    module: ProgramModule,
    candidates: Sequence[RunPlan],
    batch: ProofBatch,
    reference: list[list[np.ndarray]],
    limit: float,
) -> tuple[RunPlan | None, dict[str, float | str]]:
    """The first plan whose logits agree with the wanted ones within `limit`; the error of each that was tried."""
    errors: dict[str, float | str] = {}
    for plan in candidates:
        try:
            far = logit_error(decoder_logits(module, plan, batch), reference)
        except Exception as problem:  # whatever a graph raises over this cache, it does not run over it
            errors[plan.label] = str(problem)
            continue
        errors[plan.label] = far if np.isfinite(far) else str(far)
        if far <= limit:
            return plan, errors
    return None, errors
