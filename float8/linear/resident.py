"""Weights that are resident in float8: the layer's ``.weight`` is a `Float8Tensor` Parameter.

There is no high-precision copy: a resident weight stores one byte per element
and the scales. A frozen one serves as the base of adapters, or in a model that is only evaluated
(`float8.convert.inference`). A trainable one is MS-AMP's level O3 (`float8.ms_amp`).

Two GEMMs read the weight w_NK = data_NK * scale. The output contracts K and reads data and scale
unchanged. grad_input contracts N and reads the same data, which is not rounded a second time but
in the last row:

=============== ===================== ==========================================================
block of w_NK   scale                 grad_input_MK = g_MN @ w_NK
=============== ===================== ==========================================================
whole tensor    (1, 1)                the data's transpose, the same scale
128x128         (N / 128, K / 128)    the data's transpose, the scale's transpose
32x32, E8M0     (N / 32, K / 32)      the data's transpose, the scale's transpose
row (1, K)      (N, 1), along the     (g_MN * scale_N), cast along its rows, times the data's
                contraction           transpose with a scale of 1
1x32, E8M0      (N, K / 32)           the dequantised weight is cast along N: exact except
                                      for values far below the largest of the new block
=============== ===================== ==========================================================

On a CPU the transpose is a view. On a GPU, GEMMs read row-major operands only, so the transpose is
a copy that lives while the GEMM runs: one byte per element of one layer.

The weights of experts (E, N, K) are read in the same way, with such scales for each expert; each
token's gradient is multiplied by the scales of its own expert.

The data of a resident weight does not depend on the compute dtype, nor on autocast.
``weight.dtype`` is the dtype that the weight dequantises to and that its gradient has. The gradient
is an ordinary tensor.

The state dict of such a layer has plain tensors:

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
to numbers, and drop the scales.

Loading casts a ``weight`` in high precision. Loading float8 data into a layer with a high-precision
weight dequantises it. A checkpoint without ``input_scale``, such as one of a plain model, leaves
the layer's input cast as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from float8.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from float8.formats import E4M3, FORMATS, HIGH_PRECISION_DTYPES
from float8.granularity import WHOLE, Block, block_name, scale_shape
from float8.kernels import is_sharded, mxfp4
from float8.kernels.matrix import ROW, TENSOR
from float8.linear.casts import DelayedState, cast_alone, placed, set_cast
from float8.linear.module import weights_of
from float8.tensor import Float8Shard, Float8Tensor

KEEPS_FACTORS_OUT = (
    "and smooth_input=True multiplies the factors of each call into a weight in high precision; "
    "convert this layer with replace(config, smooth_input=False), or keep its weight in high "
    "precision"
)
SCALE_SUFFIX, INPUT_SCALE_KEY = "_scale", "input_scale"


def is_resident(weight: Tensor) -> TypeGuard[Float8Tensor]:
    """Whether a weight is resident in float8; one that FSDP2 gathers has another type."""
    return type(weight) is Float8Tensor


def reason_against_resident(config: Float8LinearConfig) -> str | None:
    """The reason why weights with this config cannot be resident in float8, or None."""
    if config.smooth_input or config.dequantize_in_backward:  # which reads any float8 weight
        return (
            f"its weight would be in float8, {KEEPS_FACTORS_OUT}" if config.smooth_input else None
        )
    output, grad_input = config.gemms.output.b, config.gemms.grad_input.b
    if output is None or grad_input is None:
        name = "output" if output is None else "grad_input"
        return (
            f"its {name} GEMM runs in high precision and would dequantise the weight in every "
            "call; take a config in which it runs in float8 (convert a converted model back first, "
            "by convert_from_float8_training)"
        )
    if output.format != grad_input.format:
        return (
            f"its two GEMMs read the weight in {output.format} and {grad_input.format}, but it is "
            "stored in one format; leave cast_config_weight_for_grad_input at None"
        )
    g, is_mx = config.gemms.grad_input.a, grad_input.scale_format.is_e8m0
    if output.block == ROW and g is not None and g.scaling_type is not ScalingType.DYNAMIC:
        return (
            "its weight has one scale per row, which multiply grad_output before its cast, and "
            f"cast_config_grad_output is {g.scaling_type.value}; give it ScalingType.DYNAMIC"
        )
    is_known = output.block in (TENSOR, ROW) and not is_mx
    is_cast_again = output.scale_format.is_e8m0 and is_mx
    if is_known or is_cast_again or output.transposed().block == grad_input.block:
        return None
    return (
        f"its weight has {block_name(output.block)} scales, which grad_input cannot use; use "
        "Tensorwise(), Rowwise() or Blockwise(128, 128) weights, or an MX format"
    )


def reason_against_training(weight: Float8Tensor) -> str | None:
    """The reason why this weight can get no gradient, or None; one that is gathered can."""
    if weight.block == TENSOR or not (is_resident(weight) and weight.requires_grad):
        return None
    return (
        f"its weight is stored in float8 with one scale for each block {tuple(weight.block)} and "
        "requires a gradient; only tensorwise float8 weights can train. Freeze it with "
        "weight.requires_grad_(False), or convert with a tensorwise recipe"
    )


def to_resident(
    weight: Tensor, config: Float8LinearConfig, state: DelayedState | None = None
) -> Float8Tensor:
    """A high-precision weight (N, K), or (E, N, K), in float8, as the output's GEMM casts it.

    `reason_against_resident` must accept ``config``. ``state`` is that of a delayed cast, whose
    scale is used if it has one.
    """
    cast, block = config.gemms.output.b, resident_block(weight, config)
    assert cast is not None
    cast = replace(cast, block=block)
    with torch.no_grad(), torch.inference_mode(False):
        source = weight.clone() if weight.is_inference() else weight.detach()
        source = mxfp4.project(source) if config.mxfp4_weights else source
        data, scale, _ = cast_alone(source, cast, state, emulate=config.emulate)
        # A delayed or static scale may be shared; the weight needs its own, which ops write to.
        scale = scale.expand(scale_shape(weight.shape, block))  # a static one, of all experts
        return Float8Tensor(data, scale.clone(), block, weight.dtype, None, cast.scales)


def resident_block(weight: Tensor, config: Float8LinearConfig) -> Block:
    """Which elements of a resident weight share a scale: experts share none."""
    cast = config.gemms.output.b
    assert cast is not None
    return (1,) * (weight.dim() - 2) + cast.block


def contraction_last(layer: nn.Module, weight: Any) -> Any:
    """A weight of a layer as (N, K) or (E, N, K), or such a weight as the layer has it: a view."""
    is_turned = weight.dim() == 3 and getattr(layer, "is_transposed", False)
    return weight.mT if is_turned else weight


def as_parameter(old: Tensor, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of other data with the attributes that users have set on ``old``.

    Functions are left out: they may refer to ``old`` and keep its memory. So are the parts of a
    `Float8Tensor`.
    """
    new, parts = nn.Parameter(data, requires_grad), Float8Tensor.__annotations__
    for key, value in vars(old).items():
        if not (key.startswith("_") or key in parts or callable(value)):
            setattr(new, key, value)
    return new


