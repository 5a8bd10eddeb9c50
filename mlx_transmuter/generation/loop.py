"""The loop of generation: prompts in, a Step after each token out, and the texts at the end."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch, Step, Stop
from mlx_transmuter.generation.beam import Beams
from mlx_transmuter.generation.context import Compiled
from mlx_transmuter.generation.group import Group
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.rows import CANCELLED, LENGTH, STOP, Result, listed
from mlx_transmuter.generation.selection import row_keys
from mlx_transmuter.generation.speculate import speculate


def run(
    gen: Compiled,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    inputs: Mapping[str, Any] | None = None,
    *,
    stop: Sequence[Stop | None] | None = None,
    cancel: threading.Event | None = None,
    prompt_cache: PromptCache | None = None,
) -> Generator[Step, None, list[Result]]:
    """Generates after each prompt; yields a Step after each token of a group of prompts, and returns the Results.

    prompts, seeds, inputs: as for `generate`. With num_return_sequences n, prompt i has the texts i × n to i × n + n -
    1. stop: per prompt None, or a function of a text's new tokens that ends it as an eos does; the token that ends it
    stays. cancel, set from any thread, ends the run after the token at hand, and so does closing the generator. A beam
    search yields its steps when its texts are known. prompt_cache: what it has of a prompt isn't computed again, and at
    the end it has the prompts and texts of this run, also of one that was ended early.

    Raises GenerationError at once for wrong prompts, seeds or inputs, or a prompt cache of another model.
    """
    return _steps(Batch(gen, prompts, seeds, inputs or {}, stop, cancel, prompt_cache))


def _steps(batch: Batch) -> Generator[Step, None, list[Result]]:
    width = batch.settings.width
    lengths = [len(prompt) for prompt in batch.prompts for _ in range(width)]
    for rows in batch.gen.decoder.groups(lengths):
        group = Group(batch, sorted({row // width for row in rows}))
        try:
            if batch.settings.num_beams > 1:
                yield from _search(group)
            else:
                yield from speculate(group) if batch.gen.guesses else _choose(group)
            group.remember()
        except GeneratorExit:  # a run given up between two steps; after any other end its slots may be half written
            group.remember()
            raise
        finally:
            group.run.close()
    return batch.results


def _choose(group: Group) -> Generator[Step, None, None]:
    """Greedy choice and sampling: one token per row and step."""
    batch, selection = group.batch, group.selection
    rows = group.texts()
    logits = group.prefill()
    state, fixed = group.state(row_keys(batch.seeds, group.width) if batch.settings.do_sample else [])
    # Without a part of the host in the choice, a step can be on its way before the token before it is read.
    ahead = group.run.runs_ahead and not selection.host

    def submit(logits: mx.array) -> mx.array:
        nonlocal state
        texts = [rows[row].text if row in rows and rows[row].live else None for row in group.all]
        packed, state = selection.tokens(logits, state, fixed | group.host.arrays(texts))
        group.run.evaluate(packed, *state.values(), wait=not ahead)
        return packed

    def going(unread: int) -> list[int]:
        """1 for each row that goes on after unread more tokens."""
        return [int(row in rows and rows[row].live and rows[row].room > unread) for row in group.all]

    packed = None if logits is None else submit(logits)
    del logits
    while packed is not None:
        following = None
        if ahead and any(counts := going(unread=1)):
            following = submit(group.step(packed[:, :1], counts))
        read = np.array(packed)
        logprobs = read[:, 1].view(np.float32).tolist() if batch.ctx.token_logprobs else [None] * len(read)
        yield batch.accept(rows, {row: (int(read[row, 0]), logprobs[row]) for row in rows})
        if batch.cancelled or not any(counts := going(unread=0)):
            break
        packed = following if following is not None else submit(group.step(read[:, :1], counts))
    for row, text in rows.items():
        batch.results[row] = text.result()


def _search(group: Group) -> Generator[Step, None, None]:
    """Beam search: the beams of each prompt are its rows, and fork after each step."""
    batch, selection, width = group.batch, group.selection, group.width
    searches = {prompt: Beams(batch.settings, batch.limits[prompt], batch.stop[prompt]) for prompt in group.members}
    logits = group.prefill()
    state, fixed = group.state(row_keys(batch.seeds, 1) if batch.settings.do_sample else [])
    while logits is not None and not batch.cancelled:
        live = [prompt for prompt, beams in searches.items() if not beams.done]
        scores = np.zeros(len(group.all), np.float32)
        texts: list[list[int] | None] = [None] * len(group.all)
        for row in (row for row in group.rows if row // width in live):
            beam = searches[row // width].running[row % width]
            scores[row] = beam.score
            texts[row] = [*batch.prompts[row // width], *beam.tokens] if selection.host else []
        given = fixed | group.host.arrays(texts)
        packed, state = selection.candidates(logits, state, given, mx.array(scores))
        del logits
        group.run.evaluate(packed, *state.values())
        read = np.array(packed)
        parents, tokens, counts = list(group.all), np.zeros(len(group.all), np.int32), [0] * len(group.all)
        for prompt in live:
            beams, first = searches[prompt], prompt * width
            chosen = beams.step(*selection.ranked(read[prompt]))
            if not beams.done:
                parents[first : first + width] = [first + parent for parent in chosen]
                tokens[first : first + width] = [beam.tokens[-1] for beam in beams.running]
                counts[first : first + width] = [1] * width
        if not any(counts):
            break
        group.fork(parents)
        state = selection.follow(state, mx.array(parents), mx.array(tokens))
        logits = group.step(tokens[:, None], counts)
    yield from _told(batch, searches)


def _told(batch: Batch, searches: Mapping[int, Beams]) -> Generator[Step, None, None]:
    """The Results of beam searches, and their tokens as Steps."""
    each = batch.settings.num_return_sequences
    told: dict[int, Result] = {}
    for prompt, beams in searches.items():
        for place, text in enumerate(beams.results()):
            tokens = listed(text.tokens, text.logprobs)
            if tokens and tokens[-1].id in batch.settings.eos_token_id:
                tokens.pop()
            reason = STOP if text.ended else LENGTH if beams.done else CANCELLED
            told[prompt * each + place] = Result(tokens, reason, float(text.score))
    for place in range(max([1, *(len(result.tokens) for result in told.values())])):
        for text, result in told.items():
            batch.results[text] = result
            batch.finished[text] = place + 1 >= len(result.tokens)
        yield batch.step({text: result.tokens[place] for text, result in told.items() if place < len(result.tokens)})
