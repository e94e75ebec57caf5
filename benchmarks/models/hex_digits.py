"""Images that every machine can draw: distorted hexadecimal digits in noise, 16 classes.

Each image is a glyph of 5 x 7 pixels under a random affine map, on a canvas of 24 x 24:

    image = c * bilinear(glyph, R(angle) S(shear) / size, shift) + s * noise

A second, fainter glyph of any class covers a part of it, and contrast c varies, so that no pixel
decides. Every image is drawn once: training never repeats one, and the held-out images come from
a generator of their own. Glyphs that differ by one stroke (8 and B, 0 and D) are mixed up most.

Shapes: B images, H = W = 24.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES, SIDE = 16, 24
ANGLE, SHEAR, SHIFT = 0.2, 0.15, 0.15  # at most, in radians and in halves of the side
SIZES = (0.7, 1.0)  # of a glyph, of the side
CONTRAST, FAINT, NOISE = (0.7, 1.3), 0.3, 0.25

# Rows from the top, the leftmost pixel is the highest of five bits.
_ROWS = """
0E 11 13 15 19 11 0E   04 0C 04 04 04 04 0E   0E 11 01 06 08 10 1F   0E 11 01 06 01 11 0E
02 06 0A 12 1F 02 02   1F 10 1E 01 01 11 0E   06 08 10 1E 11 11 0E   1F 01 02 04 08 08 08
0E 11 11 0E 11 11 0E   0E 11 11 0F 01 02 0C   0E 11 11 1F 11 11 11   1E 11 11 1E 11 11 1E
0E 11 10 10 10 11 0E   1E 11 11 11 11 11 1E   1F 10 10 1E 10 10 1F   1F 10 10 1E 10 10 10
"""


def glyphs() -> Tensor:
    """(16, 1, 7, 5), zeros and ones."""
    rows = torch.tensor([int(row, 16) for row in _ROWS.split()])
    bits = rows[:, None] >> torch.arange(4, -1, -1) & 1
    return bits.reshape(CLASSES, 1, 7, 5).float()


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (B, 1, 24, 24) and their digits (B,), which follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    digits_B, others_B = torch.randint(CLASSES, (2, count), generator=generator).unbind()
    contrast_B = _between(*CONTRAST, count, generator).view(-1, 1, 1, 1)
    images = contrast_B * _placed(digits_B, generator) + FAINT * _placed(others_B, generator)
    return images + NOISE * torch.randn(images.shape, generator=generator), digits_B


def _placed(digits_B: Tensor, generator: torch.Generator) -> Tensor:
    """Glyphs under random affine maps of the canvas to the glyph."""
    count = len(digits_B)
    angle, shear, x, y = (
        _between(-most, most, count, generator) for most in (ANGLE, SHEAR, SHIFT, SHIFT)
    )
    size = _between(*SIZES, count, generator)
    cos, sin = angle.cos() / size, angle.sin() / size
    first = torch.stack((1.4 * cos, 1.4 * (shear * cos - sin), x / size), 1)  # 7 / 5: square pixels
    second = torch.stack((sin, shear * sin + cos, y / size), 1)
    maps = torch.stack((first, second), 1)
    grid = F.affine_grid(maps, [count, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(glyphs()[digits_B], grid, align_corners=False)


def _between(low: float, high: float, count: int, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=generator)
