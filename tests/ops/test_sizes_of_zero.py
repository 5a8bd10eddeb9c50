"""Sizes, counts and steps below 1, and arrays without elements: MLX divides by some of them, which would end the process.

Each case stands for a call that did; each is an OperatorError or, of a product, zeros.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_transmuter.ops import OPERATORS, OperatorError
from mlx_transmuter.ops.functional.kernels import fused_attention, quantized_matmul
from mlx_transmuter.ops.mlx.layers import as_linear, linear, make_layer
from mlx_transmuter.ops.mlx.switch_linear import QuantizedSwitchLinear, SwitchLinear
from mlx_transmuter.ops.onnx.convolution import convolve
from mlx_transmuter.ops.registry import POSITIVE_ATTRIBUTES
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.module import ProgramModule

INT32_MIN = -(2**31)


def run(op, inputs, attrs, outputs=1):
    names = tuple(f"x{i}" for i in range(len(inputs)))
    results = tuple(f"y{i}" for i in range(outputs))
    program = Program(
        inputs=tuple(Value(name, "float32", None) for name in names),
        outputs=tuple(Value(name, "float32", None) for name in results),
        nodes=[Node(op, names, results, attrs)],
    )
    values = ProgramModule(program, {})(**dict(zip(names, inputs, strict=True)))
    mx.eval(values)
    return values["y0"]


def ones(*shape):
    return mx.ones(shape)


GQA = [ones(1, 2, 16), ones(1, 2, 8), ones(1, 2, 8), ones(1, 2, 4, 4), ones(1, 2, 4, 4), mx.array([1]), mx.array([2])]
IMAGE, KERNEL = ones(1, 2, 5, 5), ones(4, 2, 3, 3)
# An operator, its inputs, attributes that it runs with, and the sizes among them.
CALLS = [
    ("com.microsoft.GroupQueryAttention-1", GQA, {"num_heads": 4, "kv_num_heads": 2}, 3),
    (
        "com.microsoft.MultiHeadAttention-1",
        [ones(1, 2, 16)] * 3,
        {"num_heads": 4},
        1,
    ),
    ("Attention-23", [ones(1, 2, 16)] * 3, {"q_num_heads": 4, "kv_num_heads": 4}, 1),
    ("Conv-1", [IMAGE, KERNEL], {"group": 1, "strides": [1, 1], "dilations": [1, 1], "kernel_shape": [3, 3]}, 1),
    ("ConvTranspose-1", [IMAGE, ones(2, 2, 3, 3)], {"group": 1, "strides": [1, 1], "dilations": [1, 1]}, 1),
    ("MaxPool-8", [IMAGE], {"kernel_shape": [2, 2], "strides": [1, 1], "dilations": [1, 1]}, 1),
    ("AveragePool-7", [IMAGE], {"kernel_shape": [2, 2], "strides": [1, 1]}, 1),
    ("LpPool-2", [IMAGE], {"kernel_shape": [2, 2], "strides": [1, 1]}, 1),
    ("Split-18", [ones(4)], {"num_outputs": 2}, 2),
    ("SpaceToDepth-1", [ones(1, 2, 4, 4)], {"blocksize": 2}, 1),
    ("DepthToSpace-1", [ones(1, 4, 4, 4)], {"blocksize": 2}, 1),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "outputs"), CALLS, ids=[call[0] for call in CALLS])
def test_a_size_below_1_or_beyond_31_bits_is_refused(op, inputs, attrs, outputs):
    run(op, inputs, attrs, outputs)
    for name in POSITIVE_ATTRIBUTES & attrs.keys():
        for size in (0, -1, INT32_MIN, 2**31):
            value = [size, *attrs[name][1:]] if isinstance(attrs[name], list) else size
            with pytest.raises(OperatorError, match=f"{name} .*at least 1"):
                run(op, inputs, {**attrs, name: value}, outputs)


def test_the_default_that_means_none_may_be_written_out():
    x, angles = ones(1, 2, 3, 4), ones(8, 2)
    positions = mx.zeros((1, 3), mx.int32)
    inputs = [x, positions, angles, angles]
    written, absent = ({"num_heads": 0}, {})
    op = "com.microsoft.RotaryEmbedding-1"
    np.testing.assert_array_equal(np.array(run(op, inputs, written)), np.array(run(op, inputs, absent)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 0), (4, 3), (2, 4)])
def test_attention_of_heads_that_are_no_multiple_is_refused(heads, kv_heads):
    k = ones(1, kv_heads, 3, 8)
    with pytest.raises(OperatorError, match="a multiple of those of the keys"):
        mx.eval(fused_attention(ones(1, heads, 2, 8), k, k, scale=1.0, mask=None))


@pytest.mark.parametrize(("rows", "out", "into"), [(0, 32, 64), (3, 0, 64), (0, 0, 64), (3, 32, 0)])
def test_quantized_products_without_elements_are_zeros(rows, out, into):
    words, scales, biases = mx.quantize(ones(32, 64))
    quantized = (words[:out, : into // 8], scales[:out, : into // 64], biases[:out, : into // 64])
    x = ones(1, rows, into)
    y = quantized_matmul(x, *quantized, transpose=True, group_size=64, bits=4)
    assert y.tolist() == mx.zeros((1, rows, out)).tolist()
    layer = nn.QuantizedLinear(64, 32, bias=False)
    layer.weight, layer.scales, layer.biases = quantized
    assert linear(x, layer).shape == (1, rows, out)
    table = nn.QuantizedEmbedding(32, 64)
    table.weight, table.scales, table.biases = quantized
    assert as_linear(x, table).shape == (1, rows, out)
    transposed = quantized_matmul(ones(1, rows, 32), words, scales, biases, transpose=False, group_size=64, bits=4)
    assert transposed.shape == (1, rows, 64)
    mx.eval(y, transposed, linear(x, layer), as_linear(x, table))


def test_a_batch_of_no_tokens_goes_through_a_linear_layer():
    x = ones(2, 0, 8)
    y = linear(x, nn.Linear(8, 4, bias=False), ones(2, 0, 4))
    mx.eval(y)
    assert y.shape == (2, 0, 4)


@pytest.mark.parametrize("layer", [SwitchLinear(8, 4, 2), QuantizedSwitchLinear(64, 32, 2, group_size=64, bits=4)])
def test_a_mixture_of_no_experts_is_refused(layer):
    x = ones(2, 1, layer.weight.shape[-1] * (8 if isinstance(layer, QuantizedSwitchLinear) else 1))
    for cut in ((slice(0),), (slice(None), slice(0))):
        for name, array in list(layer.items()):
            layer[name] = array[cut]
        with pytest.raises(OperatorError, match="weights of experts"):
            layer(x, mx.array([0, 0]))


@pytest.mark.parametrize("shape", [(4, 0, 3, 3), (0, 2, 3, 3), (4, 2, 0, 3)])
def test_kernels_without_elements_are_refused(shape):
    with pytest.raises(OperatorError, match="kernels"):
        convolve(ones(1, shape[1], 5, 5), ones(*shape), pad_before=[0, 0], pad_after=[0, 0])


@pytest.mark.parametrize(("bits", "group_size"), [(4, 0), (0, 64), (-4, 64), (4, -64)])
def test_a_layer_of_no_bits_or_groups_is_refused(bits, group_size):
    for kind in ("QuantizedLinear", "QuantizedEmbedding", "QuantizedSwitchLinear"):
        with pytest.raises(OperatorError, match="bits and groups that MLX has"):
            make_layer(kind, bits=bits, group_size=group_size)


@pytest.mark.parametrize("split", [2**40, 0, -1, [2**40, 1], [-1, 5], [-(2**40), 2**40 + 4]])
def test_parts_that_are_not_those_of_the_axis_are_refused(split):
    split_to_sequence, split_ = (OPERATORS[name].function for name in ("SplitToSequence-11", "Split-13"))
    if split == 2**40:  # one part, as of any size beyond the axis
        assert len(split_to_sequence(ones(4), np.array(split))) == 1
        return
    with pytest.raises(OperatorError, match="parts of"):
        split_to_sequence(ones(4), np.array(split))
    if isinstance(split, list):
        with pytest.raises(OperatorError, match="parts of"):
            split_(ones(4), np.array(split), outputs=2)


def test_more_parts_than_elements_are_not_made():
    with pytest.raises(OperatorError, match="num_outputs"):
        run("Split-18", [ones(4)], {"num_outputs": 2**30}, 2)


@pytest.mark.parametrize("dtype", [mx.int8, mx.int16, mx.int32, mx.uint8, mx.uint16, mx.uint32])
@pytest.mark.parametrize(("op", "attrs"), [("Div-7", {}), ("Mod-10", {}), ("Mod-10", {"fmod": 1})])
def test_integers_divided_by_0_and_the_smallest_by_minus_1_end_no_process(op, attrs, dtype):
    """ONNX leaves both undefined; what the device gives is only some number."""
    lowest = mx.iinfo(dtype).min
    a, b = mx.array([lowest, lowest, 7, 0], dtype), mx.array([0, -1 if lowest else 1, 0, 0], dtype)
    assert run(op, [a, b], attrs).dtype == dtype
