"""The tokens whose logits are computed."""

import mlx.core as mx

from mlx_transmuter.ops.registry import op


@op("mlx.last")
def take_tokens(x, logit_indices):
    """x [rows, seq, dim] at the tokens logit_indices, int32 [rows, k], of each row: [rows, k, dim]."""
    if x.shape[1] == logit_indices.shape[1] == 1:
        return x
    return mx.take_along_axis(x, mx.broadcast_to(logit_indices[:, :, None], (*logit_indices.shape, x.shape[2])), axis=1)
