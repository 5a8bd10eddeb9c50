"""Text to token ids and back: tokenizer.json, its chat templates, and text that streams in whole characters."""

from mlx_transmuter.tokenizer.detokenizer_stream import DetokenizerStream
from mlx_transmuter.tokenizer.errors import TokenizerError
from mlx_transmuter.tokenizer.tokenizer import Tokenizer

__all__ = ["DetokenizerStream", "Tokenizer", "TokenizerError"]
