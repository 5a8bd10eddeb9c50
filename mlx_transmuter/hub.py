"""From a name to a model: repositories, local folders, the choice of a file, and the cache of converted folders."""

from __future__ import annotations

import contextlib
import difflib
import errno
import glob
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mlx_transmuter import user_cache
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.precision_options import FLOAT_DTYPES, PrecisionOptions, Quantization, did_you_mean
from mlx_transmuter.program import PROGRAM_VERSION

if TYPE_CHECKING:
    from mlx_transmuter.model import Model

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

# What a conversion may read beside the ONNX file and its external data. Nothing else is ever downloaded.
COMPANION_FILES = frozenset(
    {
        *("config.json", "generation_config.json", "genai_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
        *("chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    }
)
# A folder of named chat templates, *.jinja, kept as the companions are.
CHAT_TEMPLATE_FOLDER = "additional_chat_templates"
UNUSED_SUFFIXES = (".py", ".bin", ".pt", ".pth", ".pkl")


class SourceError(TransmuterError):
    """A source that gives no model; `where` is the source, or the file or the folder at fault."""


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
) -> Path:
    """Converts the decoder of a source into the folder `out`, and returns that folder.

    `source`: a repository id of the Hugging Face hub, a folder with ONNX files at its root or under onnx/, or one ONNX
    file. `file` names one ONNX file inside it; `dtype` picks one by its suffix as transformers.js does: fp32 (none),
    fp16, q8 (_quantized), int8, uint8, q4, q4f16, bnb4. With neither, the most precise one there is, said in one line.
    `revision`: a branch, tag or commit; one that was downloaded before is used as it is, without asking the hub.

    `dtype` may also be a float type that the graph is converted to, as mlx_lm's is: float16, bfloat16 or float32. The
    file is then chosen as without it. What must be float32 in a half type stays, such as angles of a rotation.

    `quantize`: how to quantise the linear layers and embeddings of a float graph, as mlx_lm does: "4bit" (2, 3, 4, 5,
    6 or 8), a recipe (mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6), or a dict of `bits` or `recipe`, and `group_size`
    (32, 64 or 128; 64 where it isn't said). A layer whose columns are no multiple of the group stays as it is, and is
    named. The conversion is proved in floats first; what quantising does to its logits is measured and recorded.

    `float_activations`: a file that rounds activations to 8 bits (dynamic quantisation, QDQ) keeps them in float; its
    products become quantised layers, faster and nearer to the float model. How far its logits move is recorded.

    `out` must be new, empty, or an earlier conversion, which is replaced only when the new one is whole. Raises
    HubError where the source or `out` is not what it should be, and the converter's ConvertError where the file cannot
    be converted (or quantised), ChangeError for a change that there is none of; `out` is left as it was.
    """
    dtype, changes = _precision_of_dtype(dtype)
    changes = replace(changes, float_activations=float_activations)
    if quantize is not None:
        changes = replace(changes, quantize=Quantization.of(quantize))
    out = Path(out).expanduser()
    found, file = find_source(source, file, revision)
    if "program.json" in found.file_names:
        raise SourceError(source, "already converted", "ONNX files", "load it as it is")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / "program.json").is_file())):
        raise SourceError(
            out, "exists and holds something else", "a new folder, or an earlier conversion", "name another"
        )
    name = choose_decoder_file(found, file, dtype, progress)
    folder = fetch_model_files(found, name, progress)
    return _import_converter()(folder, name, out, progress=progress, base_model=found.repo, precision=changes)


