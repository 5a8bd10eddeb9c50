"""Causal depthwise convolutions of com.microsoft, which carry their last inputs as a state from step to step."""

from itertools import pairwise

import mlx.core as mx

from mlx_transmuter.ops.functional.causal_conv import depthwise_causal_conv
from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.registry import HostArray, OperatorError, op

# The states of a window are pieces of a graph, one by one.
MAX_STATE_WINDOW = 4096


@op("com.microsoft.CausalConvWithState-1")
def causal_conv_with_state(
    x,
    weight,
    bias=None,
    past_state=None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    ndim: int = 1,
    state_channels_last: int = -1,
    state_length: int = 0,
    state_update_capacity: int = 0,
    state_window: int = 0,
):
    """The convolution of each channel with its past; and its last (taps - 1) · dilation inputs as the present state.

    x: [batch, channels, seq], or [batch, seq, *channels] where channels_last; weight: [channels, 1, taps]; bias:
    [channels]; past_state, zeros where absent: as x with the state's length in place of seq. With state_window w the
    states are [w, batch, …]: those after the last w tokens, zeros where there are fewer. com.microsoft
    CausalConvWithState-1.
    """
    if (
        ndim != 1
        or state_length
        or input_channels
        or input_channel_offset
        or state_channels_last >= 0
        or state_update_capacity
    ):
        raise OperatorError(
            "ndim above 1, or attributes that onnxruntime has on CUDA only",
            "one axis of tokens and a state of its own length",
        )
    past = element(past_state, -1) if state_window and past_state is not None else past_state

    def rows(a: mx.array) -> mx.array:
        return a.reshape(*a.shape[:2], -1) if channels_last else a.swapaxes(1, 2)

    def shaped(a: mx.array) -> mx.array:
        return a.reshape(*a.shape[:2], *x.shape[2:]) if channels_last else a.swapaxes(1, 2)

    past = None if past is None else rows(past)
    y, history = depthwise_causal_conv(rows(x), weight, bias, past, dilation=dilation, activation=activation)
    seq, total = y.shape[1], history.shape[1]
    length = total - seq
    if not state_window:
        return shaped(y), shaped(history[:, total - length :])
    if not 0 < state_window <= MAX_STATE_WINDOW:
        raise OperatorError(f"state_window {state_window}", f"at most {MAX_STATE_WINDOW}")
    zeros = mx.zeros_like(history[:, :length])
    ends = range(total - state_window + 1, total + 1)
    states = [shaped(history[:, end - length : end] if end > length else zeros) for end in ends]
    return shaped(y), mx.stack(states)


@op("com.microsoft.VarlenCausalConvWithState-1")
def varlen_causal_conv_with_state(
    x,
    weight,
    cumulative_sequence_length: HostArray,
    bias,
    initial_state,
    capture_count=None,
    kernel_delta=None,
    previous_mask=None,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
):
    """CausalConvWithState over sequences that lie one after another in x [tokens, channels].

    cumulative_sequence_length: [batch + 1], where each begins and the last ends; initial_state and the final state:
    [batch, channels, (taps - 1) · dilation]. com.microsoft VarlenCausalConvWithState-1.
    """
    if state_update_capacity or kernel_delta is not None:
        raise OperatorError("state updates or a dynamic kernel", "neither: onnxruntime has them on CUDA only")
    bounds = cumulative_sequence_length.tolist()
    outputs, states = [], []
    for row, (begin, end) in enumerate(pairwise(bounds)):
        past = initial_state[row : row + 1].swapaxes(1, 2)
        y, history = depthwise_causal_conv(
            x[None, begin:end], weight, bias, past, dilation=dilation, activation=activation
        )
        outputs.append(y[0])
        states.append(history[:, history.shape[1] - past.shape[1] :].swapaxes(1, 2))
    return mx.concatenate(outputs, axis=0), mx.concatenate(states, axis=0)
