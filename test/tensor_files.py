"""Tensors of every dtype that safetensors files have, and their comparison to the bit."""

from __future__ import annotations

import torch

from float8.checkpoints.shards import DTYPES

SHAPES = ((), (3,), (0, 4), (5, 7), (2, 3, 4))


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    """Random bits: NaNs, infinities and subnormals among them."""
    found = {}
    for name, dtype in DTYPES.items():
        for shape in SHAPES:
            bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize))
            found[f"{name}{shape}"] = bits.to(torch.uint8).view(dtype).reshape(shape)
    return found


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_same(found: torch.Tensor, expected: torch.Tensor, key: str = "") -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    assert bits(found) == bits(expected), key
