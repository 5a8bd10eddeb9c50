"""The Hugging Face hub: the files of a repository, from its cache or by one request, and their download."""

from __future__ import annotations

import contextlib
import errno
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_transmuter import user_cache
from mlx_transmuter.errors import TransmuterError, abbreviate
from mlx_transmuter.folder_format import stays_inside
from mlx_transmuter.notices import print_notice

# How long a hub may take to answer where its cache will do as well; HF_HUB_ETAG_TIMEOUT may shorten it.
SECONDS_FOR_A_CACHED_REPOSITORY = 3


class SourceError(TransmuterError):
    """A source that gives no model; `where` is the source, or the file or the folder at fault."""


@dataclass(frozen=True)
class Repository:
    """A revision of a repository: the commit that it stands for, and the names of all its files (paths with /).

    folder: where those that were downloaded lie; None where none was. is_listed: whether the names are those of all
    files, as the hub said once, and not only of those in the folder.
    """

    repo: str
    revision: str
    commit: str
    file_names: tuple[str, ...]
    folder: Path | None
    is_listed: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit's full name, which always stands for the same files."""
        return self.revision == self.commit


def find_downloaded(repo: str, revision: str) -> Repository | None:
    """The repository as it was downloaded before, without asking the hub; None where it was not.

    Raises SourceError for a name that no repository has.
    """
    folder = find_snapshot(repo, revision)
    if folder is None:
        return None
    names = user_cache.read_listing(user_cache.listing_file(repo, folder.name))
    if names is not None:
        return Repository(repo, revision, folder.name, names, folder)
    in_folder = tuple(entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_file())
    return Repository(repo, revision, folder.name, in_folder, folder, is_listed=False)


def ask_hub(repo: str, revision: str, downloaded: Repository | None) -> Repository:
    """The repository as the hub has it, by one request; `downloaded`, with a notice, where the hub does not answer.

    Raises SourceError for a repository that is not there, or a hub that cannot be reached and no download.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    timeout = constants.HF_HUB_ETAG_TIMEOUT
    if downloaded is not None:
        timeout = min(timeout, SECONDS_FOR_A_CACHED_REPOSITORY)
    try:
        if constants.HF_HUB_OFFLINE:
            raise errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=timeout)
    except Exception as error:
        is_absent = isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError))
        if downloaded is None or is_absent:
            raise describe_failure(repo, revision, error) from error
        if not constants.HF_HUB_OFFLINE:
            reason = f"the hub at {constants.ENDPOINT} gave {type(error).__name__}"
            print_notice(f"{reason}; taking {repo} as it is in the hub cache (HF_HUB_OFFLINE=1 does not ask)")
        return downloaded
    names = tuple(entry.rfilename for entry in info.siblings or () if stays_inside(entry.rfilename))
    commit = info.sha or ""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise SourceError(repo, f"commit {commit!r}", "40 hexadecimal digits")
    with contextlib.suppress(OSError):  # the listing only saves a request
        user_cache.write_listing(user_cache.listing_file(repo, commit), names)
    return Repository(repo, revision, commit, names, None)


def find_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision in the hub cache, whatever files it holds; None where there is none."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # No file is asked for, so none is missed.
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
        )
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
            repo, "offline (HF_HUB_OFFLINE), and incomplete in the hub cache", do="go online once to download it"
        )
    reason = (str(error).strip().splitlines() or [""])[0]
    return SourceError(
        repo,
        f"the hub at {constants.ENDPOINT} gave {type(error).__name__}: {reason}",
        do="try again later; if a folder was meant, there is none of that name",
    )


def download_files(repository: Repository, names: Sequence[str], progress: bool) -> Path:
    """The folder of the snapshot with these files, downloaded unless they are there. Raises SourceError."""
    import huggingface_hub

    commit, folder = repository.commit, repository.folder
    if folder is None:
        folder = find_snapshot(repository.repo, commit)  # downloaded since, by a first step
    if folder is not None and all((folder / name).is_file() for name in names):
        return folder
    # A revision that is not here yet is asked by its name, so that the hub cache remembers what the name stands for.
    revision = repository.revision if folder is None else commit
    try:
        with _progress_bars(progress):
            patterns = [glob.escape(name) for name in names]
            folder = Path(
                huggingface_hub.snapshot_download(repository.repo, revision=revision, allow_patterns=patterns)
            )
    except Exception as error:
        raise describe_failure(repository.repo, repository.revision, error) from error
    if folder.name != commit:
        raise SourceError(repository.repo, "the revision changed during the download", do="run it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        # The client gives the folder as it is when the hub cannot be reached.
        raise describe_failure(
            repository.repo, repository.revision, ConnectionError(f"{abbreviate(missing)} were not downloaded")
        )
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
