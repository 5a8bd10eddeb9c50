"""The graph that a conversion is compared with: it runs over the converted module's own arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES

from converters.names import name_weights
from converters.passes import IN_GRAPH, rewrite
from converters.passes.hit import every_expert
from converters.read import read
from converters.trials import _plain_module
from mlx_transmuter.module import Module
from mlx_transmuter.signature import outputs


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "mixtral", "granitemoe_dynamo"])
def test_no_weight_is_in_memory_twice(name):
    """Joined, stacked, turned: of what a layer holds the graph has a view, which is what the file says."""
    path = FIXTURES / name / "model.onnx"
    graph = read(path)
    graph = name_weights(graph.select(outputs(value.name for value in graph.outputs)))
    wanted = {key: tensor.read() for key, tensor in graph.arrays.items()}
    graph = every_expert(graph, path)
    read_again = []

    def counted(key, tensor):
        return replace(tensor, read=lambda: read_again.append(key) or tensor.read())

    graph = replace(graph, arrays={key: counted(key, tensor) for key, tensor in graph.arrays.items()})
    program, _ = rewrite(graph, IN_GRAPH)
    module = Module(program, {key: tensor.array() for key, tensor in program.arrays.items()})
    del read_again[:]
    plain = _plain_module(graph, program, module).weights()
    matrices = {key for key, tensor in graph.arrays.items() if len(tensor.shape) > 1}
    assert matrices
    assert not matrices & set(read_again)
    for key in matrices:
        np.testing.assert_array_equal(np.array(plain[key]), wanted[key])
