"""Plain decoding, greedy and sampled: one token per row and step; a step may be submitted before the token before it is
read."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import CacheFullError
from mlx_transmuter.generation.batch import StepOutput
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.row_group import RowGroup


def decode_tokens(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Decodes the rows of a group one token per step, greedy or sampled."""
    batch, read_token = group.batch, group.selection.read_token
    rows = group.make_rows()
    logits = group.prefill()
    keys = row_random_keys(batch.seeds, group.rows_per_prompt) if batch.settings.do_sample else []
    decoding = _TokenDecoding(group, rows, *group.initial_state(keys))
    selected_tokens = None if logits is None else decoding.select(logits)
    del logits
    while selected_tokens is not None:
        following = None
        if decoding.runs_ahead and any(counts := decoding.continuing_rows(unread=1)):
            with suppress(CacheFullError):  # not before this token is read: it may be the last of a row
                following = decoding.select(group.step(mx.maximum(selected_tokens[:, :1], 0), counts))
        host_tokens = np.array(selected_tokens)
        yield batch.append_tokens(rows, {row: read_token(host_tokens[row]) for row in rows})
        if batch.cancelled or not any(counts := decoding.continuing_rows(unread=0)):
            break
        if following is None:
            following = decoding.select(group.step(np.maximum(host_tokens[:, :1], 0), counts))
        selected_tokens = following
    for index, row in rows.items():
        batch.results[index] = row.to_result()


@dataclass
class _TokenDecoding:
    """The rows of a group that get one token per step, with the state of their processors."""

    group: RowGroup
    rows: Mapping[int, Row]
    state: ProcessorState
    fixed: ProcessorState

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is submitted before the token before it is read: the selection needs nothing of the host."""
        return self.group.session.runs_ahead and not self.group.selection.host_names

    def select(self, logits: mx.array) -> mx.array:
        """Submits the selection of the rows' next tokens, and waits for it unless steps run ahead."""
        group = self.group
        sequences = [
            self.rows[row].token_ids if row in self.rows and self.rows[row].is_live else None for row in group.all_rows
        ]
        arrays = self.fixed | group.host_inputs.arrays_for(sequences)
        selected_tokens, self.state = group.selection.select_tokens(logits, self.state, arrays)
        del logits
        group.session.evaluate(selected_tokens, *self.state.values(), wait=not self.runs_ahead)
        return selected_tokens

    def continuing_rows(self, unread: int) -> list[int]:
        """Returns 1 for each row that gets a token after `unread` more, else 0."""
        return [
            int(row in self.rows and self.rows[row].is_live and self.rows[row].remaining_tokens > unread)
            for row in self.group.all_rows
        ]
