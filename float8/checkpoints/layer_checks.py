"""Checks of one layer's tensors: before a layout stores them, and as a file has them.

A checkpoint comes from elsewhere, so each tensor is held against what its layout expects. A message
names the key, what it holds, and what is readable. Files have scales in float32, in bfloat16
(llm-compressor takes the dtype of the model), and in bytes of E8M0 (``2^(byte - 127)``), with the
dtype of that name or as uint8. All of these are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from float8.formats import E4M3, ScaleFormat
from float8.granularity import Granularity, block_name
from float8.kernels import e8m0
from float8.tensor import Float8Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0_BYTES = (torch.float8_e8m0fnu, torch.uint8)
ONE_ELEMENT: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))  # shapes of a scale per tensor


def refuses_weight(
    weight: Float8Tensor, granularity: Granularity, scale_format: ScaleFormat
) -> str | None:
    """The reason why a layout of this granularity and format of scales cannot store a weight."""
    if weight.dim() != 2:
        return f"its weight has shape {tuple(weight.shape)}, not (N, K)"
    if weight.format != E4M3:
        return f"its weight is in {weight.format}, and files hold {E4M3}"
    if weight.block != granularity.block_of(weight.shape):
        found, wanted = block_name(weight.block), block_name(granularity.block_of(weight.shape))
        return f"its weight has {found} scales, and the layout stores {wanted} ones"
    return _refuses_weight_scale(weight.scale, scale_format)


def _refuses_weight_scale(scale: Tensor, scale_format: ScaleFormat) -> str | None:
    if scale.dtype != scale_format.dtype:
        return f"its scales are {scale.dtype}, and the layout's {scale_format.dtype}"
    if (bad := _bad_scale(scale)) is not None:
        return f"its weight has the scale {bad}; a scale is finite and > 0"
    if scale_format is ScaleFormat.POWER_OF_TWO and not powers_of_two(scale):
        return f"not all of its scales are powers of two, as {scale_format} asks for"
    return None


def refuses_input_scale(scale: Tensor | None) -> str | None:
    """The reason why a layout with static inputs cannot store this scale, or None."""
    if scale is None:
        return (
            "its input has no static scale: train with delayed or static scaling, or calibrate it"
        )
    if scale.dtype != torch.float32 or scale.numel() != 1:
        return f"its input scale is {scale.dtype} {tuple(scale.shape)}, not one float32"
    if (bad := _bad_scale(scale)) is not None:
        return f"its input scale is {bad}; a scale is finite and > 0"
    return None


def read_data(name: str, read: Callable[[str], Tensor]) -> Tensor:
    """The float8 data of a layer's weight, (N, K); ValueError if it is not E4M3 or not a matrix."""
    key = f"{name}.weight"
    data = read(key)
    if data.dtype != E4M3.dtype:
        raise ValueError(f"{key} is {data.dtype}, expected {E4M3.dtype}")
    if data.dim() != 2:
        own = "; a state_dict of this library has such, and save_pretrained writes for others"
        hint = own if data.dim() == 3 and data.shape[2] == 1 else ""
        raise ValueError(f"{key} has shape {tuple(data.shape)}, expected a matrix (N, K){hint}")
    return data


def read_scale(
    key: str,
    read: Callable[[str], Tensor],
    keys: Container[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype] = FLOATS,
) -> Tensor:
    """A scale in float32, or in E8M0 where the file holds its bytes (uint8).

    ``keys`` are the keys that exist. All of ``shapes`` have as many elements; the result has the
    first of them. Raises ValueError if the scale is missing, of another dtype or shape, or not
    finite and positive.
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
    if (bad := _bad_scale(scale)) is not None:
        raise ValueError(f"{key} holds {bad}; a scale is finite and > 0")
    return scale.reshape(shapes[0])


def _bad_scale(scale: Tensor) -> str | None:
    """The first element that is not finite and > 0, and where it is, or None."""
    if scale.device.type == "meta":
        return None
    scale32 = e8m0.as_float32(scale)
    bad = (~(scale32.isfinite() & (scale32 > 0))).nonzero()
    if not bad.shape[0]:
        return None
    where = tuple(bad[0].tolist())
    return f"{scale32[where].item()}" + (f" at {list(where)}" if where else "")


def powers_of_two(scale: Tensor) -> bool:
    """Whether all of these float32 scales are powers of two, as far as there are data."""
    return scale.device.type == "meta" or bool((scale.frexp().mantissa == 0.5).all())
