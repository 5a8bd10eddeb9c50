"""The table of operators in the docs: up to date with the registry, and with every operator in one of its parts."""

from mlx_transmuter.ops import OPERATORS
from scripts import list_ops


def test_the_table_is_what_the_script_writes():
    assert list_ops.TARGET.read_text(encoding="utf-8") == list_ops.table(), "run scripts/list_ops.py"


def test_every_operator_is_in_it():
    assert {list_ops.domain(name) for name in OPERATORS} == set(list_ops.DOMAINS)
