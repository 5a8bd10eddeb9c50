"""Fourier transforms, windows over a signal, and the mel filter bank."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import take
from mlx_transmuter.ops.registry import HostArray, op
from mlx_transmuter.ops.types import ELEMENT_TYPE_NAMES


@op("DFT-17")
def dft_17(x, dft_length: HostArray = None, *, axis=1, inverse=0, onesided=0):
    """DFT-20 with its axis as an attribute. ONNX DFT-17."""
    return _dft(x, dft_length, axis, inverse, onesided)


@op("DFT-20")
def dft(x, dft_length: HostArray = None, axis: HostArray = None, *, inverse=0, onesided=0):
    """The discrete Fourier transform of x [..., 1 or 2] (real and imaginary part) along an axis: [..., 2]. ONNX DFT-20.

    dft_length: the length to which the signal is cut or filled with zeros. onesided: the output is only the first half
    of the spectrum; for the inverse the input is, and the output is real, [..., 1].
    """
    return _dft(x, dft_length, -2 if axis is None else int(axis.item()), inverse, onesided)


def _dft(x: mx.array, dft_length: np.ndarray | None, axis: int, inverse: int, onesided: int) -> mx.array:
    # The last axis holds the parts of complex numbers and is gone from the signal itself.
    axis = axis % x.ndim
    signal = _to_complex(x)
    if dft_length is not None:
        n = int(dft_length.item())
    else:
        n = 2 * (x.shape[axis] - 1) if inverse and onesided else x.shape[axis]
    if inverse and onesided:
        return mx.fft.irfft(signal, n=n, axis=axis)[..., None].astype(x.dtype)
    if signal.dtype == mx.complex64 or inverse:
        spectrum = (mx.fft.ifft if inverse else mx.fft.fft)(signal, n=n, axis=axis)
        return _real_and_imaginary(_take_bins(spectrum, axis, slice(n // 2 + 1)) if onesided else spectrum, x.dtype)
    # The spectrum of a real signal is its own mirror image: half of it is computed, and what is 0 comes as 0.
    spectrum = mx.fft.rfft(signal, n=n, axis=axis)
    if not onesided:
        mirrored = mx.conj(_take_bins(spectrum, axis, slice((n - 1) // 2, 0, -1)))
        spectrum = mx.concatenate([spectrum, mirrored], axis=axis)
    return _real_and_imaginary(spectrum, x.dtype)


def _take_bins(spectrum: mx.array, axis: int, bins: slice) -> mx.array:
    return spectrum[tuple(bins if i == axis else slice(None) for i in range(spectrum.ndim))]


def _to_complex(x: mx.array) -> mx.array:
    wide = x.astype(mx.float32)
    if x.shape[-1] == 1:
        return wide[..., 0]
    return mx.contiguous(wide).view(mx.complex64)[..., 0]


def _real_and_imaginary(x: mx.array, dtype: mx.Dtype) -> mx.array:
    return mx.stack([mx.real(x), mx.imag(x)], axis=-1).astype(dtype)


@op("STFT-17")
def stft(x, frame_step: HostArray, window=None, frame_length: HostArray = None, *, onesided=1):
    """The spectra of frames of x [batch, length, 1 or 2]: [batch, frames, bins, 2]. ONNX STFT-17.

    A frame begins every frame_step elements; each is frame_length long (the window's length, or all of x).
    """
    step = int(frame_step.item())
    if frame_length is not None:
        length = int(frame_length.item())
    else:
        length = x.shape[1] if window is None else window.shape[0]
    count = 1 + (x.shape[1] - length) // step
    places = np.arange(count, dtype=np.int32)[:, None] * step + np.arange(length, dtype=np.int32)
    frames = take(_to_complex(x), places, axis=1)
    if window is not None:
        frames = frames * window.astype(mx.float32)
    spectrum = mx.fft.fft(frames, axis=-1)
    return _real_and_imaginary(spectrum[..., : length // 2 + 1] if onesided else spectrum, x.dtype)


def _cosine_window(size: np.ndarray, datatype: int, periodic: int, waves: tuple[float, ...]) -> np.ndarray | mx.array:
    """Returns the sum of waves[k] * cos(2 pi k n / period); the period is one element longer for a periodic window."""
    count = int(size.item())
    turns = 2 * np.pi * np.arange(count) / max(count if periodic else count - 1, 1)
    return _as_onnx_type(sum(share * np.cos(k * turns) for k, share in enumerate(waves)), datatype)


def _as_onnx_type(values, datatype: int) -> np.ndarray | mx.array:
    """Returns host values as the ONNX type; bfloat16, which numpy lacks, becomes a device array."""
    if ELEMENT_TYPE_NAMES[datatype] == "bfloat16":
        return mx.array(np.asarray(values, np.float32)).astype(mx.bfloat16)
    return np.asarray(values).astype(ELEMENT_TYPE_NAMES[datatype])


@op("HannWindow-17")
def hann_window(size: HostArray, *, output_datatype=1, periodic=1):
    """A raised cosine, [size] on the host. ONNX HannWindow-17."""
    return _cosine_window(size, output_datatype, periodic, (0.5, -0.5))


@op("HammingWindow-17")
def hamming_window(size: HostArray, *, output_datatype=1, periodic=1):
    """A raised cosine that does not end at 0, [size] on the host. ONNX HammingWindow-17."""
    return _cosine_window(size, output_datatype, periodic, (25 / 46, -21 / 46))


@op("BlackmanWindow-17")
def blackman_window(size: HostArray, *, output_datatype=1, periodic=1):
    """A sum of two cosines, [size] on the host. ONNX BlackmanWindow-17."""
    return _cosine_window(size, output_datatype, periodic, (0.42, -0.5, 0.08))


@op("MelWeightMatrix-17")
def mel_weight_matrix(
    num_mel_bins: HostArray,
    dft_length: HostArray,
    sample_rate: HostArray,
    lower_edge_hertz: HostArray,
    upper_edge_hertz: HostArray,
    *,
    output_datatype=1,
):
    """The weights that turn a linear spectrum into mel bins, [dft_length / 2 + 1, bins]. ONNX MelWeightMatrix-17."""
    bins, length = int(num_mel_bins.item()), int(dft_length.item())
    low, high = (2595 * np.log10(1 + edge.item() / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    mels = low + np.arange(bins + 2) * (high - low) / (bins + 2)
    edges = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) // sample_rate.item()).astype(np.int64)
    weights = np.zeros((length // 2 + 1, bins))
    for i in range(bins):
        start, center, end = edges[i : i + 3]
        if center > start:
            weights[start : center + 1, i] = (np.arange(start, center + 1) - start) / (center - start)
        else:
            weights[center, i] = 1
        if end > center:
            weights[center:end, i] = (end - np.arange(center, end)) / (end - center)
    return _as_onnx_type(weights, output_datatype)
