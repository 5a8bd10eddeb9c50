"""The registry: what an operator's signature says of its inputs, and the values that a node gives them."""

import pytest

from mlx_transmuter.ops import OPERATORS, OperatorError, bind_inputs
from mlx_transmuter.program import Node


def test_bind_names_the_inputs_of_a_node_and_leaves_out_absent_ones():
    node = Node("mlx.attention", ("q", "k", "v", "keys", "", "heads", "mask"), ("out", "keys'"))
    assert bind_inputs(node) == {
        "q": "q",
        "k": "k",
        "v": "v",
        "key_pool": "keys",
        "head_index": "heads",
        "mask": "mask",
    }


def test_bind_numbers_the_variadic_inputs():
    operator = OPERATORS["Concat-4"]
    node = Node("Concat-4", ("a", "b"), ("c",))
    assert operator.bind(node) == {f"{operator.variadic_name}[0]": "a", f"{operator.variadic_name}[1]": "b"}


def test_the_number_of_an_input_follows_from_its_name():
    operator = OPERATORS["mlx.attention"]
    for number, name in enumerate(operator.input_names):
        assert operator.input_number(name) == number
        assert operator.input_name(number) == name
    with pytest.raises(ValueError, match="not in tuple"):
        operator.input_number("weights")


def test_input_counts_are_checked():
    operator = OPERATORS["Gather-1"]
    operator.check_input_count(Node("Gather-1", ("x", "i"), ("y",)))
    for inputs in (("x",), ("x", "i", "j")):
        with pytest.raises(OperatorError) as error:
            operator.check_input_count(Node("Gather-1", inputs, ("y",)))
        assert error.value.found == f"{len(inputs)} inputs"
    OPERATORS["Concat-4"].check_input_count(Node("Concat-4", tuple("abcdef"), ("y",)))


def test_layer_inputs_and_rowwise_operators():
    layers = {name: operator.layer_input for name, operator in OPERATORS.items() if operator.layer_input}
    assert layers == {
        "mlx.linear": "layer",
        "mlx.embedding": "table",
        "mlx.as_linear": "table",
        "mlx.switch_linear": "layer",
    }
    rowwise = {name for name, operator in OPERATORS.items() if operator.is_rowwise}
    assert rowwise == {"mlx.linear", "mlx.as_linear", "mlx.rms_norm", "mlx.activate", "mlx.gate"}
