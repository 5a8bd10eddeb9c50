"""Recurrent layers of ONNX: RNN, GRU and LSTM, unrolled over time."""

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.functional.recurrent import Activation, LSTMParameters, run_recurrent_layer, split_biases
from mlx_transmuter.ops.onnx.activation import ACTIVATIONS_BY_OP_TYPE, ParametricActivation
from mlx_transmuter.ops.registry import OperatorError, op


def _affine(x: mx.array, *, alpha: float = 1.0, beta: float = 0.0) -> mx.array:
    return alpha * x + beta


def _scaled_tanh(x: mx.array, *, alpha: float = 1.0, beta: float = 1.0) -> mx.array:
    return alpha * mx.tanh(beta * x)


def _thresholded_relu(x: mx.array, *, alpha: float = 1.0) -> mx.array:
    """As the operator ThresholdedRelu, except that an x equal to alpha passes: ONNX defines the two differently."""
    return mx.where(x >= alpha, x, 0)


# The activations of recurrent layers by their lower-case names.
RNN_ACTIVATIONS: dict[str, ParametricActivation] = {
    **{
        name.lower(): ACTIVATIONS_BY_OP_TYPE[name]
        for name in ("Relu", "Tanh", "Sigmoid", "LeakyRelu", "HardSigmoid", "Elu", "Softsign", "Softplus")
    },
    "affine": ParametricActivation(_affine, ("alpha", "beta")),
    "scaledtanh": ParametricActivation(_scaled_tanh, ("alpha", "beta")),
    "thresholdedrelu": ParametricActivation(_thresholded_relu, ("alpha",)),
}


def resolve_activations(names, alphas, betas, clip) -> list[tuple[Activation, Activation]]:
    """Returns each activation by its name as (applied to what is clipped to ±clip, applied to x itself).

    alphas and betas go in order to the activations that take one. Raises OperatorError for an unknown name.
    """
    values = {"alpha": iter(alphas or ()), "beta": iter(betas or ())}
    functions = []
    for name in (n.lower() for n in names):
        if name not in RNN_ACTIVATIONS:
            raise OperatorError(f"the activation {name!r}", ", ".join(sorted(RNN_ACTIVATIONS)))
        activation = RNN_ACTIVATIONS[name]
        parameters = [next(values[parameter], None) for parameter in activation.parameters]
        function = activation.bind(parameters)
        functions.append((function if clip is None else _clipped(function, clip), function))
    return functions


def _clipped(function: Activation, clip: float) -> Activation:
    return lambda x: function(mx.clip(x, -clip, clip))


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

    def make_step(d):
        wb, rb = split_biases(b, d, 1, r.shape[-1], x.dtype)
        f, _ = functions[d]
        w_d, r_d = element(w, d).T, element(r, d).T
        return lambda xt, h: [f(xt @ w_d + h @ r_d + (wb + rb))]

    return run_recurrent_layer(
        x,
        make_step,
        hidden_size=r.shape[-1],
        initial_states=[initial_h],
        direction=direction,
        lengths=sequence_lens,
        batch_first=bool(layout),
    )[:outputs]


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

    def make_step(d):
        wz, wr, wh, rz, rr, rh = split_biases(b, d, 3, r.shape[-1], x.dtype)
        w_z, w_r, w_h = (part.T for part in mx.split(element(w, d), 3))
        r_z, r_r, r_h = (part.T for part in mx.split(element(r, d), 3))
        (f, _), (g, _) = functions[2 * d : 2 * d + 2]

        def step(xt, h):
            z = f(xt @ w_z + h @ r_z + (wz + rz))
            reset = f(xt @ w_r + h @ r_r + (wr + rr))
            inner = reset * (h @ r_h + rh) if linear_before_reset else (reset * h) @ r_h + rh
            return [(1 - z) * g(xt @ w_h + wh + inner) + z * h]

        return step

    return run_recurrent_layer(
        x,
        make_step,
        hidden_size=r.shape[-1],
        initial_states=[initial_h],
        direction=direction,
        lengths=sequence_lens,
        batch_first=bool(layout),
    )[:outputs]


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
    parameters = LSTMParameters(b, p, functions, r.shape[-1], bool(input_forget))

    def make_step(d):
        cell = parameters.cell(d, x.dtype)
        w_d, r_d = element(w, d).T, element(r, d).T
        return lambda xt, h, c: cell(xt @ w_d + h @ r_d + cell.bias, c)

    return run_recurrent_layer(
        x,
        make_step,
        hidden_size=r.shape[-1],
        initial_states=[initial_h, initial_c],
        direction=direction,
        lengths=sequence_lens,
        batch_first=bool(layout),
    )[:outputs]
