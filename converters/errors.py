"""The one error of the converter, and what every other error of a conversion becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_transmuter import ops
from mlx_transmuter.converters.stages import current_stage
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.folder_format import FolderError
from mlx_transmuter.partial_folder import describe_write_error, is_in_partial_folder
from mlx_transmuter.program import ProgramError
from mlx_transmuter.program.signature import SignatureError

WELL_FORMED = "a graph whose nodes, shapes and tables fit together"
CHECK_FILE = "check the file with onnx.checker.check_model and onnxruntime; if they take it, report it to this project"


class ConvertError(TransmuterError):
    """A source that cannot be converted; `where` is the file or the folder, `node` the graph's node at fault."""


class RewriteError(TransmuterError):
    """A rewrite that raised what no check foresaw, or met a graph whose nodes do not fit together."""


@contextmanager
def convert_errors(path: Path, out: Path) -> Iterator[None]:
    """Raises as ConvertError whatever a conversion of the file `path` into the folder `out` raises in the block.

    Other errors of this package stay as they are where they say it all. An error of numpy, MLX or Python is one that
    no check foresaw: its message names the stage in which it came.
    """
    try:
        yield
    except (ops.OperatorError, SignatureError, RewriteError) as problem:
        raise ConvertError(path, problem.found, problem.expected, problem.do, problem.node) from problem
    except (ProgramError, FolderError) as problem:
        raise ConvertError(problem.where, problem.found, problem.expected, problem.do) from problem
    except TransmuterError:
        raise
    except OSError as problem:
        found, do = describe_write_error(problem)
        if found:
            raise ConvertError(out, found, "room for the converted model", do) from None
        file = problem.filename or path
        found = f"{problem.strerror or problem} ({out if is_in_partial_folder(file) else file})"
        raise ConvertError(out, found, "files that can be read and a folder that can be written") from problem
    except Exception as problem:
        found = f"{type(problem).__name__}: {problem} ({current_stage()})"
        if type(problem) in (MemoryError, RuntimeError):  # a RuntimeError is what MLX raises without memory
            raise ConvertError(out, found, "memory for the model") from problem
        raise ConvertError(
            path,
            found,
            WELL_FORMED,
            CHECK_FILE,
        ) from problem
