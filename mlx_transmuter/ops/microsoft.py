"""The operators of onnxruntime's domain, com.microsoft, and of quantised files: importing this file declares them all."""

from mlx_transmuter.ops import (  # noqa: F401
    microsoft_activations,
    microsoft_attention,
    microsoft_gqa,
    microsoft_integers,
    microsoft_matmul,
    microsoft_norms,
    microsoft_qlinear,
    microsoft_quantized,
    microsoft_rotary,
    quantization,
)
