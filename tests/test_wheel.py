"""The installed package: what the wheel holds, and that a converted model runs without the converter and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import golden

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

# What a machine that only runs converted models need not have.
ABSENT = ["onnx", "google", "ml_dtypes", "onnxruntime", "torch", "transformers", "optimum", "mlx_transmuter.converters"]

RUN = """
import json, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent} or name in {absent}:
            raise ImportError(f"{{name}} is absent")

sys.meta_path.insert(0, Absent())
for name in {absent}:
    try:
        __import__(name)
    except ImportError as error:
        assert "is absent" in str(error), error
    else:
        raise SystemExit(f"{{name}} was imported")

import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_transmuter as mt
from mlx_transmuter import generation

prompts, new = json.loads(sys.stdin.read())
model = mt.load(sys.argv[1])
context = generation.context(model, max_new_tokens=new, do_sample=False)
rows = generation.generate(generation.compile(context, len(prompts)), prompts, [0] * len(prompts))
absent = [name for name in sys.modules if name.split(".")[0] in {absent} or name in {absent}]
print(json.dumps({{"file": mt.__file__, "tokens": [[token.id for token in row] for row in rows], "absent": absent}}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    """The wheel as it would be published."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = place.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place / "site")
        yield archive


def test_a_wheel_made_from_the_source_distribution_has_the_converters(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = archive.getnames()
        assert len(names) == len(set(names))
        archive.extractall(tmp_path, filter="data")
    subprocess.run([*build, "-t", "wheel"], cwd=tmp_path / names[0].split("/")[0], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {f"mlx_transmuter/{path.relative_to(ROOT)}" for path in (ROOT / "converters").rglob("*.py")}
        assert files <= set(archive.namelist())


def run(wheel: zipfile.ZipFile, *args: str, text: str = "", **more: str) -> subprocess.CompletedProcess:
    """Python in an empty folder, with the unpacked wheel before everything else on the path."""
    site = Path(wheel.filename).parent / "site"
    place = site.parent / "elsewhere"
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(
        [sys.executable, *args], cwd=place, input=text, capture_output=True, text=True, env=environment, timeout=300
    )


def test_the_wheel_holds_the_package_with_its_converters_and_the_demo(wheel):
    names = set(wheel.namelist())
    for package, place in (("mlx_transmuter", ""), ("converters", "mlx_transmuter/")):
        files = {place + str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert files
        assert files <= names
    assert "mlx_transmuter/py.typed" in names
    demo = {str(path.relative_to(ROOT)) for path in (ROOT / "mlx_transmuter" / "demo").iterdir()}
    assert "mlx_transmuter/demo/model.onnx" in demo
    assert demo <= names


def test_the_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"mlx_transmuter", info}
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith((".pyc", ".orig", ".rej"))]
    assert sum(entry.file_size for entry in wheel.infolist()) < 8 * 2**20


def test_the_metadata_names_the_command_the_licence_and_the_platforms(wheel):
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert "mlx-transmuter = mlx_transmuter.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.startswith(f"{info}/licenses/LICENSE") for name in wheel.namelist())
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: mlx") and "extra" not in line]
    assert any("[cpu]" in line and "linux" in line for line in needs)
    assert any("[cpu]" not in line and "darwin" in line for line in needs)


@pytest.mark.parametrize("name", ["llama", "llama_q4"])
def test_a_converted_model_runs_without_onnx(wheel, converted, name):
    want = golden(name)
    prompts = [row["prompt"] for row in want["rows"]]
    script = RUN.format(absent=ABSENT)
    done = run(wheel, "-c", script, str(converted(name)), text=json.dumps([prompts, want["max_new_tokens"]]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(Path(wheel.filename).parent / "site")
    assert found["absent"] == []
    assert found["tokens"] == [row["tokens"] for row in want["rows"]]


def test_the_demo_of_the_wheel_speaks(wheel, tmp_path):
    done = run(wheel, "-m", "mlx_transmuter", "generate", "--max-tokens", "5", MLX_TRANSMUTER_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_importing_the_package_is_quick_and_starts_nothing(wheel):
    """No import of the converter, of the hub's client or of a tokenizer's library, and no work for a device."""
    script = "import sys, mlx_transmuter; print([n for n in ('onnx', 'mlx_transmuter.converters', 'huggingface_hub', 'tokenizers', 'jinja2') if n in sys.modules])"
    done = run(wheel, "-c", script)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture(scope="module")
def editable(tmp_path_factory) -> Path:
    """The folder that an editable install fills, as pip would: what it unpacks and what its .pth files add to the path."""
    place = tmp_path_factory.mktemp("editable")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = place.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(place / "site")
    return place / "site"


CONVERT = """
import site, sys
sys.path = [path for path in sys.path if path not in {hidden}]
site.addsitedir({site})
import mlx_transmuter.converters.pipeline, mlx_transmuter as mt
print(mlx_transmuter.__file__)
import converters
assert converters.OWN, "the user's own module"
for name in ("tests", "scripts"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} can be imported")
mt.convert(sys.argv[1], "out", progress=False)
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("own", ["converters.py", "converters/__init__.py"])
def test_a_user_may_have_converters_of_their_own(kind, own, wheel, editable, tmp_path):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("OWN = True\n")
    site = Path(wheel.filename).parent / "site" if kind == "wheel" else editable
    script = CONVERT.format(site=repr(str(site)), hidden=repr([str(ROOT), str(ROOT / "tests")]))
    environment = {**os.environ, "PYTHONPATH": "", "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("MLX_TRANSMUTER_IN_PROCESS")  # as users convert: the child, too, must find the package
    source = ROOT / "tests" / "fixtures" / "llama"
    done = subprocess.run(
        [sys.executable, "-c", script, str(source)],
        cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "program.json").is_file()
    home = site if kind == "wheel" else ROOT
    assert Path(done.stdout.strip()).is_relative_to(home)
