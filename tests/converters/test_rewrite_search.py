"""The search for rewrites: the most that agree are kept, and no program is tried twice."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mlx_transmuter.converters.graph.rewriting import Replacement, Rewrite
from mlx_transmuter.converters.proof.rewrite_search import RewriteSearch
from mlx_transmuter.program import Node, Program, Value

COUNT = 6


def chain() -> Program:
    """A program of one node for each of the rewrites."""
    nodes = [Node("Neg-13", (f"x{i}",), (f"x{i + 1}",)) for i in range(COUNT)]
    return Program((Value("x0", "float32", (1,)),), (Value(f"x{COUNT}", "float32", (1,)),), nodes)


def make_rewrite(i: int) -> Rewrite:
    """A rewrite that replaces the i-th node of the chain."""

    def rewrite(graph):
        for node in graph.nodes:
            if node.op == "Neg-13" and node.outputs == (f"x{i + 1}",):
                yield Replacement(node, (Node("Abs-13", node.inputs, node.outputs),))

    rewrite.__name__ = f"rewrite_{i}"
    return rewrite


def idle(graph):
    """A rewrite that finds nothing."""
    yield from ()


class Trials:
    """Trials in which a program disagrees when one of the wrong rewrites was applied to it."""

    def __init__(self, wrong: Iterable[int]):
        self.wrong = {f"x{i + 1}" for i in wrong}
        self.programs: list[Program] = []

    def __call__(self, program, records):
        self.programs.append(program)
        return (
            None if any(node.op == "Abs-13" and node.outputs[0] in self.wrong for node in program.nodes) else "agrees"
        )


@pytest.mark.parametrize("wrong", [[], [0], [5], [2], [0, 5], [2, 3], [1, 3, 5], range(COUNT)])
def test_every_right_rewrite_is_kept(wrong):
    rewrites = tuple(make_rewrite(i) for i in range(COUNT))
    trials = Trials(wrong)
    search = RewriteSearch(chain(), trials)
    agreeing = search.attempt(rewrites) or search.leave_out_wrong(rewrites)
    assert agreeing is not None
    assert agreeing.result == "agrees"
    assert agreeing.rewrites == tuple(rewrite for i, rewrite in enumerate(rewrites) if i not in wrong)
    assert len(trials.programs) <= 1 + 3 * COUNT
    names = [record.name for record in agreeing.all_records(rewrites)]
    assert sorted(names) == [rewrite.__name__ for rewrite in rewrites]
    assert names[COUNT - len(wrong) :] == [f"rewrite_{i}" for i in wrong]


def test_a_program_that_disagreed_is_not_tried_again():
    """Leaving out a rewrite that replaces nothing changes nothing."""
    rewrites = (make_rewrite(0), idle, idle, idle)
    trials = Trials([0])
    search = RewriteSearch(chain(), trials)
    assert search.attempt(rewrites) is None
    agreeing = search.leave_out_wrong(rewrites)
    assert agreeing is not None
    assert agreeing.rewrites == (idle, idle, idle)
    assert len(trials.programs) == 2


def test_a_program_that_disagrees_without_any_rewrite_has_no_result():
    rewrites = tuple(make_rewrite(i) for i in range(COUNT))
    assert RewriteSearch(chain(), lambda program, records: None).leave_out_wrong(rewrites) is None
