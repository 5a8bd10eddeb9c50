"""The loop of generation: prompts in, an event per step out, and the texts at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.beam import Beams
from mlx_transmuter.generation.context import Compiled, expanded
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.host import HostView
from mlx_transmuter.generation.rows import CANCELLED, LENGTH, STOP, Positions, Result, Row, listed, prompt_parts
from mlx_transmuter.generation.selection import row_keys

# Inputs of `generate` that are not inputs of the decoder.
ENCODER_TOKENS, POSITIONS = "encoder_input_ids", "position_ids"

# Whether the new tokens of a text, a sequence of ids, end it.
Stop = Callable[[Sequence[int]], bool]


class Step(NamedTuple):
    """What a step brought, one entry per text: int32 the new token or -1, bool whether no more comes, and float32 the
    token's log-probability or NaN, where asked."""

    token: np.ndarray
    finished: np.ndarray
    logprob: np.ndarray | None


def run(
    gen: Compiled,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    inputs: Mapping[str, Any] | None = None,
    *,
    stop: Sequence[Stop | None] | None = None,
    cancel: threading.Event | None = None,
) -> Generator[Step, None, list[Result]]:
    """Generates after each prompt; yields a Step after each token of a group of rows, and returns the Results.

    prompts: batch_size lists of token ids; [] is a padding row. seeds: one int per prompt. inputs: as for `generate`.
    With num_return_sequences n, prompt i has the texts i × n to i × n + n - 1. stop: per prompt None or a function that
    ends a text as an eos does; the token that ends it stays. cancel, set from any thread, ends the run after the token
    at hand; closing the generator does too. A beam search yields its steps when its texts are known.

    Raises GenerationError at once for wrong prompts, seeds or inputs.
    """
    batch = _Batch(gen, prompts, seeds, dict(inputs or {}), stop, cancel)
    return batch.run()


