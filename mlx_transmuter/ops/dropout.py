"""Dropout: a mask of chance while training, the identity in use."""

import mlx.core as mx

from mlx_transmuter.ops.registry import Host, op


def _dropout(x: mx.array, ratio: float, training: bool, seed: int | None, outputs: int):
    if training and ratio > 0:
        key = None if seed is None else mx.random.key(seed)
        kept = mx.random.bernoulli(1 - ratio, x.shape, key)
        y = mx.where(kept, x / (1 - ratio) if ratio < 1 else x, 0).astype(x.dtype)
    else:
        y, kept = x, mx.ones(x.shape, mx.bool_)
    return (y, kept)[:outputs]


@op("Dropout-10")
def dropout_10(x, *, ratio=0.5, outputs=1):
    """x itself and a mask of true, as in use; the ratio is for training. ONNX Dropout-10."""
    return _dropout(x, ratio, False, None, outputs)


@op("Dropout-12")
def dropout(x, ratio: Host = None, training_mode: Host = None, *, seed=None, outputs=1):
    """x itself, or in training with the share `ratio` set to 0 and the rest scaled; and the mask. ONNX Dropout-12, 13, 22."""
    training = training_mode is not None and bool(training_mode.item())
    return _dropout(x, 0.5 if ratio is None else float(ratio.item()), training, seed, outputs)
