"""Tensors of files: every ONNX type in each form, and external data that is wrong, missing or outside the folder."""

from __future__ import annotations

import os
import socket

import numpy as np
import onnx
import pytest
import toy
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.tensor_protos import tensor_from_proto
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES

FLOATS = [0.0, 1.5, -2.0, 0.5, 3.0]
# ONNX type -> the elements; what they are once read, where that is not the same.
ELEMENTS = {
    "FLOAT": [*FLOATS, float("inf"), 1e-40], "DOUBLE": [*FLOATS, 1e300], "FLOAT16": [*FLOATS, 65504.0], "BFLOAT16": [*FLOATS, 2.0**127],
    "INT8": [0, 1, -128, 127], "INT16": [0, -(2**15), 2**15 - 1], "INT32": [0, -(2**31), 2**31 - 1], "INT64": [0, -(2**63), 2**63 - 1],
    "UINT8": [0, 1, 255], "UINT16": [0, 2**16 - 1], "UINT32": [0, 2**32 - 1], "UINT64": [0, 2**64 - 1],
    "BOOL": [True, False, True], "STRING": ["a", "", "né"],
    "COMPLEX64": [1 + 2j, -3j], "COMPLEX128": [1 + 2j, -3.5],
    "FLOAT8E4M3FN": FLOATS, "FLOAT8E4M3FNUZ": FLOATS, "FLOAT8E5M2": FLOATS, "FLOAT8E5M2FNUZ": FLOATS,
    "FLOAT8E8M0": [1.0, 2.0, 0.25], "FLOAT4E2M1": [*FLOATS, 6.0],
    "FLOAT6E2M3": [*FLOATS, 7.5], "FLOAT6E3M2": [*FLOATS, -28.0],
    "INT4": [0, 7, -8, 3, -1], "UINT4": [0, 15, 9], "INT2": [0, 1, -2, -1, 1], "UINT2": [0, 3, 2],
}  # fmt: skip


