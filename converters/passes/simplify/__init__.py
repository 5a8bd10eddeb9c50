"""Rewrites that simplify a graph: constants, shapes that steps share, and what is computed twice."""
