"""The tokens whose logits are computed."""

import mlx.core as mx

from mlx_transmuter.ops.registry import op


@op("mlx.last")
def take_tokens(x, token_indices):
    """x [rows, seq, dim] at the tokens token_indices, int32 [rows, k], of each row: [rows, k, dim]."""
    if x.shape[1] == token_indices.shape[1] == 1:
        return x
    return mx.take_along_axis(x, mx.broadcast_to(token_indices[:, :, None], (*token_indices.shape, x.shape[2])), axis=1)
