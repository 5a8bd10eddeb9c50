"""The ranges that a walk knows integers to be in: never narrower than the integers, and enough that steps clip nothing."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.ops import OPERATORS
from mlx_transmuter.ops.functional import indexing
from mlx_transmuter.ops.indices import IntegerRange, range_of_array
from mlx_transmuter.program import Node
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.program_walk import ProgramWalk

SHAPE = (2, 3)
AXES, SIZES = np.array([1]), np.array([1, 2])
# For each operator with a rule, its constants after the inputs from the device, and its attributes.
CALLS: dict[str, tuple[int, list, dict]] = {
    **{name: (2, [], {}) for name in ("Add-7", "Sub-7", "Mul-7", "Max-8", "Min-8")},
    **{name: (1, [], {}) for name in ("Identity-1", "Squeeze-11", "Squeeze-13", "Flatten-9", "Transpose-1")},
    "Mod-10": (1, [np.array(5)], {}),
    "Clip-11": (3, [], {}),
    "Where-9": (2, [], {}),
    "Concat-4": (2, [], {"axis": 1}),
    "Cast-9": (1, [], {"to": 3}),
    "CastLike-15": (1, [], {}),
    "Reshape-5": (1, [np.array([3, 2])], {}),
    "Unsqueeze-11": (1, [], {"axes": [0]}),
    "Unsqueeze-13": (1, [AXES], {}),
    "Expand-8": (1, [np.array([2, 2, 3])], {}),
    "Tile-6": (1, [np.array([2, 1])], {}),
    "Slice-10": (1, [np.array([0]), np.array([2]), AXES], {}),
    "Split-2": (1, [], {"axis": 0}),
    "Split-13": (1, [], {"axis": 0}),
    "Split-18": (1, [], {"axis": 0}),
    "Gather-1": (1, [np.array([1, 0])], {}),
    "GatherElements-11": (1, [np.array([[1, 0, 1]])], {}),
    "GatherND-11": (1, [np.array([[1, 0]])], {}),
    "com.microsoft.GatherND-1": (1, [np.array([[1, 0]])], {}),
    "ReduceSum-11": (1, [], {"axes": [1]}),
    "ReduceSum-13": (1, [AXES], {}),
    "CumSum-11": (1, [np.array(1)], {"exclusive": 1}),
    "ArgMax-11": (1, [], {"axis": 1}),
    "ArgMin-11": (1, [], {"axis": 0}),
    "TopK-11": (1, [np.array([2])], {}),
}
# Whose integers come of what is no array of integers; tests of the steps go through them.
OTHERS = {"OneHot-9", "mlx.positions", "mlx.router", "mlx.dispatch"}
NUMBERS = st.integers(-40, 40) | st.sampled_from([2**31 - 1, -(2**31), 2**30, 255, 256, -129])


def integers_within(data, name: str) -> tuple[np.ndarray, IntegerRange]:
    low, high = sorted((data.draw(NUMBERS, f"{name}, one end"), data.draw(NUMBERS, f"{name}, the other")))
    cells = st.lists(st.integers(low, high), min_size=6, max_size=6)
    return np.array(data.draw(cells, name), np.int32).reshape(SHAPE), IntegerRange(low, high)


def call_node(
    name: str, inputs: dict[str, np.ndarray], ranges: dict[str, IntegerRange], constants: list
) -> ProgramWalk:
    """Returns the walk after a node over the inputs on the device, and then constants."""
    values: dict = {key: mx.array(value) for key, value in inputs.items()}
    values |= {f"constant{i}": value for i, value in enumerate(constants)}
    names = list(values)
    if name == "Where-9":
        values["condition"] = mx.array(np.arange(6).reshape(SHAPE) % 2 == 0)
        names = ["condition", *names]
    if name == "CastLike-15":
        values["like"] = mx.array(0, mx.uint8)
        names += ["like"]
    outputs = ("y0", "y1") if name.startswith(("Split", "TopK")) else ("y0",)
    walk = ProgramWalk(values, set(), {}, ranges=ranges)
    results = walk.run_node(Node(name, tuple(names), outputs, CALLS[name][2]))
    walk.values |= dict(zip(outputs, results, strict=True))
    return walk


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=40)
@given(data=st.data())
def test_integers_are_within_the_range_that_is_known(name, data):
    count, constants, _ = CALLS[name]
    drawn = {f"x{i}": integers_within(data, f"x{i}") for i in range(count)}
    known = data.draw(st.sets(st.sampled_from(sorted(drawn))), "inputs whose range is known")
    ranges = {key: drawn[key][1] for key in known}
    walk = call_node(name, {key: array for key, (array, _) in drawn.items()}, ranges, constants)
    for output in (key for key in walk.values if key.startswith("y")):
        actual, known_range = range_of_array(np.array(walk.values[output])), walk.range_of(output)
        assert actual is not None
        assert known_range is None or actual.is_within(*known_range)


def test_every_rule_is_tried():
    ruled = {name for name, operator in OPERATORS.items() if operator.range_rule}
    assert ruled == CALLS.keys() | OTHERS


RANGES = {
    "the ids of a table at an offset": ("Add-7", [(0, 9)], [np.array(2)], (2, 11)),
    "the tokens that a mask counts": ("ReduceSum-13", [(0, 1)], [AXES], (0, 3)),
    "their running count": ("CumSum-11", [(0, 1)], [np.array(1)], (0, 3)),
    "an upper bound alone": ("Clip-11", [None], [np.array(0), np.array(7)], (0, 7)),
    "a sum that may wrap around": ("Add-7", [(0, 2**31 - 1)], [np.array(2)], None),
}


@pytest.mark.parametrize("what", RANGES)
def test_what_is_known_of_integers(what):
    name, ranges, constants, expected = RANGES[what]
    known = {f"x{i}": IntegerRange(*one) for i, one in enumerate(ranges) if one}
    inputs = {f"x{i}": np.zeros(SHAPE, np.int32) for i in range(len(ranges))}
    actual = call_node(name, inputs, known, constants).range_of("y0")
    assert actual == (expected and IntegerRange(*expected))


COMMON = [
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "phi3",
    "qwen3_moe",
    "llama_genai",
    "qwen3_genai_qdq",
    "gpt2_ort",
    "llama_q4",
]


@pytest.mark.parametrize("name", COMMON)
def test_no_step_of_a_common_decoder_clips_an_index(loaded, monkeypatch, name):
    decoder, clipped = Decoder(loaded(name).decoder, 1), []

    def clip(array: mx.array, low: int, high: int) -> mx.array:
        clipped.append((array.shape, low, high))
        return mx.clip(array, low, high)

    monkeypatch.setattr(indexing, "_clip", clip)
    session = decoder.begin_session([12])
    for tokens in ([5, 6, 7, 8], [9], [10]):
        session.evaluate(session.step(np.array([tokens]), [len(tokens)]))
    assert not clipped
