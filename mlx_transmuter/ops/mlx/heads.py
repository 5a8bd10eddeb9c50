"""A token's vector as heads, and heads as a token's vector."""

from mlx_transmuter.ops.registry import op


@op("mlx.split_heads")
def split_heads(x, *, heads: int):
    """x [rows, seq, heads · dim] as [rows, heads, seq, dim]."""
    rows, seq = x.shape[:2]
    if seq == 1:  # the same order of elements
        return x.reshape(rows, heads, 1, -1)
    return x.reshape(rows, seq, heads, -1).swapaxes(1, 2)


@op("mlx.merge_heads")
def merge_heads(x):
    """x [rows, heads, seq, dim] as [rows, seq, heads · dim]."""
    rows, heads, seq, dim = x.shape
    if seq != 1:
        x = x.swapaxes(1, 2)
    return x.reshape(rows, seq, heads * dim)
