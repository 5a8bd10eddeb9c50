"""Speculative decoding: where drafts come from, their tree, and which of their tokens are accepted."""