class _Batch:
    """One call of `run`: the checked prompts and the texts that grow from them."""

    def __init__(
        self,
        gen: Compiled,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        inputs: dict[str, Any],
        stop: Sequence[Stop | None] | None,
        cancel: threading.Event | None,
    ):
        ctx = gen.context
        self.gen, self.ctx, self.settings, self.width = gen, ctx, ctx.settings, ctx.settings.width
        self.prompts = _checked_prompts(prompts, gen)
        self.seeds = _one_each("seeds", seeds, gen.batch_size)
        self.stop = _one_each("stop", stop or [None] * gen.batch_size, gen.batch_size)
        self.cancel = cancel
        self.sources = _sources(inputs, self.prompts, gen)
        self.positions = Positions(inputs.pop(POSITIONS), self.prompts) if inputs.get(POSITIONS) else None
        self.inputs = _given(inputs, gen)
        if self.settings.stop_strings and not any(self.stop):
            raise GenerationError(
                "setting stop_strings", "no text to find them in", "a task that decodes", "give `stop`"
            )
        self.limits = [_limit(gen, len(prompt)) if prompt else 0 for prompt in self.prompts]
        texts = self.settings.num_return_sequences
        self.results = [Result([], LENGTH) for _ in range(gen.batch_size * texts)]
        self.finished = np.array([not self.prompts[text // texts] for text in range(len(self.results))])

    def run(self) -> Generator[Step, None, list[Result]]:
        lengths = [len(prompt) for prompt in self.prompts for _ in range(self.width)]
        for rows in self.gen.decoder.groups(lengths):
            group = _Group(self, sorted({row // self.width for row in rows}))
            try:
                yield from (_search(group) if self.settings.num_beams > 1 else _choose(group))
            finally:
                group.run.close()
        return self.results

    @property
    def cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()

    def event(self, new: Mapping[int, tuple[int, float | None]]) -> Step:
        """The Step of new tokens, text -> (token, log-probability)."""
        tokens = np.full(len(self.results), -1, np.int32)
        logprobs = np.full(len(self.results), np.nan, np.float32)
        for text, (token, logprob) in new.items():
            tokens[text] = token
            logprobs[text] = np.nan if logprob is None else logprob
        return Step(tokens, self.finished.copy(), logprobs if self.ctx.token_logprobs else None)


class _Group:
    """The prompts of a batch that share one run of the decoder; the rows of the others are padding."""

    def __init__(self, batch: _Batch, members: list[int]):
        self.batch, self.members = batch, members
        self.gen, self.width = batch.gen, batch.width
        self.rows = self.gen.batch_size * self.width
        self.lengths = [0] * self.rows
        most = self.gen.decoder.max_positions
        total = [0] * self.rows
        for row in self.all_rows():
            prompt = row // self.width
            size = len(batch.prompts[prompt]) + batch.limits[prompt]
            total[row] = min(size, most) if most else size
        more: dict[str, Any] = {"inputs": expanded(batch.inputs, self.width)} if batch.inputs else {}
        if self.width > 1:
            more["paged"] = True
        self.run = self.gen.decoder.begin(total, **more)
        self.host = HostView(batch.settings, batch.ctx.processors, self.gen.decoder.vocab, batch.prompts, batch.sources)

    def all_rows(self) -> list[int]:
        """The rows of the group's prompts."""
        return [prompt * self.width + offset for prompt in self.members for offset in range(self.width)]

    def step(self, tokens: np.ndarray | mx.array, counts: list[int]) -> mx.array:
        """The logits after tokens, int32 [rows, n], of which row r has the first counts[r]."""
        if self.batch.positions is None:
            logits = self.run.step(tokens, counts)
        else:
            places = self.batch.positions.at(self.lengths, tokens.shape[1], self.width)
            logits = self.run.step(tokens, counts, places)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits

    def prefill(self) -> mx.array | None:
        """The logits after the prompts, [rows, vocab]; None if the run was cancelled.

        A prompt runs in the first of its rows alone, and the others then continue it. Only the logits of a row's last
        token are kept, from the part in which it came.
        """
        prompts = {prompt * self.width: self.batch.prompts[prompt] for prompt in self.members}
        start, last = 0, None
        for part in prompt_parts(max(map(len, prompts.values())), self.batch.ctx.prefill_step_size):
            if self.batch.cancelled:
                return None
            tokens = np.zeros((self.rows, part), np.int32)
            counts = [0] * self.rows
            for row, prompt in prompts.items():
                piece = prompt[start : start + part]
                counts[row] = len(piece)
                tokens[row, : len(piece)] = piece
            logits = self.step(tokens, counts)
            start += part
            ends = np.array([count > 0 and len(prompts[row]) <= start for row, count in enumerate(counts)])
            if ends.any():
                last = logits if last is None else mx.where(mx.array(ends)[:, None], logits, last)
            del logits
            self.run.evaluate(*([] if last is None else [last]))
        if self.width > 1 and last is not None:
            parents = [row // self.width * self.width for row in range(self.rows)]
            self.fork(parents)
            last = last[mx.array(parents)]
        return last

    def fork(self, parents: list[int]) -> None:
        """Row r continues row parents[r]."""
        if parents != list(range(self.rows)):
            self.run.fork(parents)
            self.lengths = [self.lengths[parent] for parent in parents]

    def begin(self, keys: list[mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        """The state of the rows after their prompts, and its fixed part."""
        batch, rows = self.batch, range(self.rows)
        prompts = [batch.prompts[row // self.width] for row in rows]
        sources = [batch.sources[row // self.width] for row in rows]
        news = [batch.ctx.new_tokens(len(prompt)) if prompt else 0 for prompt in prompts]
        ends = [len(prompt) + new for prompt, new in zip(prompts, news, strict=True)]
        return self.gen.selection.begin(prompts, sources, ends, keys)

    def stop(self, row: int) -> Stop | None:
        """The stop of a row's prompt."""
        return self.batch.stop[row // self.width]


def _choose(group: _Group) -> Generator[Step, None, None]:
    """Greedy choice and sampling: one token per row and step."""
    batch, selection, width = group.batch, group.gen.selection, group.width
    rows = {row: Row(batch.prompts[row // width], batch.limits[row // width]) for row in group.all_rows()}
    logits = group.prefill()
    state, fixed = group.begin(row_keys(batch.seeds, width) if batch.settings.do_sample else [])
    # Without the host's part in the choice, the next step can be on its way before this one's token is read.
    ahead = group.run.runs_ahead and not selection.host

    def submit(logits: mx.array) -> mx.array:
        nonlocal state
        texts = [
            rows[row].tokens if row in rows and rows[row].finish_reason is None else None for row in range(group.rows)
        ]
        packed, state = selection.tokens(logits, state, fixed | group.host.arrays(texts))
        group.run.evaluate(packed, *state.values(), wait=not ahead)
        return packed

    def counts(unread: int) -> list[int]:
        """1 for each row that goes on after its last token and unread more."""
        live = {
            row for row, text in rows.items() if text.finish_reason is None and len(text.tokens) + unread < text.limit
        }
        return [int(row in live) for row in range(group.rows)]

    packed = None if logits is None else submit(logits)
    del logits
    while packed is not None:
        following = None
        if ahead and any(going := counts(unread=1)):
            following = submit(group.step(packed[:, :1], going))
        read = np.array(packed)
        new = {}
        for row, text in rows.items():
            if text.finish_reason is None:
                logprob = float(read[row, 1:].view(np.float32)[0]) if batch.ctx.token_logprobs else None
                if text.accept(int(read[row, 0]), logprob, batch.settings.eos_token_id, group.stop(row)):
                    new[row] = (text.tokens[-1], logprob)
                batch.finished[row] = text.finish_reason is not None
        yield batch.event(new)
        going = counts(unread=0)
        if not any(going) or batch.cancelled:
            break
        packed = following if following is not None else submit(group.step(read[:, :1], going))
    for row, text in rows.items():
        batch.results[row] = text.result()


def _search(group: _Group) -> Generator[Step, None, None]:
    """Beam search: each prompt's beams are its rows, and fork after each step."""
    batch, selection, width = group.batch, group.gen.selection, group.width
    searches = {prompt: Beams(batch.settings, batch.limits[prompt], batch.stop[prompt]) for prompt in group.members}
    logits = group.prefill()
    state, fixed = group.begin(row_keys(batch.seeds, 1) if batch.settings.do_sample else [])
    while logits is not None and not batch.cancelled:
        texts: list[Sequence[int] | None] = [None] * group.rows
        scores = np.zeros(group.rows, np.float32)
        live = {prompt: beams for prompt, beams in searches.items() if not beams.done}
        for prompt, beams in live.items():
            rows = slice(prompt * width, prompt * width + width)
            texts[rows], scores[rows] = [text.tokens for text in beams.running], beams.scores
        given = fixed | group.host.arrays(texts)
        packed, state = selection.candidates(logits, state, given, mx.array(scores))
        del logits
        group.run.evaluate(packed, *state.values())
        read = np.array(packed).reshape(group.gen.batch_size, -1, selection.count)
        parents, tokens, counts = list(range(group.rows)), np.zeros(group.rows, np.int32), [0] * group.rows
        for prompt, beams in live.items():
            indices, bits = read[prompt, 0], read[prompt, 1:].view(np.float32)
            # The device gives the candidates unordered; sampled ones come in the order of their draws.
            order = np.arange(len(indices)) if batch.settings.do_sample else np.lexsort((indices, -bits[0]))
            origins, ids = np.divmod(indices[order], selection.vocab)
            logprobs = bits[1][order].tolist() if batch.ctx.token_logprobs else None
            chosen = beams.step(origins.tolist(), ids.tolist(), bits[0][order], logprobs)
            if not beams.done:
                for offset, parent in enumerate(chosen):
                    row = prompt * width + offset
                    parents[row], tokens[row], counts[row] = (
                        prompt * width + parent,
                        beams.running[offset].tokens[-1],
                        1,
                    )
        if not any(counts):
            break
        group.fork(parents)
        state = selection.follow(state, mx.array(parents), mx.array(tokens))
        logits = group.step(tokens[:, None], counts)
    yield from _told(group, searches)


def _told(group: _Group, searches: Mapping[int, Beams]) -> Generator[Step, None, None]:
    """The Results of the beams, and their tokens as steps."""
    batch, each = group.batch, group.batch.settings.num_return_sequences
    told: dict[int, Result] = {}
    for prompt, beams in searches.items():
        for place, found in enumerate(beams.results()):
            tokens = listed(found.tokens, found.logprobs)
            if found.tokens and found.tokens[-1] in batch.settings.eos_token_id:
                tokens.pop()
            reason = STOP if found.ended else LENGTH if beams.done else CANCELLED
            told[prompt * each + place] = Result(tokens, reason, float(found.score))
    for text, result in told.items():
        batch.results[text] = result
    for index in range(max([1, *(len(result.tokens) for result in told.values())])):
        for text, result in told.items():
            batch.finished[text] = index + 1 >= len(result.tokens)
        yield batch.event({text: result.tokens[index] for text, result in told.items() if index < len(result.tokens)})


def _checked_prompts(prompts: Sequence[Sequence[int]], gen: Compiled) -> list[list[int]]:
    found = [[int(token) for token in prompt] for prompt in _one_each("prompts", prompts, gen.batch_size)]
    vocab, most = gen.decoder.vocab, gen.decoder.max_positions
    for place, prompt in enumerate(found):
        if wrong := [token for token in prompt if not 0 <= token < vocab]:
            raise GenerationError(f"prompt {place}", f"the token ids {wrong[:5]}", f"ids from 0 to {vocab - 1}")
        if most and len(prompt) > most:
            raise GenerationError(
                f"prompt {place}", f"{len(prompt)} tokens", f"at most the model's {most} positions", "shorten it"
            )
    return found


def _one_each(name: str, values: Sequence[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise GenerationError(name, f"{len(values)}", f"one for each of the {count} prompts of the batch")
    return list(values)


def _limit(gen: Compiled, length: int) -> int:
    """The most new tokens of a prompt; the last one needs no position, for no step takes it."""
    count, most = gen.context.new_tokens(length), gen.decoder.max_positions
    return min(count, most - length + 1) if most else count


def _sources(inputs: dict[str, Any], prompts: list[list[int]], gen: Compiled) -> list[list[int]]:
    """The tokens that the encoder_ processors look at: the encoder's, or the prompts of a decoder-only model."""
    settings = gen.context.settings
    given = inputs.pop(ENCODER_TOKENS, None)
    if given is not None:
        return [
            [int(token) for token in tokens] for tokens in _one_each(f"input {ENCODER_TOKENS}", given, gen.batch_size)
        ]
    if gen.context.encoder_decoder and (
        settings.encoder_repetition_penalty != 1.0 or settings.encoder_no_repeat_ngram_size > 0
    ):
        raise GenerationError(
            f"input {ENCODER_TOKENS}", "nothing", "the encoder's tokens, which an encoder_ setting reads"
        )
    return prompts


def _given(inputs: dict[str, Any], gen: Compiled) -> dict[str, mx.array]:
    """The inputs of the decoder that the context names, one row per prompt."""
    names = set(gen.context.given)
    if inputs.keys() != names:
        found = ", ".join(sorted(inputs)) or "none"
        raise GenerationError("inputs", found, ", ".join(sorted(names)) or "none", "name them in the context's `given`")
    arrays = {name: mx.array(array) for name, array in inputs.items()}
    for name, array in arrays.items():
        if not array.ndim or array.shape[0] != gen.batch_size:
            raise GenerationError(
                f"input {name}", f"shape {list(array.shape)}", f"{gen.batch_size} rows, one per prompt"
            )
    return arrays
