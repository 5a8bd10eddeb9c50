"""The operators that split a token's vector into heads and merge it again, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.ops import OperatorError
from mlx_transmuter.ops.mlx.heads import merge_heads, split_heads

HEADS, DIM = 3, 4


@pytest.mark.parametrize("seq", [1, 5])
@pytest.mark.parametrize("groups", [(), (2,)], ids=["a vector", "a vector in two axes"])
def test_heads_are_split_and_merged_again(groups, seq):
    width = HEADS * DIM
    x = np.arange(2 * seq * width, dtype=np.float32)
    shape = (2, seq, *groups, width // int(np.prod(groups, dtype=int)))
    heads = split_heads(mx.array(x.reshape(shape)), heads=HEADS)
    np.testing.assert_array_equal(np.array(heads), x.reshape(2, seq, HEADS, DIM).swapaxes(1, 2))
    np.testing.assert_array_equal(np.array(merge_heads(heads)), x.reshape(2, seq, width))


def test_no_rows_have_no_heads():
    assert split_heads(mx.zeros((0, 5, HEADS * DIM)), heads=HEADS).shape == (0, HEADS, 5, DIM)


@pytest.mark.parametrize("heads", [-HEADS, 0, HEADS + 2])
def test_heads_that_do_not_divide_a_vector_are_refused(heads):
    with pytest.raises(OperatorError, match=f"{heads} heads of {HEADS * DIM} elements"):
        split_heads(mx.zeros((2, 5, HEADS * DIM)), heads=heads)
