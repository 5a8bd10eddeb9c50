"""Losses."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import take, take_along_axis
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op
from mlx_transmuter.ops.types import to_device


@op("NegativeLogLikelihoodLoss-12")
def negative_log_likelihood_loss(x, target: Indices, weight=None, *, ignore_index=None, reduction="mean"):
    """-x[n, target[n]] * weight[target[n]], 0 where the target is ignore_index; each, their sum or their weighted mean.

    x [batch, classes, ...], target integers [batch, ...], weight [classes]. ONNX NegativeLogLikelihoodLoss-12, 13, 22.
    """
    places, ignored = Indices.of(target), None
    if ignore_index is not None:
        labels = to_device(places.array) if isinstance(places.array, np.ndarray) else places.array
        ignored = labels == ignore_index
        places = Indices.of(mx.where(ignored, 0, labels))
    weights = mx.ones(places.shape, x.dtype) if weight is None else take(weight, places)
    if ignored is not None:
        weights = mx.where(ignored, mx.zeros((), x.dtype), weights)
    at = places.reshape(places.shape[0], 1, *places.shape[1:])
    loss = -take_along_axis(x, at, axis=1).squeeze(1) * weights
    if reduction == "none":
        return loss
    if reduction == "sum":
        return mx.sum(loss)
    if reduction == "mean":
        # Without weights the mean counts what is not ignored: those weigh 1.
        return mx.sum(loss) / mx.sum(weights)
    raise OperatorError(f"the reduction {reduction!r}", "none, sum or mean")
