"""Control flow: branches and loops over programs, decided while a step is traced."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.registry import HostArray, OperatorError, op
from mlx_transmuter.ops.types import to_device

# A step has the iterations of a loop unrolled; no step could be compiled with more of them.
MAX_LOOP_ITERATIONS = 2**10


@op("If-1")
def if_(condition: HostArray, *, then_branch, else_branch):
    """The outputs of the branch for the condition, a scalar bool. ONNX If-1 to 25."""
    return tuple((then_branch if condition.item() else else_branch)())


@op("Loop-1")
def loop(trips: HostArray = None, condition: HostArray = None, *state, body, outputs):
    """The body repeated at most `trips` times and while its condition holds. ONNX Loop-1 to 25.

    body(iteration, condition, *state) gives the next condition, the next state, and one element of each scan output.
    The results are the last state and the scan outputs stacked along a new axis 0. Trips and conditions are host
    values.
    """
    continues: np.ndarray = np.array(True) if condition is None else condition
    values, scans, i = list(state), [], 0
    while continues.item() and (trips is None or i < trips.item()):
        if i == MAX_LOOP_ITERATIONS:
            raise OperatorError(f"a loop that goes on after {i} iterations", f"at most {MAX_LOOP_ITERATIONS}")
        continues, *results = body(np.array(i, np.int64), continues, *values)
        values = results[: len(state)]
        scans.append(results[len(state) :])
        i += 1
    return (*values, *_stack_scan_outputs(scans, outputs - len(state)))


def _stack_scan_outputs(
    scans: list[list[Any]], count: int, axes: list[int] | None = None, backward: list[int] | None = None
) -> list[Any]:
    """Returns the elements of all iterations of a loop as one array per scan output; without iterations, empty ones."""
    columns = []
    for i in range(count):
        column = [elements[i] for elements in scans]
        if backward and backward[i]:
            column = column[::-1]
        if not column:
            columns.append(mx.zeros((0,)))
        elif all(isinstance(x, np.ndarray) for x in column):
            columns.append(np.stack(column, axis=axes[i] if axes else 0))
        else:
            arrays = [to_device(x) if isinstance(x, np.ndarray) else x for x in column]
            columns.append(mx.stack(arrays, axis=axes[i] if axes else 0))
    return columns


@op("Scan-9")
def scan(
    *inputs,
    body,
    num_scan_inputs,
    scan_input_axes=None,
    scan_input_directions=None,
    scan_output_axes=None,
    scan_output_directions=None,
    outputs,
):
    """The body over the elements of the last num_scan_inputs inputs, with the others as its state. ONNX Scan-9 to 25.

    body(*state, *elements) gives the next state and one element of each scan output; axes and directions (1: backward)
    are the axis of the elements and their order.
    """
    count = len(inputs) - num_scan_inputs
    state, scanned = list(inputs[:count]), list(inputs[count:])
    axes = scan_input_axes or [0] * len(scanned)
    backward = scan_input_directions or [0] * len(scanned)
    scanned = [mx.moveaxis(x, axis, 0) for x, axis in zip(scanned, axes, strict=True)]
    length, scans = scanned[0].shape[0], []
    for i in range(length):
        elements = [element(x, length - 1 - i if back else i) for x, back in zip(scanned, backward, strict=True)]
        results = body(*state, *elements)
        state = results[:count]
        scans.append(results[count:])
    return (*state, *_stack_scan_outputs(scans, outputs - count, scan_output_axes, scan_output_directions))


@op("Scan-8")
def scan_8(lengths: HostArray, *inputs, body, num_scan_inputs, directions=None, outputs):
    """Scan-9 over axis 1 of each row of a batch, which is axis 0 of every input and result. ONNX Scan-8."""
    rows = []
    for row in range(inputs[-1].shape[0]):
        own = [element(x, row) for x in inputs]
        if lengths is not None:
            first = len(own) - num_scan_inputs
            own[first:] = [x[: int(lengths[row])] for x in own[first:]]
        rows.append(
            scan(*own, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, outputs=outputs)
        )
    return tuple(_stack_scan_outputs([list(row) for row in rows], outputs))
