"""A Model: a converted folder in memory, with what its source said of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_transmuter.folder_format import PROGRAM_FILE, FolderError
from mlx_transmuter.limited_files import read_json_object
from mlx_transmuter.program import ProgramError, load_program, weights
from mlx_transmuter.program.expert_stacks import check_expert_stacks
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import CacheMode, DecoderSignature
from mlx_transmuter.program.token_tables import check_token_tables
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.wired_memory import notice_large_model
from mlx_transmuter.tokenizer import Tokenizer

_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_LEGACY_GENERATION_KEYS = (
    "max_length",
    "min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)


@dataclass
class Model:
    """A converted model. `encoder`, `embed` and `vision` are there where the source has them.

    config, generation_config: the source's JSON, {} where it has none. tokenizer: None where it has none; such a model
    takes and gives token ids. folder: where it was loaded from.
    """

    decoder: ProgramModule
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    encoder: ProgramModule | None = None
    embed: ProgramModule | None = None
    vision: ProgramModule | None = None
    folder: Path | None = None

    @property
    def cache_mode(self) -> CacheMode:
        """How the decoder's cache works: "in_place", "append" or "grow", as its conversion found by trial.

        "grow" is also what a decoder without a cache says, which reads its whole prefix at each step.
        """
        program = self.decoder.program
        return RunPlan.from_program(program, DecoderSignature.from_program(program)).cache_mode


def load_folder(folder: Path) -> Model:
    """The Model of a converted folder, its weights in memory, so that any thread may use it.

    Raises ProgramError for a folder that is not one or not whole, SignatureError for one of no decoder, TokenizerError
    for a broken tokenizer.
    """
    folder = Path(folder)
    decoder = load_module(folder)
    check_token_tables(decoder.program, DecoderSignature.from_program(decoder.program))
    check_expert_stacks(decoder.program)
    # An array that is still to be read belongs to the stream of this thread; read, it belongs to any.
    arrays = decoder.weights()
    mx.eval(arrays)
    notice_large_model(sum(array.nbytes for array in arrays.values()))
    return Model(
        decoder=decoder,
        config=read_json_object(folder / "config.json", FolderError),
        generation_config=read_generation_config(folder),
        tokenizer=Tokenizer.from_folder(folder),
        folder=folder,
    )


def load_module(folder: Path) -> ProgramModule:
    """The Module of a folder's program.json and safetensors, its weights read when they are used."""
    if not (folder / PROGRAM_FILE).is_file():
        raise ProgramError(str(folder), f"no {PROGRAM_FILE}", "a converted folder", "convert the model first")
    program = load_program(folder / PROGRAM_FILE)
    return ProgramModule(program, weights.load(folder, program))


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The folder's generation settings, named as in generation_config.json.

    Without that file they are those of genai_config.json (its `search` and the ids in its `model`), or of config.json,
    which held them in the past; as transformers' GenerationConfig.from_model_config, this takes its ids and lengths.
    """
    if (folder / "generation_config.json").is_file():
        return read_json_object(folder / "generation_config.json", FolderError)
    genai, config = (
        read_json_object(folder / "genai_config.json", FolderError),
        read_json_object(folder / "config.json", FolderError),
    )
    model, search = (genai.get(part) if isinstance(genai.get(part), dict) else {} for part in ("model", "search"))
    found = {name: config[name] for name in (*_TOKEN_ID_KEYS, *_LEGACY_GENERATION_KEYS) if config.get(name) is not None}
    found |= {name: model[name] for name in _TOKEN_ID_KEYS if model.get(name) is not None}  # type: ignore[index,union-attr]
    # past_present_share_buffer is how its runtime keeps the cache; max_length there is only the size of the cache.
    return found | {k: v for k, v in search.items() if k not in ("past_present_share_buffer", "max_length")}  # type: ignore[union-attr]


def eos_token_ids(model: Model) -> list[int]:
    """The ids that end a text: those of generation_config.json, else of config.json, and the tokenizer's, joined."""
    named = model.generation_config.get("eos_token_id", model.config.get("eos_token_id"))
    if named is None:
        named = []
    ids = named if isinstance(named, list) else [named]
    joined = [*ids, *(model.tokenizer.eos_token_ids if model.tokenizer else ())]
    return [*{repr(id): id for id in joined}.values()]  # a file may name what is no id; the settings' check refuses it
