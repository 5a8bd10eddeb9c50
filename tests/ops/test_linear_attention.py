"""ONNX's LinearAttention where decays are extreme, against the recurrence in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.ops.onnx.linear_attention import linear_attention


@pytest.mark.parametrize("decay", [-1e2, -1e6, -np.inf])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_a_token_that_forgets_all_before_it_leaves_the_small_decays_exact(rule, decay):
    """Against the recurrence in float64, one token after the other; a decay for each channel."""
    draw = np.random.default_rng(0)
    seq, dim = 8, 4
    q, k, v = (draw.standard_normal((1, seq, dim)).astype(np.float32) for _ in range(3))
    decays = np.full((1, seq, dim), -0.1, np.float32)
    decays[:, 3] = decay
    beta = None if rule == "gated" else np.full((1, seq, 1), 0.5, np.float32)
    state, expected = np.zeros((dim, dim)), []
    for t in range(seq):
        state = state * np.exp(decays[0, t].astype(np.float64))[:, None]
        written = v[0, t] if beta is None else beta[0, t] * (v[0, t] - k[0, t] @ state)
        state = state + np.outer(k[0, t], written)
        expected.append(q[0, t] @ state * dim**-0.5)
    arrays = [None if x is None else mx.array(x) for x in (q, k, v, None, decays, beta)]
    y, _ = linear_attention(*arrays, kv_num_heads=1, q_num_heads=1, update_rule=rule)
    np.testing.assert_allclose(np.array(y)[0], expected, rtol=1e-5, atol=1e-5)
