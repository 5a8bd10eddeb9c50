"""What kind of graph an ONNX file holds, where it is no decoder that converts: which one it seems to be, and which file
of its folder is the decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.errors import abbreviate
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.signature import EMBEDDINGS_INPUT, TOKEN_INPUTS

# Words of the inputs and outputs, and beginnings of the file's name, of the parts of a model beside its decoder.
_IMAGE_WORDS, _AUDIO_WORDS = {"pixel", "pixels", "image", "images", "vision"}, {"audio", "speech", "input_features"}
_EMBEDDING_WORDS = {"embed", "embeds", "embedding", "embeddings"}
_HIDDEN_WORDS = {"hidden", "features", "encoder"}


def check_is_causal_decoder(program: Program, path: Path) -> None:
    """Raises ConvertError for a graph of another kind: embeddings of tokens, an encoder, the decoder of an
    encoder-decoder, a decoder of embeddings. Other graphs that are no decoder are left to DecoderSignature."""
    inputs = [value.name for value in program.inputs]
    if not any(value.name == "logits" for value in program.outputs) and (kind := _part_beside_decoder(program, path)):
        ends = f"inputs {abbreviate(inputs)}; outputs {abbreviate([value.name for value in program.outputs])}"
        decoders = _files_beside(path, ("decoder", "model"))
        do = f"convert {' or '.join(decoders)}" if decoders else "choose the decoder among the model's files"
        raise ConvertError(path, f"what seems to be {kind} ({ends})", "the decoder of the model", do)
    if states := [name for name in inputs if "encoder" in _split_words(name)]:
        encoders = _files_beside(path, ("encoder",))
        origin = f", which {' or '.join(encoders)} computes" if encoders else ""
        raise ConvertError(
            path,
            f"a decoder that reads an encoder's states ({abbreviate(states)}){origin}",
            "a decoder of tokens, mask, positions and cache alone",
            "convert a decoder-only model: encoder-decoders are not supported yet",
        )
    if EMBEDDINGS_INPUT in inputs and not any(name in inputs for name in TOKEN_INPUTS if name != EMBEDDINGS_INPUT):
        makers = _files_beside(path, ("embed", "prepare_inputs_embeds"))
        origin = f", which {' or '.join(makers)} makes of token ids" if makers else ""
        raise ConvertError(
            path,
            f"a decoder that takes embeddings ({EMBEDDINGS_INPUT}){origin}",
            "a decoder that takes token ids (input_ids)",
            "export the decoder with its embeddings: two files are not joined yet",
        )


def _part_beside_decoder(program: Program, path: Path) -> str:
    """Returns which part of a model other than its decoder a graph without logits seems to be, "" for none."""
    inputs, outputs = _all_words(program.inputs), _all_words(program.outputs)
    stem = set(_split_words(path.stem)[:1])
    if not (outputs & (_EMBEDDING_WORDS | _HIDDEN_WORDS)) and not stem & {"embed", "encoder", "vision", "audio"}:
        return ""
    if inputs & _IMAGE_WORDS:
        return "an encoder of images"
    if inputs & _AUDIO_WORDS:
        return "an encoder of audio"
    if not {value.name for value in program.inputs} & set(TOKEN_INPUTS):
        return ""
    if outputs & _EMBEDDING_WORDS or "embed" in stem:
        return "the embeddings of tokens"
    return "an encoder, or a model without its head"


def _files_beside(path: Path, prefixes: tuple[str, ...]) -> list[str]:
    """Returns the other ONNX files of the folder whose names begin so, the first few."""
    files = (file.name for file in path.parent.glob("*.onnx") if file.name != path.name)
    return sorted(name for name in files if name.startswith(prefixes))[:3]


def _all_words(values: Iterable[Value]) -> set[str]:
    names = [value.name for value in values]
    return {word for name in names for word in (name, *_split_words(name))}


def _split_words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())
