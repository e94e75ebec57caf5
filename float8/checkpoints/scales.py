"""Tensors that a file stores for one layer, checked before they become a `Layer`.

A checkpoint comes from elsewhere, so each tensor is held against what its layout expects. A message
names the key, what it holds, and what is readable. Scales come out in float32, exactly: files have
them in float32, in bfloat16 (compressed-tensors takes the dtype of the model), and in bytes of E8M0
(``2^(byte - 127)``), with the dtype of that name or as uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from float8.formats import E4M3
from float8.kernels import e8m0
from float8.tensor import Float8Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0_BYTES = (torch.float8_e8m0fnu, torch.uint8)


def read_data(name: str, read: Callable[[str], Tensor]) -> Tensor:
    """The float8 data of a layer's weight, (N, K).

    Raises:
        ValueError: it is not E4M3, or not a matrix.
    """
    key = f"{name}.weight"
    data = read(key)
    if data.dtype != E4M3.dtype:
        raise ValueError(f"{key} is {data.dtype}, expected {E4M3.dtype}")
    if data.dim() != 2:
        raise ValueError(f"{key} has shape {tuple(data.shape)}, expected a matrix (N, K)")
    return data


def read_scale(
    key: str,
    read: Callable[[str], Tensor],
    keys: Container[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> Tensor:
    """A scale in float32, or in E8M0 where the file holds its bytes.

    Args:
        key: of the scale.
        read: (key) -> the tensor.
        keys: the keys that exist.
        shapes: the shapes that it may have, all of as many elements; the result has the first.
        dtypes: the dtypes that it may have; uint8 means E8M0.

    Raises:
        ValueError: it is missing, of another dtype or shape, or not finite and positive.
    """
    if key not in keys:
        raise ValueError(f"{key} is missing: the layer is in float8 and needs this scale")
    scale = read(key)
    if scale.dtype not in dtypes:
        known = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{key} is {scale.dtype}, expected {known}")
    if tuple(scale.shape) not in shapes:
        known = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{key} has shape {tuple(scale.shape)}, expected {known}")
    is_bytes = scale.dtype in E8M0_BYTES
    scale = scale.view(torch.float8_e8m0fnu) if is_bytes else scale.to(torch.float32)
    if (bad := bad_scale(scale)) is not None:
        raise ValueError(f"{key} holds {bad}; a scale is finite and > 0")
    return scale.reshape(shapes[0])


def bad_scale(scale: Tensor) -> str | None:
    """The first element that is no scale, and where it is; None if all are finite and > 0.

    Tensors on the meta device have no elements to look at.
    """
    if scale.device.type == "meta":
        return None
    scale32 = e8m0.as_float32(scale)
    bad = (~(scale32.isfinite() & (scale32 > 0))).nonzero()
    if not bad.shape[0]:
        return None
    where = tuple(bad[0].tolist())
    return f"{scale32[where].item()}" + (f" at {list(where)}" if where else "")


def refuses_weight(weight: Float8Tensor) -> str | None:
    """The reason why no layout stores a weight, or None: it is no matrix, or not in E4M3."""
    if weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}, not (N, K)"
    if weight.format != E4M3:
        return f"its weight is in {weight.format}, and files hold {E4M3}"
    if (bad := bad_scale(weight.scale)) is not None:
        return f"its weight has the scale {bad}; a scale is finite and > 0"
    return None
