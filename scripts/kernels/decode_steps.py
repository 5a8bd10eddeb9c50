"""The functions that one token takes, of this project and of mlx-lm, in the form that they have on Metal."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from .exported_graph import COMPILED, ExportedGraph, export_graph, fast_functions_marked, marked
from .fusion import fuse
from .metal_kernels import Kernel, metal_kernels

# The operations of which a layer has exactly one, the first that a graph has: what lies between two is a layer.
_ONE_PER_LAYER = ("scaled_dot_product_attention", "Softmax", "ScatterAxis", "SliceUpdate")


@contextmanager
def as_on_metal() -> Iterator[None]:
    """Code that asks for the default device is told that it is a GPU; what it computes runs on the CPU all the same."""
    default_device = mx.default_device
    mx.default_device = lambda: mx.Device(mx.gpu)  # type: ignore[assignment]
    try:
        with fast_functions_marked():
            yield
    finally:
        mx.default_device = default_device


def zeros_like(inputs: Any) -> Any:
    """Returns zeros in the place of arrays: who holds a pool makes a step copy it."""
    return tree_map(lambda leaf: mx.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf, inputs)


def compiled_calls(run: Callable[[], Any]) -> tuple[dict[str, tuple[Callable[..., Any], Any]], Any]:
    """Returns the functions that are compiled and called while something runs, each with inputs like its last ones.

    What `run` returns is returned beside them: its owner keeps a compiled function alive.
    """
    calls: dict[str, tuple[Callable[..., Any], Any]] = {}

    def watching(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            calls.pop(function.__qualname__, None)
            calls[function.__qualname__] = (function, zeros_like(list(inputs)))
            return function(*inputs)

        return call

    compile_function = mx.compile
    mx.compile = watching  # type: ignore[assignment]
    try:
        owner = run()
    finally:
        mx.compile = compile_function
    return calls, owner


def own_graphs(
    model: Any, *, prompt_length: int = 40, batch_size: int = 1, **settings: Any
) -> tuple[ExportedGraph, ExportedGraph]:
    """Returns the graphs of a token's step and of its selection."""
    from mlx_transmuter import generation

    with as_on_metal():

        def run() -> Any:
            ctx = generation.context(model, max_new_tokens=3, eos_token_id=[], **settings)
            gen = generation.compile(ctx, batch_size)
            generation.generate(gen, [[5] * prompt_length] * batch_size, [0] * batch_size)
            return gen

        calls, _owner = compiled_calls(run)
        graphs = {name: export_graph(function, *inputs) for name, (function, inputs) in calls.items()}
    steps = [graph for name, graph in graphs.items() if "Step" in name]
    selections = [graph for name, graph in graphs.items() if "Selection" in name]
    return steps[-1], selections[-1]


def peer_graphs(folder: Path, *, prompt_length: int = 40, **settings: Any) -> tuple[ExportedGraph, ExportedGraph]:
    """Returns the same of mlx-lm: its model's call for a token, and its sampler on log-probabilities."""
    compile_function = mx.compile

    def compile_marked(function: Any = None, **options: Any) -> Any:
        if function is None:  # used as partial(mx.compile, ...)
            return lambda each: compile_marked(each, **options)
        return marked(COMPILED, function)

    mx.compile = compile_marked  # type: ignore[assignment]
    try:
        activations = importlib.reload(
            importlib.import_module("mlx.nn.layers.activations")
        )  # its functions are compiled where it is imported
        for name in set(vars(activations)) & set(vars(nn)):
            setattr(nn, name, getattr(activations, name))
        from mlx_lm import load
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.sample_utils import make_sampler

        model = load(str(folder))[0]
        with as_on_metal():
            cache = make_prompt_cache(model)
            mx.eval(model(mx.array([[5] * prompt_length]), cache=cache), [entry.state for entry in cache])

            def step(token: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
                for entry, (keys, values) in zip(cache, zip(arrays[::2], arrays[1::2], strict=True), strict=True):
                    entry.keys, entry.values = keys, values
                logits = model(token, cache=cache)[:, -1, :]
                return logits, *(array for entry in cache for array in (entry.keys, entry.values))

            arrays = [array for entry in cache for array in (entry.keys, entry.values)]
            graph = export_graph(step, mx.array([[7]]), *arrays)
            vocab = graph.shapes[graph.outputs[0]][-1]
            sampler = make_sampler(**settings)
            choice = export_graph(
                lambda logits: sampler(logits - mx.logsumexp(logits, keepdims=True)), mx.zeros((1, vocab))
            )
    finally:
        mx.compile = compile_function
    return graph, choice


def step_kernels(graph: ExportedGraph, *, regions_alone: bool = False) -> list[Kernel]:
    """Returns the kernels of a step; see `fuse`."""
    return metal_kernels(graph, fuse(graph, regions_alone=regions_alone))


def layer_kernels(kernels: list[Kernel]) -> tuple[int, int]:
    """Returns (kernels of a layer, kernels besides the layers) of a step."""
    names = [kernel.name for kernel in kernels]
    mark = next(name for name in _ONE_PER_LAYER if name in names)
    places = [i for i, name in enumerate(names) if name == mark]
    if len(places) < 2:
        raise ValueError(f"a step with {len(places)} layers: to tell layers from the rest takes at least two")
    if mark == "scaled_dot_product_attention":  # a long context is read by two kernels
        places = [i for i in places if names[i - 1] != mark]
    per_layer = median_low([after - before for before, after in pairwise(places)])
    return per_layer, len(names) - per_layer * len(places)
