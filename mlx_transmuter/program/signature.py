"""The signature of a decoder: which of a program's inputs and outputs are tokens, mask, positions, cache and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.cache_pairs import (
    MAX_FIXED_AXIS,
    CachePair,
    SignatureError,
    StatePair,
    abbreviate_names,
    find_pairs,
    is_cache_or_state_name,
)

CacheMode = Literal["in_place", "append", "grow"]
CACHE_MODES: tuple[CacheMode, ...] = ("in_place", "append", "grow")

# Inputs of a program over pools: the index, the index over pools that keep heads apart, the tokens of
# each row whose logits are wanted.
CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT = "index", "lanes", "ends"
TOKEN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids")
MASK_INPUT, POSITIONS_INPUT, USE_CACHE_BRANCH_INPUT = "attention_mask", "position_ids", "use_cache_branch"
LOGITS_TO_KEEP_INPUTS = ("num_logits_to_keep", "logits_to_keep")
# What a graph may take of a step beside its tokens, and can do without where nothing reads it.
OPTIONAL_INPUTS = frozenset({MASK_INPUT, POSITIONS_INPUT, USE_CACHE_BRANCH_INPUT, *LOGITS_TO_KEEP_INPUTS})


@dataclass(frozen=True)
class DecoderSignature:
    """What generation gives to a decoder and reads from it. Names are None where the graph has no such input.

    tokens: input_ids or inputs_embeds. position_axes: 0 for position_ids [rows, seq], else the size of their first
    axis. keep: the input that says of how many last positions the graph gives logits (0: all), int64 of keep_shape.
    entries, states: what the graph carries from step to step, with and without an axis of positions; without either it
    reads its whole prefix at each step. index: whether the program reads and writes pools, by an index; its pasts are
    then pools and its presents the new ones. both: whether each of these pools has the keys of all heads and, after
    them, the values. ends: whether it gives logits of the tokens that are asked for alone,
    [rows, k, vocab]. vocab: the size of the vocabulary, the last axis of the logits. one_row: whether the graph says
    that it takes one row. given: the other inputs, which a task gives (the outputs of an encoder).
    """

    token_input: str
    takes_embeddings: bool
    mask_input: str | None
    positions_input: str | None
    position_axes: int
    use_cache_branch_input: str | None
    logits_to_keep_input: str | None
    logits_to_keep_shape: tuple[int, ...]
    cache_pairs: tuple[CachePair, ...]
    state_pairs: tuple[StatePair, ...]
    logits_output: str
    vocab_size: int
    uses_pools: bool
    fused_kv_pools: bool
    selects_logits: bool
    single_row: bool
    extra_inputs: tuple[str, ...]

    @staticmethod
    def from_program(program: Program) -> DecoderSignature:
        """The signature of the program. Raises SignatureError for a program without logits or with an unknown cache."""
        inputs = {value.name: value for value in program.inputs}
        logits = _find_logits(program.outputs)
        shape = logits.shape or ()
        vocab = shape[-1] if len(shape) == 3 else None
        if not isinstance(vocab, int) or not 2 <= vocab <= MAX_FIXED_AXIS:
            do = "export the model with a vocabulary of a fixed size"
            raise SignatureError(f"logits of shape {list(shape)}", "rows, positions and the size of the vocabulary", do)
        tokens = next((name for name in TOKEN_INPUTS if name in inputs), None)
        if tokens is None:
            raise SignatureError(f"the inputs {abbreviate_names(inputs)}", "input_ids or inputs_embeds")
        positions = inputs.get(POSITIONS_INPUT)
        keep = next((name for name in LOGITS_TO_KEEP_INPUTS if name in inputs), None)
        axes = 0
        if positions is not None and positions.shape is not None and len(positions.shape) == 3:
            axes = positions.shape[0] if isinstance(positions.shape[0], int) else 3
        known = {tokens, CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT, *OPTIONAL_INPUTS}
        others = [value for value in program.inputs if value.name not in known]
        parts = find_pairs(others, [value for value in program.outputs if value.name != logits.name])
        pasts = {part.past for part in parts}
        return DecoderSignature(
            token_input=tokens,
            takes_embeddings=tokens == "inputs_embeds",
            mask_input=MASK_INPUT if MASK_INPUT in inputs else None,
            positions_input=POSITIONS_INPUT if positions is not None else None,
            position_axes=axes,
            logits_to_keep_input=keep,
            logits_to_keep_shape=(1,) * len(inputs[keep].shape or ()) if keep else (),
            use_cache_branch_input=USE_CACHE_BRANCH_INPUT if USE_CACHE_BRANCH_INPUT in inputs else None,
            cache_pairs=tuple(part for part in parts if isinstance(part, CachePair)),
            state_pairs=tuple(part for part in parts if isinstance(part, StatePair)),
            logits_output=logits.name,
            vocab_size=vocab,
            uses_pools=CACHE_INDEX_INPUT in inputs,
            fused_kv_pools=CACHE_INDEX_INPUT in inputs
            and any(node.op == "mlx.attention" and not node.inputs[4] for node in program.all_nodes()),
            selects_logits=LOGIT_INDICES_INPUT in inputs,
            single_row=(inputs[tokens].shape or (None,))[0] == 1
            or any(part.shape[part.batch_axis] == 1 for part in parts),
            extra_inputs=tuple(value.name for value in others if value.name not in pasts),
        )

    @property
    def pairs(self) -> tuple[CachePair | StatePair, ...]:
        """What steps carry: the cache and the states."""
        return (*self.cache_pairs, *self.state_pairs)

    @property
    def required_outputs(self) -> list[str]:
        """The outputs that a decoder needs of the program: the logits and what is carried."""
        return [self.logits_output, *(part.present for part in self.pairs)]


def outputs(names: Iterable[str]) -> list[str]:
    """Those of the output `names` of a decoder that generation reads: logits and the present cache."""
    return [name for name in names if name == "logits" or name.startswith("present")]


def infer_cache_mode(program: Program, signature: DecoderSignature) -> CacheMode:
    """The cache mode that the graph's form suggests; a conversion tries it before it counts.

    in_place: GroupQueryAttention writes into a buffer. append: position_ids are given, so a buffer may have free
    columns. grow: positions come from the length of the cache.
    """
    if any(node.op.startswith("com.microsoft.GroupQueryAttention") for node in program.all_nodes()):
        return "in_place"
    return "append" if signature.positions_input else "grow"


def _find_logits(outputs: Iterable[Value]) -> Value:
    """The output named logits, or the only one of three axes that is no part of a cache."""
    outputs = list(outputs)
    for value in outputs:
        if value.name == "logits":
            return value
    found = [value for value in outputs if len(value.shape or ()) == 3 and not is_cache_or_state_name(value.name)]
    found = [value for value in found if "hidden" not in value.name]
    if len(found) != 1:
        names = abbreviate_names(value.name for value in outputs)
        raise SignatureError(f"the outputs {names}", "an output named logits, or one alone of three axes")
    return found[0]
