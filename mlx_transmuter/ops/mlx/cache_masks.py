"""The positions of a step's tokens, and the masks of their attention over the columns of a cache.

`index` is a CacheIndex, or a HybridIndex in a model of which only some layers have a window.
"""

import mlx.core as mx

from mlx_transmuter.cache import HybridIndex
from mlx_transmuter.ops.functional.attention import lowest_addable_score
from mlx_transmuter.ops.indices import IntegerRange
from mlx_transmuter.ops.integer_ranges import NodeCall
from mlx_transmuter.ops.registry import op


@op("mlx.visible")
def visibility_mask(index, *, window: int = 0):
    """Which columns each token attends to: bool [rows, 1, seq, context]. window: only the last so many positions; 0:
    all."""
    return (index.window(window) if window else index).visible()


def _range_of_positions(call: NodeCall) -> list[IntegerRange | None]:
    last = call.arguments[0].max_position
    return [None if last is None else IntegerRange(0, max(last, 0))]


@op("mlx.positions", integer_range=_range_of_positions)
def token_positions(index):
    """The positions of the step's tokens, int32 [rows, seq], 0 for padding."""
    return index.positions()


@op("mlx.alibi")
def add_alibi_bias(index, mask, *, slopes):
    """ALiBi: turns mask, bool [rows, 1, seq, context], into an additive one [rows, heads, seq, context] of each head's
    slope times the distance, the column's position minus the token's. Press et al. 2022.
    """
    index = layer_index(index, mask)
    distance = (index.column_positions()[:, None] - index.positions()[:, :, None])[:, None].astype(mx.float32)
    bias = mx.array(slopes, mx.float32)[:, None, None] * distance
    # Not -inf: a padding token attends to nothing, and its scores must not become NaN.
    return mx.where(mask, bias, mx.array(lowest_addable_score(mx.float32), mx.float32))


def layer_index(index, mask):
    """Returns the index by which a layer with this mask reads its pools: the one with as many columns as the mask."""
    return index.index_for(mask.shape[-1]) if isinstance(index, HybridIndex) else index