def proto(kind: str, form: str) -> TensorProto:
    code, values = getattr(TensorProto, kind), ELEMENTS[kind]
    if form == "typed":
        return helper.make_tensor("t", code, [len(values)], values)
    if kind in ("INT4", "UINT4", "INT2", "UINT2"):  # elements lie in a byte from its low bits up
        bits = int(kind[-1])
        codes = [value & (2**bits - 1) for value in values]
        per = 8 // bits
        data = [sum(c << bits * j for j, c in enumerate(codes[i : i + per])) for i in range(0, len(codes), per)]
        return TensorProto(name="t", data_type=code, dims=[len(values)], raw_data=bytes(data))
    if kind == "BFLOAT16":  # the upper half of a float32
        data = (np.array(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        return TensorProto(name="t", data_type=code, dims=[len(values)], raw_data=data)
    dtype = helper.tensor_dtype_to_np_dtype(code)
    array = np.array(values, dtype) if dtype.kind in "iu" else np.array(values).astype(dtype)
    return numpy_helper.from_array(array, "t")


def elements(found: LazyTensor) -> list:
    array = found.read()
    assert array.shape == found.shape
    wide = array if array.dtype.kind in "biuUc" else array.astype(np.float64)
    return wide.tolist()


def expected_elements(kind: str) -> list:
    values = ELEMENTS[kind]
    if kind in ("FLOAT", "FLOAT16"):
        return np.array(values, {"FLOAT": np.float32, "FLOAT16": np.float16}[kind]).astype(np.float64).tolist()
    return values


def program_type_name(kind: str) -> str:
    """The type as programs spell it."""
    spelled = {"FLOAT": "float32", "DOUBLE": "float64"}.get(kind, kind.lower())
    return spelled.replace("float8e", "float8_e").replace("float4e", "float4_e").replace("float6e", "float6_e")


KINDS = [TensorProto.DataType.Name(code) for code in ELEMENT_TYPE_NAMES]
FORMS = [(kind, form) for kind in KINDS for form in ("raw", "typed", "external") if kind != "STRING" or form == "typed"]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_every_type_is_read(kind, form, tmp_path):
    given = proto(kind, "typed" if form == "typed" else "raw")
    if form == "external":
        (tmp_path / "data").write_bytes(
            b"\x7f" * 5 + given.raw_data + b"\x7f" * 3
        )  # at an odd place, with more after it
        toy.place(given, "data", 5, len(given.raw_data))
        given.ClearField("raw_data")
    found = tensor_from_proto(given, tmp_path / "model.onnx")
    assert found.dtype == program_type_name(kind)
    assert elements(found) == expected_elements(kind)
    if kind not in ("STRING", "COMPLEX64", "COMPLEX128"):
        assert found.transpose().read().shape == found.shape[::-1]


def test_a_type_that_is_not_known_is_refused():
    for code in (0, 99):
        with pytest.raises(ConvertError, match=f"'t' of type {code}"):
            tensor_from_proto(TensorProto(name="t", data_type=code, dims=[1], raw_data=b"1234"), "f")


@pytest.mark.parametrize(
    ("kind", "dims", "field", "count"),
    [("FLOAT", [3], "float_data", 2), ("FLOAT", [], "float_data", 0), ("INT64", [2], "int64_data", 3), ("COMPLEX64", [2], "float_data", 2),
     ("DOUBLE", [1], "double_data", 2), ("UINT64", [1], "uint64_data", 0), ("INT8", [4], "int32_data", 3), ("INT4", [5], "int32_data", 2),
     ("UINT2", [5], "int32_data", 1), ("STRING", [2], "string_data", 1)],
)  # fmt: skip
def test_typed_data_of_another_size_is_refused(kind, dims, field, count):
    given = TensorProto(name="t", data_type=getattr(TensorProto, kind), dims=dims)
    getattr(given, field).extend([b"x" if kind == "STRING" else 1] * count)
    with pytest.raises(ConvertError, match="'t'"):
        tensor_from_proto(given, "f")


def test_text_that_is_not_utf8_is_read_with_replacement_characters():
    given = TensorProto(name="t", data_type=TensorProto.STRING, dims=[2], string_data=[b"\xff", b"ok"])
    assert tensor_from_proto(given, "f").read().tolist() == ["\ufffd", "ok"]


STORED = ["FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "UINT64", "BOOL"]


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("external", [False, True])
def test_a_weight_of_each_type_gives_the_logits_of_onnxruntime(kind, external, tmp_path):
    """The head's bias, or a part of it, is stored in the type and cast when it is used."""
    model = toy.decoder(21)
    values = (np.arange(toy.VOCAB) % 5).astype(np.float32)
    code = getattr(TensorProto, kind)
    toy.replace(model, "head.bias", helper.make_tensor("head.bias", code, [toy.VOCAB], values))
    cast = helper.make_node("Cast", ["head.bias"], ["bias"], to=TensorProto.FLOAT)
    toy.node(model, "logits").input[1] = "bias"
    model.graph.node.insert(0, cast)
    source = toy.write(tmp_path / "source", model)
    if external:
        bias = toy.initializer(model, "head.bias")
        raw = numpy_helper.from_array(numpy_helper.to_array(bias))
        (source / "bias.bin").write_bytes(raw.raw_data)
        for field in ("float_data", "int32_data", "double_data", "uint64_data", "int64_data"):
            bias.ClearField(field)
        toy.place(bias, "bias.bin")
        (source / "model.onnx").write_bytes(model.SerializeToString())
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False)
    ids = [1, 4, 9]
    np.testing.assert_allclose(
        toy.converted_logits(folder, ids), toy.onnxruntime_logits(source / "model.onnx", ids), atol=1e-4
    )


def test_a_weight_that_MLX_has_no_type_for_is_refused_by_name(tmp_path):
    model = toy.decoder(21)
    values = (np.arange(toy.VOCAB) % 5).astype(np.float32)
    toy.replace(model, "head.bias", helper.make_tensor("head.bias", TensorProto.FLOAT8E5M2, [toy.VOCAB], values))
    model.graph.node.insert(0, helper.make_node("Cast", ["head.bias"], ["bias"], to=TensorProto.FLOAT))
    toy.node(model, "logits").input[1] = "bias"
    with pytest.raises(ConvertError, match="float8_e5m2"):
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def sparse_file(path, size: int, at: int, data: bytes) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(data)


def test_external_data_beyond_two_gigabytes_and_in_several_files(tmp_path):
    model = toy.decoder()
    wanted_logits = toy.onnxruntime_logits(model, [2, 3])
    places = {"model.embed.weight": 2**31 + 64, "head.weight": 2**32 + 4096}
    for i, name in enumerate(("model.embed.weight", "head.weight", "onnx::MatMul_1")):
        one = toy.initializer(model, name)
        offset = places.get(name, 0)
        file = "model.onnx_data" + (f"_{i}" if i else "")
        sparse_file(tmp_path / file, offset + len(one.raw_data), offset, one.raw_data)
        toy.place(one, file, offset, len(one.raw_data))
        one.ClearField("raw_data")
    toy.write(tmp_path, model)
    folder = convert(tmp_path, "model.onnx", tmp_path / "out", progress=False)
    np.testing.assert_allclose(toy.converted_logits(folder, [2, 3]), wanted_logits, atol=1e-4)


def external(tmp_path, **entries):
    """The toy with its embedding in data.bin, 512 bytes, placed by `entries`."""
    model = toy.decoder()
    one = toy.initializer(model, "model.embed.weight")
    folder = tmp_path / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "data.bin").write_bytes(one.raw_data)
    one.ClearField("raw_data")
    one.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "data.bin", **entries}.items():
        one.external_data.add(key=key, value=value)
    return toy.write(folder, model)


