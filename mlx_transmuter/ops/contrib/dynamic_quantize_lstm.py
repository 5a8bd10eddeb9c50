"""com.microsoft DynamicQuantizeLSTM: an LSTM whose products are of 8-bit integers, quantized as they come."""

import mlx.core as mx

from mlx_transmuter.ops.contrib.integer_products import dynamic_quantize_mat_mul
from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.functional.recurrent import LSTMParameters, run_recurrent_layer
from mlx_transmuter.ops.onnx.recurrent import resolve_activations
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

    The inputs of all steps are quantized together, the state of each step by itself. Scales and zero points:
    [directions], or [directions, 4 · hidden]. The gates are i, o, f, c; the other arguments as in LSTM. com.microsoft
    DynamicQuantizeLSTM-1.
    """
    hidden = r.shape[1]
    functions = resolve_activations(activations, activation_alpha, activation_beta, clip)
    parameters = LSTMParameters(b, p, functions, hidden, bool(input_forget))

    def by_direction(value: mx.array, d: int) -> mx.array:
        return element(value.reshape(w.shape[0], -1), d).reshape(-1 if value.ndim > 1 else ())

    # The products of the inputs for all directions side by side: a step takes its own slice.
    inputs = mx.concatenate(
        [
            dynamic_quantize_mat_mul(x, element(w, d), by_direction(w_scale, d), by_direction(w_zero_point, d))
            for d in range(w.shape[0])
        ],
        axis=-1,
    )

    def make_step(d: int):
        cell = parameters.cell(d, x.dtype)
        scale, zero_point = by_direction(r_scale, d), by_direction(r_zero_point, d)

        def step(xt: mx.array, h: mx.array, c: mx.array) -> list[mx.array]:
            gates = xt[:, 4 * hidden * d : 4 * hidden * (d + 1)] + cell.bias
            return cell(gates + dynamic_quantize_mat_mul(h, element(r, d), scale, zero_point), c)

        return step

    return run_recurrent_layer(
        inputs,
        make_step,
        hidden_size=hidden,
        initial_states=[initial_h, initial_c],
        direction=direction,
        lengths=sequence_lens,
    )[:outputs]
