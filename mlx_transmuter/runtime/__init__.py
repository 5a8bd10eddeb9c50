"""The runtime: a Program as an MLX module, its step functions, and the sessions that own a decoder's cache."""
