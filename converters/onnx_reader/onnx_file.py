"""An ONNX file as a ModelProto, with its external data left where it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import ModelProto

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.inline_data import read_without_data
from mlx_transmuter.git_lfs import check_not_lfs_pointer

_DOWNLOAD_AGAIN = "download the file again"


def load_onnx_file(file: Path) -> ModelProto:
    """Returns the model in a file. Raises ConvertError for a file that does not hold a complete ONNX model."""
    if not file.is_file():
        raise ConvertError(file, "no such file", "an ONNX model")
    check_not_lfs_pointer(file, ConvertError)
    try:
        model = _parse_model(file)
    except (DecodeError, ValueError, UnicodeDecodeError, RuntimeError) as error:
        found = f"{file.stat().st_size} bytes that are no ONNX model ({error})"
        raise ConvertError(file, found, "a complete ONNX file", _DOWNLOAD_AGAIN) from None
    if not model.graph.node or not model.opset_import:
        raise ConvertError(file, "a file without a graph", "an ONNX model", _DOWNLOAD_AGAIN)
    for text in _text_fields(model):
        if isinstance(text, bytes):  # protobuf's form of a text field that is not UTF-8
            raise ConvertError(file, f"the name {text!r}", "names in UTF-8", _DOWNLOAD_AGAIN)
    return model


def _parse_model(file: Path) -> ModelProto:
    """Returns the model with large data of its tensors left in the file. Raises what protobuf and ONNX raise."""
    try:
        message = read_without_data(file)
    except ValueError:  # no protobuf message, or one of ONNX's other formats
        return onnx.load_model(str(file), load_external_data=False)
    return ModelProto.FromString(message)


def _text_fields(message: Message) -> Iterator[str | bytes]:
    """The value of every text field of a message and of the messages in it."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            yield from [value] if isinstance(value, str | bytes) else value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _text_fields(inner)
