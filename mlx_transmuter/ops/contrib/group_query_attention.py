"""com.microsoft GroupQueryAttention: grouped heads over a buffer, into which each row writes after its own tokens."""

import math

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.contrib.kv_buffers import first_columns, value_if_known, write_to_buffer
from mlx_transmuter.ops.functional.attention import attend, attention_weights_and_scores, following_positions
from mlx_transmuter.ops.functional.heads import merge_heads, split_qkv_heads
from mlx_transmuter.ops.functional.indexing import clip_indices
from mlx_transmuter.ops.functional.norms import rms_norm
from mlx_transmuter.ops.functional.rotary import rotate_at_positions
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op


@op("com.microsoft.GroupQueryAttention-1")
def group_query_attention(
    query,
    key=None,
    value=None,
    past_key=None,
    past_value=None,
    seqlens_k: Indices = None,
    total_sequence_length=None,
    cos_cache=None,
    sin_cache=None,
    position_ids: Indices = None,
    attention_bias=None,
    head_sink=None,
    k_scale=None,
    v_scale=None,
    q_norm_weight=None,
    k_norm_weight=None,
    query_seqlens=None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_norm_epsilon: float | None = None,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    q_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    outputs: int = 1,
):
    """Attention of grouped heads over the past buffer and the step's tokens; the present buffers; and the scores.

    query: [batch, seq, heads · dim], or q, k and v packed on the last axis; key, value: [batch, seq, kv heads · dim];
    past_key, past_value: [batch, kv heads, capacity, dim]; seqlens_k: int32 [batch], the tokens that a row holds after
    the step, less 1; total_sequence_length: their largest. Row b's tokens have the positions from P = seqlens_k[b] + 1
    - seq (0 where that is negative: a first prompt padded on the right) and are written there, padding tokens too. The
    present has the capacity max(past's, total). position_ids: [batch, seq], to rotate by, P + i where absent;
    attention_bias: [batch or 1, heads or 1, seq, total]; head_sink: [heads]; query_seqlens: [batch], the real tokens of
    the step.

    onnxruntime refuses several tokens on a past for batch > 1; here each row gets what it would get alone.
    A total known only when the step runs must fit the past's capacity. com.microsoft GroupQueryAttention-1.
    """
    if (
        k_quant_type != "NONE"
        or v_quant_type != "NONE"
        or k_scale is not None
        or v_scale is not None
        or kv_cache_bit_width
    ):
        raise OperatorError("a quantized cache", "a cache of floats", "export it without a quantized cache")
    if sliding_window_cache:
        raise OperatorError(
            "sliding_window_cache", "a cache that holds every position", "export it with local_window_size alone"
        )
    if seqlens_k is None:
        raise OperatorError("no seqlens_k", "the length of each row, less 1")
    q, k, v = split_qkv_heads(query, key, value, num_heads, kv_num_heads)
    batch, _, seq, dim = q.shape
    # A total that is known only when the step runs must fit the past's capacity, which then is the present's, too.
    min_total = seq if attention_bias is None else attention_bias.shape[-1]
    total = value_if_known(total_sequence_length, min_total)
    capacity = max(0 if past_key is None else past_key.shape[2], total)
    length = clip_indices(seqlens_k, -1, capacity - 1).reshape(batch) + 1
    counts = None if query_seqlens is None else query_seqlens.reshape(batch)
    start = _first_columns(length, counts, seq, capacity)
    positions = following_positions(start, seq)

    if q_norm_weight is not None and k_norm_weight is not None:
        q_eps = qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon
        k_eps = qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon
        q = rms_norm(q, q_norm_weight, q_eps, compute_dtype=q.dtype)
        k = rms_norm(k, k_norm_weight, k_eps, compute_dtype=k.dtype)
    if do_rotary:
        rotary_positions = positions if position_ids is None else Indices.of(position_ids).reshape(-1, seq)
        q, k = rotate_at_positions((q, k), cos_cache, sin_cache, rotary_positions, interleaved=rotary_interleaved)

    k = write_to_buffer(past_key, k, start, capacity, counts)
    v = write_to_buffer(past_value, v, start, capacity, counts)
    columns = shared_arange(capacity)[None, None, None]
    newest = positions.array[:, None, :, None] if causal else (length[:, None, None, None] - 1)
    visible = columns <= newest
    if local_window_size > 0:
        visible = visible & (columns > newest - local_window_size)
    if attention_bias is not None and attention_bias.shape[-1] < capacity:
        attention_bias = mx.pad(attention_bias, [(0, 0)] * 3 + [(0, capacity - attention_bias.shape[-1])])
    sinks = head_sink
    if sinks is None and smooth_softmax == 1:
        sinks = mx.zeros((num_heads,), dtype=q.dtype)
    scale = scale or 1 / math.sqrt(dim)
    options = {"bias": attention_bias, "visibility": visible, "softcap": softcap, "sinks": sinks}
    output = merge_heads(attend(q, k, v, scale, **options))
    if not qk_output or outputs < 4:
        return output, k, v
    weights, scores = attention_weights_and_scores(q, k, scale, **options)
    return output, k, v, (scores if qk_output == 1 else weights).astype(q.dtype)


def _first_columns(length: mx.array, counts: mx.array | None, seq: int, capacity: int) -> Indices:
    """Returns the column of each row's first token, [batch]: after the tokens that it holds already.

    length: int32 [batch], from 0 to capacity, the tokens of each row after the step. counts: how many of these are the
    step's; None for seq, or all where a row has fewer: a first prompt with padding.
    """
    if counts is not None:
        return Indices.of(length - counts)
    return first_columns(Indices.between(length - mx.minimum(length, seq), 0, max(capacity - seq, 0)), seq, capacity)