def load(
    source: str | Path, *, file: str | None = None, dtype: str | None = None, revision: str | None = None
) -> Model:
    """The model of a converted folder, or of any source of `convert`, with the same choice of a file.

    A `dtype` that names a float type converts the graph to it, as in `convert`.
    An unconverted source is converted once into the user's cache, which is said in one line: the folder that
    MLX_TRANSMUTER_CACHE names, else ~/.cache/mlx_transmuter. It is converted again when the source changes. Removing
    the folder, or one in it, clears it. Raises HubError, the converter's ConvertError, and load_folder's errors.
    """
    from mlx_transmuter.model import load_folder

    found, file = find_source(source, file, revision)
    if "program.json" in found.file_names:
        if file or dtype:
            raise SourceError(source, "already converted", "neither file nor dtype", "convert the one you want")
        return load_folder(fetch_files(found, [name for name in found.file_names if is_converted_file(name)]))
    dtype, changes = _precision_of_dtype(dtype)
    name = choose_decoder_file(found, file, dtype)
    folder = _cached_conversion(found, name, changes)
    if not (folder / "program.json").is_file():
        origin = fetch_model_files(found, name)
        with user_cache.partial_folder(folder) as temporary:
            whole = _import_converter()(origin, name, temporary / "model", base_model=found.repo, precision=changes)
            try:
                os.rename(whole, folder)
            except OSError:  # another process may have been first: its folder holds the same
                if not (folder / "program.json").is_file():
                    raise
        print_notice(f"converted {found.label} ({name}) once into {folder}; remove that folder to clear it")
    return load_folder(folder)


@dataclass(frozen=True)
class Source:
    """Files of one model: `names` are all of them (paths with /), `folder` is where those that are here lie.

    `repo`, `revision` and `commit` are None for a local folder; `folder` is None for a repository not downloaded yet.
    """

    label: str
    file_names: tuple[str, ...]
    folder: Path | None
    repo: str | None = None
    revision: str | None = None
    commit: str | None = None


def find_source(source: str | Path, file: str | None, revision: str | None) -> tuple[Source, str | None]:
    """The source by its name, and the file where the source itself names one."""
    path = Path(source).expanduser()
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
    if revision is not None and not user_cache.stays_inside(revision):
        raise SourceError(source, f"revision {revision!r}", "a branch, tag or commit")
    return list_repository_files(text, revision or "main"), file


def list_local_files(folder: Path, file: str | None) -> tuple[str, ...]:
    """The files at the folder's root, under onnx/ and beside `file`."""
    beside = PurePosixPath(file).parent if file and user_cache.stays_inside(file) else PurePosixPath("onnx")
    names = {entry.name: entry for entry in folder.iterdir()}
    for sub in {PurePosixPath("onnx"), beside}:
        if (folder / sub).is_dir():
            names.update({str(sub / entry.name): entry for entry in (folder / sub).iterdir()})
    return tuple(sorted(name for name, entry in names.items() if entry.is_file()))


def list_repository_files(repo: str, revision: str) -> Source:
    """The files of a repository's revision: from what was downloaded before, else by one question to the hub."""
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    here = find_snapshot(repo, revision)
    listing = None if here is None else user_cache.read_listing(user_cache.listing_file(repo, here.name))
    if here is not None and listing is not None:
        return Source(repo, listing, here, repo, revision, here.name)
    try:
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        info = hub.HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:
        unreachable = not isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError))
        if here is None or not unreachable:
            raise describe_failure(repo, revision, error) from error
        names = tuple(str(PurePosixPath(entry.relative_to(here))) for entry in here.rglob("*") if entry.is_file())
        return Source(repo, names, here, repo, revision, here.name)
    names = tuple(entry.rfilename for entry in info.siblings or () if user_cache.stays_inside(entry.rfilename))
    commit = info.sha or ""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceError(repo, f"commit {commit!r}", "40 hexadecimal digits")
    with contextlib.suppress(OSError):  # the listing only saves a question
        user_cache.write_listing(user_cache.listing_file(repo, commit), names)
    return Source(repo, names, None, repo, revision, commit)


