"""The contenders: each loads one model of the benchmark and decodes greedily, with the time of every token."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Prompts = list[list[int]]


class Transmuted:
    """mlx-transmuter on the converted folder. beams above 1: beam search, whose steps are timed as a whole."""

    folder = "transmuted"

    def __init__(self, root: Path):
        import mlx_transmuter as mt

        self.model = mt.load(root / self.folder)
        self.compiled: dict[tuple[int, int, int], object] = {}

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        from mlx_transmuter import generation

        key = (len(prompts), new, beams)
        if key not in self.compiled:
            ctx = generation.context(
                self.model, num_beams=beams, max_new_tokens=new, do_sample=False, eos_token_id=None
            )
            self.compiled[key] = generation.compile(ctx, len(prompts))
        for step in generation.run(self.compiled[key], prompts, [0] * len(prompts)):
            yield [int(token) for token in step.token]

    def shapes(self) -> int:
        return sum(gen.decoder.compilations for gen in self.compiled.values())  # type: ignore[attr-defined]


class Transmuted4Bit(Transmuted):
    """The same of the 4-bit file."""

    folder = "transmuted-q4"


class Peer:
    """mlx-lm on the same weights, with its own generation loops."""

    folder = "hf"

    def __init__(self, root: Path):
        import mlx.core as mx

        self.module = importlib.import_module("mlx_lm.generate")
        self.model, _ = importlib.import_module("mlx_lm.utils").load_model(root / self.folder)
        mx.eval(self.model.parameters())

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        import mlx.core as mx

        if beams > 1:
            raise NotImplementedError("mlx-lm has no beam search")
        if len(prompts) == 1:
            for token, _ in self.module.generate_step(mx.array(prompts[0]), self.model, max_tokens=new):
                yield [int(token)]
            return
        batch = self.module.BatchGenerator(
            self.model, max_tokens=new, completion_batch_size=len(prompts), prefill_batch_size=len(prompts)
        )
        ids = batch.insert(prompts)
        left = set(ids)
        while left:
            _, answers = batch.next()
            if answers:
                yield [answer.token for answer in answers]
                left -= {answer.uid for answer in answers if answer.finish_reason}
        batch.close()

    def shapes(self) -> int:
        return 0


class Peer4Bit(Peer):
    """mlx-lm on the weights quantised to 4 bits in groups of 32, as the 4-bit file has them."""

    folder = "hf-q4"


class Onnxruntime:
    """onnxruntime's CPU provider on the ONNX file that was converted."""

    file = "onnx/model.onnx"

    def __init__(self, root: Path):
        import onnxruntime as ort

        self.session = ort.InferenceSession(str(root / self.file), providers=["CPUExecutionProvider"])
        self.pasts = [value for value in self.session.get_inputs() if value.name.startswith("past")]
        self.names = [value.name for value in self.session.get_outputs()]

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        if beams > 1:
            raise NotImplementedError("beams")
        ids = np.array(prompts, np.int64)
        rows, length = ids.shape
        past = {value.name: np.zeros((rows, value.shape[1], 0, value.shape[3]), np.float32) for value in self.pasts}
        for _ in range(new):
            feed = {"input_ids": ids, "attention_mask": np.ones((rows, length), np.int64), **past}
            feed["position_ids"] = np.broadcast_to(np.arange(length - ids.shape[1], length), ids.shape).astype(np.int64)
            given = dict(zip(self.names, self.session.run(None, feed), strict=True))
            past = {name: given[name.replace("past_key_values", "present")] for name in past}
            ids = given["logits"][:, -1].argmax(-1)[:, None]
            length += 1
            yield ids[:, 0].tolist()

    def shapes(self) -> int:
        return 0


class Onnxruntime4Bit(Onnxruntime):
    """The same of the 4-bit file."""

    file = "onnx-q4/model.onnx"


CONTENDERS = {
    "mlx-transmuter": Transmuted,
    "mlx-lm": Peer,
    "onnxruntime": Onnxruntime,
    "mlx-transmuter q4": Transmuted4Bit,
    "mlx-lm q4": Peer4Bit,
    "onnxruntime q4": Onnxruntime4Bit,
}


def timed(contender: object, prompts: Prompts, new: int, beams: int) -> dict:
    """first: seconds to the first token. step: median seconds from token to token. tokens: of the first prompt."""
    start = last = time.perf_counter()
    first, steps, found = 0.0, [], []
    for tokens in contender.tokens(prompts, new, beams):  # type: ignore[attr-defined]
        now = time.perf_counter()
        if found:
            steps.append(now - last)
        else:
            first = now - start
        found.append(tokens[0])
        last = now
    whole = last - start
    # A beam search gives its tokens when it is done; its steps are the whole time shared among them.
    step = whole / max(1, len(found)) if beams > 1 else float(np.median(steps)) if steps else 0.0
    return {"first": first, "step": step, "whole": whole, "tokens": found}
