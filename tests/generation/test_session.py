"""Session: what generation uses of a session, of every kind and of the fake one."""

from __future__ import annotations

from fake_decoder import FakeDecoder

from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.session import Session


def test_every_session_has_what_generation_uses(loaded):
    """A session over a cache, one over the full context, and that of the fake decoder."""
    for name in ("llama", "gpt2_reread"):
        assert isinstance(Decoder(loaded(name).decoder, 1).begin_session([4]), Session)
    assert isinstance(FakeDecoder(1).begin_session([4]), Session)
