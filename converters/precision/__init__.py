"""Precision options: another float type, quantised weights, float activations, and what they change."""
