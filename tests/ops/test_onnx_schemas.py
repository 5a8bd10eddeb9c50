"""The declared operator versions against ONNX's schemas: inputs, attributes, defaults, and versions of the schemas.

An operator version holds from its own opset until the next version of its operator. ONNX may publish a schema version in
between; a person must check that its meaning is the same, and then lists it in REVIEWED_VERSIONS.
"""

import numpy as np
import onnx
import pytest

from mlx_transmuter.ops import OPERATORS, REQUIRED, resolve_operator

OLDEST_OPSET = 11

# Operator version: the versions of ONNX's schema that it covers. Schema versions that only add types, change their text, or
# add an input or attribute whose default is the older meaning share one; the schemas of onnx 1.23 were read for it.
REVIEWED_VERSIONS = """
Abs-6: 6 13; Acos-7: 7 22; Acosh-9: 9 22; Add-7: 7 13 14; AffineGrid-20: 20; And-7: 7; ArgMax-11: 11 12 13;
ArgMin-11: 11 12 13; Asin-7: 7 22; Asinh-9: 9 22; Atan-7: 7 22; Atanh-9: 9 22; Attention-23: 23 24 25;
AveragePool-7: 11 19 22; BatchNormalization-9: 9; BatchNormalization-14: 14 15; Bernoulli-15: 15 22; BitCast-26: 26;
BitShift-11: 11 28; BitwiseAnd-18: 18; BitwiseNot-18: 18; BitwiseOr-18: 18; BitwiseXor-18: 18; BlackmanWindow-17: 17;
Cast-9: 9 13 19 21 23 24 25 28; CastLike-15: 15 19 21 23 24 25; CausalConvWithState-27: 27; Ceil-6: 6 13;
Celu-12: 12 28; Clip-11: 11 12 13; Col2Im-18: 18; Compress-9: 11 28; Concat-4: 11 13; ConcatFromSequence-11: 11;
Constant-9: 11 12 13 19 21 23 24 25; ConstantOfShape-9: 9 20 21 23 24 25; Conv-1: 11 22; ConvInteger-10: 10;
ConvTranspose-1: 11 22; Cos-7: 7 22; Cosh-9: 9 22; CumProd-26: 26; CumSum-11: 11 14; DFT-17: 17; DFT-20: 20;
DeformConv-19: 19 22; DepthToSpace-1: 11 13 28; DequantizeLinear-10: 10; DequantizeLinear-13: 13;
DequantizeLinear-19: 19; DequantizeLinear-21: 21; DequantizeLinear-23: 23; DequantizeLinear-24: 24;
DequantizeLinear-25: 25 28; Det-11: 11 22; Div-7: 7 13 14; Dropout-10: 10; Dropout-12: 12 13 22;
DynamicQuantizeLinear-11: 11; Einsum-12: 12 28; Elu-6: 6 22; Equal-7: 11 13 19; Erf-9: 9 13; Exp-6: 6 13;
Expand-8: 8 13; EyeLike-9: 9 22; Flatten-9: 11 13 21 23 24 25; Floor-6: 6 13; GRU-7: 7 14 22; Gather-1: 11 13;
GatherElements-11: 11 13; GatherND-11: 11 12 13; Gelu-20: 20; Gemm-11: 11 13; GlobalAveragePool-1: 1 22;
GlobalLpPool-2: 2 22; GlobalMaxPool-1: 1 22; Greater-9: 9 13; GreaterOrEqual-12: 12 16; GridSample-16: 16 20 22;
GroupNormalization-21: 21; HammingWindow-17: 17; HannWindow-17: 17; HardSigmoid-6: 6 22; HardSwish-14: 14 22;
Hardmax-11: 11; Hardmax-13: 13; Identity-1: 1 13 14 16 19 21 23 24 25; If-1: 11 13 16 19 21 23 24 25;
InstanceNormalization-6: 6 22; IsInf-10: 10 20; IsNaN-9: 9 13 20; LRN-1: 1 13; LSTM-7: 7 14 22;
LayerNormalization-17: 17; LeakyRelu-6: 6 16; Less-9: 9 13; LessOrEqual-12: 12 16; LinearAttention-27: 27;
Log-6: 6 13; LogSoftmax-11: 11; LogSoftmax-13: 13; Loop-1: 11 13 16 19 21 23 24 25; LpNormalization-1: 1 22;
LpPool-2: 11 18 22; MatMul-1: 9 13; MatMulInteger-10: 10; Max-8: 8 12 13; MaxPool-8: 11 12 22; MaxRoiPool-1: 1 22;
MaxUnpool-9: 11 22; Mean-8: 8 13; MeanVarianceNormalization-9: 9 13; MelWeightMatrix-17: 17; Min-8: 8 12 13;
Mish-18: 18 22; Mod-10: 10 13 28; Mul-7: 7 13 14; Multinomial-7: 7 22; Neg-6: 6 13;
NegativeLogLikelihoodLoss-12: 12 13 22; NonMaxSuppression-10: 11; NonZero-9: 9 13; Not-1: 1; OneHot-9: 11 28;
Optional-15: 15 28; OptionalGetElement-15: 15 18 28; OptionalHasElement-15: 15 18 28; Or-7: 7; PRelu-9: 9 16;
Pad-11: 11 13 18 19 21 23 24 25; Pow-7: 7 12 13 15; QLinearConv-10: 10; QLinearMatMul-10: 10; QLinearMatMul-21: 21;
QuantizeLinear-10: 10; QuantizeLinear-13: 13; QuantizeLinear-19: 19; QuantizeLinear-21: 21; QuantizeLinear-23: 23;
QuantizeLinear-24: 24; QuantizeLinear-25: 25 28; RMSNormalization-23: 23; RNN-7: 7 14 22; RandomNormal-1: 1 22;
RandomNormalLike-1: 1 22; RandomUniform-1: 1 22; RandomUniformLike-1: 1 22; Range-11: 11 27; Reciprocal-6: 6 13;
ReduceL1-11: 11 13; ReduceL1-18: 18; ReduceL2-11: 11 13; ReduceL2-18: 18; ReduceLogSum-11: 11 13;
ReduceLogSum-18: 18 28; ReduceLogSumExp-11: 11 13; ReduceLogSumExp-18: 18 28; ReduceMax-11: 11 12 13;
ReduceMax-18: 18 20; ReduceMean-11: 11 13; ReduceMean-18: 18; ReduceMin-11: 11 12 13; ReduceMin-18: 18 20;
ReduceProd-11: 11 13; ReduceProd-18: 18; ReduceSum-11: 11; ReduceSum-13: 13; ReduceSumSquare-11: 11 13;
ReduceSumSquare-18: 18; Relu-6: 6 13 14; Reshape-5: 5 13 14 19 21 23 24 25; Resize-11: 11 13 18 19;
ReverseSequence-10: 10 28; RoiAlign-10: 10; RoiAlign-16: 16 22; RotaryEmbedding-23: 23; Round-11: 11 22; STFT-17: 17;
Scan-9: 11 16 19 21 23 24 25; Scatter-9: 9; ScatterElements-11: 11 13 16 18; ScatterND-11: 11 13 16 18; Selu-6: 6 22;
SequenceAt-11: 11; SequenceConstruct-11: 11; SequenceEmpty-11: 11; SequenceErase-11: 11; SequenceInsert-11: 11;
SequenceLength-11: 11; Shape-1: 1 13 15 19 21 23 24 25; Shrink-9: 9; Sigmoid-6: 6 13; Sign-9: 9 13; Sin-7: 7 22;
Sinh-9: 9 22; Size-1: 1 13 19 21 23 24 25; Slice-10: 11 13; Softmax-11: 11; Softmax-13: 13; Softplus-1: 1 22;
Softsign-1: 1 22; SpaceToDepth-1: 1 13 28; Split-2: 11; Split-13: 13; Split-18: 18; SplitToSequence-11: 11 24;
Sqrt-6: 6 13; Squeeze-11: 11; Squeeze-13: 13 21 23 24 25; Sub-7: 7 13 14; Sum-8: 8 13; SwiGLU-28: 28; Swish-24: 24;
Tan-7: 7 22; Tanh-6: 6 13; TensorScatter-24: 24; TfIdfVectorizer-9: 9; ThresholdedRelu-10: 10 22; Tile-6: 6 13;
TopK-11: 11 24; Transpose-1: 1 13 21 23 24 25; Trilu-14: 14; Unique-11: 11 28; Unsqueeze-11: 11;
Unsqueeze-13: 13 21 23 24 25; Upsample-9: 9; Where-9: 9 16; Xor-7: 7;
"""

