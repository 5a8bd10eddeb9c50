"""docs/operators.md is up to date with the registry."""

from mlx_transmuter.ops import OPERATORS
from scripts import list_ops


def test_the_document_is_up_to_date():
    assert list_ops.TARGET.read_text(encoding="utf-8") == list_ops.table(), "run scripts/list_ops.py"


def test_every_domain_has_a_section():
    assert {list_ops.domain(name) for name in OPERATORS} == set(list_ops.DOMAINS)
