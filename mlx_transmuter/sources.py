"""Sources: what a name stands for (a repository, a folder, a file), and which of its files a conversion reads."""

from __future__ import annotations

import difflib
import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mlx_transmuter import hub
from mlx_transmuter.errors import abbreviate, did_you_mean
from mlx_transmuter.folder_format import (
    COMPANION_FILES,
    PROGRAM_FILE,
    WEIGHTS_FILE,
    check_link,
    is_companion_file,
    stays_inside,
)
from mlx_transmuter.hub import Repository, SourceError
from mlx_transmuter.notices import print_notice
from mlx_transmuter.path_arguments import as_name, as_path
from mlx_transmuter.precision_options import FLOAT_DTYPES

# The suffixes of transformers.js, most precise first and, among equals, in the order of its own table. The first of
# these that a source has is taken where neither file nor dtype is given: each later one has lost something.
DTYPE_SUFFIXES = {
    "fp32": "",
    "fp16": "_fp16",
    "q8": "_quantized",
    "int8": "_int8",
    "uint8": "_uint8",
    "q4": "_q4",
    "q4f16": "_q4f16",
    "bnb4": "_bnb4",
}
FILE_DTYPES = tuple(DTYPE_SUFFIXES)

# Names of a decoder's file, best first: a merged one runs prompts and single tokens, one without a past has no cache.
DECODER_STEMS = ("decoder_model_merged", "model_merged", "model", "decoder_with_past_model", "decoder_model")
NON_DECODER_PREFIXES = ("encoder", "vision", "audio", "speech", "embed", "prepare_inputs_embeds")
# Never external data of a graph.
UNUSED_SUFFIXES = (".py", ".bin", ".pt", ".pth", ".pkl")


@dataclass(frozen=True)
class Source:
    """Files of one model.

    label: what to call it in messages. file_names: all its files (paths with /). folder: where those that are here lie;
    None for a repository of which nothing was downloaded yet. repository: None for a local folder.
    """

    label: str
    file_names: tuple[str, ...]
    folder: Path | None
    repository: Repository | None = None

    @property
    def repo(self) -> str | None:
        """The id of the repository, or None."""
        return self.repository.repo if self.repository else None


def find_source(
    source: str | Path, file: str | None, revision: str | None, dtype: str | None = None
) -> tuple[Source, str | None]:
    """The source by its name, and the file where the source itself names one.

    A repository that was downloaded before is taken as it is in the hub cache, where its listing is known, or where
    the revision is a commit whose files for `file` and `dtype` are all there. Otherwise the hub is asked. Raises
    SourceError for arguments that are no names, and for a source that is not there.
    """
    for label, name in (("file", file), ("revision", revision), ("dtype", dtype)):
        if name is not None:
            as_name(name, label, SourceError)
    path = as_path(source, "source", SourceError, "a folder, an ONNX file, or a repository id")
    if path.is_file():
        if path.suffix != ".onnx" or file:
            raise SourceError(source, "a file", "an ONNX file, a folder or a repository")
        path, file = path.parent, path.name
    if path.is_dir():
        if revision is not None:
            raise SourceError(source, f"revision {revision!r} of a local folder", "none")
        return Source(str(source), list_local_files(path, file), path), file
    text = str(source)
    if isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text:
        raise SourceError(source, "no such folder", "a folder with ONNX files, or a repository id")
    if revision is not None and not stays_inside(revision):
        raise SourceError(source, f"revision {revision!r}", "a branch, tag or commit")
    repository = hub.find_downloaded(text, revision or "main")
    if repository is None or not (
        repository.is_listed or (repository.is_fixed and _has_files(repository, file, dtype))
    ):
        repository = hub.ask_hub(text, revision or "main", repository)
    return _source_of_repository(repository), file


def _source_of_repository(repository: Repository) -> Source:
    return Source(repository.repo, repository.file_names, repository.folder, repository)


