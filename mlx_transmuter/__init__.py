"""mlx-transmuter: ONNX decoders as MLX modules, with the generation of Python transformers.

    import mlx_transmuter as mt

    model = mt.load("onnx-community/SmolLM2-135M-ONNX")
    print(mt.text.generation(model, max_new_tokens=50)("The capital of France is").text)

Names are imported when they are first used, so that `mlx-transmuter --help` does not wait for MLX.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import takes longer than all else here

if TYPE_CHECKING:
    from mlx_transmuter import generation as generation
    from mlx_transmuter.api import convert as convert
    from mlx_transmuter.api import load as load
    from mlx_transmuter.model import Model as Model
    from mlx_transmuter.tasks import text as text

__version__ = "0.1.0"

_LAZY_EXPORTS = {
    "Model": ("mlx_transmuter.model", "Model"),
    "convert": ("mlx_transmuter.api", "convert"),
    "generation": ("mlx_transmuter.generation", None),
    "load": ("mlx_transmuter.api", "load"),
    "text": ("mlx_transmuter.tasks.text", None),
}
__all__ = sorted(_LAZY_EXPORTS)


def __getattr__(name: str):
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY_EXPORTS[name]
    found = import_module(module)
    return getattr(found, attribute) if attribute else found
