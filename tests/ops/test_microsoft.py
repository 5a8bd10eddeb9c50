"""The operators of com.microsoft against the schemas of the onnxruntime that is installed."""

import pytest

from mlx_transmuter.ops import OPERATORS, REQUIRED
from mlx_transmuter.ops.microsoft_left_out import LEFT_OUT

pytest.importorskip("onnxruntime")
state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")

SCHEMAS = {s.name: s for s in state.get_all_operator_schema() if s.domain == "com.microsoft"}
# In no schema: names that other exporters give to ONNX's own.
OTHERS = {"SimplifiedLayerNormalization"}
DECLARED = {name.split(".")[-1].removesuffix("-1") for name in OPERATORS if name.startswith("com.microsoft.")}


def test_every_operator_is_declared_or_left_out_with_a_reason():
    assert not DECLARED & LEFT_OUT.keys()
    assert sorted(SCHEMAS.keys() - DECLARED - LEFT_OUT.keys()) == []
    assert all(reason.strip() for reason in LEFT_OUT.values())


def test_no_name_is_made_up():
    import onnxruntime

    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32):
        pytest.skip("the tables are those of onnxruntime 1.32")
    assert SCHEMAS.keys() >= DECLARED - OTHERS
    assert LEFT_OUT.keys() <= SCHEMAS.keys()


@pytest.mark.parametrize("name", sorted(DECLARED & SCHEMAS.keys()))
def test_signature_says_what_the_schema_says(name):
    operator, schema = OPERATORS[f"com.microsoft.{name}-1"], SCHEMAS[name]
    assert schema.attributes.keys() <= operator.attributes.keys()
    for attribute, declared in schema.attributes.items():
        assert declared.required == (operator.attributes[attribute] is REQUIRED), attribute
    if not operator.variadic:
        assert len(operator.inputs) >= len(schema.inputs)
        needed = [i for i, x in enumerate(schema.inputs) if not str(x.option).endswith("Optional")]
        assert operator.required <= max(needed) + 1
