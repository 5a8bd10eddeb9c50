"""The operators of com.microsoft against the schemas of the installed onnxruntime."""

import pytest

from mlx_transmuter.converters.onnx_reader.attribute_types import attribute_codes
from mlx_transmuter.ops import OPERATORS, REQUIRED
from mlx_transmuter.ops.contrib.unsupported import UNSUPPORTED_OPERATORS

pytest.importorskip("onnxruntime")
state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")

CONTRIB_SCHEMAS = {s.name: s for s in state.get_all_operator_schema() if s.domain == "com.microsoft"}
# In no schema: names that other exporters give to ONNX's own.
NAMES_WITHOUT_SCHEMA = {"SimplifiedLayerNormalization"}
DECLARED_OPERATORS = {name.split(".")[-1].removesuffix("-1") for name in OPERATORS if name.startswith("com.microsoft.")}


def test_every_operator_is_declared_or_excluded_with_a_reason():
    assert not DECLARED_OPERATORS & UNSUPPORTED_OPERATORS.keys()
    assert sorted(CONTRIB_SCHEMAS.keys() - DECLARED_OPERATORS - UNSUPPORTED_OPERATORS.keys()) == []
    assert all(reason.strip() for reason in UNSUPPORTED_OPERATORS.values())


def test_every_name_is_in_the_schemas():
    import onnxruntime

    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32):
        pytest.skip("the tables are those of onnxruntime 1.32")
    assert CONTRIB_SCHEMAS.keys() >= DECLARED_OPERATORS - NAMES_WITHOUT_SCHEMA
    assert UNSUPPORTED_OPERATORS.keys() <= CONTRIB_SCHEMAS.keys()


@pytest.mark.parametrize("name", sorted(DECLARED_OPERATORS & CONTRIB_SCHEMAS.keys()))
def test_signatures_agree_with_the_schemas(name):
    operator, schema = OPERATORS[f"com.microsoft.{name}-1"], CONTRIB_SCHEMAS[name]
    assert schema.attributes.keys() <= operator.attribute_defaults.keys()
    for attribute, declared in schema.attributes.items():
        assert declared.required == (operator.attribute_defaults[attribute] is REQUIRED), attribute
        assert attribute_codes(operator.name)[attribute] == declared.type.value, attribute
    if not operator.is_variadic:
        assert len(operator.input_names) >= len(schema.inputs)
        needed = [i for i, x in enumerate(schema.inputs) if not str(x.option).endswith("Optional")]
        assert operator.required_inputs <= max(needed) + 1
