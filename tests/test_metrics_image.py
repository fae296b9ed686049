import math

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from fastcar.metrics.image import psnr, psnr_by_frame, ssim, ssim_by_frame


@pytest.fixture
def clip():
    return np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)


def test_identical_clips(clip):
    assert psnr(clip, clip.copy()) == math.inf
    assert ssim(clip, clip.copy()) == 1
    assert psnr_by_frame(clip, clip).tolist() == [math.inf] * 3


def test_psnr_by_hand():
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    b = a.copy()
    b[1] += 10
    assert psnr_by_frame(a, b).tolist() == [math.inf, pytest.approx(20 * math.log10(25.5))]
    assert psnr(a, b) == pytest.approx(10 * math.log10(255**2 / 50))  # the mean squared error of both frames is 50
    assert psnr(b, a) == psnr(a, b)
    assert psnr(np.zeros_like(a), np.full_like(a, 255)) == 0


def test_ssim_of_flat_pictures_by_hand():
    a, b = np.full((1, 16, 16, 3), 50, np.uint8), np.full((1, 16, 16, 3), 200, np.uint8)
    c1 = (0.01 * 255) ** 2
    assert ssim(a, b) == pytest.approx((2 * 50 * 200 + c1) / (50**2 + 200**2 + c1))


def test_ssim_as_wang_et_al_define_it(clip):
    a, b = clip[:1], np.clip(clip[:1] * 0.7 + 20, 0, 255).astype(np.uint8)
    x, y = a[0].astype(float), b[0].astype(float)

    def mean(image):
        return gaussian_filter(image, (1.5, 1.5, 0), truncate=3.5)  # 11 pixels wide

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    similarity = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert ssim(a, b) == pytest.approx(similarity[5:-5, 5:-5].mean(), abs=1e-9)


def test_a_clip_is_the_mean_of_its_frames(clip):
    other = clip.copy()
    other[1:, ::3] = 0
    by_frame = ssim_by_frame(clip, other)
    assert by_frame.shape == (3,)
    assert by_frame[0] == 1
    assert ssim(clip, other) == pytest.approx(by_frame.mean())
    assert (by_frame[1:] < 0.9).all()


@pytest.mark.parametrize("metric", [psnr, ssim, psnr_by_frame, ssim_by_frame])
def test_clips_that_cannot_be_compared(metric, clip):
    with pytest.raises(ValueError, match=r"different shapes .* \[3, 24, 32, 3\] and \[2, 24, 32, 3\]"):
        metric(clip, clip[:2])
    with pytest.raises(ValueError, match=r"uint8 \[F, H, W, 3\], got float64 \[3, 24, 32, 3\]"):
        metric(clip, clip / 255)
    with pytest.raises(ValueError, match=r"got uint8 \[24, 32, 3\]"):
        metric(clip[0], clip[0])


def test_frames_too_small_for_ssim(clip):
    with pytest.raises(ValueError, match="at least 11x11 pixels, got 32x10"):
        ssim(clip[:, :10], clip[:, :10])
