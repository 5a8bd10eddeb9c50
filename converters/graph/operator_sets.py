"""Sets of operators by what they do to a value, each written once; a name is an op type ("Add", "mlx.linear").

A rewrite that needs a few operators more takes a set from here and names what it adds. Every name here is one that the
registry declares.
"""

from __future__ import annotations

from mlx_transmuter.ops import OPERATORS

# Operators that apply a layer of the program; of them those whose layer is a matrix of its own, and those that may
# compute logits, because each row of their result depends on one row of the input alone.
LAYER_OPS = tuple(name for name, operator in OPERATORS.items() if operator.layer_input)
LINEAR_LAYER_OPS = ("mlx.linear", "mlx.switch_linear")
HEAD_OPS = tuple(name for name in LAYER_OPS if OPERATORS[name].is_rowwise)

# Activations.
NONLINEAR_OPS = ("Sigmoid", "Tanh", "Erf")  # parts of an activation that is written in several nodes
GELU_AND_SWISH_OPS = ("Gelu", "Swish", "com.microsoft.Gelu", "com.microsoft.FastGelu", "com.microsoft.QuickGelu")
ACTIVATION_OPS = (
    *NONLINEAR_OPS,
    *GELU_AND_SWISH_OPS,
    *("Relu", "LeakyRelu", "Elu", "HardSwish", "Softplus", "Mish"),
)
# Activations that are not elementwise: they add a bias first, and BiasSplitGelu multiplies its two halves.
BIASED_ACTIVATION_OPS = ("com.microsoft.BiasGelu", "com.microsoft.BiasSplitGelu")
FUSED_ACTIVATION_OPS = ("mlx.activate", "mlx.gate")  # of this project, and elementwise

# Elementwise: each element of the result depends on one element of each input.
ARITHMETIC_OPS = ("Mul", "Add", "Sub", "Div", "Pow", "Sqrt", "Neg")
ELEMENTWISE_OPS = (*ARITHMETIC_OPS, *ACTIVATION_OPS, "Abs", "Exp", "Min", "Max", "Clip", "Cast", "Identity")

# Shape-only: the result has the elements of the first input and no others.
RESHAPE_OPS = ("Reshape", "Unsqueeze", "Squeeze", "Identity")  # all of them, in their order
COPY_OPS = (*RESHAPE_OPS, "Expand", "Tile")  # all of them, some several times
VALUE_KEEPING_OPS = ("Cast", "Identity", "Dropout")  # all of them, in their shape
SLICING_OPS = ("Split", "Slice")  # some of them, on one axis
# Elements of a float value by another type, order or shape: what stands between a value and its use by heads.
BROADCAST_OPS = (*COPY_OPS, "Transpose", "Cast")

# Results that differ from one run to the next.
RANDOM_OPS = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")

# Quantization. Dynamic: activations are rounded by a scale that is computed from them when the graph runs.
DYNAMIC_QUANTIZATION_OPS = (
    "DynamicQuantizeLinear",
    *(f"com.microsoft.{name}" for name in ("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention")),
)
QUANTIZE_OPS = ("QuantizeLinear", "com.microsoft.QuantizeLinear")
# Operators that only a quantized file has.
QUANTIZED_FILE_OPS = (
    *("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv", "DequantizeLinear"),
    *(
        f"com.microsoft.{name}"
        for name in (
            *("DequantizeLinear", "MatMulNBits", "MatMulBnb4", "GatherBlockQuantized", "MatMulIntegerToFloat"),
            *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QMoE", "QGemm"),
        )
    ),
)
