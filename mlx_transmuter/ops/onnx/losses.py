"""Losses."""

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError, op


@op("NegativeLogLikelihoodLoss-12")
def negative_log_likelihood_loss(x, target, weight=None, *, ignore_index=None, reduction="mean"):
    """-x[n, target[n]] * weight[target[n]], 0 where the target is ignore_index; each, their sum or their weighted mean.

    x [batch, classes, ...], target integers [batch, ...], weight [classes]. ONNX NegativeLogLikelihoodLoss-12, 13, 22.
    """
    ignored = None if ignore_index is None else target == ignore_index
    places = target if ignored is None else mx.where(ignored, 0, target)
    weights = mx.ones(places.shape, x.dtype) if weight is None else mx.take(weight, places)
    if ignored is not None:
        weights = mx.where(ignored, mx.zeros((), x.dtype), weights)
    loss = -mx.take_along_axis(x, mx.expand_dims(places, 1), axis=1).squeeze(1) * weights
    if reduction == "none":
        return loss
    if reduction == "sum":
        return mx.sum(loss)
    if reduction == "mean":
        # Without weights the mean counts what is not ignored: those weigh 1.
        return mx.sum(loss) / mx.sum(weights)
    raise OperatorError(f"the reduction {reduction!r}", "none, sum or mean")
