"""How alike two clips are, pixel for pixel: PSNR and SSIM.

Both compare with a reference, not with the truth, and both are generous to a clip that does not move: read them beside
prompt adherence, never alone.
"""

from __future__ import annotations

import numpy as np
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

__all__ = ["psnr", "psnr_by_frame", "ssim", "ssim_by_frame"]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two clips in dB, infinite if they are identical.

    The squared error is averaged over all frames before the logarithm is taken: the first frame never replays, so that
    it is often identical in both clips, and a mean over the frames' decibels would then be infinite.

    Args:
        a, b: uint8 [F, H, W, 3].

    Raises:
        ValueError: clips of different shapes, or no such clips.
    """
    _check(a, b)
    return _decibels(a, b)


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of two clips, -1..1: the mean of :func:`ssim_by_frame`. Arguments as for :func:`psnr`."""
    return float(ssim_by_frame(a, b).mean())


def psnr_by_frame(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of every frame: float64 [F]. Arguments as for :func:`psnr`."""
    _check(a, b)
    return np.array([_decibels(x, y) for x, y in zip(a, b, strict=True)])


def ssim_by_frame(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Structural similarity of every frame, mean over colours: float64 [F].

    With the settings of Wang et al. (2004): Gaussian window of sigma 1.5 and 11x11 pixels, population covariance.
    Arguments as for :func:`psnr`; frames must have at least 11x11 pixels.
    """
    _check(a, b)
    if min(a.shape[1:3]) < 11:
        raise ValueError(f"SSIM needs frames of at least 11x11 pixels, got {a.shape[2]}x{a.shape[1]}")
    return np.array(
        [
            structural_similarity(
                x, y, data_range=255, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
            )
            for x, y in zip(a, b, strict=True)
        ]
    )


def _decibels(a: np.ndarray, b: np.ndarray) -> float:
    return float("inf") if np.array_equal(a, b) else float(peak_signal_noise_ratio(a, b, data_range=255))


def _check(a: np.ndarray, b: np.ndarray) -> None:
    for clip in (a, b):
        if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[3] != 3 or 0 in clip.shape:
            raise ValueError(f"clips must be uint8 [F, H, W, 3], got {clip.dtype} {list(clip.shape)}")
    if a.shape != b.shape:
        raise ValueError(f"clips of different shapes cannot be compared: {list(a.shape)} and {list(b.shape)}")
