"""The guesses of a smaller model, which writes on in a run of its own and is set back where its guesses were wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.context import Assistant
from mlx_transmuter.generation.group import Group, read_in_parts
from mlx_transmuter.generation.guesses import Tree
from mlx_transmuter.generation.rows import Row
from mlx_transmuter.generation.state import State


class AssistantRun:
    """The guesses for a group of prompts: one path per row.

    The assistant chooses as the model would, with the same processors, state and random keys, from its own logits: so
    under sampling too a guess is right where the two agree, and an assistant that is the model itself is always right.
    """

    def __init__(self, assistant: Assistant, group: Group):
        self.assistant, self.group = assistant, group
        settings = group.batch.settings
        self.eos, self.least = frozenset(settings.eos_token_id), settings.assistant_confidence_threshold
        positions = assistant.decoder.max_positions
        self.total = [min(size, positions or size) for size in group.total]
        self.run = assistant.decoder.begin(self.total)

    def propose(
        self, rows: Mapping[int, Row], most: Mapping[int, int], deepest: Mapping[int, int], state: State, fixed: State
    ) -> dict[int, Tree]:
        """A path of guesses for each row: at most most[r] and deepest[r], none after one that the assistant gave less
        than assistant_confidence_threshold, and no eos."""
        trees = {row: Tree(text.text[-1]) for row, text in rows.items()}
        # A guess is chosen after the tokens before it were read, and the last one is not read.
        counts = {row: min(most[row], deepest[row], self.total[row] - len(text.text) + 1) for row, text in rows.items()}
        if self.run.largest is not None:  # more could not be taken back
            counts = {row: min(count, self.run.largest - 1) for row, count in counts.items()}
        self._set_back(rows)
        going = {row: list(text.text) for row, text in rows.items() if counts[row] > 0}
        logits = self._read(going) if going else None
        while logits is not None and going:
            texts = [going.get(row) for row in self.group.all]
            packed, state = self.assistant.selection.tokens(logits, state, fixed | self.group.host.arrays(texts))
            del logits
            self.run.evaluate(packed, *state.values())
            chosen = np.array(packed)
            for row, text in list(going.items()):
                token, sure = int(chosen[row, 0]), math.exp(float(chosen[row, 1:].view(np.float32)[0]))
                if token in self.eos or sure < self.least:
                    del going[row]
                    continue
                trees[row].add(len(trees[row]) - 1, token)
                text.append(token)
                if len(trees[row]) > counts[row]:
                    del going[row]
            logits = self.run.step(chosen[:, :1], [int(row in going) for row in self.group.all]) if going else None
        return trees

    def close(self) -> None:
        """Gives the run's memory back."""
        self.run.close()

    def _set_back(self, rows: Mapping[int, Row]) -> None:
        """Drops what the run has of wrong guesses. A text's last token is the model's own choice, so that what the run
        has beyond the token before it is wrong or not needed."""
        lengths = self.run.lengths.tolist()
        for row, text in rows.items():
            lengths[row] = min(lengths[row], len(text.text) - 1)
        self.run.back(lengths)

    def _read(self, texts: Mapping[int, list[int]]) -> mx.array | None:
        """The logits [rows, vocab] after the texts, of which the run reads what it lacks: at first the prompts, then
        the last token, and the last guess where all were right. None if the run was cancelled."""
        batch, lengths = self.group.batch, self.run.lengths.tolist()
        lacking = {row: text[lengths[row] :] for row, text in texts.items()}
        return read_in_parts(self.run, self.run.step, lacking, batch)
