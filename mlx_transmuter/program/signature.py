"""The signature of a decoder: which inputs and outputs of a program are tokens, mask, positions, cache and logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_transmuter.errors import abbreviate
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.attention_nodes import has_fused_kv_pools
from mlx_transmuter.program.cache_pairs import (
    MAX_FIXED_AXIS,
    CachePair,
    SignatureError,
    StatePair,
    find_pairs,
    is_cache_or_state_name,
)
from mlx_transmuter.program.length_switches import TOTAL_LENGTH_INPUT, LengthSwitches

CacheMode = Literal["in_place", "append", "grow"]
CACHE_MODES: tuple[CacheMode, ...] = ("in_place", "append", "grow")

# Inputs of a program over pools, by their saved names: the index of the step's tokens, the same over pools that keep
# heads apart, and the tokens of each row whose logits are computed.
CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT = "index", "lanes", "ends"
EMBEDDINGS_INPUT = "inputs_embeds"
TOKEN_INPUTS = ("input_ids", EMBEDDINGS_INPUT, "decoder_input_ids")
MASK_INPUT, POSITIONS_INPUT, USE_CACHE_BRANCH_INPUT = "attention_mask", "position_ids", "use_cache_branch"
LOGITS_TO_KEEP_INPUTS = ("num_logits_to_keep", "logits_to_keep")
# The inputs of a step beside its tokens, which are removed where no node reads them.
OPTIONAL_INPUTS = frozenset(
    {MASK_INPUT, POSITIONS_INPUT, USE_CACHE_BRANCH_INPUT, TOTAL_LENGTH_INPUT, *LOGITS_TO_KEEP_INPUTS}
)


@dataclass(frozen=True)
class DecoderSignature:
    """The inputs that generation feeds a decoder and the outputs that it reads; a name is None where there is no such
    input.

    token_input: input_ids or inputs_embeds. position_axes: 0 for position_ids [rows, seq], else the size of their first
    axis. logits_to_keep_input: for how many last tokens the graph computes logits (0: all), int64 of
    logits_to_keep_shape. cache_pairs, state_pairs: what the graph carries from step to step, with and without an axis
    of positions; without either it reads all tokens at each step. uses_pools: whether the program reads and writes
    pools by an index; its pasts are then pools and its presents the new ones. fused_kv_pools: whether each of these
    pools has the keys of all heads and, after them, the values. selects_logits: whether it computes the logits of
    chosen tokens alone, [rows, k, vocab]. vocab_size: the last axis of the logits. single_row: whether the graph
    declares one row. length_switches: the total lengths past which keys are computed otherwise. extra_inputs: the other
    inputs, which a task feeds (the outputs of an encoder).
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
    length_switches: LengthSwitches
    extra_inputs: tuple[str, ...]

    @staticmethod
    def from_program(program: Program) -> DecoderSignature:
        """Returns the signature of a program. Raises SignatureError where logits are missing or a cache is unknown."""
        inputs = {value.name: value for value in program.inputs}
        logits = _find_logits(program.outputs)
        shape = logits.shape or ()
        vocab = shape[-1] if len(shape) == 3 else None
        if not isinstance(vocab, int) or not 2 <= vocab <= MAX_FIXED_AXIS:
            do = "export the model with a vocabulary of a fixed size"
            raise SignatureError(f"logits of shape {list(shape)}", "rows, positions and the size of the vocabulary", do)
        tokens = next((name for name in TOKEN_INPUTS if name in inputs), None)
        if tokens is None:
            found = f"the inputs {abbreviate(list(inputs))}" if inputs else "no inputs"
            raise SignatureError(found, f"input_ids or {EMBEDDINGS_INPUT}")
        positions = inputs.get(POSITIONS_INPUT)
        logits_to_keep = next((name for name in LOGITS_TO_KEEP_INPUTS if name in inputs), None)
        axes = 0
        if positions is not None and positions.shape is not None and len(positions.shape) == 3:
            axes = positions.shape[0] if isinstance(positions.shape[0], int) else 3
        known = {tokens, CACHE_INDEX_INPUT, HEAD_INDEX_INPUT, LOGIT_INDICES_INPUT, *OPTIONAL_INPUTS}
        others = [value for value in program.inputs if value.name not in known]
        pairs = find_pairs(others, [value for value in program.outputs if value.name != logits.name])
        pasts = {pair.past for pair in pairs}
        return DecoderSignature(
            token_input=tokens,
            takes_embeddings=tokens == EMBEDDINGS_INPUT,
            mask_input=MASK_INPUT if MASK_INPUT in inputs else None,
            positions_input=POSITIONS_INPUT if positions is not None else None,
            position_axes=axes,
            logits_to_keep_input=logits_to_keep,
            logits_to_keep_shape=(1,) * len(inputs[logits_to_keep].shape or ()) if logits_to_keep else (),
            use_cache_branch_input=USE_CACHE_BRANCH_INPUT if USE_CACHE_BRANCH_INPUT in inputs else None,
            cache_pairs=tuple(pair for pair in pairs if isinstance(pair, CachePair)),
            state_pairs=tuple(pair for pair in pairs if isinstance(pair, StatePair)),
            logits_output=logits.name,
            vocab_size=vocab,
            uses_pools=CACHE_INDEX_INPUT in inputs,
            fused_kv_pools=CACHE_INDEX_INPUT in inputs and has_fused_kv_pools(program),
            selects_logits=LOGIT_INDICES_INPUT in inputs,
            single_row=(inputs[tokens].shape or (None,))[0] == 1
            or any(pair.shape[pair.batch_axis] == 1 for pair in pairs),
            length_switches=LengthSwitches.from_program(program),
            extra_inputs=tuple(value.name for value in others if value.name not in pasts),
        )

    @property
    def pairs(self) -> tuple[CachePair | StatePair, ...]:
        """What steps carry: the cache pairs and the state pairs."""
        return (*self.cache_pairs, *self.state_pairs)

    @property
    def required_outputs(self) -> list[str]:
        """The outputs that a decoder reads: the logits and what is carried, as the signature found them; `outputs`
        goes by names alone."""
        return [self.logits_output, *(pair.present for pair in self.pairs)]


def outputs(names: Iterable[str]) -> list[str]:
    """Returns those of the output names of a decoder that are named `logits` or `present…`.

    It takes names without a program; DecoderSignature.required_outputs also knows outputs of other names.
    """
    return [name for name in names if name == "logits" or name.startswith("present")]


def infer_cache_mode(program: Program, signature: DecoderSignature) -> CacheMode:
    """Returns the cache mode that the graph's form suggests, which a conversion tries.

    in_place: GroupQueryAttention writes into a buffer. append: position_ids are an input, so a buffer may have free
    columns. grow: positions come from the length of the cache.
    """
    if any(node.op.startswith("com.microsoft.GroupQueryAttention") for node in program.all_nodes()):
        return "in_place"
    return "append" if signature.positions_input else "grow"


def _find_logits(outputs: Iterable[Value]) -> Value:
    """Returns the output named logits, or the only one of three axes that is no part of a cache."""
    outputs = list(outputs)
    for value in outputs:
        if value.name == "logits":
            return value
    candidates = [value for value in outputs if len(value.shape or ()) == 3 and not is_cache_or_state_name(value.name)]
    candidates = [value for value in candidates if "hidden" not in value.name]
    if len(candidates) != 1:
        found = f"the outputs {abbreviate([value.name for value in outputs])}" if outputs else "no outputs"
        raise SignatureError(found, "an output named logits, or one alone of three axes")
    return candidates[0]
