"""Drafts of a smaller model, which decodes in a session of its own and is truncated where its drafts were rejected."""

from __future__ import annotations

import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.drafts.draft_tree import DraftTree
from mlx_transmuter.generation.generation_context import CompiledAssistant
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.prefill import prefill_in_chunks
from mlx_transmuter.generation.prompt_positions import clip_to_positions
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.row_group import RowGroup, read_selection


class AssistantDrafter:
    """The drafts of an assistant model for a group of prompts: one path per row.

    The assistant selects as the model would, with the same processors, state and random keys, from its own logits. So
    under sampling too a draft token is accepted where the two agree, and an assistant that is the model itself is
    always right.
    """

    def __init__(self, assistant: CompiledAssistant, group: RowGroup):
        self.assistant, self.group = assistant, group
        self.confidence_threshold = group.batch.settings.assistant_confidence_threshold
        max_positions = assistant.decoder.max_positions
        self.max_lengths = [clip_to_positions(length, max_positions) for length in group.max_lengths]
        self.session = assistant.decoder.begin_session(self.max_lengths)

    def propose(
        self,
        rows: Mapping[int, Row],
        max_nodes: Mapping[int, int],
        max_depths: Mapping[int, int],
        state: ProcessorState,
        fixed_state: ProcessorState,
    ) -> dict[int, DraftTree]:
        """Returns a path of draft tokens for each row r: at most max_nodes[r] and max_depths[r], no eos, and none after
        a token to which the assistant gives a probability below assistant_confidence_threshold."""
        trees = {index: DraftTree(row.token_ids[-1]) for index, row in rows.items()}
        limits = {
            index: self._draft_limit(index, row, min(max_nodes[index], max_depths[index]))
            for index, row in rows.items()
        }
        self._truncate_rejected(rows)
        drafting = {index: list(row.token_ids) for index, row in rows.items() if limits[index] > 0}
        logits = self._read_missing_tokens(drafting) if drafting else None
        while logits is not None:
            arrays = fixed_state | self.group.host_inputs.arrays_for([drafting.get(row) for row in self.group.all_rows])
            selected_tokens, state = self.assistant.selection.select_tokens(logits, state, arrays)
            del logits
            read = read_selection(self.session, selected_tokens, state)
            for index, sequence in list(drafting.items()):
                token, logprob = self.assistant.selection.read_token(read[index])
                if not self._is_drafted(rows[index], token, logprob):
                    del drafting[index]
                    continue
                trees[index].add(len(trees[index]) - 1, token)
                sequence.append(token)
                if len(trees[index]) > limits[index]:
                    del drafting[index]
            if not drafting:
                break
            logits = self.session.step(
                np.maximum(read[:, :1], 0), [int(row in drafting) for row in self.group.all_rows]
            )
        return trees

    def close(self) -> None:
        """Frees the memory of the session."""
        self.session.close()

    def _draft_limit(self, index: int, row: Row, limit: int) -> int:
        """Returns how many tokens to draft for a row: at most `limit`, and as the session allows."""
        # A token is drafted after those before it are read, and the last one is not read.
        limit = min(limit, self.max_lengths[index] - len(row.token_ids) + 1)
        if self.session.max_step_tokens is None:
            return limit
        return min(limit, self.session.max_step_tokens - 1)  # more could not be truncated again

    def _is_drafted(self, row: Row, token: int, logprob: float | None) -> bool:
        assert logprob is not None  # the assistant's selection computes them; NaN where the token is a ScoreFault
        return not row.stop_rules.is_eos(token) and math.exp(logprob) >= self.confidence_threshold

    def _truncate_rejected(self, rows: Mapping[int, Row]) -> None:
        """Drops the rejected drafts that the session has read. A row's last token is the model's own, so that whatever
        the session has beyond the token before it is rejected or not needed."""
        lengths = self.session.lengths.tolist()
        for index, row in rows.items():
            lengths[index] = min(lengths[index], len(row.token_ids) - 1)
        self.session.truncate(lengths)

    def _read_missing_tokens(self, sequences: Mapping[int, list[int]]) -> mx.array | None:
        """Returns the logits [rows, vocab] after the sequences, of which the session reads what it lacks: at first the
        prompts, then the last token, and the last draft token where all were accepted. None if the run was
        cancelled."""
        lengths = self.session.lengths.tolist()
        missing = {index: sequence[lengths[index] :] for index, sequence in sequences.items()}
        return prefill_in_chunks(self.session, self.session.step, missing, self.group.batch)
