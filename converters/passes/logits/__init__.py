"""Rewrites of what follows the last layer: logits of the wanted tokens alone."""
