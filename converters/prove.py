"""The proof of a conversion: the converted module, run as generation runs it, against the unrewritten graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.decoder import Decoder
from mlx_transmuter.module import Module
from mlx_transmuter.plan import Padding, Plan
from mlx_transmuter.program import Program
from mlx_transmuter.signature import Mode, Signature, declared_mode

STEPS = 2
# How far logits may differ, relative to their spread, by the type that the graph computes in. The rewrites keep the
# graph's arithmetic up to its order of summation; two orders of a sum differ by some 1e-6 of it in float32 and 1e-2 in
# half types.
# A dynamic graph rounds its activations to 8 bits by a scale of the whole step: a sum in another order can move a value
# by one of 255 steps, and the next layers by more.
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "dynamic": 5e-2, "bfloat16": 1e-1}
# A prompt that runs in one part, for dynamic graphs: their scales, and so all logits, depend on what a step holds.
ONE_PART = 8
_DYNAMIC = ("DynamicQuantizeLinear", "com.microsoft.DynamicQuantize", "com.microsoft.QAttention")


def is_dynamic(program: Program) -> bool:
    """Whether the graph quantises activations by scales that it takes from them when it runs."""
    return any(node.op.startswith(_DYNAMIC) for node in program.all_nodes())


def rounds(program: Program) -> bool:
    """Whether the graph rounds activations to 8 bits, by fixed scales or by those of a step."""
    kinds = ("QuantizeLinear-", "com.microsoft.QuantizeLinear-")
    return is_dynamic(program) or any(node.op.startswith(kinds) for node in program.all_nodes())


def tolerance(program: Program) -> float:
    """How far logits may be off, by the lowest float type that the weights or the cache have."""
    kinds = {weight.dtype for weight in program.weights.values() if math.prod(weight.shape) > 1}
    kinds |= {value.dtype for value in (*program.inputs, *program.outputs)}
    kinds |= {"dynamic"} if rounds(program) else set()
    return max(limit for kind, limit in TOLERANCES.items() if kind in kinds or kind == "float32")


@dataclass(frozen=True)
class Case:
    """Prompts of a batch, [] for a padding row, and the tokens that follow each: STEPS decode steps."""

    prompts: list[list[int]]
    following: list[list[int]]

    @staticmethod
    def random(vocab: int, lengths: Sequence[int]) -> Case:
        """Seeded tokens, from the upper three quarters of the vocabulary: special tokens stand at its beginning."""
        draw = np.random.default_rng(0)
        prompts = [draw.integers(vocab // 4, vocab, n).tolist() for n in lengths]
        return Case(prompts, [draw.integers(vocab // 4, vocab, STEPS).tolist() for _ in lengths])


def plain(
    module: Module, signature: Signature, case: Case, eager: bool = False, *, single: bool = False
) -> list[list[np.ndarray]]:
    """The logits [vocab] of each row after its prompt and after each following token, one row at a time.

    The graph runs as its exporter meant it: the prompt at once (single: token by token), a cache of exactly the tokens
    so far, no padding; a graph without a cache gets all tokens so far.
    eager: shapes may depend on values, as a mixture's experts have them before their rewrite.
    """
    found = []
    for prompt, following in zip(case.prompts, case.following, strict=True):
        parts = [[token] for token in prompt] if single else [prompt]
        logits = _plain_row(module, signature, [*parts, *([token] for token in following)], eager) if prompt else []
        found.append(logits[len(parts) - 1 :] if prompt else [])
    return found


def _plain_row(module: Module, signature: Signature, parts: list[list[int]], eager: bool) -> list[np.ndarray]:
    inputs = {value.name: value for value in module.program.inputs}
    cache = {e.past: mx.zeros(e.sizes(1, 0), ops.device_dtype(e.dtype)) for e in signature.entries}
    cache |= {s.past: mx.zeros(s.sizes(1), ops.device_dtype(s.dtype)) for s in signature.states}
    length, found, text = 0, [], []
    for part in parts:
        text += part
        if not signature.carried:
            length, part = 0, text
        feed: dict[str, mx.array | np.ndarray] = dict(cache)
        feed[signature.tokens] = mx.array([part], mx.int32)
        if signature.mask:
            feed[signature.mask] = mx.ones((1, length + len(part)), ops.device_dtype(inputs[signature.mask].dtype))
        if signature.positions:
            place = mx.arange(length, length + len(part), dtype=mx.int32)[None]
            axes = signature.position_axes
            feed[signature.positions] = mx.broadcast_to(place, (axes, *place.shape)) if axes else place
        if signature.branch:
            feed[signature.branch] = np.array([length > 0])
        if signature.keep:
            feed[signature.keep] = np.zeros(signature.keep_shape, np.int64)
        given = (module.eagerly if eager else module)(**feed)
        cache = {one.past: given[one.present] for one in signature.carried}
        length += len(part)
        mx.eval(given)
        logits = given[signature.logits]
        found.append(ops.to_host(logits[0, -1] if logits.ndim == 3 and logits.size else logits))
    return found


def run(module: Module, plan: Plan, case: Case) -> list[list[np.ndarray]]:
    """The same logits from a batch over pools, the prompts in parts as the plan says, as generation runs them."""
    decoder = Decoder(module, len(case.prompts), plan=plan)
    found: list[list[np.ndarray]] = [[] for _ in case.prompts]
    for group in decoder.groups([len(prompt) for prompt in case.prompts]):
        rows = [case.prompts[r] + case.following[r] if r in group else [] for r in range(decoder.rows)]
        session = decoder.begin([len(row) for row in rows])
        lengths = [len(case.prompts[r]) if r in group else 0 for r in range(decoder.rows)]
        at = [0] * decoder.rows
        while any(at[r] < len(rows[r]) for r in group):
            left = [
                (lengths[r] if at[r] < lengths[r] else at[r] + 1) - at[r] if r in group else 0
                for r in range(decoder.rows)
            ]
            prompting = max((lengths[r] - at[r] for r in group), default=0)
            left = [n if (at[r] < lengths[r]) == (prompting > 0) else 0 for r, n in enumerate(left)]
            seq = {"whole": max(left), "single": 1}.get(plan.prompts, 1 << (max(left).bit_length() - 1))
            counts = [min(seq, n) for n in left]
            tokens = [rows[r][at[r] : at[r] + n] + [0] * (seq - n) for r, n in enumerate(counts)]
            logits = session.step(np.array(tokens, np.int32), counts)
            session.evaluate(logits)
            for r, n in enumerate(counts):
                at[r] += n
                if n and at[r] >= lengths[r]:
                    found[r].append(ops.to_host(logits[r]))
    return found


def error(found: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> float:
    """The largest difference of two sets of logits, relative to the spread of the wanted ones; infinite for NaN."""
    worst = 0.0
    for row, truth in zip(found, wanted, strict=True):
        for one, other in zip(row, truth, strict=True):
            finite = np.isfinite(other)
            spread = float(np.ptp(other[finite])) if finite.any() else 0.0
            if (np.isfinite(one) != finite).any():
                return float("inf")
            far = np.abs(one[finite].astype(np.float32) - other[finite]) / (spread or 1.0)
            worst = max(worst, float(far.max(initial=0.0)))
    return worst


def divergence(found: list[list[np.ndarray]], wanted: list[list[np.ndarray]]) -> float:
    """How far the next token's distribution is from the wanted one's: the mean Kullback-Leibler divergence in nats."""
    far = []
    for one, other in (
        (o, t) for row, truth in zip(found, wanted, strict=True) for o, t in zip(row, truth, strict=True)
    ):
        logs = [x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64)) for x in (one, other)]
        chance = np.exp(logs[1])
        far.append(float(np.sum(chance * (logs[1] - logs[0]), where=chance > 0)))
    return float(np.mean(far)) if far else 0.0


def plans(program: Program, signature: Signature) -> list[Plan]:
    """The plans to try, the fastest first. A graph that counts its positions from the mask runs over a buffer
    undeclared; without a mask nothing hides free columns, however little they weigh in a trial.
    """
    modes: tuple[Mode, ...] = ("grow",)
    paddings: tuple[Padding, ...] = ("right", "none")
    if signature.mask:
        in_place = declared_mode(program, signature) == "in_place"
        modes, paddings = ("in_place" if in_place else "append", "grow"), ("right", "left", "none")
    if not signature.carried:
        tried = [Plan("grow", "whole", padding) for padding in paddings]
    elif signature.branch:  # the branch without a cache has no columns to leave free
        tried = [Plan("grow", "parts"), Plan("grow", "whole")]
    elif signature.states:
        first = [Plan(modes[0])] if signature.mask else []
        tried = [*first, *(Plan(mode, "parts", "none") for mode in modes)]
    else:
        tried = [Plan(mode) for mode in modes]
    if signature.one_row:
        tried += [replace(plan, alone=True) for plan in tried]
    return tried


def best_plan(
    module: Module, tried: Sequence[Plan], case: Case, wanted: list[list[np.ndarray]], limit: float
) -> tuple[Plan | None, dict[str, float | str]]:
    """The first plan whose logits agree with the wanted ones within `limit`; the error of each that was tried."""
    errors: dict[str, float | str] = {}
    for plan in tried:
        try:
            far = error(run(module, plan, case), wanted)
        except Exception as problem:  # whatever a graph raises over this cache, it does not run over it
            errors[plan.name] = str(problem)
            continue
        errors[plan.name] = far if np.isfinite(far) else str(far)
        if far <= limit:
            return plan, errors
    return None, errors
