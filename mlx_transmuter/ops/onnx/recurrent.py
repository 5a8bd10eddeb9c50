"""Recurrent layers, unrolled over time."""

from collections.abc import Callable, Iterator

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError, op

# name -> (function of x, alpha, beta; default alpha; default beta), as ONNX's RNN lists them.
RNN_ACTIVATIONS: dict[str, tuple[Callable, float, float]] = {
    "relu": (lambda x, a, b: mx.maximum(x, 0), 0, 0),
    "tanh": (lambda x, a, b: mx.tanh(x), 0, 0),
    "sigmoid": (lambda x, a, b: mx.sigmoid(x), 0, 0),
    "affine": (lambda x, a, b: a * x + b, 1, 0),
    "leakyrelu": (lambda x, a, b: mx.where(x < 0, a * x, x), 0.01, 0),
    "thresholdedrelu": (lambda x, a, b: mx.where(x >= a, x, 0), 1, 0),
    "scaledtanh": (lambda x, a, b: a * mx.tanh(b * x), 1, 1),
    "hardsigmoid": (lambda x, a, b: mx.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: mx.where(x < 0, a * mx.expm1(x), x), 1, 0),
    "softsign": (lambda x, a, b: x / (1 + mx.abs(x)), 0, 0),
    "softplus": (lambda x, a, b: mx.logaddexp(x, 0), 0, 0),
}
ACTIVATIONS_WITH_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
ACTIVATIONS_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}


def resolve_activations(names, alphas, betas, clip) -> list[Callable]:
    """The activations by name; alphas and betas go in order to those that take one."""
    alpha, beta = iter(alphas or ()), iter(betas or ())
    found = []
    for name in (n.lower() for n in names):
        if name not in RNN_ACTIVATIONS:
            raise OperatorError(f"the activation {name!r}", ", ".join(sorted(RNN_ACTIVATIONS)))
        function, a, b = RNN_ACTIVATIONS[name]
        a = next(alpha, a) if name in ACTIVATIONS_WITH_ALPHA else a
        b = next(beta, b) if name in ACTIVATIONS_WITH_BETA else b
        found.append(lambda x, f=function, a=a, b=b: f(x if clip is None else mx.clip(x, -clip, clip), a, b))
    return found


def _backward_flags(direction: str) -> list[bool]:
    """Whether each direction runs backward."""
    try:
        return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    except KeyError:
        raise OperatorError(f"the direction {direction!r}", "forward, reverse or bidirectional") from None


def _run_direction(
    x, lengths, state: list[mx.array], backward: bool, step: Callable
) -> tuple[mx.array, list[mx.array]]:
    """step over time, x [time, batch, in]: the first state after each step [time, batch, hidden], and the last states.

    A row whose length is reached keeps its state and gives zeros; backward starts at each row's own last step.
    """
    outputs: dict[int, mx.array] = {}
    for t in _time_order(x.shape[0], backward):
        new = step(x[t], *state)
        if lengths is not None:
            live = (t < lengths)[:, None]
            outputs[t] = mx.where(live, new[0], 0)
            state = [mx.where(live, n, old) for n, old in zip(new, state, strict=True)]
        else:
            outputs[t], state = new[0], new
    if not outputs:
        return mx.zeros((0, *state[0].shape), state[0].dtype), state
    return mx.stack([outputs[t] for t in range(x.shape[0])]), state


def _time_order(count: int, backward: bool) -> Iterator[int]:
    return reversed(range(count)) if backward else iter(range(count))


def run_recurrent_layer(x, w, hidden_size, lengths, initials, direction, layout, outputs, make_step: Callable):
    """The results of a layer: all states [time, directions, batch, hidden], then the last [directions, ...].

    make(d) gives the step of direction d; layout 1 has the batch first everywhere.
    """
    if layout:
        x = x.swapaxes(0, 1)
        initials = [None if s is None else s.swapaxes(0, 1) for s in initials]
    zeros = mx.zeros((x.shape[1], hidden_size.shape[-1]), x.dtype)
    runs = [
        _run_direction(x, lengths, [zeros if s is None else s[d] for s in initials], backward, make_step(d))
        for d, backward in enumerate(_backward_flags(direction))
    ]
    y = mx.stack([states for states, _ in runs], axis=1)
    last = [mx.stack([state[i] for _, state in runs]) for i in range(len(initials))]
    if layout:
        y, last = y.transpose(2, 0, 1, 3), [s.swapaxes(0, 1) for s in last]
    results = (y, *last)
    return results[:outputs]


