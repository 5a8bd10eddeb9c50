"""Recurrent layers unrolled over time: the loop over steps and directions, and the cell of an LSTM."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.registry import OperatorError

Activation = Callable[[mx.array], mx.array]
# One step of one direction: the inputs [batch, in] and the states [batch, hidden] to the new states.
Step = Callable[..., list[mx.array]]


def run_recurrent_layer(
    x: mx.array,
    make_step: Callable[[int], Step],
    *,
    hidden_size: int,
    initial_states: Sequence[mx.array | None],
    direction: str,
    lengths: mx.array | None = None,
    batch_first: bool = False,
) -> tuple[mx.array, ...]:
    """Returns all states [time, directions, batch, hidden], then the last of each kind [directions, batch, hidden].

    x: [time, batch, in]; make_step(d) gives the step of direction d; initial_states: [directions, batch, hidden], zeros
    where None; lengths: integers [batch], the real steps of each row. batch_first: x and the results have the batch
    before all other axes. Raises OperatorError for a direction other than forward, reverse and bidirectional.
    """
    if batch_first:
        x = x.swapaxes(0, 1)
        initial_states = [None if state is None else state.swapaxes(0, 1) for state in initial_states]
    zeros = mx.zeros((x.shape[1], hidden_size), x.dtype)
    runs = [
        _run_direction(
            x, lengths, [zeros if s is None else element(s, d) for s in initial_states], backward, make_step(d)
        )
        for d, backward in enumerate(_backward_flags(direction))
    ]
    y = mx.stack([states for states, _ in runs], axis=1)
    last = [mx.stack([state[i] for _, state in runs]) for i in range(len(initial_states))]
    if batch_first:
        y, last = y.transpose(2, 0, 1, 3), [state.swapaxes(0, 1) for state in last]
    return y, *last


def _backward_flags(direction: str) -> list[bool]:
    """Returns for each direction whether it runs backward."""
    try:
        return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    except KeyError:
        raise OperatorError(f"the direction {direction!r}", "forward, reverse or bidirectional") from None


def _run_direction(
    x: mx.array, lengths: mx.array | None, state: list[mx.array], backward: bool, step: Step
) -> tuple[mx.array, list[mx.array]]:
    """Returns the first state after each step, [time, batch, hidden], and the last states.

    A row past its length keeps its states and gives zeros; backward starts at each row's own last step.
    """
    outputs: dict[int, mx.array] = {}
    for t in _time_order(x.shape[0], backward):
        new = step(x[t], *state)
        if lengths is not None:
            is_real = (t < lengths)[:, None]
            outputs[t] = mx.where(is_real, new[0], 0)
            state = [mx.where(is_real, n, old) for n, old in zip(new, state, strict=True)]
        else:
            outputs[t], state = new[0], new
    if not outputs:
        return mx.zeros((0, *state[0].shape), state[0].dtype), state
    return mx.stack([outputs[t] for t in range(x.shape[0])]), state


def _time_order(count: int, backward: bool) -> Iterator[int]:
    return reversed(range(count)) if backward else iter(range(count))


def split_biases(b: mx.array | None, d: int, gates: int, hidden: int, dtype: mx.Dtype) -> list[mx.array]:
    """Returns the biases of direction d: `gates` of the inputs, then `gates` of the states, [hidden] each."""
    if b is None:
        return [mx.zeros(hidden, dtype)] * (2 * gates)
    return list(mx.split(element(b, d), 2 * gates))


class LSTMCell(NamedTuple):
    """The cell of one direction: what turns the sums of its four gates into the new states.

    bias: [4 · hidden], of i, o, f and c; peepholes: those of i, o and f, [hidden] each. gate_activation is that of i, o
    and f, cell_activation that of c, output_activation that of the new cell state. Hochreiter & Schmidhuber 1997, Gers
    & Schmidhuber 2000.
    """

    bias: mx.array
    peepholes: tuple[mx.array, mx.array, mx.array]
    gate_activation: Activation
    cell_activation: Activation
    output_activation: Activation
    input_forget: bool

    def __call__(self, gates: mx.array, c: mx.array) -> list[mx.array]:
        """Returns the new h and c from the biased sums of the gates [batch, 4 · hidden] and the old c."""
        i, o, forget, cell = mx.split(gates, 4, axis=-1)
        p_i, p_o, p_f = self.peepholes
        i = self.gate_activation(i + p_i * c)
        forget = 1 - i if self.input_forget else self.gate_activation(forget + p_f * c)
        c = forget * c + i * self.cell_activation(cell)
        return [self.gate_activation(o + p_o * c) * self.output_activation(c), c]


class LSTMParameters(NamedTuple):
    """The parameters of an LSTM's cells: biases [directions, 8 · hidden], peepholes [directions, 3 · hidden].

    activations: three per direction, each as (with the clip of the attribute, without it).
    """

    biases: mx.array | None
    peepholes: mx.array | None
    activations: list[tuple[Activation, Activation]]
    hidden_size: int
    input_forget: bool

    def cell(self, d: int, dtype: mx.Dtype) -> LSTMCell:
        """Returns the cell of direction d."""
        biases = split_biases(self.biases, d, 4, self.hidden_size, dtype)
        zeros = mx.zeros(self.hidden_size, dtype)
        p_i, p_o, p_f = [zeros] * 3 if self.peepholes is None else mx.split(element(self.peepholes, d), 3)
        (gate, _), (cell, _), (_, output) = self.activations[3 * d : 3 * d + 3]
        return LSTMCell(
            bias=mx.concatenate([biases[i] + biases[4 + i] for i in range(4)]),
            peepholes=(p_i, p_o, p_f),
            gate_activation=gate,
            cell_activation=cell,
            # As in onnxruntime, the clip is of the gates: the cell's output is not clipped.
            output_activation=output,
            input_forget=self.input_forget,
        )
