"""Dynamic 8-bit files operator by operator: a rounding that goes the other way moves all that comes after it, so each
node is given what onnxruntime gives the same node.
"""

from __future__ import annotations

import exporter_forms
import numpy as np
import onnx
import pytest

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.runtime.program_walk import evaluate_node

ort = pytest.importorskip("onnxruntime")


def values_of(path, rows: int, length: int) -> dict[str, np.ndarray]:
    """What onnxruntime gives of every value of the file in a first step of the rows."""
    model = onnx.load(path)
    given = {value.name for value in model.graph.output}
    made = [name for node in model.graph.node for name in node.output if name and name not in given]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(30, 120, (rows, length))
    feed = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(length)[None].repeat(rows, 0),
    }
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feed[value.name] = np.zeros((rows, value.shape[1], 0, value.shape[3]), np.float32)
    feed = {value.name: feed[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return feed | dict(zip(names, session.run(names, feed), strict=True))


@pytest.mark.parametrize("form", exporter_forms.EIGHT_BITS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_each_node_of_a_dynamic_file_gives_what_onnxruntime_gives_of_it(name, form, tmp_path):
    path = exporter_forms.make(name, form, tmp_path / "source") / "model.onnx"
    truth = values_of(path, 2, 9)
    program = read_onnx(path)
    held = {name: tensor.read() for name, tensor in program.tensors.items()} | program.constants | truth
    seen = {"DynamicQuantizeLinear-11": 0, "MatMulInteger-10": 0, "DequantizeLinear-13": 0}
    for node in program.nodes:
        found = evaluate_node(
            node, {name: ops.to_device(held[name]) if held[name].ndim else held[name] for name in node.inputs if name}
        )
        for output, value in zip(node.outputs, found, strict=False):
            if not output or output not in truth:
                continue
            value, wanted = value if isinstance(value, np.ndarray) else ops.to_host(value), truth[output]
            assert value.shape == wanted.shape
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-5, err_msg=str(node))
            else:
                np.testing.assert_array_equal(value, wanted, err_msg=str(node))
        if node.op in seen:
            seen[node.op] += 1
    assert min(seen.values()) > 0
