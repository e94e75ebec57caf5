"""Rotary position embedding (arXiv 2104.09864): queries and keys turn with their position.

Features i and i + d/2 of a head are one point of a plane. At position s it is turned by an angle
``s * base ** (-2 i / d)``; a product of a query and a key then depends on their distance only:

    y_i       = x_i cos - x_(i + d/2) sin
    y_(i+d/2) = x_i sin + x_(i + d/2) cos

A rotation keeps the length of every vector, forward and backward, so it needs no scale. The angles
are computed where they are used, S x d/2 of them: there is no cache that a sequence could outgrow,
that a meta device would leave uninitialised or that a checkpoint would carry.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x_SD: Tensor, base: float = 10000.0) -> Tensor:
    """Turn the features of every position.

    Args:
        x_SD: (..., S, d): heads of S positions and d features, d even. Any floating dtype; angles
            and products are computed in float32 or better.
        base: the wavelengths are ``2 pi`` to ``2 pi base`` positions.

    Returns:
        The shape and dtype of ``x_SD``.

    Raises:
        ValueError: d is odd, or ``base`` is not positive.
    """
    positions, features = x_SD.shape[-2:]
    if features % 2:
        raise ValueError(f"rotary embedding turns pairs of features: the head has {features}")
    if not base > 0:
        raise ValueError(f"rotary embedding: base is a wavelength, greater than 0, got {base}")
    wide = torch.promote_types(x_SD.dtype, torch.float32)
    exponents = torch.arange(0, features, 2, device=x_SD.device, dtype=wide) / -features
    places = torch.arange(positions, device=x_SD.device, dtype=wide)
    angles = places[:, None] * base**exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = x_SD.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x_SD.dtype)
