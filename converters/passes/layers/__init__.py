"""Rewrites that make layers: projections, embeddings, norms, gated MLPs, and weights in few bits."""
