"""The data of tensors inside an ONNX file, left where it is.

A large model may have its weights in the ONNX file itself. Protobuf would copy them into memory, twice; here the file
is mapped, its messages are followed to the data of its tensors, and the model is parsed without these bytes. Such a
tensor then names them as external data, in the ONNX file itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onnx import ModelProto, TensorProto

# Data of fewer bytes stays in its message.
MIN_DATA_BYTES = 2**12
# Protobuf reads no deeper messages.
_MAX_DEPTH = 100
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = (
    TensorProto.DESCRIPTOR.fields_by_name[name].number for name in ("raw_data", "external_data", "data_location")
)
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    """A field of a message: its number, the kind of its value, and where it begins, its value begins, and both end."""

    number: int
    kind: int
    begin: int
    value: int
    end: int


def read_without_data(file: Path) -> bytes:
    """Returns the bytes of the model in a file, with large data of its tensors as external data in that file.

    Raises ValueError for a file that is no protobuf message.
    """
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return _ModelBytes(mapped, file.name).without_data(0, len(mapped), ModelProto.DESCRIPTOR, 0)


class _ModelBytes:
    """The mapped bytes of a model, and the name of its file."""

    def __init__(self, mapped: mmap.mmap, file_name: str):
        self.mapped, self.file_name = mapped, file_name

    def without_data(self, begin: int, end: int, descriptor: Any, depth: int) -> bytes:
        """Returns the message between two places without the data of tensors in it. Raises ValueError."""
        if depth > _MAX_DEPTH:
            raise ValueError("messages inside one another")
        if descriptor is TensorProto.DESCRIPTOR:
            return self._tensor_without_data(begin, end)
        message = bytearray()
        for field in self._fields(begin, end):
            declared = descriptor.fields_by_number.get(field.number)
            inner = declared.message_type if declared is not None and field.kind == _LENGTH else None
            if inner is None or field.end - field.value < MIN_DATA_BYTES:
                message += self.mapped[field.begin : field.end]
            else:
                content = self.without_data(field.value, field.end, inner, depth + 1)
                message += _varint_bytes(field.number << 3 | _LENGTH) + _varint_bytes(len(content)) + content
        return bytes(message)

    def _tensor_without_data(self, begin: int, end: int) -> bytes:
        """Returns a TensorProto with its data as external data, if that is large and has one place."""
        fields = [*self._fields(begin, end)]
        data = [field for field in fields if field.number == _RAW_DATA and field.kind == _LENGTH]
        is_external = any(field.number in (_EXTERNAL_DATA, _DATA_LOCATION) for field in fields)
        if len(data) != 1 or is_external or data[0].end - data[0].value < MIN_DATA_BYTES:
            return self.mapped[begin:end]
        offset, length = data[0].value, data[0].end - data[0].value
        place = TensorProto(data_location=TensorProto.EXTERNAL)
        for key, value in {"location": self.file_name, "offset": offset, "length": length}.items():
            place.external_data.add(key=key, value=str(value))
        return self.mapped[begin : data[0].begin] + self.mapped[data[0].end : end] + place.SerializeToString()

    def _fields(self, begin: int, end: int) -> Iterator[_Field]:
        """Yields the fields of the message between two places. Raises ValueError for one that is no message."""
        while begin < end:
            key, value = self._varint(begin, end)
            kind = key & 7
            if kind == _VARINT:
                _, stop = self._varint(value, end)
            elif kind == _LENGTH:
                length, value = self._varint(value, end)
                stop = value + length
            elif kind in (_FIXED64, _FIXED32):
                stop = value + (8 if kind == _FIXED64 else 4)
            else:
                raise ValueError(f"a field of kind {kind}")
            if stop > end:
                raise ValueError("a field that ends after its message")
            yield _Field(key >> 3, kind, begin, value, stop)
            begin = stop

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        """Returns the number at a place, and the place after it."""
        value = 0
        for count in range(10):
            if place + count >= end:
                break
            byte = self.mapped[place + count]
            value |= (byte & 127) << (7 * count)
            if byte < 128:
                return value, place + count + 1
        raise ValueError("a number without an end")


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
