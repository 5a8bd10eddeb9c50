"""Control flow: branches and loops over programs, decided while a step is traced."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import Host, op


@op("If-1")
def if_(condition: Host, *, then_branch, else_branch):
    """The outputs of the branch that condition, a scalar bool, chooses. ONNX If-1 to 25."""
    return tuple((then_branch if condition.item() else else_branch)())


@op("Loop-1")
def loop(trips: Host = None, condition: Host = None, *state, body):
    """The body over and over, at most `trips` times and while its condition holds. ONNX Loop-1 to 25.

    body(iteration, condition, *state) gives the next condition, the next state, and one element of each scan output. The
    results are the last state and the scan outputs stacked along a new axis 0. Trips and conditions are host values.
    """
    going = np.array(True) if condition is None else condition
    values, scans, i = list(state), [], 0
    while going.item() and (trips is None or i < trips.item()):
        going, *results = body(np.array(i, np.int64), going, *values)
        values = results[: len(state)]
        scans.append(results[len(state) :])
        i += 1
    return (*values, *(mx.stack(column) for column in zip(*scans, strict=True)))