@torch.no_grad()
def make_plain(model: nn.Module) -> None:
    """Dequantise every resident float8 weight of ``model``; shared weights stay shared."""
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in weights_of(module).items():
            if not is_resident(weight):
                continue
            if id(weight) not in plain:
                plain[id(weight)] = as_parameter(weight, weight.dequantize(), weight.requires_grad)
            module._parameters[name] = plain[id(weight)]


# --- state dicts


def input_scale_of(layer: Any) -> Tensor | None:
    """The static scale of the inputs of a layer with a resident weight, float32 (); else None."""
    is_linear = isinstance(layer, nn.Linear)
    cast = layer.float8_config.cast_config_input
    is_static = is_linear and cast.scaling_type is ScalingType.STATIC
    if not (is_static and is_resident(layer.weight)):
        return None
    return torch.tensor(cast.static_scale, dtype=torch.float32, device=layer.weight.device)


def split_saved(layer: Any, destination: dict[str, Any], prefix: str) -> None:
    """Put the weights of a layer that are no ordinary tensors into a state dict.

    Of resident ones data and scales, or dequantised. They share memory with the state dict,
    ``destination``. ``prefix`` is that of the layer's keys.
    """
    for name, weight in weights_of(layer).items():
        if is_gatherable(weight) and prefix + name in destination:
            destination[prefix + name] = without_gather(weight)
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
    """Whether loaded data and scales fit a sharded weight, into which they are then copied.

    They are sharded as the weight is, or whole.
    """
    from torch.distributed.tensor import distribute_tensor

    def part(x: Any, shape: torch.Size) -> Any:
        if x is not None and not is_sharded(x) and x.shape != shape:
            x = distribute_tensor(x, weight.device_mesh, weight.placements, src_data_rank=None)
        return getattr(x, "_local_tensor", x)

    local = weight._local_tensor
    own = local.float8_data.unsqueeze(-1), local.scale
    pairs = [(mine, part(x, mine.shape)) for mine, x in zip(own, loaded, strict=True)]
    fits = all(b is not None and (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
    for mine, its in pairs if fits else ():
        mine.copy_(its)
    return fits


def join_loaded(layer: Any, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Convert the weights in a state dict to the form of the layer's weights, in place.

    A weight of ``state_dict`` is replaced, and its scales are removed, where needed. A static
    input scale becomes that of the layer, if its weight is resident. Messages of errors are
    appended to ``errors``.
    """
    config = layer.float8_config
    for name, weight in weights_of(layer).items():
        key = prefix + name
        loaded, scale = state_dict.get(key), state_dict.get(key + SCALE_SUFFIX)
        if loaded is None or isinstance(loaded, Float8Tensor):
            continue
        if is_sharded(weight) and _parts(weight) is not None:
            if not _loads(weight, (loaded, state_dict.pop(key + SCALE_SUFFIX, None))):
                errors.append(
                    f"{key}: it is sharded, and the checkpoint of this rank has neither such parts "
                    "of it nor the whole, float8 data and scales"
                )
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
    cast, weight, scale_name = config.gemms.output.b, weights_of(layer)[name], name + SCALE_SUFFIX
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
    return contraction_last(layer, joined)


# --- weights that FSDP2 gathers in float8


class GatherableWeight(Tensor):
    """Abstract: a high-precision weight, or a shard of one, that FSDP2 gathers in float8.

    ``plain`` is the ordinary tensor that it wraps; a state dict has that.
    """

    plain: Tensor


def is_gatherable(weight: Any) -> bool:
    """Whether a weight, or this rank's shard of it, is a `GatherableWeight`."""
    return isinstance(getattr(weight, "_local_tensor", weight), GatherableWeight)


def without_gather(weight: Any) -> Tensor:
    """A gatherable weight as an ordinary tensor, or a DTensor of ordinary ones."""
    # detach() shares the version counter, so that in-place writes to the checkpoint are detected
    return _with_local(weight, lambda local: local.plain.detach())


def stay_gatherable(layer: Any, before: dict[str, Any]) -> None:
    """Make the weights gatherable again that ``load_state_dict(assign=True)`` has replaced."""
    for name, old in before.items():
        new: Any = layer._parameters[name]
        if is_gatherable(old) and not is_gatherable(new):
            kind: Any = type(getattr(old, "_local_tensor", old))
            like = _with_local(new, lambda plain, kind=kind: kind(plain.detach()))
            layer._parameters[name] = nn.Parameter(like, new.requires_grad)


@torch.no_grad()
def _with_local(x: Any, change: Any) -> Tensor:
    local = getattr(x, "_local_tensor", None)
    if local is None:
        return change(x)
    return placed(change(local), x.shape, x.device_mesh, x.placements)


# --- static scales of inputs, which are calibrated, or read from a checkpoint


def with_static_input(config: Float8LinearConfig, scale: float | Tensor) -> Float8LinearConfig:
    """A config whose inputs are cast with this scale.

    ``config`` casts inputs with one scale per tensor. ``scale`` is finite and > 0,
    ``value = data * scale``; a tensor has one element. Raises ValueError for another scale, and for
    inputs in high precision or with several scales.
    """
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"an input has one static scale, got a tensor of {tuple(scale.shape)}")
    value = float(scale)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"an input's scale must be finite and > 0, got {value}")
    cast = config.gemms.output.a
    if cast is None or any(extent != WHOLE for extent in cast.block):
        what = "in high precision" if cast is None else f"with a scale for each {cast.block}"
        raise ValueError(
            f"its config casts inputs {what}, and static scales are for tensorwise inputs; "
            "convert_from_float8_training first, to convert it with another config"
        )
    target = config.cast_config_input.target_dtype
    static = CastConfig(ScalingType.STATIC, target_dtype=target, static_scale=value)
    is_delayed = any(c.scaling_type is ScalingType.DELAYED for c in config.operand_casts[1:])
    delayed = config.delayed_scaling if is_delayed else DelayedScalingConfig()
    return replace(config, cast_config_input=static, delayed_scaling=delayed)


def set_input_cast(layer: Any, config: Float8LinearConfig) -> None:
    """Give a layer a config that differs from its own in the cast of the input alone."""
    layer.config = config
    set_cast(layer, "cast_input", config.cast_config_input, E4M3, config, layer.weight.device)
