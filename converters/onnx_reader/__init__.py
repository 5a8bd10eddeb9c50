"""ONNX files as Programs: protobuf, external data, element types and weight names; nothing of ONNX goes further."""
