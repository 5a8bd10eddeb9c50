"""What rewrites work with: a view of the graph, patterns, the shape probe, and how a match is replaced."""
