"""The benchmark's model: random weights of a named shape, exported by optimum, in every form that a contender reads.

Needs an environment with the extra `fixtures` (torch, transformers, optimum) and, for hf-q4, mlx-lm; `bench.py --make`
calls it.
"""

from __future__ import annotations

from pathlib import Path

SHAPES = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def make(shape: str, root: Path) -> None:
    """Writes hf, onnx and onnx-q4 below root."""
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from optimum.exporters.onnx import main_export
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    root.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], bos_token_id=0, eos_token_id=0)).save_pretrained(root / "hf")
    main_export(str(root / "hf"), output=root / "onnx", task="text-generation-with-past", do_validation=False)
    import onnx

    quantizer = MatMulNBitsQuantizer(onnx.load(root / "onnx" / "model.onnx"), block_size=32, is_symmetric=False)
    quantizer.process()
    (root / "onnx-q4").mkdir(exist_ok=True)
    onnx.save(quantizer.model.model, str(root / "onnx-q4" / "model.onnx"))  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("config.json", "generation_config.json"):
        (root / "onnx-q4" / name).write_bytes((root / "onnx" / name).read_bytes())


def convert(root: Path) -> None:
    """Writes transmuted and transmuted-q4 anew, by this version, and hf-q4 for mlx-lm where it isn't, below root."""
    import importlib

    import mlx_transmuter as mt

    for source, out in (("onnx", "transmuted"), ("onnx-q4", "transmuted-q4")):
        mt.convert(root / source, root / out)
    if not (root / "hf-q4").exists():
        utils = importlib.import_module("mlx_lm.utils")
        model, config = utils.load_model(root / "hf")
        model, config = utils.quantize_model(model, config, group_size=32, bits=4)
        (root / "hf-q4").mkdir()
        utils.save_model(root / "hf-q4", model)
        utils.save_config(config, config_path=root / "hf-q4" / "config.json")
