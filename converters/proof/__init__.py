"""The proof of a conversion: the converted module against the unrewritten graph, and the trials of rewrites."""
