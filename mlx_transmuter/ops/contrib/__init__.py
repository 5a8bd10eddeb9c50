"""onnxruntime's contributed operators (com.microsoft), a file for each family."""

# The imports declare the operators.
from mlx_transmuter.ops.contrib import (  # noqa: F401
    activation,
    arrays,
    block_quantized,
    causal_conv,
    dynamic_quantize_lstm,
    fused_conv,
    fused_matmul,
    group_query_attention,
    integer_products,
    kv_buffers,
    linear_attention,
    moe,
    multi_head_attention,
    normalization,
    paged_attention,
    qlinear,
    relative_position_bias,
    rotary,
    sparse_attention,
    unsupported,
)
