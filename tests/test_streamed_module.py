"""StreamedModule: the numbers of a module whose weights are in memory, with few of them in memory at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES

from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, apply_rewrites
from mlx_transmuter.program import Program, ProgramError
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.streamed_module import StreamedModule


def read(name: str) -> Program:
    graph = name_weights(read_onnx(FIXTURES / name / "model.onnx"))
    return graph.select_outputs(DecoderSignature.from_program(graph).required_outputs)


def arrays(program: Program) -> dict[str, mx.array]:
    return {name: tensor.to_device() for name, tensor in program.tensors.items()}


def streamed(program: Program) -> StreamedModule:
    return StreamedModule(program, lambda name: program.tensors[name].to_device())


# With branches (gpt2_merged), loops (deltanet_ort), shapes that depend on values (qwen3_moe), blocks (llama_q4).
@pytest.mark.parametrize("name", ["llama", "gpt2_merged", "deltanet_ort", "qwen3_moe", "llama_q4", "llama_genai"])
@pytest.mark.parametrize("rewritten", [False, True])
def test_its_outputs_are_those_of_the_weights_in_memory(name, rewritten):
    program = read(name)
    if rewritten:
        program, _ = apply_rewrites(program, GRAPH_REWRITES)
    inputs = make_step_inputs(program, DecoderSignature.from_program(program), 1, 3, 2)
    expected, actual = (
        ProgramModule(program, arrays(program)).call_eagerly(**inputs),
        streamed(program).call_eagerly(**inputs),
    )
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(np.array(actual[key]), np.array(expected[key]))


@pytest.mark.parametrize("name", ["llama", "gpt2_merged"])
def test_a_weight_is_in_memory_from_its_first_read_to_its_last(name):
    program, most, reads = read(name), 0, []

    def read_weight(key: str) -> mx.array:
        nonlocal most
        array = program.tensors[key].to_device()
        reads.append(key)
        most = max(most, mx.get_active_memory())
        return array

    sizes = [tensor.to_device().nbytes for tensor in program.tensors.values()]
    module = StreamedModule(program, read_weight)
    inputs = make_step_inputs(program, DecoderSignature.from_program(program), 1, 3, 2)
    before = mx.get_active_memory()
    mx.eval(module(**inputs))
    assert len(reads) == len(set(reads))
    assert most - before < 0.6 * sum(sizes)


def test_a_decoder_runs_over_it_without_compiling():
    program = read("llama")
    module, tokens = streamed(program), np.array([[5, 6, 7]], np.int32)
    logits = []
    for decoder in (Decoder(module, 1), Decoder(ProgramModule(program, arrays(program)), 1)):
        session = decoder.begin_session([4])
        step_logits = session.step(tokens, [3])
        session.evaluate(step_logits)
        logits.append(np.array(step_logits))
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert not module.weights()


def test_an_array_of_another_shape_is_refused():
    program = read("llama")
    module = StreamedModule(program, lambda name: mx.zeros((1,)))
    inputs = make_step_inputs(program, DecoderSignature.from_program(program), 1, 0, 2)
    with pytest.raises((ProgramError, ValueError), match="the weight"):
        module(**inputs)
