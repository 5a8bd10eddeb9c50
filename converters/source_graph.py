"""The source of a conversion: its ONNX graph with named weights, its configuration, and the files that go along."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.file_kinds import check_is_causal_decoder
from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.onnx_reader.genai_names import apply_genai_names
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import find_length_switches
from mlx_transmuter.converters.passes.moe.traced_experts import restore_traced_experts
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.stages import enter_stage
from mlx_transmuter.folder_format import (
    CHAT_TEMPLATE_FOLDER,
    COMPANION_FILES,
    FolderError,
    check_link,
    copy_companion,
)
from mlx_transmuter.limited_files import read_json_object
from mlx_transmuter.program import Program
from mlx_transmuter.program.position_limit import find_position_limit
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.program.token_tables import check_token_tables
from mlx_transmuter.runtime.program_walk import MAX_VALUE_BYTES
from mlx_transmuter.tokenizer import Tokenizer, TokenizerError

# What the configurations call the tokens of a row that a model was trained for.
_TRAINED_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "context_length",
)
# Sliding windows that the proof's prompts reach past; longer ones would take too long.
_PROVED_WINDOWS = range(8, 129)


@dataclass(frozen=True)
class SourceGraph:
    """A decoder as its file has it, and what its configuration says of it.

    path: the ONNX file. config: config.json, {} without one. trained_length: the tokens of a row that the configuration
    says the model was trained for, or None.
    """

    path: Path
    program: Program
    config: dict[str, Any]
    trained_length: int | None

    @property
    def signature(self) -> DecoderSignature:
        return DecoderSignature.from_program(self.program)

    def proof_prompt_lengths(self) -> list[int]:
        """Returns the prompt lengths of the proof.

        They are ragged, with a padding row, and reach past the sliding window where it is short. A dynamic graph, whose
        numbers depend on what a step holds, has one prompt that runs in one chunk. No row passes a length switch: its
        sides are proved one by one.
        """
        if quantizes_dynamically(self.program):
            return [proof.SINGLE_CHUNK_LENGTH]
        window = self.config.get("sliding_window") or self.config.get("window_size") or 0
        position_limit = find_position_limit(self.program, self.signature)
        first_switch = find_length_switches(self.program).next_switch(1)
        limits = [self.trained_length, position_limit and position_limit.tokens, first_switch, 2**20]
        limit = min(limit for limit in limits if limit) - proof.DECODE_STEPS
        longest = window + 5 if isinstance(window, int) and window in _PROVED_WINDOWS else 13
        return [max(1, min(longest, limit)), max(1, min(5, limit)), 0]


def read_source_graph(source: Path, path: Path, folder: Path, *, progress: bool = False) -> SourceGraph:
    """Reads the decoder in the file `path` of the folder `source`, and copies what stands beside it into `folder`.

    Raises ConvertError for a file that is no causal decoder, or one that MLX cannot hold; ProgramError for a broken
    configuration; SignatureError for a graph that is no decoder, or one with a table that has no row for some token.
    """
    enter_stage("reading the file")
    check_link(path, source)
    origins = copy_companions(source, path, folder)
    # The generation settings are only read to know that they can be.
    config, genai, _ = (
        read_json_object(origins.get(name, path / "none"), FolderError)
        for name in ("config.json", "genai_config.json", "generation_config.json")
    )
    graph = apply_genai_names(read_onnx(path, progress=progress), genai)
    check_is_causal_decoder(graph, path)
    signature = DecoderSignature.from_program(graph)
    graph = restore_traced_experts(name_weights(graph.select_outputs(signature.required_outputs)), path)
    if signature.extra_inputs:
        raise ConvertError(
            path,
            f"the inputs {', '.join(signature.extra_inputs)}",
            "tokens, mask, positions and cache",
            "convert a decoder of text alone",
        )
    _check_device_types(graph, path)
    check_token_tables(graph, signature)
    _check_tokenizer_vocabulary(folder, signature.vocab_size, path, origins)
    trained_length = _configured_length(config, genai)
    if (short := _short_longrope_length(config)) and not find_length_switches(graph):
        trained_length = min(short, trained_length or short)
    graph.metadata["trained_length"] = trained_length  # the proof's decoders read it too
    return SourceGraph(path, graph, config, trained_length)


def copy_companions(source: Path, path: Path, folder: Path) -> dict[str, Path]:
    """Copies what a converted folder has of its source: configuration, tokenizer and templates, nothing that holds
    code.

    A file beside the graph comes before one at the source's root. Returns where each file came from. Raises FolderError
    as `copy_companion` does.
    """
    origins: dict[str, Path] = {}
    for place in (source, path.parent):
        for name in COMPANION_FILES:
            if os.path.lexists(place / name):
                copy_companion(place / name, source, folder / name)
                origins[name] = place / name
        for template in (place / CHAT_TEMPLATE_FOLDER).glob("*.jinja"):
            (folder / CHAT_TEMPLATE_FOLDER).mkdir(exist_ok=True)
            copy_companion(template, source, folder / CHAT_TEMPLATE_FOLDER / template.name)
            origins[template.name] = template
    return origins


def _check_device_types(graph: Program, path: Path) -> None:
    """Raises ConvertError for a weight or input of a type that MLX lacks, or a weight that this machine cannot hold."""
    arrays = [(f"the weight {name!r}", tensor.dtype, tensor.size) for name, tensor in graph.tensors.items()]
    arrays += [(f"the input {value.name!r}", value.dtype, 0) for value in graph.inputs]
    for label, dtype, size in arrays:
        try:
            count = ops.device_dtype(dtype).size * size
        except ops.OperatorError as error:
            raise ConvertError(path, f"{label}: {error.found}", error.expected) from None
        if count > MAX_VALUE_BYTES:
            raise ConvertError(path, f"{label} of {count} bytes", f"at most {MAX_VALUE_BYTES}, half of the memory here")


def _check_tokenizer_vocabulary(folder: Path, vocab: int, path: Path, origins: Mapping[str, Path]) -> None:
    """Raises ConvertError for a tokenizer of more tokens than the graph has, TokenizerError for a broken one."""
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except TokenizerError as error:  # of a copy, which no user knows
        where = origins.get(Path(error.where).name, error.where)
        raise TokenizerError(error.found, where=where, expected=error.expected, do=error.do) from error
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise ConvertError(
            path, f"a vocabulary of {vocab} tokens and a tokenizer with {tokenizer.vocab_size}",
            "a tokenizer without tokens that the model lacks", "use the tokenizer files of this model",
        )  # fmt: skip


def _configured_length(config: dict[str, Any], genai: dict[str, Any]) -> int | None:
    """Returns the tokens of a row that a model was trained for, from config.json or genai_config.json.

    None where they say nothing, or fewer than the proof decodes, which no decoder means.
    """
    for section in (config, config.get("text_config"), genai.get("model")):
        if not isinstance(section, dict):
            continue
        for name in _TRAINED_LENGTH_KEYS:
            if isinstance(section.get(name), int) and section[name] > proof.DECODE_STEPS:
                return section[name]
    return None


def _short_longrope_length(config: dict[str, Any]) -> int | None:
    """Returns up to how many tokens a model with longrope rotates by its short factors; None for another model.

    An exporter that traces the model writes these factors alone: longer rows are then not as in transformers.
    """
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return None
    name = "original_max_position_embeddings"
    length = config.get(name, scaling.get(name))
    return length if isinstance(length, int) and length > proof.DECODE_STEPS else None
