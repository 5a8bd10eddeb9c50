"""A token's vector as one vector per head, and back."""

from mlx_transmuter.ops.functional import heads as functional_heads
from mlx_transmuter.ops.registry import op


@op("mlx.split_heads")
def split_heads(x, *, heads: int):
    """x [rows, seq, heads · dim] as [rows, heads, seq, dim]."""
    return functional_heads.split_heads(x, heads)


@op("mlx.merge_heads")
def merge_heads(x):
    """x [rows, heads, seq, dim] as [rows, seq, heads · dim]."""
    return functional_heads.merge_heads(x)
