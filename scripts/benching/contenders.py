"""The contenders: each loads one model of the benchmark and decodes greedily, token by token."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]


class Transmuted:
    """mlx-transmuter on the converted folder. beams above 1: beam search, whose tokens come when it is done.

    evaluated: the seconds that the run spent in evaluations; the rest of a step is the host's.
    """

    folder = "transmuted"

    def __init__(self, root: Path):
        import mlx_transmuter as mt
        from mlx_transmuter.cache import Pools

        self.model = mt.load(root / self.folder)
        self.compiled: dict[tuple[int, int, int], object] = {}
        self.evaluated = 0.0
        evaluate = Pools.evaluate

        def timed_evaluate(pools, *arrays, wait=True):
            start = time.perf_counter()
            evaluate(pools, *arrays, wait=wait)
            self.evaluated += time.perf_counter() - start

        Pools.evaluate = timed_evaluate  # type: ignore[method-assign]

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        from mlx_transmuter import generation

        key = (len(prompts), new, beams)
        if key not in self.compiled:
            ctx = generation.context(
                self.model, num_beams=beams, max_new_tokens=new, do_sample=False, eos_token_id=None
            )
            self.compiled[key] = generation.compile(ctx, len(prompts))
        for step in generation.generate_steps(self.compiled[key], prompts, [0] * len(prompts)):
            yield [int(token) for token in step.token]

    def shapes(self) -> int:
        return sum(gen.decoder.compilations for gen in self.compiled.values())  # type: ignore[attr-defined]


class Transmuted4Bit(Transmuted):
    """The same of the 4-bit file."""

    folder = "transmuted-q4"


class Rows(Transmuted):
    """The decoder's steps alone, without a choice of tokens but the greatest logit: rows of their own slots."""

    paged = False

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        import mlx.core as mx

        from mlx_transmuter.runtime.decoder import Decoder

        if beams > 1:
            raise NotImplementedError("beams")
        key = (len(prompts), 0, 1)
        if key not in self.compiled:
            self.compiled[key] = Decoder(self.model.decoder, len(prompts))
        run = self.compiled[key].begin_session([len(prompts[0]) + new] * len(prompts), paged=self.paged)  # type: ignore[attr-defined]
        tokens = np.array(prompts, np.int32)
        for _ in range(new):
            found = mx.argmax(run.step(tokens, [tokens.shape[1]] * len(prompts)), axis=-1)
            run.evaluate(found)
            tokens = np.array(found, np.int32)[:, None]
            yield tokens[:, 0].tolist()
        run.close()

    def shapes(self) -> int:
        return sum(decoder.compilations for decoder in self.compiled.values())  # type: ignore[attr-defined]


class Pages(Rows):
    """The same steps over pages of one slot, as beams and drafts have them."""

    paged = True


class Products:
    """The floor: the model's matrix products alone, each over the last one's result, on the same weights.

    Those of attention, of each query head with the keys and of the weights with the values, are among them, over keys
    and values of each layer's own, in the order of factors that the CPU multiplies fastest.
    """

    def __init__(self, root: Path):
        import json

        import mlx.core as mx

        weights = mx.load(str(root / "hf" / "model.safetensors"))
        assert isinstance(weights, dict)
        config = json.loads((root / "hf" / "config.json").read_bytes())
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
        self.layers = [
            [weights[f"model.layers.{i}.{name}_proj.weight"].T for name in names]
            for i in range(config["num_hidden_layers"])
        ]
        self.head = weights["model.embed_tokens.weight"].T
        mx.eval(self.layers, self.head)

    def tokens(self, prompts: Prompts, new: int, beams: int) -> Iterator[list[int]]:
        import mlx.core as mx

        if beams > 1:
            raise NotImplementedError("beams")
        rows, context, dim = len(prompts), len(prompts[0]), self.layers[0][1].shape[1] // self.kv
        pasts = [[mx.zeros((rows, self.kv, context, dim)) for _ in "kv"] for _ in self.layers]
        mx.eval(pasts)
        yield []
        for i in range(new):
            seq = 1 if i else context
            x = mx.ones((rows, seq, self.head.shape[0])) * 1e-3
            for (q, k, v, o, gate, up, down), (old_keys, old_values) in zip(self.layers, pasts, strict=True):
                queries, keys, values = x @ q, x @ k, x @ v
                asked = queries.reshape(rows, self.kv, -1, dim)
                if asked.shape[2] <= 4 and context >= 512:
                    scores = (old_keys @ asked.swapaxes(2, 3)).swapaxes(2, 3)
                else:
                    scores = asked @ old_keys.swapaxes(2, 3)
                x = (scores @ old_values).reshape(rows, seq, -1) @ o
                gated, widened = x @ gate, x @ up
                (x,) = mx.depends([gated @ down], [keys, values, widened])
            mx.eval(x[:, -1:] @ self.head)
            yield [0] * rows

    def shapes(self) -> int:
        return 0


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
    """mlx-lm on the weights quantized to 4 bits in groups of 32, as the 4-bit file has them."""

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
            outputs: Any = self.session.run(None, feed)
            given = dict(zip(self.names, outputs, strict=True))
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
    "products": Products,
    "mlx-transmuter": Transmuted,
    "steps over rows": Rows,
    "steps over pages": Pages,
    "mlx-lm": Peer,
    "onnxruntime": Onnxruntime,
    "mlx-transmuter q4": Transmuted4Bit,
    "mlx-lm q4": Peer4Bit,
    "onnxruntime q4": Onnxruntime4Bit,
}
