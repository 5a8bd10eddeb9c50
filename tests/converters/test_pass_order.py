"""The table of passes: its order keeps what each pass says of itself, and it names every pass once."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest

from mlx_transmuter.converters import passes
from mlx_transmuter.converters.graph.rewriting import RewriteRecord
from mlx_transmuter.converters.passes import GRAPH_PASSES, POOL_PASSES, Pass, had_data_dependent_shapes

ALL_PASSES = (*GRAPH_PASSES, *POOL_PASSES)
# They change what a graph computes, so they run before anything is compared with it, or only where a user asks for it.
OUTSIDE_THE_ORDER = {"enumerate_traced_experts", "drop_activation_quantization"}


def pass_functions() -> list[Callable]:
    """The public functions of the folders of passes that take a graph alone and yield what becomes of its matches."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(passes.__path__, f"{passes.__name__}.")
        if not module.ispkg
    ]
    return [
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and function.__annotations__ == {"graph": "GraphView", "return": "Iterator[MatchOutcome]"}
    ]


@pytest.mark.parametrize("entry", ALL_PASSES, ids=lambda entry: entry.name)
def test_each_pass_comes_after_the_passes_that_it_names(entry: Pass):
    order = [other.rewrite for other in ALL_PASSES]
    earlier = order[: order.index(entry.rewrite)]
    assert [rewrite.__name__ for rewrite in entry.after if rewrite not in earlier] == []
    assert all(entry.after.values()), "each `after` has a reason"


def test_the_table_names_every_pass_of_the_folders_once():
    names = [function.__name__ for function in pass_functions() if function.__name__ not in OUTSIDE_THE_ORDER]
    assert sorted(entry.name for entry in ALL_PASSES) == sorted(names)
    assert len(set(names)) == len(names)


def test_only_what_removes_data_dependent_shapes_makes_the_graph_run_eagerly():
    assert had_data_dependent_shapes([RewriteRecord("make_experts_dense", 4, {})])
    assert not had_data_dependent_shapes([RewriteRecord("make_experts_dense", 0, {"no shape": 1})])
    assert not had_data_dependent_shapes([RewriteRecord("fuse_rms_norm", 4, {})])
