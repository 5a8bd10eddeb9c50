"""com.microsoft DynamicQuantizeLSTM: an LSTM whose products are of 8-bit integers, quantised as they come."""

import mlx.core as mx

from mlx_transmuter.ops.contrib.integer_products import dynamic_quantize_mat_mul
from mlx_transmuter.ops.onnx.recurrent import resolve_activations, run_recurrent_layer, split_biases
from mlx_transmuter.ops.registry import op


@op("com.microsoft.DynamicQuantizeLSTM-1")
def dynamic_quantize_lstm(
    x,
    w,
    r,
    b,
    sequence_lens,
    initial_h,
    initial_c,
    p,
    w_scale,
    w_zero_point,
    r_scale,
    r_zero_point,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: tuple[str, ...] = ("Sigmoid", "Tanh", "Tanh", "Sigmoid", "Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    outputs: int = 1,
):
    """ONNX's LSTM with w [directions, in, 4 · hidden] and r [directions, hidden, 4 · hidden] in 8 bits.

    The inputs of all steps are quantised together, the state of each step by itself. Scales and zero points:
    [directions], or [directions, 4 · hidden]. The gates are i, o, f, c; the other arguments as in LSTM. com.microsoft
    DynamicQuantizeLSTM-1.
    """
    functions = resolve_activations(activations, activation_alpha, activation_beta, clip)
    hidden = r.shape[1]

    def by_direction(value: mx.array, d: int) -> mx.array:
        return value.reshape(w.shape[0], -1)[d].reshape(-1 if value.ndim > 1 else ())

    # The inputs' products for all directions side by side, so that a step finds its own among them.
    inputs = mx.concatenate(
        [
            dynamic_quantize_mat_mul(x, w[d], by_direction(w_scale, d), by_direction(w_zero_point, d))
            for d in range(w.shape[0])
        ],
        axis=-1,
    )

    def make(d: int):
        biases = split_biases(b, d, 4, hidden, x.dtype)
        bias = mx.concatenate([biases[i] + biases[4 + i] for i in range(4)])
        p_i, p_o, p_f = [mx.zeros(hidden)] * 3 if p is None else mx.split(p[d], 3)
        f, g, out = functions[3 * d : 3 * d + 3]
        scale, zero_point = by_direction(r_scale, d), by_direction(r_zero_point, d)

        def step(xt: mx.array, h: mx.array, c: mx.array) -> list[mx.array]:
            gates = xt[:, 4 * hidden * d : 4 * hidden * (d + 1)] + bias
            gates = gates + dynamic_quantize_mat_mul(h, r[d], scale, zero_point)
            i, o, forget, cell = mx.split(gates, 4, axis=-1)
            i = f(i + p_i * c)
            forget = 1 - i if input_forget else f(forget + p_f * c)
            c = forget * c + i * g(cell)
            return [f(o + p_o * c) * out(c), c]

        return step

    state = mx.zeros((w.shape[0], 1, hidden))  # _layer reads the width of the states from its last axis
    return run_recurrent_layer(inputs, w, state, sequence_lens, [initial_h, initial_c], direction, 0, outputs, make)
