"""The reference of a proof: the logits of the unrewritten graph, and whether it takes its prompts token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.converters.proof.proof import Logits, ProofBatch
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule


@dataclass(frozen=True)
class Reference:
    """The logits that a conversion must give, and whether the graph takes its prompts one token at a time."""

    logits: Logits
    token_by_token: bool


@dataclass(frozen=True)
class UnrewrittenGraph:
    """The graph that a conversion is compared with.

    modules: the graph on each side of its length switches, one after the other; one where it has none. eager: whether
    its shapes may depend on values, so that they are computed on the way.
    """

    modules: tuple[ProgramModule, ...]
    signature: DecoderSignature
    eager: bool
    path: Path

    @property
    def module(self) -> ProgramModule:
        """The graph on the side of short rows."""
        return self.modules[0]

    def logits(self, batch: ProofBatch, *, token_by_token: bool = False) -> Logits:
        """Returns its logits, on each side. Raises OperatorError where a node cannot run."""
        return [
            row
            for module in self.modules
            for row in proof.reference_logits(module, self.signature, batch, self.eager, token_by_token=token_by_token)
        ]

    def agrees(self, batch: ProofBatch, reference: Logits, tolerance: float) -> bool:
        """Returns whether it runs and its logits are the reference's."""
        try:
            return proof.logit_error(self.logits(batch), reference) <= tolerance
        except ops.OperatorError:
            return False

    def reference(self, batch: ProofBatch, tolerance: float) -> Reference:
        """Returns the reference for the batch. Raises OperatorError or ConvertError where the graph itself is at fault.

        A graph that was exported for tokens after a cache, as its name or its shapes say, may hide nothing of a step's
        later tokens from its earlier ones: its logits after a whole prompt then differ from those after the prompt's
        tokens one by one, and the latter are right.
        """
        try:
            logits = self.logits(batch)
        except ops.OperatorError as problem:
            return self._reference_without_whole_prompts(batch, problem)
        _check_logits(logits, self.signature.vocab_size, self.path)
        if not self._is_exported_for_single_tokens():
            return Reference(logits, token_by_token=False)
        try:
            steps = self.logits(batch, token_by_token=True)
        except ops.OperatorError:
            return Reference(logits, token_by_token=False)
        differs = proof.logit_error([row[:1] for row in steps], [row[:1] for row in logits]) > tolerance
        return Reference(steps if differs else logits, token_by_token=differs)

    def _reference_without_whole_prompts(self, batch: ProofBatch, problem: ops.OperatorError) -> Reference:
        """Returns the reference of a graph that cannot run a whole prompt over an empty cache."""
        try:
            return Reference(self.logits(batch, token_by_token=True), token_by_token=True)
        except ops.OperatorError:
            if not self.signature.cache_pairs or not self._runs_over_filled_cache():
                raise problem from None
        raise ConvertError(
            self.path,
            f"a graph that takes no empty cache ({problem.node}: {problem.found})",
            "a decoder that can begin with a prompt",
            "convert the merged decoder of the model, or the one without a past (decoder_model.onnx)",
        ) from problem

    def _runs_over_filled_cache(self) -> bool:
        call = self.module.call_eagerly if self.eager else self.module
        try:
            call(**make_step_inputs(self.module.program, self.signature, 1, 4, 1))
        except ops.OperatorError:
            return False
        return True

    def _is_exported_for_single_tokens(self) -> bool:
        """Returns whether the file's name or the shape of its tokens says that the graph takes single tokens.

        Of any other graph whose steps differ from its prompts nothing says which of the two is right.
        """
        tokens = self.module.program.input(self.signature.token_input)
        shape = tokens.shape if tokens is not None else None
        single = "with_past" in self.path.stem or (shape is not None and len(shape) > 1 and shape[1] == 1)
        has_cache = self.signature.pairs and not self.signature.use_cache_branch_input
        return bool(single and has_cache and not quantizes_dynamically(self.module.program))


def _check_logits(reference: Logits, vocab: int, path: Path) -> None:
    for logits in (logits for row in reference for logits in row):
        if logits.shape != (vocab,) or not np.isfinite(logits).any():
            raise ConvertError(
                path,
                f"logits {list(logits.shape)}, {int(np.isfinite(logits).sum())} of them finite",
                f"{vocab} logits a token, as the graph declares",
                "export the model again",
            )