# Attributes that a Program never has: the reader makes constants of them, and needs no type of an optional.
ATTRIBUTES_NOT_IN_PROGRAMS = {"Constant": {"sparse_value"}, "Optional": {"type"}}

# Defaults that ONNX spells in two ways.
EQUIVALENT_DEFAULTS = {"bilinear": "linear"}


def schema_versions():
    """Yields (operator, version, schema) of ONNX's own domain: all versions in force from opset 11 on."""
    schemas: dict[str, dict[int, onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and not schema.deprecated:
            schemas.setdefault(schema.name, {})[schema.since_version] = schema
    for name, versions in sorted(schemas.items()):
        oldest = max((v for v in versions if v <= OLDEST_OPSET), default=OLDEST_OPSET)
        for version in sorted(v for v in versions if v >= oldest):
            yield name, version, versions[version]


CASES = [
    pytest.param(schema, id=f"{name}-{v}")
    for name, v, schema in schema_versions()
    if resolve_operator(name, max(v, OLDEST_OPSET))
]


def schema_default(attribute: onnx.defs.OpSchema.Attribute):
    value = attribute.default_value
    if attribute.required:
        return REQUIRED
    if value.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = onnx.helper.get_attribute_value(value)
    if isinstance(value, bytes):
        return value.decode()
    return [v.decode() if isinstance(v, bytes) else v for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("schema", CASES)
def test_an_operator_version_takes_the_inputs_and_attributes_of_the_schema(schema):
    operator = OPERATORS[resolve_operator(schema.name, max(schema.since_version, OLDEST_OPSET))]
    option = onnx.defs.OpSchema.FormalParameterOption
    variadic = any(parameter.option == option.Variadic for parameter in schema.inputs)
    assert operator.is_variadic == variadic
    if not variadic:
        assert len(schema.inputs) <= len(operator.input_names)
        required = sum(parameter.option == option.Single for parameter in schema.inputs)
        assert operator.required_inputs <= required
    for name, attribute in schema.attributes.items():
        if name in ATTRIBUTES_NOT_IN_PROGRAMS.get(schema.name, ()):
            continue
        assert name in operator.attribute_defaults, f"{operator.name} takes no {name}"
        ours, theirs = operator.attribute_defaults[name], schema_default(attribute)
        if isinstance(theirs, float):
            assert ours is not None
            assert np.float32(ours) == np.float32(theirs), f"{name}: {ours}, ONNX has {theirs}"
        elif isinstance(theirs, list):
            assert list(ours) == theirs, f"{name}: {ours}, ONNX has {theirs}"
        elif theirs is not None or ours is REQUIRED:
            assert ours is theirs or ours == EQUIVALENT_DEFAULTS.get(theirs, theirs), (
                f"{name}: {ours}, ONNX has {theirs}"
            )


def test_every_schema_version_was_reviewed():
    reviewed = {}
    for entry in REVIEWED_VERSIONS.replace("\n", " ").split(";"):
        name, _, versions = entry.strip().partition(": ")
        reviewed[name] = {int(v) for v in versions.split()}
    reviewed.pop("")
    for kind, version, _ in schema_versions():
        name = resolve_operator(kind, max(version, OLDEST_OPSET))
        if name is not None:
            assert version in reviewed.get(name, ()), (
                f"{kind}-{version} resolves to {name}, which nobody has reviewed: read what ONNX changed, then either "
                f"declare a new operator version or add {version} to REVIEWED_VERSIONS"
            )
    stale = {name for name in reviewed if name not in OPERATORS}
    assert not stale