def _has_files(repository: Repository, file: str | None, dtype: str | None) -> bool:
    """Whether a model can be made of what was downloaded, and of nothing else, whatever more the repository has."""
    names, folder = repository.file_names, repository.folder
    if folder is None or not {"config.json", "tokenizer.json"} <= {PurePosixPath(name).name for name in names}:
        return False
    if PROGRAM_FILE in names:
        return WEIGHTS_FILE in names
    if file is None and dtype is None:
        dtype = FILE_DTYPES[0]  # of a file that is less precise, a better one may be on the hub
    try:
        name = choose_decoder_file(_source_of_repository(repository), file, dtype, progress=False)
    except SourceError:
        return False
    return _external_locations(folder, name) <= set(names)


def list_local_files(folder: Path, file: str | None) -> tuple[str, ...]:
    """The files at the folder's root, under onnx/ and beside `file`."""
    beside = PurePosixPath(file).parent if file and stays_inside(file) else PurePosixPath("onnx")
    names = {entry.name: entry for entry in folder.iterdir()}
    for sub in {PurePosixPath("onnx"), beside}:
        if (folder / sub).is_dir():
            names.update({str(sub / entry.name): entry for entry in (folder / sub).iterdir()})
    return tuple(sorted(name for name, entry in names.items() if entry.is_file()))


def choose_decoder_file(source: Source, file: str | None, dtype: str | None, progress: bool = True) -> str:
    """The name of the decoder's ONNX file: `file`, else the one that genai_config.json names, else the best of that
    dtype; see `mlx_transmuter.convert`. Raises SourceError.
    """
    if dtype is not None and dtype not in DTYPE_SUFFIXES:
        known = (*FILE_DTYPES, *FLOAT_DTYPES)
        raise SourceError(source.label, f"dtype {dtype!r}", " ".join(known), did_you_mean(dtype, known))
    onnx_files = [name for name in source.file_names if name.endswith(".onnx")]
    if not onnx_files:
        found = f"no ONNX file among {abbreviate(source.file_names)}"
        raise SourceError(source.label, found, "an .onnx file at the root or under onnx/")
    if file is not None:
        return _named_file(source, onnx_files, file, dtype)
    if dtype is None and (name := _genai_decoder_file(source, progress)) in onnx_files:
        return name
    return _best_decoder_file(source, onnx_files, dtype)


def _named_file(source: Source, onnx_files: Sequence[str], file: str, dtype: str | None) -> str:
    name = str(PurePosixPath(file))
    if name not in onnx_files:
        close = difflib.get_close_matches(name, onnx_files, n=3, cutoff=0.3)
        raise SourceError(source.label, f"no file {file!r}", f"one of {abbreviate(close or onnx_files)}")
    if dtype is not None and _dtype_of_file(name) != dtype:
        found = f"file {file!r} with dtype {dtype}"
        raise SourceError(source.label, found, "a file of that dtype, or one of the two")
    return name


def _best_decoder_file(source: Source, onnx_files: Sequence[str], dtype: str | None) -> str:
    """The best kind of decoder in that dtype, or the most precise one there is, which is said in one line."""
    in_place = [name for name in onnx_files if str(PurePosixPath(name).parent) in (".", "onnx")]
    decoders = [name for name in in_place if _stem_without_dtype(name) in DECODER_STEMS]
    candidates = decoders or [
        name for name in in_place or onnx_files if not _stem_without_dtype(name).startswith(NON_DECODER_PREFIXES)
    ]
    if not decoders and len({PurePosixPath(name).with_name(_stem_without_dtype(name)) for name in candidates}) != 1:
        found = f"several files that may be the decoder: {abbreviate(candidates)}"
        if not candidates:
            found = f"no file that may be the decoder among {abbreviate(onnx_files)}"
        raise SourceError(source.label, found, do="name it with file (--file)")
    of_dtype = [name for name in candidates if dtype is None or _dtype_of_file(name) == dtype]
    if not of_dtype:
        dtypes = sorted({_dtype_of_file(name) for name in candidates}, key=FILE_DTYPES.index)
        found = f"no {dtype} file among {abbreviate(candidates)}"
        raise SourceError(source.label, found, f"dtype {' or '.join(dtypes)}")
    name = min(of_dtype, key=_decoder_rank)
    same_stem = [other for other in candidates if _stem_without_dtype(other) == _stem_without_dtype(name)]
    other_dtypes = {_dtype_of_file(other) for other in same_stem} - {_dtype_of_file(name)}
    if dtype is None and other_dtypes:
        also = " ".join(sorted(other_dtypes, key=FILE_DTYPES.index))
        print_notice(f"taking {name} of {source.label}, the most precise; also there, by dtype: {also}")
    return name


