"""Tensors of every dtype that safetensors files have, and their comparison to the bit."""

from __future__ import annotations

import torch

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64),
)
SHAPES = ((), (3,), (0, 4), (5, 7), (2, 3, 4))


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    """Random bits: NaNs, infinities and subnormals among them."""
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize))
            found[f"{dtype}{shape}"] = bits.to(torch.uint8).view(dtype).reshape(shape)
    return found


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_same(found: torch.Tensor, expected: torch.Tensor, key: str = "") -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    assert bits(found) == bits(expected), key
