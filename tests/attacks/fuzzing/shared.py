"""What cases share and is made once: converted folders, files of prompt caches, tokenizers, recorded nodes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import mlx.core as mx
import toy

from fuzzing import kinds, recorded_nodes, tokenizers_of_kinds
from mlx_transmuter import generation
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import load_folder

CONVERTED_FOLDERS = Path(__file__).parents[2] / "converted_folders"


def make_converted(place: Path, names: list[str]) -> None:
    """Converts the fixtures of these names, and copies the folders that earlier versions made."""
    for name in names:
        source = toy.write(place / "source", toy.decoder()) if name == "toy" else kinds.FIXTURES / name
        convert(source, "model.onnx", place / name, progress=False)
    for folder in CONVERTED_FOLDERS.iterdir():
        if folder.is_dir() and folder.name not in names:
            shutil.copytree(folder, place / folder.name)


def make_prompt_cache(folder: Path) -> None:
    """Writes a prompt cache of the folder's model into it, where it can have one."""
    one = load_folder(folder)
    try:
        cache = PromptCache(one, block=2)
    except GenerationError:  # its rows have states
        return
    ctx = generation.context(one, max_new_tokens=2, eos_token_id=None)
    generation.generate(generation.compile(ctx, 1), [kinds.PROMPT], [0], prompt_cache=cache)
    cache.save(folder / kinds.CACHE_FILE)


def main(place: Path, names: list[str], tests: list[str]) -> None:
    """Makes all of it in the folder `place`. tests: those whose nodes are recorded, beside those of the decoders."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    make_converted(place, names)
    folders = [path.parent for path in sorted(place.glob("*/program.json"))]
    for folder in folders:
        make_prompt_cache(folder)
    tokenizers_of_kinds.write_all(place / "tokenizers")
    recorder = recorded_nodes.Recorder()
    graphs = kinds.GRAPHS if tests else names[1:]
    recorded_nodes.record_decoders(recorder, (read_onnx(kinds.FIXTURES / name / "model.onnx") for name in graphs))
    for folder in folders:
        with recorder.recording():
            kinds.first_logits(folder)
    if tests:
        recorded_nodes.record_tests(recorder, tests)
    recorded_nodes.save(recorder.nodes, place / "nodes.npz")
    (place / "made").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
