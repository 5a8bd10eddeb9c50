"""The arrows between the rooms: what each may import. This table is their documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mlx_transmuter", "converters")

# Room -> the rooms that it may import, itself aside. Everything points one way:
# program <- ops <- runtime <- generation <- tasks <- cli, with cache and tokenizer on their own.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "notices": set(),
    "git_lfs": set(),
    "limited_files": {"git_lfs"},
    "folder_format": {"limited_files"},
    "partial_folder": set(),
    "memory": set(),
    "precision_options": set(),
    "path_arguments": set(),
    "user_cache": {"folder_format", "partial_folder"},
    "tokenizer": {"limited_files", "path_arguments"},
    "cache": set(),
    "program": {"git_lfs", "folder_format"},
    "ops": {"program", "cache"},
    "runtime": {"program", "notices", "cache", "ops"},
    "model": {"program", "folder_format", "limited_files", "runtime", "tokenizer"},
    "generation": {"program", "cache", "ops", "runtime", "model", "partial_folder", "path_arguments"},
    "tasks": {"program", "notices", "tokenizer", "model", "generation"},
    "converters": {
        *("program", "git_lfs", "limited_files", "folder_format", "partial_folder", "precision_options", "notices"),
        *("cache", "tokenizer", "ops", "runtime", "model", "memory"),
    },
    "hub": {"folder_format", "notices", "user_cache"},
    "sources": {"folder_format", "notices", "path_arguments", "precision_options", "hub"},
    "api": {
        *("program", "folder_format", "notices", "partial_folder", "path_arguments", "precision_options", "user_cache"),
        *("memory", "model", "hub", "sources", "converters"),
    },
    "cli": {
        "program", "notices", "precision_options", "memory", "tokenizer", "model", "generation", "tasks", "hub", "sources", "api"
    },
    # What a user imports: the names of all of them.
    "__init__": {"generation", "api", "model", "tasks"},
    "__main__": {"cli"},
}  # fmt: skip

# The rooms of the converters: each may import those before it, and the errors that they share.
CONVERTER_ROOMS = (
    *("stages", "errors", "onnx_reader", "graph", "passes", "proof", "precision"),
    *("model_card", "file_kinds", "source_graph", "staging", "pipeline", "child_main", "child_process"),
)
# Those that run a program: rewrites do so through `graph` (the shape probe, parts of a program) alone.
CONVERTER_ROOMS_WITH_RUNTIME = ("graph", "proof", "precision", "source_graph", "pipeline")

# What comes from outside and where: anything else is a dependency that pyproject.toml doesn't name, or one in a wrong room.
OUTSIDE = {
    "mlx": {"program", "ops", "cache", "runtime", "model", "generation", "tasks", "cli", "converters"},
    "numpy": {"program", "ops", "cache", "runtime", "generation", "tasks", "converters"},
    "onnx": {"converters"},
    "google": {"converters"},
    "tqdm": {"converters"},
    "tokenizers": {"tokenizer"},
    "jinja2": {"tokenizer"},
    "huggingface_hub": {"hub"},
}


def sources(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted({path.resolve() for path in paths})  # the converters are linked into the package


def room(parts: tuple[str, ...]) -> str:
    """The room of a module's dotted parts: `mlx_transmuter.ops.shaping` is in ops."""
    if parts[0] != "mlx_transmuter":
        return parts[0]
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Each import of a tree, and the dotted name of what it takes, names of `from` imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def inside_a_function(tree: ast.AST, wanted: ast.stmt) -> bool:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return any(wanted in ast.walk(function) for function in functions)


def of_typing(tree: ast.AST, wanted: ast.stmt) -> bool:
    """Whether an import is under `if TYPE_CHECKING:`, which no run executes."""
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    return any(wanted in ast.walk(guard) for guard in guards)


def violations(path: Path, text: str) -> list[str]:
    """What a file of a room imports that it may not."""
    tree = ast.parse(text)
    own = room(path.relative_to(ROOT).with_suffix("").parts)
    found = []
    for node, name in imports(tree):
        parts = tuple(name.split("."))
        where = f"{path.relative_to(ROOT)}:{node.lineno}: {own} imports {name}"
        if parts[0] == "mlx_transmuter":
            other = room(parts)
            if other == "errors":  # the base class of all errors, which every room may have
                continue
            # `from mlx_transmuter import ops` names a room, `from mlx_transmuter import __version__` the package itself.
            if other not in ARROWS:
                other = "__init__"
            if other not in (own, "__init__") and other not in ARROWS[own]:
                found.append(where)
            if other == "converters" and own != "converters" and not inside_a_function(tree, node):
                found.append(f"{where} outside a function")
        elif parts[0] in OUTSIDE and own not in OUTSIDE[parts[0]] and not of_typing(tree, node):
            found.append(where)
    return found


