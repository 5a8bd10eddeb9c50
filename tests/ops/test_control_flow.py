"""Branches, loops and sequences, on the host and on the device."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.module import ProgramModule


def float_values(*names):
    return tuple(Value(name, "float32", None) for name in names)


def int64_array(*numbers):
    return np.array(numbers, np.int64)


def make_module(nodes, inputs, outputs=("y",), constants=None):
    return ProgramModule(Program(float_values(*inputs), float_values(*outputs), nodes, constants or {}), {})


BRANCHES = {
    "then_branch": Program((), float_values("twice"), [Node("Add-7", ("x", "x"), ("twice",))]),
    "else_branch": Program((), float_values("none"), [Node("Sub-7", ("x", "x"), ("none",))]),
}


@pytest.mark.parametrize("taken", [True, False])
def test_only_the_branch_of_a_host_condition_runs(taken):
    chosen = make_module([Node("If-1", ("c",), ("y",), BRANCHES)], ("c", "x"))
    y = chosen(c=np.array(taken), x=mx.array([1.0, 2.0]))["y"]
    assert y.tolist() == ([2.0, 4.0] if taken else [0.0, 0.0])


def test_a_condition_known_only_in_the_step_raises():
    with pytest.raises(
        OperatorError, match=r"condition \('c'\) depending on values that are known only when the step runs"
    ):
        make_module([Node("If-1", ("c",), ("y",), BRANCHES)], ("c", "x"))(c=mx.array(True), x=mx.array([1.0]))


# y = x * 2 ** turns, the sums of each turn, and a size that the loop carries and reshapes by.
LOOP_BODY = Program(
    float_values("i", "going", "total", "size"),
    float_values("still", "next", "larger", "shown"),
    [
        Node("Identity-1", ("going",), ("still",)),
        Node("Add-7", ("total", "total"), ("next",)),
        Node("Add-7", ("size", "one"), ("larger",)),
        Node("Expand-8", ("i", "larger"), ("wide",)),
        Node("ReduceSum-13", ("wide",), ("shown",), {"keepdims": 0}),
    ],
)


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_a_loop_carries_values_and_stacks_outputs(trips):
    nodes = [Node("Loop-1", ("trips", "", "x", "none"), ("y", "last", "shown"), {"body": LOOP_BODY})]
    constants = {"trips": np.array(trips), "one": int64_array(1), "none": int64_array(0)}
    doubled = [Node("Loop-1", ("trips", "", "x"), ("y",), {"body": Program(
        float_values("i", "going", "total"), float_values("still", "next"),
        [Node("Identity-1", ("going",), ("still",)), Node("Add-7", ("total", "total"), ("next",))],
    )})]  # fmt: skip
    x = mx.array([1.0, 3.0])
    assert make_module(doubled, ("x",), ("y",), constants)(x=x)["y"].tolist() == [2.0**trips, 3 * 2.0**trips]
    hosted = make_module(nodes, ("x",), ("y", "last", "shown"), constants)(x=np.array([1.0, 3.0], np.float32))
    assert hosted["y"].tolist() == [2.0**trips, 3 * 2.0**trips]
    assert hosted["last"].tolist() == [trips]
    assert hosted["shown"].tolist() == [i * (i + 1) for i in range(trips)]


def test_a_loop_ends_when_its_condition_is_false():
    body = Program(
        float_values("i", "going", "total"),
        float_values("more", "next"),
        [Node("Add-7", ("total", "one"), ("next",)), Node("Less-9", ("next", "limit"), ("more",))],
    )
    constants = {
        "yes": np.array(True),
        "no": np.array(False),
        "one": int64_array(1),
        "limit": int64_array(5),
        "zero": int64_array(0),
    }
    for condition, last in (("yes", 5), ("no", 0)):
        loop = make_module([Node("Loop-1", ("", condition, "zero"), ("y",), {"body": body})], (), ("y",), constants)
        assert loop()["y"].tolist() == [last]


@pytest.mark.parametrize("backward", [0, 1])
def test_a_scan_runs_along_an_axis_in_either_direction(backward):
    body = Program(
        float_values("total", "element"),
        float_values("next", "shown"),
        [Node("Add-7", ("total", "element"), ("next",)), Node("Identity-1", ("next",), ("shown",))],
    )
    attrs = {"body": body, "num_scan_inputs": 1, "scan_input_axes": [1], "scan_input_directions": [backward]}
    attrs |= {"scan_output_axes": [1], "scan_output_directions": [backward]}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    scan = make_module([Node("Scan-9", ("start", "x"), ("last", "y"), attrs)], ("start", "x"), ("last", "y"))
    actual = scan(start=mx.zeros(2), x=mx.array(x))
    turned = x[:, ::-1] if backward else x
    sums = np.cumsum(turned, axis=1)
    assert actual["last"].tolist() == sums[:, -1].tolist()
    assert actual["y"].tolist() == (sums[:, ::-1] if backward else sums).tolist()


def test_sequences_hold_arrays():
    constants = {"axis": int64_array(0), "first": np.array(0), "last": np.array(-1), "sizes": int64_array(1, 2)}
    nodes = [
        Node("SplitToSequence-11", ("x", "sizes"), ("parts",)),
        Node("SequenceAt-11", ("parts", "last"), ("end",)),
        Node("SequenceInsert-11", ("parts", "end", "first"), ("three",)),
        Node("SequenceErase-11", ("three", "last"), ("two",)),
        Node("ConcatFromSequence-11", ("two",), ("y",), {"axis": 0}),
        Node("SequenceLength-11", ("three",), ("count",)),
    ]
    actual = make_module(nodes, ("x",), ("y", "count"), constants)(x=mx.array([1.0, 2.0, 3.0]))
    assert actual["y"].tolist() == [2.0, 3.0, 1.0]
    assert actual["count"].item() == 3


def test_optionals():
    nodes = [
        Node("Optional-15", ("x",), ("some",)),
        Node("Optional-15", (), ("none",)),
        Node("OptionalHasElement-15", ("some",), ("a",)),
        Node("OptionalHasElement-15", ("none",), ("b",)),
        Node("OptionalGetElement-15", ("some",), ("y",)),
    ]
    actual = make_module(nodes, ("x",), ("a", "b", "y"))(x=mx.array([4.0]))
    assert (actual["a"].item(), actual["b"].item(), actual["y"].item()) == (True, False, 4.0)
