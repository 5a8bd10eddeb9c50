"""SparseAttention against onnxruntime."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnxruntime_node import CONTRIB_DOMAIN, assert_outputs_close, module_outputs
from random_inputs import floats

HEADS, KV, DIM, BLOCK, CAPACITY = 4, 2, 16, 16, 64
OUTPUTS = ("y", "present_key", "present_value")
LAYOUTS = np.array(
    [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]],
    ]
)


def layouts_to_csr(layouts):
    """Returns the row indices of the layouts, and their column indices padded with -1."""
    rows = np.concatenate([np.zeros((len(layouts), 1)), layouts.sum(axis=2).cumsum(axis=1)], axis=1)
    columns = [np.nonzero(layout)[1] for layout in layouts]
    most = max(map(len, columns))
    return rows.astype(np.int32), np.array(
        [np.pad(c, (0, most - len(c)), constant_values=-1) for c in columns], dtype=np.int32
    )


def shared_buffer_outputs(inputs, attrs):
    """Returns onnxruntime's outputs, with each past and present in one buffer, as it requires."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    types = onnx.helper.np_dtype_to_tensor_dtype
    values = [
        onnx.helper.make_tensor_value_info(n, types(x.dtype), x.shape) for n, x in zip(names, inputs, strict=True) if n
    ]
    node = onnx.helper.make_node("SparseAttention", names, OUTPUTS, domain=CONTRIB_DOMAIN, **attrs)
    graph = onnx.helper.make_graph([node], "node", values, [onnx.ValueInfoProto(name=n) for n in OUTPUTS])
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(CONTRIB_DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    buffers = {n: ort.OrtValue.ortvalue_from_numpy(x) for n, x in zip(names, inputs, strict=True) if n}
    for name, value in buffers.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    binding.bind_ortvalue_output("present_key", buffers["x3"])
    binding.bind_ortvalue_output("present_value", buffers["x4"])
    session.run_with_iobinding(binding)
    return [value.numpy().copy() for value in (binding.get_outputs()[0], buffers["x3"], buffers["x4"])]


@pytest.mark.parametrize("rotary", [None, 0, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layouts", [1, 2])
@pytest.mark.parametrize(("held", "seq"), [((0, 0), 40), ((40, 63), 1), ((0, 20), 1)])
def test_sparse_attention(held, seq, layouts, packed, rotary):
    lengths = np.array(held, dtype=np.int32) + seq
    width = (HEADS + 2 * KV) * DIM if packed else HEADS * DIM
    inputs = [floats(1, 2, seq, width)]
    inputs += [None, None] if packed else [floats(2, 2, seq, KV * DIM), floats(3, 2, seq, KV * DIM)]
    inputs += [floats(4, 2, KV, CAPACITY, DIM), floats(5, 2, KV, CAPACITY, DIM), *layouts_to_csr(LAYOUTS[:layouts])]
    inputs += [np.array([lengths.max()], dtype=np.int32), lengths]
    attrs = {"num_heads": HEADS, "kv_num_heads": KV, "sparse_block_size": BLOCK}
    if rotary is not None:
        inputs += [floats(6, CAPACITY, DIM // 2), floats(7, CAPACITY, DIM // 2)]
        attrs |= {"do_rotary": 1, "rotary_interleaved": rotary}
    actual = module_outputs("SparseAttention", inputs, attrs, OUTPUTS)
    for row, length in enumerate(lengths):  # one by one: onnxruntime mixes up the heads of rows of different lengths
        alone = [
            x[row : row + 1].copy() if i in (0, 1, 2, 3, 4, 8) and x is not None else x for i, x in enumerate(inputs)
        ]
        alone[7] = lengths[row : row + 1]
        expected = shared_buffer_outputs(alone, attrs)
        assert_outputs_close(expected[0][0], actual[0][row], 1e-5)
        for a, b in zip(expected[1:], actual[1:], strict=True):
            assert_outputs_close(a[0, :, :length], b[row, :, :length], 1e-6)
