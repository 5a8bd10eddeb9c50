"""Rewrites of mixtures of experts: the ways exporters write them, all into one switch form."""
