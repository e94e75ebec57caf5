"""The state dict of layers whose weights are resident in float8: plain tensors.

================ =================== ============================================================
key              dtype               shape
================ =================== ============================================================
``weight``       float8              (N, K, 1)
``weight_scale`` float32 or E8M0     ``ceil((N, K) / block)``
``input_scale``  float32             (); only where inputs are cast with a static scale
================ =================== ============================================================

Experts have such keys for each of their stacks: ``NAME`` (E, N, K, 1) and ``NAME_scale``. Those of
a sharded weight are DTensors, except scales of which each rank has all.

The last dimension of ``weight`` keeps it out of a plain layer, whose weight is (N, K): loading
reports a size mismatch, also with ``strict=False``. Without it, torch would convert the float8 data
to numbers, and drop the scales. Versions before 0.12 wrote (N, K); both load.

Loading casts a ``weight`` in high precision. Loading float8 data into a layer with a high-precision
weight dequantises it. A checkpoint without ``input_scale``, such as one of a plain model or of
an earlier version, leaves the layer's input cast as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8.config import Float8LinearConfig, ScalingType
from float8.formats import FORMATS, HIGH_PRECISION_DTYPES
from float8.granularity import scale_shape
from float8.kernels import is_sharded
from float8.linear.float8_weight import (
    contraction_last,
    is_resident,
    resident_block,
    to_resident,
)
from float8.linear.registration import weights_of
from float8.linear.scaling import placed
from float8.linear.static_input import set_input_cast, with_static_input
from float8.tensor import Float8Shard, Float8Tensor

SCALE_SUFFIX, INPUT_SCALE_KEY = "_scale", "input_scale"


def input_scale_of(layer: Any) -> Tensor | None:
    """The static scale of the inputs of a layer with a resident weight, float32 (); else None."""
    if layer.float8_config is not None:  # of experts
        return None
    cast = layer.config.cast_config_input
    if cast.scaling_type is not ScalingType.STATIC or not is_resident(layer.weight):
        return None
    return torch.tensor(cast.static_scale, dtype=torch.float32, device=layer.weight.device)


def split_saved(layer: Any, destination: dict[str, Any], prefix: str) -> None:
    """Put the resident weights of a layer into a state dict: data and scales; or dequantised.

    Data and scale share memory with the state dict, ``destination``. ``prefix`` is that of the
    layer's keys.
    """
    for name, weight in weights_of(layer).items():
        if (parts := _parts(weight)) is None:
            continue
        if layer.high_precision and is_resident(weight):
            destination[prefix + name] = weight.detach().dequantize()
            continue
        destination[prefix + name], destination[prefix + name + SCALE_SUFFIX] = parts
        if (scale := input_scale_of(layer)) is not None:
            destination[prefix + INPUT_SCALE_KEY] = scale


def _parts(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Data (..., 1) and scale of a resident weight, DTensors where it is sharded; else None."""
    local = getattr(weight, "_local_tensor", weight)
    if not (is_resident(local) or isinstance(local, Float8Shard)):
        return None
    data, scale = local.float8_data.detach().unsqueeze(-1), local.scale.detach()
    shape = scale_shape(weight.shape, local.block)
    if local is not weight:
        mesh, placements = weight.device_mesh, weight.placements
        data = placed(data, (*weight.shape, 1), mesh, placements)
        scale = scale if scale.shape == shape else placed(scale, shape, mesh, placements)
    return data, scale


@torch.no_grad()
def _loads(weight: Any, loaded: tuple[Any, Any]) -> bool:
    """Whether loaded data and scales are sharded as a weight, into which they are then copied."""
    local, (data, scale) = weight._local_tensor, (getattr(x, "_local_tensor", x) for x in loaded)
    parts = ((local.float8_data.unsqueeze(-1), data), (local.scale, scale))
    fits = scale is not None and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in parts)
    for mine, its in parts if fits else ():
        mine.copy_(its)
    return fits


