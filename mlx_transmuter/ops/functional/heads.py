"""Heads: a token's vector as one vector per head, and back."""

import math

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError


def split_heads(x: mx.array, heads: int) -> mx.array:
    """Returns x [batch, seq, …], whose other axes hold heads · dim elements, as [batch, heads, seq, dim].

    Raises OperatorError for a number of heads that does not divide them.
    """
    batch, seq = x.shape[:2]
    width = math.prod(x.shape[2:])
    if heads < 1 or width % heads:  # MLX takes negative sizes whose product is right
        raise OperatorError(f"{heads} heads of {width} elements a token", "a number of heads that divides them")
    dim = width // heads
    if seq == 1:  # the same order of elements
        return x.reshape(batch, heads, 1, dim)
    return x.reshape(batch, seq, heads, dim).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """Returns x [batch, heads, seq, dim] as [batch, seq, heads · dim]."""
    batch, heads, seq, dim = x.shape
    if seq != 1:
        x = x.swapaxes(1, 2)
    return x.reshape(batch, seq, heads * dim)


def repeat_heads(x: mx.array, heads: int) -> mx.array:
    """Returns x [batch, shared heads, …] with each head repeated so that there are `heads` of them."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)


def split_qkv_heads(
    query: mx.array, key: mx.array | None, value: mx.array | None, heads: int, kv_heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns q [batch, heads, seq, dim], k and v [batch, kv heads, seq, dim].

    query, key, value: [batch, seq, heads · dim] each; or query has all three one after another on its last axis.
    """
    if key is not None and value is not None:
        return split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
    packed = split_heads(query, heads + 2 * kv_heads)
    return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
