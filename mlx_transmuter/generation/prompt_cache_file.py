"""The file of a prompt cache: safetensors with the stored blocks, checked before any of it is used.

    before  int32 [blocks]         the block that each one follows, an earlier one, or -1 minus the side of the model's
                                   length switches that its keys are of
    tokens  int32 [blocks, block]  their token ids
    <past>  [blocks · block, heads · width]  for each pool, under the name of the graph's input: the slots' rows

The metadata have the format, its version, the block size, the fingerprint of the model, and for quantized pools the
bits and the group size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_transmuter.cache import CacheError, KVCache, check_quantization
from mlx_transmuter.cache.layout import slots_of_blocks
from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.setting_checks import is_integer
from mlx_transmuter.partial_folder import describe_write_error, partial_folder
from mlx_transmuter.path_arguments import as_path
from mlx_transmuter.program import program_to_json
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.program.weights import write_safetensors
from mlx_transmuter.runtime.module import ProgramModule

FORMAT_NAME, FORMAT_VERSION = "mlx-transmuter prompt cache", "1"
# A header has a few hundred bytes for each pool: no model needs more.
MAX_HEADER_BYTES = 2**24
MAX_BLOCK_SIZE = 2**16
_SAFETENSORS_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I32": mx.int32, "U32": mx.uint32}

# The dtype and shape of each tensor, by name.
TensorTable = dict[str, tuple[mx.Dtype, tuple[int, ...]]]


class PromptCacheHeader(NamedTuple):
    """The header of a file: its tensors, the block size, the model's fingerprint, and how keys and values are
    quantized."""

    path: Path
    tensors: TensorTable
    block_size: int
    fingerprint: str
    kv_bits: int | None
    kv_group_size: int


def save_prompt_cache(
    path: str | os.PathLike[str],
    kv_cache: KVCache,
    module: ProgramModule,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> None:
    """Writes the stored blocks of kv_cache, first beside the path and then in its place. Raises GenerationError."""
    path = as_path(path, "path", GenerationError, "the name of a file to write")
    if path.is_dir():
        raise GenerationError(str(path), "a folder", "the name of a file to write")
    stored = kv_cache.block_manager.stored_blocks()
    tokens = np.array([block.tokens for block in stored], np.int32).reshape(len(stored), kv_cache.block_size)
    arrays: dict[str, mx.array] = {
        "before": mx.array(np.array([block.before for block in stored], np.int32)),
        "tokens": mx.array(tokens),
    }
    slots = slots_of_blocks([block.number for block in stored], kv_cache.block_size)
    values = kv_cache.read_slots(slots)
    for name, spec, value in zip(_past_names(module), kv_cache.pool_specs, values, strict=True):
        arrays[name] = value.reshape(len(slots), spec.heads * spec.width)
    metadata = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "block": str(kv_cache.block_size),
        "fingerprint": model_fingerprint(module),
    }
    if kv_bits is not None:
        metadata |= {"kv_bits": str(kv_bits), "kv_group_size": str(kv_group_size)}
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, f"no folder {path.parent}")
        with partial_folder(path) as folder:
            write_safetensors(folder / "cache.safetensors", arrays, metadata)
            os.replace(folder / "cache.safetensors", path)
    except (OSError, RuntimeError) as error:  # a RuntimeError is what MLX raises where it gets no memory
        found, do = describe_write_error(error) if isinstance(error, OSError) else ("", "")
        found = found or str(getattr(error, "strerror", None) or error)
        raise GenerationError(str(path), found, "a place to write to", do) from None


def read_header(path: str | os.PathLike[str]) -> PromptCacheHeader:
    """Returns the header of a file. Raises GenerationError for one that is no prompt cache, or not whole."""
    path = as_path(path, "path", GenerationError, "a prompt cache's file")
    try:
        header, data_size = _read_json_header(path)
        metadata = header.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that is no text")
        if (metadata["format"], metadata["version"]) != (FORMAT_NAME, FORMAT_VERSION):
            raise ValueError(f"the format {metadata['format']!r}, version {metadata['version']!r}")
        tensors = _check_tensors(header, data_size)
        return PromptCacheHeader(path, tensors, *_check_metadata(metadata))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise GenerationError(str(path), str(found), "a prompt cache that was saved whole", "save it again") from None


def _read_json_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the JSON header of a safetensors file, and how many bytes of tensors follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        return json.loads(file.read(length)), size - 8 - length


def _check_tensors(header: dict[str, Any], data_size: int) -> TensorTable:
    """Returns the tensors of a header. Raises ValueError unless they fill data_size bytes without a gap."""
    tensors: TensorTable = {}
    end = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = _SAFETENSORS_DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        first, last = tensor["data_offsets"]
        if not all(is_integer(number) and number >= 0 for number in (*shape, first, last)):
            raise ValueError(f"a size of {name!r} that is no whole number")
        if first != end or last - first != math.prod(shape) * dtype.size:
            raise ValueError(f"{last - first} bytes at {first} of {name!r}, of shape {list(shape)}")
        tensors[name], end = (dtype, shape), last
    if end != data_size:
        raise ValueError(f"{data_size} bytes of tensors, of which the header names {end}")
    return tensors


def _check_metadata(metadata: dict[str, Any]) -> tuple[int, str, int | None, int]:
    """Returns the block size, the fingerprint, kv_bits and kv_group_size of the metadata."""
    block_size = int(metadata["block"])
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"blocks of {block_size} tokens")
    is_quantized = "kv_bits" in metadata
    bits, group_size = (int(metadata["kv_bits"]), int(metadata["kv_group_size"])) if is_quantized else (None, 64)
    check_quantization(bits, group_size)
    return block_size, str(metadata["fingerprint"]), bits, group_size


def restore_prompt_cache(header: PromptCacheHeader, kv_cache: KVCache, module: ProgramModule, vocab_size: int) -> None:
    """Fills an empty cache with the blocks of the file. Raises GenerationError for a file that does not fit it."""
    if header.fingerprint != (own := model_fingerprint(module)):
        raise _refusal(header, f"the fingerprint {header.fingerprint[:16]}", f"this model's, {own[:16]}")
    _, shape = header.tensors.get("before", (mx.int32, ()))
    count = shape[0] if shape else 0
    expected: TensorTable = {"before": (mx.int32, (count,)), "tokens": (mx.int32, (count, kv_cache.block_size))}
    names = _past_names(module)
    expected |= {
        name: (spec.dtype, (count * kv_cache.block_size, spec.heads * spec.width))
        for name, spec in zip(names, kv_cache.pool_specs, strict=True)
    }
    if header.tensors != expected:
        raise _refusal(header, _describe_tensors(header.tensors), _describe_tensors(expected))
    slots = count * kv_cache.block_size
    if kv_cache.max_slots is not None and slots > kv_cache.max_slots:
        raise _refusal(header, f"{slots} tokens", f"at most the limit of {kv_cache.max_slots}", "raise the limit")
    if not count:
        return
    try:
        arrays: Any = mx.load(str(header.path), format="safetensors")
        before, tokens = np.array(arrays["before"]), np.array(arrays["tokens"])
    except RuntimeError as error:
        raise _refusal(header, str(error), "a safetensors file") from None
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _refusal(header, f"token ids from {tokens.min()} to {tokens.max()}", f"ids from 0 to {vocab_size - 1}")
    kv_cache.grow(slots)
    try:
        blocks = zip(before.tolist(), tokens.tolist(), strict=True)
        sides = DecoderSignature.from_program(module.program).length_switches.sides
        restored = kv_cache.block_manager.restore_blocks(blocks, roots=sides)
    except CacheError as error:
        raise _refusal(header, str(error.found), str(error.expected)) from None
    kv_cache.write_slots(
        slots_of_blocks(restored, kv_cache.block_size),
        [
            arrays[name].reshape(slots, spec.heads, spec.width)
            for name, spec in zip(names, kv_cache.pool_specs, strict=True)
        ],
    )


def model_fingerprint(module: ProgramModule) -> str:
    """Returns 64 hex digits that identify a model: of its program, and of each parameter's name, shape, dtype and sum
    of bits."""
    digest = hashlib.sha256(json.dumps(program_to_json(module.program), sort_keys=True).encode())
    parameters: Any = tree_flatten(module.parameters())
    for name, array in sorted(parameters):
        bits = array.reshape(-1).view(mx.uint8)
        bits = bits.view(mx.uint32) if bits.size and bits.size % 4 == 0 else bits.astype(mx.uint32)
        digest.update(f"{name} {array.dtype} {list(array.shape)} {bits.sum().item()}\n".encode())
    return digest.hexdigest()


def _past_names(module: ProgramModule) -> list[str]:
    return [pair.past for pair in DecoderSignature.from_program(module.program).cache_pairs]


def _describe_tensors(tensors: TensorTable) -> str:
    described = [f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in sorted(tensors.items())]
    return ", ".join(described[:6]) + (f" and {len(described) - 6} more" if len(described) > 6 else "")


def _refusal(
    header: PromptCacheHeader, found: str, expected: str, do: str = "save it again with this model"
) -> GenerationError:
    return GenerationError(str(header.path), found, expected, do)
