"""Products of 8-bit integers of com.microsoft, their scales fused in: dynamic quantization, attention and Gemm."""

from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.contrib.multi_head_attention import attend_packed_qkv, cuda_only_error
from mlx_transmuter.ops.contrib.normalization import normalize_embedding_sum
from mlx_transmuter.ops.functional.indexing import take_rows
from mlx_transmuter.ops.functional.integer_quantization import (
    dequantize_affine,
    integer_matmul,
    quantized_type_name,
    round_and_saturate,
    subtract_zero_point,
)
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.onnx.quantization import dynamic_quantize_linear
from mlx_transmuter.ops.registry import op


class QuantizedMatrix(NamedTuple):
    """8-bit integers [..., rows, columns] that stand for (integers - zero_point) · scale.

    scale and zero_point: scalars, or of the right operand of a product [columns]; zero_point None is 0.
    """

    integers: mx.array
    scale: mx.array
    zero_point: mx.array | None


def dequantized_product(a: QuantizedMatrix, b: QuantizedMatrix, bias: mx.array | None = None) -> mx.array:
    """Returns a [..., m, k] times b [..., k, n], plus bias [n]: float32. The product of the integers is exact."""
    total = integer_matmul(
        subtract_zero_point(a.integers, a.zero_point), subtract_zero_point(b.integers, b.zero_point)
    ).astype(mx.float32)
    scale = a.scale.astype(mx.float32) * b.scale.astype(mx.float32)
    return total * scale if bias is None else total * scale + bias.astype(mx.float32)


