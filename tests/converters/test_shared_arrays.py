"""Shared arrays: the graph that a conversion is compared with runs over the converted module's own arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES

from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, apply_rewrites
from mlx_transmuter.converters.passes.moe.traced_experts import restore_traced_experts
from mlx_transmuter.converters.proof.staged_weights import SharedArrays
from mlx_transmuter.program.signature import outputs
from mlx_transmuter.runtime.module import ProgramModule


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "mixtral", "granitemoe_dynamo"])
def test_no_weight_is_in_memory_twice(name):
    """Of weights that a layer has merged, stacked or transposed the graph has views, with the values of the file."""
    path = FIXTURES / name / "model.onnx"
    graph = read_onnx(path)
    graph = name_weights(graph.select_outputs(outputs(value.name for value in graph.outputs)))
    expected = {key: tensor.read() for key, tensor in graph.tensors.items()}
    graph = restore_traced_experts(graph, path)
    reads = []

    def counted(key, tensor):
        return replace(tensor, read=lambda: reads.append(key) or tensor.read())

    graph = replace(graph, tensors={key: counted(key, tensor) for key, tensor in graph.tensors.items()})
    program, _ = apply_rewrites(graph, GRAPH_REWRITES)
    module = ProgramModule(program, {key: tensor.to_device() for key, tensor in program.tensors.items()})
    del reads[:]
    unrewritten = SharedArrays.of(module).module(graph).weights()
    matrices = {key for key, tensor in graph.tensors.items() if len(tensor.shape) > 1}
    assert matrices
    assert not matrices & set(reads)
    for key in matrices:
        np.testing.assert_array_equal(np.array(unrewritten[key]), expected[key])
