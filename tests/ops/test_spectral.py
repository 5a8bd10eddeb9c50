"""Fourier transforms against NumPy: lengths, axes, one-sided spectra, frames."""

import numpy as np
import pytest
from numpy_node import assert_node_gives, run_node
from onnxruntime_node import assert_matches_onnxruntime

rng = np.random.default_rng(0)


def real_and_imaginary(x):
    return np.stack([x.real, x.imag], axis=-1).astype(np.float32)


@pytest.mark.parametrize("axis", [1, 2, -2])
@pytest.mark.parametrize("length", [None, 4, 7, 12])
@pytest.mark.parametrize("complex_", [False, True])
def test_transforms(axis, length, complex_):
    z = rng.normal(size=(2, 6, 7)) + (1j * rng.normal(size=(2, 6, 7)) if complex_ else 0)
    x = real_and_imaginary(z) if complex_ else z[..., None].astype(np.float32)
    along = axis if axis > 0 else 2
    rest = [None if length is None else np.array(length), np.array(axis)]
    assert_node_gives("DFT", [x, *rest], real_and_imaginary(np.fft.fft(z, n=length, axis=along)), tolerance=1e-6)
    inverse = real_and_imaginary(np.fft.ifft(z, n=length, axis=along))
    assert_node_gives("DFT", [x, *rest], inverse, {"inverse": 1}, tolerance=1e-6)
    assert_node_gives(
        "DFT",
        [x, *([] if length is None else rest[:1])],
        inverse,
        {"inverse": 1, "axis": along},
        opset=17,
        tolerance=1e-6,
    )
    if not complex_:
        half = np.fft.rfft(z, n=length, axis=along)
        assert_node_gives("DFT", [x, *rest], real_and_imaginary(half), {"onesided": 1}, tolerance=1e-6)
        n = length or z.shape[along]
        back = np.fft.irfft(half, n=n, axis=along)[..., None].astype(np.float32)
        assert_node_gives(
            "DFT",
            [real_and_imaginary(half), np.array(n), rest[1]],
            back,
            {"onesided": 1, "inverse": 1},
            opset=20,
            tolerance=1e-6,
        )


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("windowed", [True, False])
def test_frames(onesided, windowed):
    x = rng.normal(size=(2, 21, 1)).astype(np.float32)
    window = rng.random(6).astype(np.float32) if windowed else None
    starts = range(0, 21 - 6 + 1, 4)
    frames = np.stack([x[:, i : i + 6, 0] * (window if windowed else 1) for i in starts], axis=1)
    spectrum = np.fft.rfft(frames) if onesided else np.fft.fft(frames)
    given = [x, np.array(4), window, np.array(6)]
    assert_node_gives("STFT", given, real_and_imaginary(spectrum), {"onesided": onesided}, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@pytest.mark.parametrize("periodic", [0, 1])
def test_windows(kind, periodic):
    assert_matches_onnxruntime(kind, [np.array(9)], {"periodic": periodic}, domain="ai.onnx", tolerance=1e-6)
    assert run_node(kind, [np.array(9)], {"output_datatype": 10})[0].dtype == np.float16


def test_mel_weights():
    given = [np.array(8), np.array(64), np.array(16000), np.array(100.0, np.float32), np.array(7000.0, np.float32)]
    assert_matches_onnxruntime("MelWeightMatrix", given, {}, domain="ai.onnx", tolerance=1e-6)
