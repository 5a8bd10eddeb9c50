"""The prompts of a batch that share one run of the decoder: their parts, steps and forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch
from mlx_transmuter.generation.guesses import room
from mlx_transmuter.generation.host import HostView
from mlx_transmuter.generation.rows import Row, packs, prompt_parts
from mlx_transmuter.generation.state import State
from mlx_transmuter.sizes import stride


class Group:
    """A run of the decoder for the prompts `members`; the rows of the batch's other prompts only pad.

    Prompt i has the rows i × width to i × width + width - 1: its beams, or the texts sampled for it.
    """

    def __init__(self, batch: Batch, members: Sequence[int]):
        self.batch, self.members, self.width = batch, members, batch.settings.width
        decoder, self.selection = batch.gen.decoder, batch.gen.selection
        self.all = range(batch.gen.batch_size * self.width)
        self.rows = [row for row in self.all if row // self.width in members]
        self.lengths = [0] * len(self.all)
        total = [0] * len(self.all)
        for row in self.rows:
            size = len(batch.prompts[row // self.width]) + batch.limits[row // self.width]
            total[row] = min(size, decoder.max_positions or size)
        inputs = batch.inputs
        if self.width > 1:
            inputs = {name: mx.repeat(array, self.width, axis=0) for name, array in inputs.items()}
        if guesses := batch.gen.guesses:
            block = 1 if batch.prompt_cache is None else batch.prompt_cache.store.block
            new = [batch.limits[row // self.width] for row in self.all]
            total = [room(size, n, guesses, block) if size else 0 for size, n in zip(total, new, strict=True)]
            if batch.prompt_cache is None:
                # As many for each row, of few sizes, so that runs whose rows are pages share steps as other runs do. A
                # cache's pools have sizes of their own, and a limit.
                slots = stride(max(total))
                total = [slots if size else 0 for size in total]
        self.total = total
        if batch.prompt_cache is None:
            self.run = decoder.begin(total, inputs, paged=self.width > 1 or guesses > 0)
        else:
            prompts = [self._prompt(row) if total[row] and not row % self.width else [] for row in self.all]
            self.run = decoder.begin(total, inputs, store=batch.prompt_cache.store, prompts=prompts)
            self.lengths = self.run.lengths.tolist()
        self._texts: dict[int, Row] = {}
        self.host = HostView(batch.settings, batch.ctx.processors, decoder.vocab, batch.prompts, batch.sources)

    def prefill(self) -> mx.array | None:
        """The logits after the prompts, [rows, vocab]; None if the run was cancelled.

        A prompt runs in the first of its rows alone, without what a prompt cache has of it, and the others then
        continue it.
        """
        first = [prompt * self.width for prompt in self.members]
        prompts = {row: self._prompt(row)[self.lengths[row] :] for row in first}
        if lanes := self._lanes(prompts):
            last = self._in_lanes(prompts, lanes)
        else:
            last = read_in_parts(self.run, self.step, prompts, self.batch, self.batch.gen.decoder.prompts)
        if last is None or self.width == 1:
            return last
        parents = [row // self.width * self.width for row in self.all]
        self.fork(parents)
        return last[mx.array(parents)]

    def _lanes(self, prompts: Mapping[int, list[int]]) -> list[tuple[list[int], int]]:
        """The lanes to run whole prompts in, several in one, where that takes fewer tokens; else none."""
        if "packed" not in self.batch.gen.decoder.supports or self.batch.positions is not None or any(self.lengths):
            return []
        lengths = {row: len(prompt) for row, prompt in prompts.items()}
        return packs(lengths, len(self.all), _step_size(self.run, self.batch))

    def _in_lanes(self, prompts: Mapping[int, list[int]], lanes: Sequence[tuple[list[int], int]]) -> mx.array | None:
        """The logits after the prompts, from a step for each lane."""
        last = None
        for members, size in lanes:
            if self.batch.cancelled:
                return None
            logits = self.run.packed([prompts[row] if row in members else [] for row in self.all], size)
            for row in members:
                self.lengths[row] = len(prompts[row])
            ends = mx.array([row in members for row in self.all])[:, None]
            last = logits if last is None else mx.where(ends, logits, last)
            del logits
            self.run.evaluate(last)
        return last

    def step(self, tokens: np.ndarray | mx.array, counts: list[int]) -> mx.array:
        """The logits [rows, vocab] after tokens, int32 [rows, n], of which row r has the first counts[r]."""
        places = None
        if self.batch.positions is not None:
            places = self.batch.positions.at(self.lengths, tokens.shape[1], self.width)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return self.run.step(tokens, counts, places)

    def remember(self) -> None:
        """Leaves the rows' texts in the prompt cache, where there is one; of a beam search, the prompts."""
        if self.batch.prompt_cache is not None:
            texts = {row: self._texts[row].text if row in self._texts else self._prompt(row) for row in self.rows}
            self.run.keep([texts.get(row) for row in self.all])

    def guess(self, tokens: np.ndarray, sees: np.ndarray, depths: np.ndarray) -> mx.array:
        """The logits [rows, nodes, vocab] after each node of the rows' trees; `keep` then takes a path of each."""
        return self.run.draft(tokens, sees, depths)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """The tokens of row r go on along the nodes paths[r] of the tree that was guessed."""
        self.run.accept(paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def fork(self, parents: list[int]) -> None:
        """Row r continues row parents[r] from now on."""
        if parents != list(self.all):
            self.run.fork(parents)
            self.lengths = [self.lengths[parent] for parent in parents]

    def texts(self) -> dict[int, Row]:
        """The rows of the group's prompts, without new tokens."""
        batch = self.batch
        self._texts = {row: Row(self._prompt(row), batch.limits[row // self.width]) for row in self.rows}
        return self._texts

    def state(self, keys: list[mx.array]) -> tuple[State, State]:
        """What the processors know of the rows after their prompts, and the part of it that stays fixed."""
        batch = self.batch
        prompts = [batch.prompts[row // self.width] for row in self.all]
        sources = [batch.sources[row // self.width] for row in self.all]
        # Where positions end first, max_length still is what was asked for.
        ends = [len(prompt) + batch.ctx.new_tokens(len(prompt)) if prompt else 0 for prompt in prompts]
        return self.selection.begin(prompts, sources, ends, keys)

    def _prompt(self, row: int) -> list[int]:
        return self.batch.prompts[row // self.width]


def read_in_parts(
    run: Any,
    step: Callable[[np.ndarray, list[int]], mx.array],
    texts: Mapping[int, Sequence[int]],
    batch: Batch,
    how: str = "parts",
) -> mx.array | None:
    """The logits [rows, vocab] after the tokens texts[r] of some rows, which a run reads by `step` (`prompt_parts` says
    how); None if the batch was cancelled.

    Of the logits only those of a row's last token are kept, from the part in which it came.
    """
    rows = range(batch.gen.batch_size * batch.settings.width)
    start, last = 0, None
    for part in prompt_parts(max(map(len, texts.values())), _step_size(run, batch), how):
        if batch.cancelled:
            return None
        tokens = np.zeros((len(rows), part), np.int32)
        counts = [0] * len(rows)
        for row, text in texts.items():
            piece = text[start : start + part]
            tokens[row, : len(piece)] = piece
            counts[row] = len(piece)
        logits = step(tokens, counts)
        start += part
        ends = np.array([counts[row] > 0 and len(texts[row]) <= start for row in rows])
        if ends.any():
            last = logits if last is None else mx.where(mx.array(ends)[:, None], logits, last)
        del logits
        run.evaluate(*([] if last is None else [last]))
    assert last is not None  # each text has tokens
    return last


def _step_size(run: Any, batch: Batch) -> int:
    """The most tokens of a step of a prompt."""
    return min(batch.ctx.prefill_step_size, run.largest or batch.ctx.prefill_step_size)
