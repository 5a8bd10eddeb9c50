"""Indices out of range: no operator reads or writes outside an array, on the host or on the device, compiled or not.

The arrays that an operator indexes lie in the middle of larger buffers of garbage, so that an index out of range would
meet garbage. What it must give is what the nearest index in range gives.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_transmuter.ops as ops_package
from mlx_transmuter.ops import OPERATORS, OperatorError
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.mlx.switch_linear import SwitchLinear

PADDING = 64  # elements of garbage before and after an array
INT32 = np.iinfo(np.int32)


class BoundsCase(NamedTuple):
    """The inputs of an operator by name, its attributes, and the least and the largest number in range of each input
    that is an index; None where numbers out of range give something else than the nearest in range.

    An array of floats is put among garbage, a function makes an input of a function that puts arrays there.
    """

    inputs: dict[str, Any]
    attributes: dict[str, Any]
    ranges: dict[str, tuple[int, int] | None]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def integers(*values) -> np.ndarray:
    return np.array(values, np.int32)


TABLE = floats(6, 4)
ROWS = {"weight": floats(7, 4), "indices": integers(1, 2, 0)}
ATTENTION = {"query": floats(2, 1, 16), "key": floats(2, 1, 16), "value": floats(2, 1, 16)}
BUFFERS = {"past_key": floats(2, 2, 6, 8), "past_value": floats(2, 2, 6, 8)}
GROUPED = {"query": floats(2, 2, 32), "key": floats(2, 2, 16), "value": floats(2, 2, 16), **BUFFERS}
EMBEDDINGS = {"word_embedding": TABLE, "position_embedding": floats(5, 4), "segment_embedding": floats(3, 4)}


def codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 256, shape).astype(np.uint8)


def embedding_layer(guarded: Callable[[np.ndarray], mx.array]) -> nn.Module:
    layer = nn.Embedding(1, 1)
    layer.weight = guarded(TABLE)
    return layer


def switch_layer(guarded: Callable[[np.ndarray], mx.array]) -> nn.Module:
    layer = SwitchLinear(1, 1, 1, bias=True)
    layer.weight, layer.bias = guarded(floats(3, 2, 4)), guarded(floats(3, 2))
    return layer


CASES: dict[str, BoundsCase] = {
    "Gather-1": BoundsCase({"x": floats(4, 5), "indices": integers([1, 0], [4, 2])}, {"axis": 1}, {"indices": (-5, 4)}),
    "GatherElements-11": BoundsCase(
        {"x": floats(4, 5), "indices": integers([1, 0, 2])}, {"axis": 0}, {"indices": (-4, 3)}
    ),
    "GatherND-11": BoundsCase(
        {"x": floats(2, 3, 3), "indices": integers([[1, 0]], [[2, 2]])}, {"batch_dims": 1}, {"indices": (-3, 2)}
    ),
    "com.microsoft.GatherND-1": BoundsCase(
        {"x": floats(3, 3, 4), "indices": integers([1, 0], [2, 2])}, {}, {"indices": (-3, 2)}
    ),
    "MaxUnpool-9": BoundsCase(
        {"x": floats(1, 1, 1, 1), "indices": integers([[[[2]]]])},
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"indices": (-4, 3)},
    ),
    "NegativeLogLikelihoodLoss-12": BoundsCase(
        {"x": floats(3, 5), "target": integers(0, 4, 2), "weight": floats(5)},
        {"reduction": "none"},
        {"target": (-5, 4)},
    ),
    "ReverseSequence-10": BoundsCase(
        {"x": floats(4, 3, 2), "sequence_lens": integers(1, 4, 2)}, {}, {"sequence_lens": (0, 4)}
    ),
    "RotaryEmbedding-23": BoundsCase(
        {
            "x": floats(1, 3, 8),
            "cos_cache": floats(6, 4),
            "sin_cache": floats(6, 4),
            "position_ids": integers([0, 1, 2]),
        },
        {"num_heads": 1},
        {"position_ids": (0, 5)},
    ),
    "com.microsoft.RotaryEmbedding-1": BoundsCase(
        {
            "x": floats(1, 3, 8),
            "position_ids": integers([0, 1, 2]),
            "cos_cache": floats(6, 4),
            "sin_cache": floats(6, 4),
        },
        {"num_heads": 1},
        {"position_ids": (0, 5)},
    ),
    "com.microsoft.MRotaryEmbedding-1": BoundsCase(
        {
            "x": floats(1, 2, 8),
            "position_ids": integers([[0, 1]], [[1, 2]], [[2, 3]]),
            "cos_cache": floats(6, 4),
            "sin_cache": floats(6, 4),
        },
        {"num_heads": 1, "mrope_section": [2, 1, 1]},
        {"position_ids": (0, 5)},
    ),
    **{
        name: BoundsCase(
            {"x": floats(4, 3), "indices": integers([1, 3, 0]), "updates": floats(1, 3)},
            {"axis": 0, **attributes},
            {"indices": (-4, 3)},
        )
        for name, attributes in (("Scatter-9", {}), ("ScatterElements-11", {"reduction": "add"}))
    },
    "ScatterND-11": BoundsCase(
        {"x": floats(3, 3, 2), "indices": integers([1, 2], [0, 1]), "updates": floats(2, 2)},
        {"reduction": "max"},
        {"indices": (-3, 2)},
    ),
    "TensorScatter-24": BoundsCase(
        {"x": floats(2, 2, 6, 2), "updates": floats(2, 2, 2, 2), "write_indices": integers(1, 3)},
        {},
        {"write_indices": (0, 4)},
    ),
    **{
        name: BoundsCase(
            {
                **ATTENTION,
                **BUFFERS,
                "past_sequence_length": integers(3),
                "cache_indirection": integers([[0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]),
            },
            {"num_heads": 2, **attributes},
            {"past_sequence_length": (0, 5), "cache_indirection": (0, 1)},
        )
        for name, attributes in (
            ("com.microsoft.MultiHeadAttention-1", {}),
            ("com.microsoft.DecoderMaskedMultiHeadAttention-1", {"past_present_share_buffer": 1}),
        )
    },
    "com.microsoft.EmbedLayerNormalization-1": BoundsCase(
        {
            "input_ids": integers([1, 5, 0]),
            "segment_ids": integers([0, 1, 2]),
            **EMBEDDINGS,
            "gamma": floats(4),
            "beta": floats(4),
            "position_ids": integers([0, 1, 4]),
        },
        {},
        {"input_ids": (0, 5), "segment_ids": (0, 2), "position_ids": (0, 4)},
    ),
    "com.microsoft.QEmbedLayerNormalization-1": BoundsCase(
        {
            "input_ids": integers([1, 5, 0]),
            "segment_ids": integers([0, 1, 2]),
            "word_embedding": codes(6, 4),
            "position_embedding": codes(5, 4),
            "segment_embedding": codes(3, 4),
            "gamma": codes(4),
            "beta": codes(4),
            "mask": integers([1, 1, 1]),
            **{f"{name}_scale": np.float32(0.5) for name in (*EMBEDDINGS, "gamma", "beta")},
            **{f"{name}_zero_point": np.uint8(7) for name in (*EMBEDDINGS, "gamma", "beta")},
        },
        {},
        {"input_ids": (0, 5), "segment_ids": (0, 2)},
    ),
    "com.microsoft.GatherBlockQuantized-1": BoundsCase(
        {"data": codes(6, 16), "indices": integers(1, 5, 0), "scales": floats(6, 2)},
        {"block_size": 16},
        {"indices": None},
    ),
    "com.microsoft.GroupQueryAttention-1": BoundsCase(
        {**GROUPED, "seqlens_k": integers(3, 5), "cos_cache": floats(9, 4), "sin_cache": floats(9, 4)},
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        {"seqlens_k": (1, 5)},
    ),
    "com.microsoft.GroupQueryAttention-1 by position_ids": BoundsCase(
        {
            **GROUPED,
            "seqlens_k": integers(3, 5),
            "cos_cache": floats(9, 4),
            "sin_cache": floats(9, 4),
            "position_ids": integers([1, 2], [3, 4]),
        },
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        {"position_ids": (0, 8)},
    ),
    "com.microsoft.GroupQueryAttention-1 by query_seqlens": BoundsCase(
        {
            **GROUPED,
            "seqlens_k": integers(3, 5),
            "cos_cache": floats(9, 4),
            "sin_cache": floats(9, 4),
            "query_seqlens": integers(1, 2),
        },
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        {"seqlens_k": None, "query_seqlens": None},
    ),
    "com.microsoft.MatMulNBits-1": BoundsCase(
        {"a": floats(2, 32), "b": codes(3, 2, 8), "scales": floats(3, 2), "g_idx": np.arange(32, dtype=np.int32) // 16},
        {"K": 32, "N": 3, "block_size": 16},
        {"g_idx": (-2, 1)},
    ),
    "com.microsoft.PagedAttention-1": BoundsCase(
        {
            "query": floats(3, 16),
            "key": floats(3, 16),
            "value": floats(3, 16),
            "key_cache": floats(4, 2, 2, 8),
            "value_cache": floats(4, 2, 2, 8),
            "cumulative_sequence_length": integers(0, 1, 3),
            "past_seqlens": integers(2, 1),
            "block_table": integers([0, 1], [2, 3]),
            "cos_cache": floats(9, 4),
            "sin_cache": floats(9, 4),
        },
        {"kv_num_heads": 2, "num_heads": 2, "do_rotary": 1},
        {"cumulative_sequence_length": None, "past_seqlens": None, "block_table": None},
    ),
    "com.microsoft.PagedAttention-1 by slot_mapping": BoundsCase(
        {
            "query": floats(3, 16),
            "key": floats(3, 16),
            "value": floats(3, 16),
            "key_cache": floats(4, 2, 2, 8),
            "value_cache": floats(4, 2, 2, 8),
            "cumulative_sequence_length": integers(0, 1, 3),
            "past_seqlens": integers(2, 1),
            "block_table": integers([0, 1], [2, 3]),
            "slot_mapping": integers(2, 5, 6),
        },
        {"kv_num_heads": 2, "num_heads": 2},
        {"slot_mapping": None},
    ),
    "com.microsoft.SparseAttention-1": BoundsCase(
        {
            **GROUPED,
            "block_row_indices": np.array([[0, 1, 2, 3]]),
            "block_col_indices": np.array([[0, 1, 2]]),
            "total_sequence_length": integers(5),
            "key_total_sequence_lengths": integers(3, 5),
            "cos_cache": floats(9, 4),
            "sin_cache": floats(9, 4),
        },
        {"num_heads": 4, "kv_num_heads": 2, "sparse_block_size": 2, "do_rotary": 1},
        {"key_total_sequence_lengths": (2, 6)},
    ),
    "com.microsoft.TorchEmbedding-1": BoundsCase(ROWS, {}, {"indices": (-7, 6)}),
    "mlx.embedding": BoundsCase({"ids": integers([1, 5, 0]), "table": embedding_layer}, {}, {"ids": (-6, 5)}),
    "mlx.last": BoundsCase(
        {"x": floats(2, 5, 3), "logit_indices": integers([1, 4], [0, 2])}, {}, {"logit_indices": (0, 4)}
    ),
    "mlx.switch_linear": BoundsCase(
        {"x": floats(2, 1, 1, 4), "layer": switch_layer, "experts": integers([0, 2], [1, 0])}, {}, {"experts": (0, 2)}
    ),
}
INDEX_INPUTS = [(case, name) for case in CASES for name in CASES[case].ranges]
# Lengths on the device that no index input declares, because they are compared and subtracted, never an index.
UNDECLARED = {("com.microsoft.GroupQueryAttention-1 by query_seqlens", "query_seqlens")}


def among(garbage: float) -> Callable[[np.ndarray], mx.array]:
    """Returns a function that gives an array as a view of the middle of a buffer of garbage."""

    def guarded(array: np.ndarray) -> mx.array:
        array = np.asarray(array)
        filler = np.full(PADDING, garbage).astype(array.dtype)
        buffer = mx.array(np.concatenate([filler, array.reshape(-1), filler]))
        mx.eval(buffer)
        view = buffer[PADDING : PADDING + array.size].reshape(array.shape)
        mx.eval(view)
        return view

    return guarded


def run(name: str, changed: dict[str, np.ndarray], garbage: float, compiled: bool) -> list[np.ndarray]:
    """Returns the outputs of a case whose indices are `changed`."""
    case, operator = CASES[name], OPERATORS[name.partition(" ")[0]]
    guarded = among(garbage)
    host = {operator.input_names[number] for number in operator.host_inputs}
    inputs = {
        key: value(guarded) if callable(value) else guarded(value)
        for key, value in case.inputs.items()
        if key not in changed and key not in host
    } | {key: value for key, value in case.inputs.items() if key in host}

    def call(indices: dict[str, mx.array]) -> list[mx.array]:
        results = operator.function(**inputs, **indices, **case.attributes)
        return [array for array in (results if isinstance(results, tuple) else (results,)) if array is not None]

    outputs = (mx.compile(call) if compiled else call)({key: mx.array(value) for key, value in changed.items()})
    mx.eval(outputs)
    return [np.array(output) for output in outputs]


def numbers_outside(name: str, key: str) -> list[np.ndarray]:
    """Returns the indices of a case with numbers out of range: just so, in the garbage, and far away."""
    base, limits = CASES[name].inputs[key], CASES[name].ranges[key] or (0, int(CASES[name].inputs[key].max()))
    low, high = limits
    near = [high + 1, low - 1, high + 2, low - 2, high + 7, low - 5]
    far = [10**7, -(10**7), INT32.max, INT32.min, INT32.max - 1, INT32.min + 1]
    arrays = []
    for numbers in (near, far):
        for shift in range(len(numbers)):
            changed = np.resize(np.roll(numbers, shift), base.shape).astype(np.int32)
            arrays.append(changed)
            arrays.append(np.where(np.arange(base.size).reshape(base.shape) % 2 == shift % 2, changed, base))
    return arrays


def test_every_operator_with_indices_is_here():
    declared = {
        (name, operator.input_names[number]) for name, operator in OPERATORS.items() for number in operator.index_inputs
    }
    assert {(case.partition(" ")[0], key) for case, key in INDEX_INPUTS if (case, key) not in UNDECLARED} == declared


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="Metal may answer otherwise")
def test_an_index_out_of_range_would_meet_the_garbage():
    assert np.array(mx.take(among(7e3)(floats(4, 4)), mx.array([4, 5]), axis=0)).tolist() == [[7e3] * 4] * 2


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("name", "key"), INDEX_INPUTS, ids=lambda part: part.replace("com.microsoft.", ""))
def test_an_index_out_of_range_gives_what_the_nearest_gives(name, key, compiled):
    limits = CASES[name].ranges[key]
    arrays = numbers_outside(name, key)
    for indices in arrays[:: 6 if compiled else 1]:
        outputs = run(name, {key: indices}, 7e3, compiled)
        for actual, other in zip(outputs, run(name, {key: indices}, -5e2, compiled), strict=True):
            np.testing.assert_array_equal(actual, other)
        if limits:
            expected = run(name, {key: np.clip(indices.astype(np.int64), *limits).astype(np.int32)}, 7e3, False)
            for actual, one in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(actual, one, rtol=1e-6, atol=1e-6)  # compiled sums in another order


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name, key in INDEX_INPUTS if CASES[name].ranges[key]],
    ids=lambda part: part.replace("com.microsoft.", ""),
)
def test_an_index_out_of_range_that_the_host_knows_is_an_error(name, key):
    if "Attention-1" in name and key != "position_ids":
        pytest.skip("lengths are computed with before they are an index")
    operator, case = OPERATORS[name.partition(" ")[0]], CASES[name]
    inputs = {
        k: value(mx.array) if callable(value) else mx.array(value) for k, value in case.inputs.items() if k != key
    }
    high = case.ranges[key][1]
    indices = Indices.of(np.full(case.inputs[key].shape, high + 2**33, np.int64))
    with pytest.raises(OperatorError, match="found"):
        mx.eval(operator.function(**inputs, **{key: indices}, **case.attributes))


# The one file of ops/ that may call MLX's indexing, and the operators that it cannot make: they clip before they call.
INDEXING_CALLS = {
    *("take", "take_along_axis", "put_along_axis", "slice_update", "as_strided", "gather_mm", "gather_qmm"),
    *("segmented_mm", "scatter_add_axis", "slice"),
}
ALLOWED = {
    "functional/indexing.py": {"take", "take_along_axis", "put_along_axis", "slice_update", "at"},
    "functional/sliding_windows.py": {"as_strided"},
    "mlx/switch_linear.py": {"gather_mm", "gather_qmm"},
}


def test_only_the_indexing_functions_call_mlx_indexing():
    root = Path(ops_package.__file__).parent
    for path in sorted(root.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        calls = {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mx"
        } & INDEXING_CALLS
        updated = [node.value for node in nodes if isinstance(node, ast.Subscript)]  # x.at[…]
        calls |= {node.attr for node in updated if isinstance(node, ast.Attribute) and node.attr == "at"}
        assert calls <= ALLOWED.get(path.relative_to(root).as_posix(), set()), path
