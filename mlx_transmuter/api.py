"""The entry points: convert and load. A load walks down once: source, download, conversion, folder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from mlx_transmuter import user_cache
from mlx_transmuter.folder_format import PROGRAM_FILE, is_converted_file
from mlx_transmuter.hub import SourceError
from mlx_transmuter.memory import parse_memory_size
from mlx_transmuter.model import Model, load_folder
from mlx_transmuter.notices import print_notice
from mlx_transmuter.partial_folder import remove_stale_folders
from mlx_transmuter.path_arguments import as_path
from mlx_transmuter.precision_options import FLOAT_DTYPES, PrecisionOptions, Quantization
from mlx_transmuter.program import PROGRAM_VERSION
from mlx_transmuter.sources import (
    Source,
    choose_decoder_file,
    companion_files,
    external_data_files,
    fetch_files,
    fetch_model_files,
    find_source,
)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    file: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    quantize: str | Mapping[str, Any] | None = None,
    float_activations: bool = False,
    max_memory: int | str | None = None,
) -> Path:
    """Converts the decoder of a source into the folder `out`, and returns that folder.

    `source`: a repository id of the Hugging Face hub, a folder with ONNX files at its root or under onnx/, or one ONNX
    file. `file` names one ONNX file inside it; `dtype` picks one by its suffix as transformers.js does: fp32 (none),
    fp16, q8 (_quantized), int8, uint8, q4, q4f16, bnb4. With neither, the most precise one there is, said in one line.
    `revision`: a branch, tag or commit; one that was downloaded before is used as it is, without asking the hub. What
    another tool downloaded is, too, where `revision` is a commit's full name and all files are there; of a branch the
    hub is asked once which files it has, and one that doesn't answer within 3 s leaves what is in the hub cache.
    HF_HUB_OFFLINE=1 never asks.

    `dtype` may also be a float type that the graph is converted to, as mlx_lm's is: float16, bfloat16 or float32. The
    file is then chosen as without it. What must be float32 in a half type stays, such as angles of a rotation.

    `quantize`: how to quantize the linear layers and embeddings of a float graph, as mlx_lm does: "4bit" (2, 3, 4, 5,
    6 or 8), a recipe (mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6), or a dict of `bits` or `recipe`, and `group_size`
    (32, 64 or 128; 64 where it isn't said). A layer whose columns are no multiple of the group stays as it is, and is
    named. The conversion is proved in floats first; what quantizing does to its logits is measured and recorded.

    `float_activations`: a file that rounds activations to 8 bits (dynamic quantization, QDQ) keeps them in float; its
    products become quantized layers, faster and nearer to the float model. How far its logits move is recorded.

    `max_memory`: the memory that the conversion may take, in bytes or as "6GB"; by default three quarters of what there
    is. A model that is larger is proved with its weights read from its files at each use, which takes longer.

    `out` must be new, empty, or an earlier conversion, which is replaced only when the new one is whole. Raises
    SourceError where the source or `out` is not what it should be, ConvertError where the file cannot be converted (or
    quantized), PrecisionError for an option that there is none of; `out` is left as it was.
    """
    dtype, options = _precision_of_dtype(dtype)
    options = replace(options, float_activations=float_activations)
    if quantize is not None:
        options = replace(options, quantize=Quantization.of(quantize))
    memory = None if max_memory is None else parse_memory_size(max_memory)
    out = as_path(out, "out", SourceError, "the folder to write")
    resolved_source, file = find_source(source, file, revision, dtype)
    if PROGRAM_FILE in resolved_source.file_names:
        raise SourceError(source, "already converted", "ONNX files", "load it as it is")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / PROGRAM_FILE).is_file())):
        raise SourceError(
            out, "exists and holds something else", "a new folder, or an earlier conversion", "name another"
        )
    name = choose_decoder_file(resolved_source, file, dtype, progress)
    folder = fetch_model_files(resolved_source, name, progress)
    return _import_converter()(
        folder,
        name,
        out,
        progress=progress,
        base_model=resolved_source.repo,
        precision=options,
        max_memory=memory,
    )


def load(
    source: str | Path, *, file: str | None = None, dtype: str | None = None, revision: str | None = None
) -> Model:
    """The model of a converted folder, or of any source of `convert`, with the same choice of a file.

    A `dtype` that names a float type converts the graph to it, as in `convert`.
    An unconverted source is converted once into the user's cache, which is said in one line: the folder that
    MLX_TRANSMUTER_CACHE names, else ~/.cache/mlx_transmuter. It is converted again when the source changes.
    Removing the folder, or one in it, clears it. Raises SourceError, ConvertError, ProgramError and TokenizerError.
    """
    file_dtype, options = _precision_of_dtype(dtype)
    resolved_source, file = find_source(source, file, revision, file_dtype)
    if PROGRAM_FILE in resolved_source.file_names:
        if file or dtype:
            raise SourceError(source, "already converted", "neither file nor dtype", "convert the one you want")
        return load_folder(
            fetch_files(resolved_source, [name for name in resolved_source.file_names if is_converted_file(name)])
        )
    name = choose_decoder_file(resolved_source, file, file_dtype)
    folder = _cached_conversion(resolved_source, name, options)
    if not (folder / PROGRAM_FILE).is_file():
        remove_stale_folders(folder.parent)
        fetched = fetch_model_files(resolved_source, name)
        _import_converter()(
            fetched, name, folder, base_model=resolved_source.repo, precision=options, replace_converted=False
        )
        print_notice(f"converted {resolved_source.label} ({name}) once into {folder}; remove that folder to clear it")
    return load_folder(folder)


def _precision_of_dtype(dtype: str | None) -> tuple[str | None, PrecisionOptions]:
    """What a `dtype` says of the choice of a file, and what it says of the conversion."""
    return (
        (None, PrecisionOptions(dtype=dtype))
        if isinstance(dtype, str) and dtype in FLOAT_DTYPES
        else (dtype, PrecisionOptions())
    )


def _cached_conversion(source: Source, name: str, precision: PrecisionOptions) -> Path:
    """Where the conversion of a source's file lies: its name holds what the conversion depends on."""
    if source.repository is not None:
        identity: Any = [source.repository.repo, source.repository.commit]
    else:
        assert source.folder is not None
        files = [name, *external_data_files(source, source.folder, name), *companion_files(source, name)]
        stats = [(file, (source.folder / file).stat()) for file in files]
        identity = [str(source.folder.resolve()), [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]]
    identity = [identity, name, PROGRAM_VERSION, *([precision.dtype] if precision.dtype else [])]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    label = source.repo or (source.folder or Path()).resolve().name
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", f"{label}--{PurePosixPath(name).stem}").lstrip(".")[:120]
    return user_cache.cache_folder() / "converted" / f"{readable}--{key}"


def _import_converter():
    if importlib.util.find_spec("onnx") is None:
        raise SourceError("converting", "the package onnx is not installed", do="install it: pip install onnx")
    from mlx_transmuter.converters.child_process import convert

    return convert