def _decoder_rank(name: str) -> tuple[int, int, str]:
    """The smallest is taken: the best kind of decoder, then the most precise."""
    stem = _stem_without_dtype(name)
    kind = DECODER_STEMS.index(stem) if stem in DECODER_STEMS else len(DECODER_STEMS)
    return kind, FILE_DTYPES.index(_dtype_of_file(name)), name


def _genai_decoder_file(source: Source, progress: bool) -> str:
    """The file that genai_config.json at the root calls the decoder; "" where it names none."""
    if "genai_config.json" not in source.file_names:
        return ""
    file = fetch_files(source, ["genai_config.json"], progress) / "genai_config.json"
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model"]["decoder"]["filename"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _stem_without_dtype(name: str) -> str:
    stem = PurePosixPath(name).stem
    return stem.removesuffix(DTYPE_SUFFIXES[_dtype_of_file(name)])


def _dtype_of_file(name: str) -> str:
    stem = PurePosixPath(name).stem
    return next((dtype for dtype, suffix in DTYPE_SUFFIXES.items() if suffix and stem.endswith(suffix)), "fp32")


def fetch_model_files(source: Source, name: str, progress: bool = True) -> Path:
    """The folder that holds the ONNX file, its external data and what stands beside it, downloaded where it must be."""
    folder = fetch_files(source, [name, *companion_files(source, name)], progress)
    return fetch_files(source, [name, *external_data_files(source, folder, name)], progress)


def companion_files(source: Source, name: str) -> list[str]:
    """The configuration, tokenizer and processor files at the root, beside the ONNX file `name` and among templates."""
    beside = {str(PurePosixPath(name).parent / other) for other in COMPANION_FILES}
    return [other for other in source.file_names if other in beside or is_companion_file(other)]


def external_data_files(source: Source, folder: Path, name: str) -> list[str]:
    """The external data files that the ONNX file names and the source has."""
    names = {name for name in source.file_names if not name.endswith((".onnx", ".md", *UNUSED_SUFFIXES))}
    names -= COMPANION_FILES
    return sorted(_external_locations(folder, name) & names) if names else []


def _external_locations(folder: Path, name: str) -> set[str]:
    """The names of external data in an ONNX file.

    An entry of TensorProto.external_data is written as the key `location` (field 1) and the path (field 2). Without the
    onnx package it is found by these bytes; a wrong hit names no file of a source.
    """
    beside = PurePosixPath(name).parent
    if (folder / name).stat().st_size == 0:
        return set()
    found = set()
    with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for hit in re.finditer(rb"\x0a\x08location\x12([\x80-\xff]*[\x00-\x7f])", data):
            size = sum((byte & 127) << 7 * i for i, byte in enumerate(hit.group(1)))
            if size < 4096:
                path = bytes(data[hit.end() : hit.end() + size]).decode(errors="replace")
                found.add(str(beside / path))
    return found


def fetch_files(source: Source, names: Sequence[str], progress: bool = True) -> Path:
    """The folder that holds all these files; those of a repository are downloaded unless they are here.

    Raises FolderError for a link that leads out of the folder.
    """
    folder = source.folder
    if source.repository is not None:
        folder = hub.download_files(source.repository, names, progress)
    assert folder is not None
    for name in names:
        check_link(folder / name, folder)
    return folder
