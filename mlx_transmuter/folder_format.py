"""The files of a converted folder: their names, what it keeps of its source, and which links may lead to them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.limited_files import MAX_JSON_BYTES, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, check_file

PROGRAM_FILE = "program.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

# What a conversion may read beside the ONNX file and its external data, and what a converted folder keeps of it.
# Nothing else is ever downloaded.
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


class FolderError(TransmuterError):
    """A file of a model's folder that is missing, broken, or a link to somewhere else; `where` is its path."""


def is_companion_file(name: str) -> bool:
    """Whether the file of that name (a path with /) at a source's root is one that a converted folder keeps."""
    return name in COMPANION_FILES or (name.startswith(f"{CHAT_TEMPLATE_FOLDER}/") and name.endswith(".jinja"))


def is_converted_file(name: str) -> bool:
    """Whether a file at the root of a converted repository belongs to the conversion."""
    weights = name.endswith(".safetensors") or name == WEIGHTS_INDEX_FILE
    return (weights and "/" not in name) or name == PROGRAM_FILE or is_companion_file(name)


def stays_inside(name: str) -> bool:
    """Whether a relative path stays inside the folder that it is relative to, by its parts alone."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts and "\\" not in name and "\0" not in name


def leaves_folder(path: Path, folder: Path) -> bool:
    """Whether `path`, with its links followed, lies outside `folder`.

    The one link that may lead out is that of a Hugging Face snapshot, whose files all point into the repository's own
    `blobs`: `models--x/snapshots/<commit>/…` to `models--x/blobs/<hash>`, itself a folder and no link.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    blobs = snapshots.parent / "blobs" if snapshots else None
    is_blob = blobs is not None and real.parent == blobs and blobs.is_dir() and not blobs.is_symlink()
    return not (real.is_relative_to(home) or is_blob)


def check_link(path: Path, folder: Path) -> None:
    """Raises FolderError for a file that lies outside its folder; see `leaves_folder`."""
    if leaves_folder(path, folder):
        raise FolderError(
            path, f"a link to {os.path.realpath(path)}", "a file inside its folder", "copy the file there"
        )


def copy_companion(path: Path, source: Path, place: Path) -> None:
    """Copies a companion of the source folder to `place`. Raises FolderError for a link out of the source, for what is
    no regular file, is too large for its kind, or is a pointer of Git LFS."""
    check_link(path, source)
    check_file(path, _most_bytes(path.name), FolderError)
    shutil.copyfile(path, place)


def _most_bytes(name: str) -> int:
    if name.endswith(".jinja"):
        return MAX_TEMPLATE_BYTES
    is_table = name in ("tokenizer.json", "vocab.json") or not name.endswith(".json")
    return MAX_TOKENIZER_BYTES if is_table else MAX_JSON_BYTES