def test_every_room_is_in_the_table():
    rooms = {room(path.relative_to(ROOT).with_suffix("").parts) for path in sources(*PACKAGES)}
    assert rooms == set(ARROWS)


@pytest.mark.parametrize("name", ARROWS)
def test_a_room_imports_only_what_the_table_allows(name):
    own = [path for path in sources(*PACKAGES) if room(path.relative_to(ROOT).with_suffix("").parts) == name]
    assert own
    assert [problem for path in own for problem in violations(path, path.read_text())] == []


def test_the_arrows_make_no_circle():
    """Converters aside, which api reaches inside a function only."""
    left, done = {name: ways - {"converters"} for name, ways in ARROWS.items()}, set()
    while ready := [name for name, ways in left.items() if ways <= done]:
        done.update(ready)
        left = {name: ways for name, ways in left.items() if name not in done}
    assert not left


def test_the_check_sees_what_it_should():
    wrong = {
        "mlx_transmuter/program/program.py": [
            "import mlx_transmuter.ops",
            "from mlx_transmuter.runtime import module",
            "import onnx",
        ],
        "mlx_transmuter/ops/onnx/shaping.py": [
            "from mlx_transmuter.runtime.module import ProgramModule",
            "import onnx",
        ],
        "mlx_transmuter/cache/index.py": [
            "from mlx_transmuter.program import Program",
            "from mlx_transmuter import ops",
        ],
        "mlx_transmuter/generation/loop.py": [
            "from mlx_transmuter.tasks import text",
            "def f():\n    import mlx_transmuter.cli",
        ],
        "mlx_transmuter/api.py": ["from mlx_transmuter.converters.pipeline import convert", "import onnx"],
        "mlx_transmuter/model.py": ["def f():\n    from mlx_transmuter.converters.onnx_reader.reader import read_onnx"],
    }
    for path, texts in wrong.items():
        for text in texts:
            assert violations(ROOT / path, text), (path, text)
    assert not violations(
        ROOT / "mlx_transmuter/api.py", "def f():\n    from mlx_transmuter.converters.pipeline import convert"
    )
    assert not violations(
        ROOT / "mlx_transmuter/runtime/decoder.py",
        "from mlx_transmuter import ops\nfrom mlx_transmuter.cache import Pools",
    )


def converter_room(parts: tuple[str, ...]) -> str:
    """The room of a module of the converters: `mlx_transmuter.converters.passes.moe.find_experts` is in passes."""
    return parts[parts.index("converters") + 1]


@pytest.mark.parametrize("own", CONVERTER_ROOMS)
def test_a_room_of_the_converters_imports_only_those_before_it(own):
    earlier = CONVERTER_ROOMS[: CONVERTER_ROOMS.index(own) + 1]
    problems = []
    for path in sources("converters"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1:] == ("__init__",) or converter_room(parts) != own:
            continue
        for node, name in imports(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
            target = name.split(".")
            if target[:2] == ["mlx_transmuter", "converters"] and converter_room(tuple(target)) not in earlier:
                problems.append(where)
            if target[:2] == ["mlx_transmuter", "runtime"] and own not in CONVERTER_ROOMS_WITH_RUNTIME:
                problems.append(where)
    assert problems == []


def test_every_room_of_the_converters_has_its_place():
    rooms = {converter_room(path.relative_to(ROOT).with_suffix("").parts) for path in sources("converters")}
    assert rooms - {"__init__"} == set(CONVERTER_ROOMS)


def test_annotations_of_operators_are_no_strings():
    """The registry reads them, and `from __future__ import annotations` would make text of `Host`."""
    files = sources("mlx_transmuter/ops")
    assert files
    for path in files:
        assert "__future__.annotations" not in [name for _, name in imports(ast.parse(path.read_text()))], path


def test_every_file_says_what_it_is_for_in_its_first_line():
    for path in sources(*PACKAGES, "tests", "scripts"):
        text = path.read_text()
        assert text.startswith('"""'), path
        first = text.splitlines()[0]
        assert first.count('"""') == 2 or first[3:4].isalpha(), path


def test_nothing_that_runs_code_is_called():
    """A model's files are data: nothing here evaluates text, unpickles, or starts a process, but for the one of a
    conversion."""
    forbidden = {"eval", "exec", "compile", "__import__", "breakpoint"}
    modules = {"pickle", "marshal", "shelve", "subprocess", "ctypes"}
    for path in sources(*PACKAGES):
        tree = ast.parse(path.read_text())
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        taken = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not calls & forbidden - own - taken, path
        allowed = {"subprocess"} if path.name == "child_process.py" else set()
        assert not {name.split(".")[0] for _, name in imports(tree)} & modules - allowed, path
