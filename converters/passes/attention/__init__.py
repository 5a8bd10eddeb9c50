"""Rewrites of attention: the ways exporters write it, all into attention over the pools of the cache."""
