"""Computations that several operators share; no operators themselves."""
