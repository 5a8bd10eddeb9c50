"""Precision options: another float type, quantized weights, float activations, and what they change."""