def refused(folder, match="'model.embed.weight'"):
    with pytest.raises(ConvertError, match=match) as error:
        read_onnx(folder / "model.onnx")
    assert error.value.where == str(folder / "model.onnx")


def test_valid_external_data_is_read(tmp_path):
    folder = external(tmp_path)
    assert np.array_equal(
        read_onnx(folder / "model.onnx").tensors["model.embed.weight"].read(), toy.weights()["model.embed.weight"]
    )


SIZES = [
    {"offset": "4"}, {"offset": "-4"}, {"offset": str(2**70)}, {"offset": "x"}, {"offset": "1.0"}, {"length": "511"}, {"length": "513"},
    {"length": "-512"}, {"length": "0x200"}, {"offset": "512", "length": "512"}, {"length": str(2**64 + 512)},
]  # fmt: skip


@pytest.mark.parametrize("entries", SIZES, ids=str)
def test_external_data_of_another_size_is_refused(tmp_path, entries):
    refused(external(tmp_path, **entries))


def test_external_data_that_is_truncated_or_missing_is_refused(tmp_path):
    folder = external(tmp_path)
    (folder / "data.bin").write_bytes((folder / "data.bin").read_bytes()[:-1])
    refused(folder)
    (folder / "data.bin").unlink()
    refused(folder, "no file 'data.bin', which holds the tensor 'model.embed.weight'")


def test_a_tensor_larger_than_memory_is_refused_before_it_is_read(tmp_path):
    folder = external(tmp_path)
    with open(folder / "data.bin", "r+b") as file:
        file.truncate(2**40)
    model = onnx.load_model(str(folder / "model.onnx"), load_external_data=False)
    one = toy.initializer(model, "model.embed.weight")
    one.dims[:] = [2**28, 2**10]
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConvertError, match="of 1099511627776 bytes"):
        convert(folder, "model.onnx", tmp_path / "out", progress=False)


