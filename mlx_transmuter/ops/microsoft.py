"""The operators of onnxruntime's domain, com.microsoft, and of quantised files: the import declares them all."""

from mlx_transmuter.ops import (  # noqa: F401
    microsoft_activations,
    microsoft_arrays,
    microsoft_attention,
    microsoft_causal_conv,
    microsoft_experts,
    microsoft_gqa,
    microsoft_integers,
    microsoft_linear_attention,
    microsoft_matmul,
    microsoft_norms,
    microsoft_paged_attention,
    microsoft_positions,
    microsoft_qlinear,
    microsoft_quantized,
    microsoft_recurrent,
    microsoft_rotary,
    microsoft_sparse_attention,
    quantization,
)
