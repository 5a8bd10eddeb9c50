"""The kernels of a step on Metal, counted without a Mac."""