def join_loaded(layer: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Convert the weights in a state dict to the form of the layer's weights, in place.

    A weight of ``state_dict`` is replaced, and its scales are removed, where needed. A static
    input scale becomes that of the layer, if its weight is resident. Messages of errors are
    appended to ``errors``.
    """
    config = layer.float8_config or layer.config
    for name, weight in weights_of(layer).items():
        key = prefix + name
        loaded, scale = state_dict.get(key), state_dict.get(key + SCALE_SUFFIX)
        if loaded is None or isinstance(loaded, Float8Tensor):
            continue
        if is_sharded(weight) and _parts(weight) is not None:
            if not _loads(weight, (loaded, state_dict.pop(key + SCALE_SUFFIX, None))):
                errors.append(f"{key}: it is sharded, and the checkpoint has no such parts of it")
            state_dict[key] = weight  # loads into itself
            continue
        if loaded.dtype in FORMATS and loaded.shape == (*weight.shape, 1):
            loaded = loaded.squeeze(-1)
        if loaded.shape != weight.shape:
            continue  # torch raises the error
        if loaded.dtype in FORMATS:
            try:
                joined = _joined(layer, name, loaded, scale, config)
                state_dict[key] = joined if is_resident(weight) else joined.dequantize()
            except (TypeError, ValueError) as error:
                errors.append(f"{key}: its float8 data does not load: {error}")
                state_dict[key] = weight  # loads into itself: no change
            state_dict.pop(key + SCALE_SUFFIX, None)
            if (input_scale := state_dict.pop(prefix + INPUT_SCALE_KEY, None)) is not None:
                _take_input_scale(layer, input_scale, prefix, errors)
        elif is_resident(weight) and loaded.dtype in HIGH_PRECISION_DTYPES:
            own = to_resident(contraction_last(layer, loaded.to(weight.dtype)), config)
            state_dict[key] = contraction_last(layer, own)
        elif is_resident(weight):
            known = ", ".join(str(dtype) for dtype in HIGH_PRECISION_DTYPES)
            errors.append(f"{key}: it is {loaded.dtype}, and only {known} can be cast to float8")
            state_dict[key] = weight  # loads into itself: no change


def _take_input_scale(layer: Any, scale: Tensor, prefix: str, errors: list[str]) -> None:
    """Let a layer with a resident weight cast its inputs with the scale of a checkpoint."""
    own = input_scale_of(layer)
    if not is_resident(layer.weight) or scale.is_meta:
        return
    if own is not None and not own.is_meta and scale.numel() == 1 and float(scale) == float(own):
        return  # as it is: the same number, whose digits in the config may be longer
    try:
        set_input_cast(layer, with_static_input(layer.config, scale))
    except (TypeError, ValueError) as error:
        errors.append(f"{prefix}{INPUT_SCALE_KEY}: it does not load: {error}")


def _joined(
    layer: Any, name: str, data: Tensor, scale: Tensor | None, config: Float8LinearConfig
) -> Float8Tensor:
    cast, weight, scale_name = config.plan.output.b, weights_of(layer)[name], name + SCALE_SUFFIX
    if scale is None:
        raise ValueError(f"the checkpoint has no {scale_name} for it")
    if cast is None:
        raise ValueError("this layer multiplies its weight in high precision")
    like = contraction_last(layer, weight)
    block = like.block if is_resident(like) else resident_block(like, config)
    if scale.dtype != cast.scale_format.dtype:
        raise ValueError(
            f"its {scale_name} is {scale.dtype}, and this layer has scales of "
            f"{cast.scale_format.dtype} ({cast.scale_format}); load the checkpoint of a layer with "
            "this config, or one in high precision"
        )
    if is_resident(weight) and data.dtype != weight.float8_data.dtype:
        raise ValueError(
            f"it is {data.dtype}, and the layer's weight is {weight.float8_data.dtype}"
        )
    data, scale = (contraction_last(layer, x.detach()) for x in (data, scale))
    joined = Float8Tensor(data, scale, block, weight.dtype, None, cast.scales)
    result: Float8Tensor = contraction_last(layer, joined)
    return result