def split_biases(b, d: int, gates: int, hidden: int, dtype: mx.Dtype) -> list[mx.array]:
    """The biases of direction d: `gates` for the input, then `gates` for the state, [hidden] each."""
    if b is None:
        return [mx.zeros(hidden, dtype)] * (2 * gates)
    return list(mx.split(b[d], 2 * gates))


@op("RNN-7")
def rnn(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=("Tanh", "Tanh"),
    clip=None,
    direction="forward",
    hidden_size=None,
    layout=0,
    outputs=1,
):
    """h = f(x w + h r + b) over time. ONNX RNN-7, 14, 22.

    x [time, batch, in], w [directions, hidden, in], r [directions, hidden, hidden], b [directions, 2 * hidden],
    initial_h [directions, batch, hidden]; gives all h [time, directions, batch, hidden] and the last.
    """
    functions = resolve_activations(activations, activation_alpha, activation_beta, clip)

    def make(d):
        wb, rb = split_biases(b, d, 1, r.shape[-1], x.dtype)
        f = functions[d]
        return lambda xt, h: [f(xt @ w[d].T + h @ r[d].T + (wb + rb))]

    return run_recurrent_layer(x, w, r, sequence_lens, [initial_h], direction, layout, outputs, make)


@op("GRU-7")
def gru(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=("Sigmoid", "Tanh", "Sigmoid", "Tanh"),
    clip=None,
    direction="forward",
    hidden_size=None,
    layout=0,
    linear_before_reset=0,
    outputs=1,
):
    """Gated recurrent units, gates z, r, h. Shapes as RNN's with 3 * hidden rows and 6 * hidden biases.

    ONNX GRU-7, 14, 22.
    """
    functions = resolve_activations(activations, activation_alpha, activation_beta, clip)

    def make(d):
        wz, wr, wh, rz, rr, rh = split_biases(b, d, 3, r.shape[-1], x.dtype)
        w_z, w_r, w_h = (part.T for part in mx.split(w[d], 3))
        r_z, r_r, r_h = (part.T for part in mx.split(r[d], 3))
        f, g = functions[2 * d : 2 * d + 2]

        def step(xt, h):
            z = f(xt @ w_z + h @ r_z + (wz + rz))
            reset = f(xt @ w_r + h @ r_r + (wr + rr))
            inner = reset * (h @ r_h + rh) if linear_before_reset else (reset * h) @ r_h + rh
            return [(1 - z) * g(xt @ w_h + wh + inner) + z * h]

        return step

    return run_recurrent_layer(x, w, r, sequence_lens, [initial_h], direction, layout, outputs, make)


@op("LSTM-7")
def lstm(
    x,
    w,
    r,
    b=None,
    sequence_lens=None,
    initial_h=None,
    initial_c=None,
    p=None,
    *,
    activation_alpha=None,
    activation_beta=None,
    activations=("Sigmoid", "Tanh", "Tanh", "Sigmoid", "Tanh", "Tanh"),
    clip=None,
    direction="forward",
    hidden_size=None,
    input_forget=0,
    layout=0,
    outputs=1,
):
    """Long short-term memory, gates i, o, f, c. Shapes as RNN's with 4 * hidden rows and 8 * hidden biases.

    p [directions, 3 * hidden] are the peepholes of i, o and f. Gives all h, the last h and the last c. ONNX LSTM-7, 14,
    22.
    """
    functions = resolve_activations(activations, activation_alpha, activation_beta, clip)
    unclipped = resolve_activations(activations, activation_alpha, activation_beta, None)

    def make(d):
        biases = split_biases(b, d, 4, r.shape[-1], x.dtype)
        bias = mx.concatenate([biases[i] + biases[4 + i] for i in range(4)])
        zeros = mx.zeros(r.shape[-1], x.dtype)
        p_i, p_o, p_f = [zeros] * 3 if p is None else mx.split(p[d], 3)
        f, g = functions[3 * d : 3 * d + 2]
        # The clip is of the gates: onnxruntime, whose word it is, leaves the cell's way out as it is.
        (out,) = unclipped[3 * d + 2 : 3 * d + 3]

        def step(xt, h, c):
            gates = xt @ w[d].T + h @ r[d].T + bias
            i, o, forget, cell = mx.split(gates, 4, axis=-1)
            i = f(i + p_i * c)
            forget = 1 - i if input_forget else f(forget + p_f * c)
            c = forget * c + i * g(cell)
            return [f(o + p_o * c) * out(c), c]

        return step

    return run_recurrent_layer(x, w, r, sequence_lens, [initial_h, initial_c], direction, layout, outputs, make)
