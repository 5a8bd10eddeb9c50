"""ONNX to Program: reading, rewriting, proving and writing a converted folder. Users call `mlx_transmuter.convert`."""