def find_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision in the hub cache, whatever files it holds; None where there is none."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        # No file is asked for, so none is missed.
        return Path(hub.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except errors.HFValidationError:
        raise SourceError(
            repo, "no such folder, and no repository id", "user/name or a folder with ONNX files"
        ) from None
    except OSError:  # LocalEntryNotFoundError is one
        return None


def describe_failure(repo: str, revision: str, error: Exception) -> SourceError:
    """What the hub's client raised, as one clear line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            repo, "a gated repository", do=f"ask for access on its page at {constants.ENDPOINT}, then hf auth login."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            repo, "no such folder and no such repository", do="if it is private, log in first: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(repo, f"no revision {revision!r}", "a branch, tag or commit")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return SourceError(
            repo, "no space left on the disk of the hub cache", do="make room, or set HF_HUB_CACHE elsewhere"
        )
    if constants.HF_HUB_OFFLINE:
        return SourceError(
            repo, "offline (HF_HUB_OFFLINE), and not whole in the hub cache", do="go online once to download it"
        )
    reason = (str(error).strip().splitlines() or [""])[0]
    return SourceError(
        repo,
        f"the hub at {constants.ENDPOINT} gave {type(error).__name__}: {reason}",
        do="try again later; if a folder was meant, there is none of that name",
    )


def choose_decoder_file(source: Source, file: str | None, dtype: str | None, progress: bool = True) -> str:
    """The name of the decoder's ONNX file; see `convert` for the rule."""
    if dtype is not None and dtype not in DTYPE_SUFFIXES:
        known = (*FILE_DTYPES, *FLOAT_DTYPES)
        raise SourceError(source.label, f"dtype {dtype!r}", " ".join(known), did_you_mean(dtype, known))
    there = [name for name in source.file_names if name.endswith(".onnx")]
    if not there:
        raise SourceError(
            source.label,
            f"no ONNX file among {shorten_list(source.file_names)}",
            "an .onnx file at the root or under onnx/",
        )
    if file is not None:
        name = str(PurePosixPath(file))
        if name not in there:
            alike = difflib.get_close_matches(name, there, n=3, cutoff=0.3)
            raise SourceError(source.label, f"no file {file!r}", f"one of {shorten_list(alike or there)}")
        if dtype is not None and _dtype_of_file(name) != dtype:
            raise SourceError(
                source.label, f"file {file!r} with dtype {dtype}", "a file of that dtype, or one of the two"
            )
        return name
    if dtype is None and (name := _genai_decoder_file(source, progress)) in there:
        return name
    home = [name for name in there if str(PurePosixPath(name).parent) in (".", "onnx")]
    named = [name for name in home if _stem_without_dtype(name) in DECODER_STEMS]
    candidates = named or [
        name for name in home or there if not _stem_without_dtype(name).startswith(NON_DECODER_PREFIXES)
    ]
    if not named and len({PurePosixPath(name).with_name(_stem_without_dtype(name)) for name in candidates}) != 1:
        raise SourceError(
            source.label, f"no telling which is the decoder: {shorten_list(there)}", do="name it with file (--file)"
        )
    of_dtype = [name for name in candidates if dtype is None or _dtype_of_file(name) == dtype]
    if not of_dtype:
        dtypes = sorted({_dtype_of_file(name) for name in candidates}, key=FILE_DTYPES.index)
        raise SourceError(
            source.label, f"no {dtype} file among {shorten_list(candidates)}", f"dtype {' or '.join(dtypes)}"
        )
    name = min(of_dtype, key=_decoder_rank)
    others = {
        _dtype_of_file(other) for other in candidates if _stem_without_dtype(other) == _stem_without_dtype(name)
    } - {_dtype_of_file(name)}
    if dtype is None and others:
        also = " ".join(sorted(others, key=FILE_DTYPES.index))
        print_notice(f"taking {name} of {source.label}, the most precise; also there, by dtype: {also}")
    return name


def _decoder_rank(name: str) -> tuple[int, int, str]:
    """The smallest is taken: the best kind of decoder, then the most precise."""
    kind = (
        DECODER_STEMS.index(_stem_without_dtype(name))
        if _stem_without_dtype(name) in DECODER_STEMS
        else len(DECODER_STEMS)
    )
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
    folder = fetch_files(source, [name, *_companion_files(source, name)], progress)
    return fetch_files(source, [name, *external_data_files(source, folder, name)], progress)


def _companion_files(source: Source, name: str) -> list[str]:
    """The configuration, tokenizer and processor files at the root, beside the file and among its templates."""
    beside = {
        str(PurePosixPath(place) / other) for place in (".", PurePosixPath(name).parent) for other in COMPANION_FILES
    }
    return [
        other
        for other in source.file_names
        if other in beside or (other.startswith(f"{CHAT_TEMPLATE_FOLDER}/") and other.endswith(".jinja"))
    ]


def external_data_files(source: Source, folder: Path, name: str) -> list[str]:
    """The external data files that the ONNX file names and the source has.

    An entry of TensorProto.external_data is written as the key `location` (field 1) and the path (field 2). Without the
    onnx package it is found by these bytes; a wrong hit names no file of the source.
    """
    beside = PurePosixPath(name).parent
    names = {
        other for other in source.file_names if not other.endswith((".onnx", ".md", *UNUSED_SUFFIXES))
    } - COMPANION_FILES
    if not names or (folder / name).stat().st_size == 0:
        return []
    found = set()
    with open(folder / name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for hit in re.finditer(rb"\x0a\x08location\x12([\x80-\xff]*[\x00-\x7f])", data):
            size = sum((byte & 127) << 7 * i for i, byte in enumerate(hit.group(1)))
            if size < 4096:
                path = bytes(data[hit.end() : hit.end() + size]).decode(errors="replace")
                found.add(str(beside / path))
    return sorted(found & names)


def is_converted_file(name: str) -> bool:
    """Whether a file at the root of a converted repository belongs to the conversion."""
    weights = name.endswith(".safetensors") or name == "model.safetensors.index.json"
    return "/" not in name and (weights or name == "program.json" or name in COMPANION_FILES)


def fetch_files(source: Source, names: Sequence[str], progress: bool = True) -> Path:
    """The folder that holds all these files; those of a repository are downloaded unless they are here."""
    folder = source.folder
    if source.repo is not None:
        folder = download_files(source, names, progress)
    assert folder is not None
    for name in names:
        real = (folder / name).resolve()
        snapshots = next((parent for parent in folder.resolve().parents if parent.name == "snapshots"), None)
        allowed = [folder.resolve(), *([snapshots.parent / "blobs"] if snapshots else [])]
        if not any(real.is_relative_to(place) for place in allowed):
            raise SourceError(folder / name, f"a link to {real}", "a file inside its folder", "copy the file there")
    return folder


def download_files(source: Source, names: Sequence[str], progress: bool) -> Path:
    import huggingface_hub as hub

    assert source.repo is not None
    assert source.revision is not None
    commit, folder = source.commit, source.folder
    if folder is None and commit is not None:
        folder = find_snapshot(source.repo, commit)  # downloaded since, by a first step
    if folder is not None and all((folder / name).is_file() for name in names):
        return folder
    # A revision that is not here yet is asked by its name, so that the hub cache remembers what the name stands for.
    revision = source.revision if folder is None else commit
    try:
        with _progress_bars(progress):
            patterns = [glob.escape(name) for name in names]
            folder = Path(hub.snapshot_download(source.repo, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise describe_failure(source.repo, source.revision, error) from error
    if folder.name != commit:
        raise SourceError(source.label, "the revision changed during the download", do="run it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        # The client gives the folder as it is when the hub cannot be reached.
        raise describe_failure(source.repo, source.revision, ConnectionError(f"{shorten_list(missing)} did not come"))
    return folder


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """The progress bars of huggingface_hub, or none, as they were before afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _precision_of_dtype(dtype: str | None) -> tuple[str | None, PrecisionOptions]:
    """What a `dtype` says of the choice of a file, and what it says of the conversion."""
    return (None, PrecisionOptions(dtype=dtype)) if dtype in FLOAT_DTYPES else (dtype, PrecisionOptions())


def _cached_conversion(source: Source, name: str, precision: PrecisionOptions) -> Path:
    """Where the conversion of a source's file lies: its name holds what the conversion depends on."""
    if source.repo is not None:
        identity: Any = [source.repo, source.commit]
    else:
        assert source.folder is not None
        files = [name, *external_data_files(source, source.folder, name), *_companion_files(source, name)]
        stats = [(file, (source.folder / file).stat()) for file in files]
        identity = [str(source.folder.resolve()), [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]]
    identity = [identity, name, PROGRAM_VERSION, *([precision.dtype] if precision.dtype else [])]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    label = source.repo or (source.folder or Path()).resolve().name
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", f"{label}--{PurePosixPath(name).stem}").lstrip(".")[:120]
    return user_cache.cache_folder() / "converted" / f"{readable}--{key}"


def _import_converter():
    try:
        from mlx_transmuter.converters.pipeline import convert
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise SourceError(
            "converting", "the package onnx is not installed", do="install it: pip install onnx"
        ) from None
    return convert


def shorten_list(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "nothing"


def print_notice(line: str) -> None:
    print(f"mlx-transmuter: {line}", file=sys.stderr)
