"""How many kernels a token takes on Metal, counted without one; see scripts/kernels/."""

import re
from collections import Counter

import mlx.core as mx
import pytest
from conftest import FIXTURES
from mlx.utils import tree_flatten

from mlx_transmuter import generation
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import PrecisionOptions
from scripts.kernels.decode_steps import compiled_calls, layer_kernels, own_graphs, step_kernels
from scripts.kernels.exported_graph import export_graph, fast_functions_marked
from scripts.kernels.fusion import FusedOperation, fuse
from scripts.kernels.metal_kernels import VIEWS, metal_kernels


def kernels(function, *args):
    """Returns the names of the kernels of a function that is compiled, those of copies with what they copy for."""
    graph = export_graph(function, *args)
    return [kernel.name for kernel in metal_kernels(graph, fuse(graph))]


X, W = mx.ones((4, 8)), mx.ones((8, 8))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: mx.exp(x) * 2 + 1, 1),
        (lambda x, w: mx.exp(x @ w) * 2, 2),
        (lambda x, w: x @ w.T, 1),  # a product reads a transposed matrix
        (lambda x, w: x[:, ::2] @ w[:4], 2),  # but none with gaps between its elements
        (lambda x, w: x.reshape(2, 16).T, 0),
        (lambda x, w: x.T.reshape(4, 8), 1),  # here the elements move
        (lambda x, w: x.reshape(2, 2, 8).swapaxes(0, 1).reshape(4, 8) + 1, 2),
        (lambda x, w: mx.concatenate([x, w]), 2),
        (lambda x, w: mx.split(x, 2, axis=-1)[1], 0),
        (lambda x, w: mx.sort(mx.broadcast_to(x[:1, :1], (1, 50000)), axis=-1), 10),
        (lambda x, w: mx.softmax(x, axis=-1).sum(-1), 2),
    ],
)
def test_kernels_of_small_functions(function, expected):
    assert len(kernels(function, X, W)) == expected


def test_a_function_of_mx_fast_is_one_kernel():
    def function(x, w):
        return mx.fast.rms_norm(mx.exp(x @ w), w[0], 1e-5) * 2

    with fast_functions_marked():
        graph = export_graph(function, X, W)
    names = [operation.name for operation in graph.operations if operation.name not in ("Squeeze", "Broadcast")]
    assert names == ["Matmul", "Exp", "Gather", "rms_norm", "Multiply"]


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_fusion_is_that_of_mlx(name, loaded, tmp_path):
    """MLX's own fused kernels have as many operations each."""

    model = loaded(name)

    def run():
        settings = {"do_sample": True, "top_k": 5, "top_p": 0.9, "eos_token_id": []}
        gen = generation.compile(generation.context(model, max_new_tokens=3, **settings), 2)
        generation.generate(gen, [[5] * 20] * 2, [0] * 2)
        return gen

    calls, _owner = compiled_calls(run)
    assert len(calls) >= 2
    for function, inputs in calls.values():
        fused = [each for each in fuse(export_graph(function, *inputs)) if isinstance(each, FusedOperation)]
        sizes = Counter(sum(each.name != "Broadcast" for each in one.operations) for one in fused)
        arrays = [leaf for _, leaf in tree_flatten(mx.compile(function)(*inputs)) if isinstance(leaf, mx.array)]
        mx.export_to_dot(str(tmp_path / "step.dot"), *arrays)
        labels = re.findall(r'label ="Compiled(\w+)"', (tmp_path / "step.dot").read_text())
        assert sizes == Counter(len(operations_of(label)) for label in labels)


def operations_of(label: str) -> list[str]:
    """Returns the operations of a fused kernel by MLX's name of it."""
    for name in ("GreaterEqual", "LessEqual", "NotEqual", "AsType", "LogicalAnd", "LogicalOr", "LogicalNot", "ErfInv"):
        label = label.replace(name, name.capitalize())
    label = re.sub(r"(Bitwise|Left|Right)(\w)", lambda match: match[1] + match[2].lower(), label)
    return re.findall(r"[A-Z][a-z0-9]*", label.replace("Broadcast", ""))


@pytest.mark.parametrize(("name", "per_layer", "fixed"), [("llama", 10, 12), ("llama_q4", 13, 12)])
def test_kernels_of_a_step(name, per_layer, fixed, loaded):
    step, _ = own_graphs(loaded(name))
    layer, besides = layer_kernels(step_kernels(step))
    assert layer <= per_layer
    assert besides <= fixed, [kernel.name for kernel in step_kernels(step)]
    assert not [kernel for kernel in step_kernels(step) if kernel.is_copy]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"do_sample": False}, 3),
        ({"do_sample": True, "top_k": 40, "top_p": 0.9}, 31),
        ({"do_sample": False, "token_logprobs": True}, 11),
    ],
)
def test_kernels_of_a_choice(settings, most, loaded):
    _, choice = own_graphs(loaded("llama"), **settings)
    assert len(step_kernels(choice)) <= most


def kernels_of_constants(graph):
    """Returns the kernels that read nothing but what is known when a step is traced."""
    known, found = set(graph.constants), []
    for operation in fuse(graph):
        if not set(operation.inputs) <= known:
            continue
        known.update(operation.outputs)
        if isinstance(operation, FusedOperation) or operation.name not in (*VIEWS, "Reshape"):
            found.append(operation)
    return found


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "opt", "bloom"])
def test_a_step_computes_nothing_that_is_known_before_it(name, dtype, loaded, tmp_path):
    """In bfloat16 too, which numpy lacks: a scalar of it would be an operation of each step, on the CPU's stream."""
    model = loaded(name)
    if dtype is not None:
        folder = convert(
            FIXTURES / name, "model.onnx", tmp_path / "out", progress=False, precision=PrecisionOptions(dtype=dtype)
        )
        model = load_folder(folder)
    for graph in own_graphs(model):
        assert kernels_of_constants(graph) == []