PATHS_OUTSIDE = [
    "../secret.bin", "/etc/passwd", "sub/../../secret.bin", "..", ".", "", "sub", "./../secret.bin", "\0data.bin", "data.bin\0x",
    "C:\\secret.bin", "sub\\data.bin", "file:///etc/passwd", "~/secret.bin", "x" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("location", PATHS_OUTSIDE, ids=lambda text: repr(text)[:20])
def test_a_path_out_of_the_folder_is_refused(tmp_path, location):
    folder = external(tmp_path)
    (folder / "sub").mkdir()
    (tmp_path / "models" / "secret.bin").write_bytes((folder / "data.bin").read_bytes())
    model = onnx.load_model(str(folder / "model.onnx"), load_external_data=False)
    toy.initializer(model, "model.embed.weight").external_data[0].value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    refused(folder)


def test_an_absolute_path_into_the_folder_is_refused(tmp_path):
    folder = external(tmp_path)
    model = onnx.load_model(str(folder / "model.onnx"), load_external_data=False)
    toy.initializer(model, "model.embed.weight").external_data[0].value = str(folder / "data.bin")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    refused(folder)


def test_links_are_followed_only_inside_the_folder(tmp_path):
    folder = external(tmp_path)
    data = (folder / "data.bin").read_bytes()
    (folder / "real").mkdir()
    (folder / "data.bin").rename(folder / "real" / "data.bin")
    (folder / "data.bin").symlink_to("real/data.bin")
    read_onnx(folder / "model.onnx")
    (tmp_path / "secret.bin").write_bytes(data)
    for target in ("../../secret.bin", tmp_path / "secret.bin", "/etc/hostname", "/dev/zero"):
        (folder / "data.bin").unlink()
        (folder / "data.bin").symlink_to(target)
        refused(folder)


def test_a_link_to_a_folder_outside_is_refused(tmp_path):
    folder = external(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (folder / "data.bin").rename(tmp_path / "elsewhere" / "data.bin")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    model = onnx.load_model(str(folder / "model.onnx"), load_external_data=False)
    toy.initializer(model, "model.embed.weight").external_data[0].value = "sub/data.bin"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    refused(folder)


def test_links_in_a_circle_and_special_files_are_refused(tmp_path):
    folder = external(tmp_path)
    (folder / "data.bin").unlink()
    (folder / "data.bin").symlink_to("other.bin")
    (folder / "other.bin").symlink_to("data.bin")
    refused(folder)
    (folder / "data.bin").unlink()
    os.mkfifo(folder / "data.bin")  # opening it would wait forever
    refused(folder)
    (folder / "data.bin").unlink()
    with socket.socket(socket.AF_UNIX) as one:
        place = os.getcwd()
        os.chdir(folder)  # a socket's path is short
        try:
            one.bind("data.bin")
        finally:
            os.chdir(place)
        refused(folder)
    (folder / "data.bin").unlink()
    (folder / "data.bin").mkdir()
    refused(folder)


def snapshot(tmp_path, repository="hub/models--a--toy", sub=""):
    """The toy in the layout of the hub's cache: links in snapshots/<commit> to files in blobs."""
    folder = external(tmp_path)
    repo = tmp_path / repository
    place = repo / "snapshots" / "c0ffee" / sub
    place.mkdir(parents=True)
    (repo / "blobs").mkdir()
    up = "../" * (2 + bool(sub))
    for name, blob in (("model.onnx", "aaa"), ("data.bin", "bbb")):
        (folder / name).rename(repo / "blobs" / blob)
        (place / name).symlink_to(f"{up}blobs/{blob}")
    return repo, place


@pytest.mark.parametrize("sub", ["", "onnx"])
def test_the_links_of_a_hub_snapshot_are_followed(tmp_path, sub):
    _, place = snapshot(tmp_path, sub=sub)
    assert read_onnx(place / "model.onnx").tensors["model.embed.weight"].read().shape == (toy.VOCAB, toy.DIM)
    # The snapshot may be reached through a link of the user's, or by a relative path.
    (tmp_path / "mine").symlink_to(place)
    read_onnx(tmp_path / "mine" / "model.onnx")
    here = os.getcwd()
    os.chdir(place)
    try:
        read_onnx(type(place)("model.onnx"))
    finally:
        os.chdir(here)


def test_forged_snapshots_are_refused(tmp_path):
    repo, place = snapshot(tmp_path)
    blob = (repo / "blobs" / "bbb").read_bytes()
    link = place / "data.bin"

    def point(target):
        link.unlink()
        link.symlink_to(target)

    # A file beside the blobs, one below them, one in another repository's blobs.
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_bytes(blob)
    (repo / "blobs" / "deep").mkdir()
    (repo / "blobs" / "deep" / "x").write_bytes(blob)
    other = tmp_path / "hub" / "models--b--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_bytes(blob)
    for target in ("../../refs/main", "../../blobs/deep/x", "../../../models--b--other/blobs/x"):
        point(target)
        refused(place)
    # A blob that is itself a link out of the repository.
    (tmp_path / "secret.bin").write_bytes(blob)
    (repo / "blobs" / "ccc").symlink_to(tmp_path / "secret.bin")
    point("../../blobs/ccc")
    refused(place)
    # Blobs that are a link to another folder.
    (repo / "blobs").rename(tmp_path / "elsewhere")
    (repo / "blobs").symlink_to(tmp_path / "elsewhere")
    point("../../blobs/bbb")
    refused(place)


def test_a_folder_beside_blobs_is_no_snapshot(tmp_path):
    folder = external(tmp_path)
    (folder.parent / "blobs").mkdir()
    (folder / "data.bin").rename(folder.parent / "blobs" / "bbb")
    (folder / "data.bin").symlink_to("../blobs/bbb")
    refused(folder)