@op("com.microsoft.MatMulIntegerToFloat-1")
def mat_mul_integer_to_float(a, b, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    """The product of the quantized a [..., m, k] and b [..., k, n], plus bias [n], in the scales' float type.

    a_scale, a_zero_point: scalars; b_scale, b_zero_point: scalars or [n]. com.microsoft MatMulIntegerToFloat-1.
    """
    a, b = QuantizedMatrix(a, a_scale, a_zero_point), QuantizedMatrix(b, b_scale, b_zero_point)
    return dequantized_product(a, b, bias).astype(a_scale.dtype)


@op("com.microsoft.DynamicQuantizeMatMul-1")
def dynamic_quantize_mat_mul(a, b, b_scale, b_zero_point=None, bias=None):
    """a float32 [..., m, k], quantized to uint8 as a whole, times the 8-bit b [..., k, n], plus bias [n]: float32.

    b_scale, b_zero_point: scalars or [n]. com.microsoft DynamicQuantizeMatMul-1.
    """
    quantized_a = QuantizedMatrix(*dynamic_quantize_linear(a))
    return dequantized_product(quantized_a, QuantizedMatrix(b, b_scale, b_zero_point), bias)


@op("com.microsoft.QGemm-1")
def q_gemm(
    a,
    a_scale,
    a_zero_point,
    b,
    b_scale,
    b_zero_point,
    c=None,
    y_scale=None,
    y_zero_point=None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
):
    """alpha · a · b + c of quantized matrices, c being int32 in units of alpha · a_scale · b_scale.

    float32 without y_scale, else quantized by it to y_zero_point's type. b_scale, b_zero_point: scalars or [n].
    com.microsoft QGemm-1.
    """
    a, b = a.T if transA else a, b.T if transB else b
    total = integer_matmul(subtract_zero_point(a, a_zero_point), subtract_zero_point(b, b_zero_point))
    total = (total if c is None else total + c).astype(mx.float32)
    scale = alpha * a_scale * b_scale
    if y_scale is None:
        return total * scale
    return round_and_saturate(
        total * (scale / y_scale),
        0.0 if y_zero_point is None else y_zero_point.astype(mx.float32),
        quantized_type_name(y_zero_point),
    )


@op("com.microsoft.QAttention-1")
def q_attention(
    x,
    weight,
    bias,
    input_scale,
    weight_scale,
    mask_index=None,
    input_zero_point=None,
    weight_zero_point=None,
    past=None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
):
    """Attention over the projections of quantized x [batch, seq, in] by a quantized weight [in, 3 · hidden].

    weight_scale, weight_zero_point: scalars or [3 hidden]; the others as in Attention. com.microsoft QAttention-1.
    """
    if do_rotary or past_present_share_buffer:
        raise cuda_only_error()
    quantized_x = QuantizedMatrix(x, input_scale, input_zero_point)
    quantized_weight = QuantizedMatrix(weight, weight_scale, weight_zero_point)
    packed_qkv = dequantized_product(quantized_x, quantized_weight, bias).astype(bias.dtype)
    return attend_packed_qkv(
        packed_qkv,
        heads=num_heads,
        mask_index=mask_index,
        past=past,
        mask_filter_value=mask_filter_value,
        scale=scale,
        unidirectional=bool(unidirectional),
    )


@op("com.microsoft.MatMulInteger16-1")
def mat_mul_integer_16(a, b):
    """The product of 16-bit integers as numpy.matmul, modulo 2³²: int32, or uint32 if unsigned. MatMulInteger16-1."""
    unsigned = a.dtype == mx.uint16 and b.dtype == mx.uint16

    def halves(x: mx.array) -> tuple[mx.array, mx.array]:
        high = x.astype(mx.int32) >> 8
        return high, x.astype(mx.int32) - (high << 8)

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    middle = integer_matmul(a_high, b_low) + integer_matmul(a_low, b_high)
    total = (integer_matmul(a_high, b_high) << 16) + (middle << 8) + integer_matmul(a_low, b_low)
    return total.view(mx.uint32) if unsigned else total


@op("com.microsoft.MulInteger-1")
def mul_integer(a, a_zero_point, b, b_zero_point=None):
    """(a - a_zero_point) · (b - b_zero_point) by element, broadcast: int32. com.microsoft MulInteger-1."""
    return subtract_zero_point(a, a_zero_point) * subtract_zero_point(b, b_zero_point)


@op("com.microsoft.ReduceSumInteger-1")
def reduce_sum_integer(x, *, axes: list[int], keepdims: int):
    """The sum of 8-bit x over axes: int32, or uint32 of uint8. com.microsoft ReduceSumInteger-1."""
    dtype = mx.uint32 if x.dtype == mx.uint8 else mx.int32
    return mx.sum(x.astype(dtype), axis=axes, keepdims=bool(keepdims))


@op("com.microsoft.QEmbedLayerNormalization-1")
def q_embed_layer_normalization(
    input_ids: Indices,
    segment_ids: Indices,
    word_embedding,
    position_embedding,
    segment_embedding,
    gamma,
    beta,
    mask,
    word_embedding_scale,
    position_embedding_scale,
    segment_embedding_scale,
    gamma_scale,
    beta_scale,
    word_embedding_zero_point,
    position_embedding_zero_point,
    segment_embedding_zero_point,
    gamma_zero_point,
    beta_zero_point,
    *,
    epsilon: float = 1e-12,
):
    """EmbedLayerNormalization over 8-bit tables, gamma and beta, each with its scale and zero point: float32.

    com.microsoft QEmbedLayerNormalization-1.
    """
    positions = position_embedding[: input_ids.shape[1]]
    segments = None
    if segment_ids is not None and segment_embedding is not None:
        segments = take_rows(segment_embedding, segment_ids)
        segments = dequantize_affine(segments, segment_embedding_scale, segment_embedding_zero_point)
    words = take_rows(word_embedding, input_ids)
    return normalize_embedding_sum(
        words=dequantize_affine(words, word_embedding_scale, word_embedding_zero_point),
        positions=dequantize_affine(positions, position_embedding_scale, position_embedding_zero_point)[None],
        segments=segments,
        gamma=dequantize_affine(gamma, gamma_scale, gamma_zero_point),
        beta=dequantize_affine(beta, beta_scale, beta_zero_point),
        mask=mask,
        epsilon=epsilon,
    )[:2]
