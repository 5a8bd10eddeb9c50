"""The selection of tokens: logits processors, sampling settings, and the compiled step over them."""
