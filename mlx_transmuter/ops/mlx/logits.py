"""The tokens whose logits are computed."""

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import clip_indices, take_along_axis
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import op


@op("mlx.last")
def take_tokens(x, logit_indices: Indices):
    """x [rows, seq, dim] at the tokens logit_indices, int32 [rows, k], of each row: [rows, k, dim]."""
    if x.shape[1] == logit_indices.shape[1] == 1:
        return x
    tokens = clip_indices(logit_indices, 0, x.shape[1] - 1)[:, :, None]
    places = Indices.between(mx.broadcast_to(tokens, (*tokens.shape[:2], x.shape[2])), 0, x.shape[1] - 1)
    return take_along_axis(x, places, axis=1)
