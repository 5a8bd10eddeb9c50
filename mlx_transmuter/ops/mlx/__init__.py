"""This project's own operators, made by rewrites: attention over pools, layers, experts and fused nodes."""

# The imports declare the operators.
from mlx_transmuter.ops.mlx import (  # noqa: F401
    cache_masks,
    fused,
    heads,
    layers,
    logits,
    moe,
    pooled_attention,
    quantized_pool_products,
    switch_linear,
)
