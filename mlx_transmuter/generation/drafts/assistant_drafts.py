"""The guesses of a smaller model, which writes on in a run of its own and is set back where its guesses were wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.drafts.draft_tree import DraftTree
from mlx_transmuter.generation.generation_context import CompiledAssistant
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.row_group import RowGroup, prefill_in_chunks


class AssistantDrafter:
    """The guesses for a group of prompts: one path per row.

    The assistant chooses as the model would, with the same processors, state and random keys, from its own logits: so
    under sampling too a guess is right where the two agree, and an assistant that is the model itself is always right.
    """

    def __init__(self, assistant: CompiledAssistant, group: RowGroup):
        self.assistant, self.group = assistant, group
        settings = group.batch.settings
        self.eos_token_ids, self.confidence_threshold = (
            frozenset(settings.eos_token_id),
            settings.assistant_confidence_threshold,
        )
        positions = assistant.decoder.max_positions
        self.max_lengths = [min(size, positions or size) for size in group.max_lengths]
        self.session = assistant.decoder.begin_session(self.max_lengths)

    def propose(
        self,
        rows: Mapping[int, Row],
        max_nodes: Mapping[int, int],
        max_depths: Mapping[int, int],
        state: ProcessorState,
        fixed_state: ProcessorState,
    ) -> dict[int, DraftTree]:
        """A path of guesses for each row: at most most[r] and deepest[r], none after one that the assistant gave less
        than assistant_confidence_threshold, and no eos."""
        trees = {row: DraftTree(text.sequence[-1]) for row, text in rows.items()}
        # A guess is chosen after the tokens before it were read, and the last one is not read.
        counts = {
            row: min(max_nodes[row], max_depths[row], self.max_lengths[row] - len(text.sequence) + 1)
            for row, text in rows.items()
        }
        if self.session.max_step_tokens is not None:  # more could not be taken back
            counts = {row: min(count, self.session.max_step_tokens - 1) for row, count in counts.items()}
        self._truncate_rejected(rows)
        going = {row: list(text.sequence) for row, text in rows.items() if counts[row] > 0}
        logits = self._read_missing_tokens(going) if going else None
        while logits is not None and going:
            texts = [going.get(row) for row in self.group.all_rows]
            packed, state = self.assistant.selection.select_tokens(
                logits, state, fixed_state | self.group.host_inputs.arrays_for(texts)
            )
            del logits
            self.session.evaluate(packed, *state.values())
            chosen = np.array(packed)
            for row, text in list(going.items()):
                token, sure = int(chosen[row, 0]), math.exp(float(chosen[row, 1:].view(np.float32)[0]))
                if token in self.eos_token_ids or sure < self.confidence_threshold:
                    del going[row]
                    continue
                trees[row].add(len(trees[row]) - 1, token)
                text.append(token)
                if len(trees[row]) > counts[row]:
                    del going[row]
            logits = (
                self.session.step(chosen[:, :1], [int(row in going) for row in self.group.all_rows]) if going else None
            )
        return trees

    def close(self) -> None:
        """Gives the run's memory back."""
        self.session.close()

    def _truncate_rejected(self, rows: Mapping[int, Row]) -> None:
        """Drops what the run has of wrong guesses. A text's last token is the model's own choice, so that what the run
        has beyond the token before it is wrong or not needed."""
        lengths = self.session.lengths.tolist()
        for row, text in rows.items():
            lengths[row] = min(lengths[row], len(text.sequence) - 1)
        self.session.truncate(lengths)

    def _read_missing_tokens(self, sequences: Mapping[int, list[int]]) -> mx.array | None:
        """The logits [rows, vocab] after the texts, of which the run reads what it lacks: at first the prompts, then
        the last token, and the last guess where all were right. None if the run was cancelled."""
        batch, lengths = self.group.batch, self.session.lengths.tolist()
        lacking = {row: text[lengths[row] :] for row, text in sequences.items()}
        return prefill_in_chunks(self.session, self.session.step, lacking, batch)
