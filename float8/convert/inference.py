"""`convert_to_float8_inference`: layers that keep only the float8 copy of their weight.

::

    model = convert_to_float8_inference(model.to(torch.bfloat16))     # 0.50x of the weights' bytes
    y = model(x)                                                      # evaluation
    add_adapters(model)                                               # or a frozen base: LoRA
    loss(model(x)).backward()                                         # reaches inputs and adapters

What a layer holds, next to bfloat16, of a weight (N, K): ``1 / 2`` and 4 bytes (recipe
``tensorwise``), ``1 / 2 + 2 / K`` (``rowwise``), ``1 / 2 + 1 / 8192`` (``blockwise``). Inputs are
cast at every call, with the scale that the batch has or with a calibrated constant. Gradients reach
the input: grad_input runs in float8 on the codes that are there (`linear.resident_weight` says how
for each granularity, and what a checkpoint holds). The weight itself is frozen, in ``train()`` as
in ``eval()``: the mode changes what dropout does and which amaxes a delayed recipe records, no
more.

Under `DistributedDataParallel` adapters train after `hide_from_ddp`;
`fully_shard` does not take weights that live in float8.

``model.to(dtype)`` changes what weights stand for, not their bytes. What fits a plain model's
checkpoint fits here, and is quantised on loading. `convert_from_float8_training` gives plain layers
with the dequantised weights; so does a ``state_dict()`` under `high_precision`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType
from float8.convert.conversion import Conversion, report_bypasses, tell
from float8.convert.convert import (
    candidates,
    check_all,
    check_arguments,
    check_model,
    replace_children,
    warn_of_fixed_scales,
)
from float8.convert.filters import ModuleFilter
from float8.formats import E4M3
from float8.granularity import WHOLE
from float8.kernels import is_sharded
from float8.kernels.scaled_mm import architecture
from float8.linear.cast import make_cast
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_call
from float8.linear.registration import MODULE_RULES
from float8.linear.resident_weight import as_parameter, is_resident, refuses_resident, to_resident
from float8.linear.switch import Float8Module


def convert_to_float8_inference(
    model: nn.Module,
    static_scales: Mapping[str, float | Tensor] | None = None,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Keep only a frozen float8 copy of the linear layers' weights, in place.

    Takes what `convert_to_float8_training` takes, and layers that it has converted, with the config
    that they have. The high-precision weights are freed, as soon as nobody else holds them (an
    optimizer does). Add adapters afterwards, or leave them out by ``module_filter_fn``. Layers
    that cannot take part are left in high precision, with the reason in ``float8_conversion``:
    those whose weight something else reads too, as an embedding that is tied to the head.

    Args:
        model: the model; it may itself be an ``nn.Linear``.
        static_scales: layer name -> scale of its input (``value = code * scale``), for all layers
            that are converted; norms and gates that wrote float8 by another scale become plain, and
            `float8.fuse_norms` may fuse them again. None casts inputs with dynamic scales, or as a
            converted layer does.
        config: of layers that are no Float8Linear yet; dynamic tensorwise by default.
        module_filter_fn: called with each candidate and its name; False leaves it alone.

    Returns:
        ``model``, or the new layer if ``model`` itself was one.

    Raises:
        ValueError: layers that cannot be converted, or scales whose names or values do not fit;
            nothing has been changed then.
        TypeError: arguments of other types.
    """
    check_arguments(model, "model", config, module_filter_fn, "convert_to_float8_inference")
    if static_scales is not None and not isinstance(static_scales, Mapping):
        raise TypeError(
            "static_scales must map layer names to the scales of their inputs, as "
            f'{{"layers.0.proj": 0.02}}, got a {type(static_scales).__name__}'
        )
    config = config or Float8LinearConfig()
    check_model(model)
    conversion = Conversion()
    chosen = layers_for_inference(model, config, module_filter_fn, conversion)
    plain = [(fqn, layer) for fqn, layer in chosen.items() if not _is_float8(layer)]
    # No step comes first whose amaxes would replace a scale of 1.
    new = replace(config, enable_amax_init=True)
    configs = {fqn: layer.config if _is_float8(layer) else new for fqn, layer in chosen.items()}
    configs = _with_static_inputs(configs, static_scales, conversion)
    check_all(plain, config)
    _check_weights(chosen, configs)
    warn_of_fixed_scales(plain, config)
    swapped = {m: MODULE_RULES[type(m)].convert(m, configs[fqn], fqn) for fqn, m in plain}
    if static_scales is not None:
        swapped |= {m: m.to_float() for m in _producers(model)}
    model = replace_children(model, swapped)
    layers = {fqn: swapped.get(m, m) for fqn, m in chosen.items()}
    del plain, chosen, swapped  # what else holds the old layers: weights are freed one by one
    _keep_codes_only(layers, configs)
    report_bypasses(model, conversion)
    hide_from_ddp(model)
    conversion.converted = list(layers)
    model.float8_conversion = conversion  # type: ignore[assignment]
    tell(model, conversion, module_filter_fn, "convert_to_float8_inference")
    return model


def layers_for_inference(
    model: nn.Module,
    config: Float8LinearConfig,
    module_filter_fn: ModuleFilter | None,
    conversion: Conversion,
) -> dict[str, Any]:
    """Name -> layer that `convert_to_float8_inference` takes; reasons for the others are noted.

    Calibration asks too: static scales have to name these layers.
    """
    chosen: dict[str, Any] = dict(candidates(model, config, module_filter_fn, conversion))
    for fqn, module in model.named_modules():
        if isinstance(module, Float8Linear):
            del conversion.skipped[fqn]
            if module_filter_fn is None or module_filter_fn(module, fqn):
                chosen[fqn] = module
            else:
                conversion.skipped[fqn] = "module_filter_fn returned False"
    for fqn, reason in read_elsewhere(model, chosen).items():
        del chosen[fqn]
        conversion.skipped[fqn] = reason
    return chosen


def _is_float8(layer: nn.Module) -> bool:
    return isinstance(layer, Float8Linear)


def _producers(model: nn.Module) -> list[Any]:
    """The modules that write float8 for layers."""
    return [m for m in model.modules() if isinstance(m, Float8Module) and not _is_float8(m)]


def read_elsewhere(model: nn.Module, chosen: dict[str, Any]) -> dict[str, str]:
    """The chosen layers (name -> layer) whose weight something else reads too, and what does."""
    places: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((fqn, module, name))
    layers = set(chosen.values())
    fused = _read_by_the_fast_path(model)
    return {fqn: reason for fqn in chosen if (reason := fused.get(fqn)) is not None} | {
        fqn: f"its weight is also {other}.{name} ({type(module).__name__}), which reads it in high "
        "precision: untie the two to convert it"
        for fqn, layer in chosen.items()
        for other, module, name in places[id(layer.weight)]
        if module not in layers or name != "weight"
    }


def _read_by_the_fast_path(model: nn.Module) -> dict[str, str]:
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    return {
        f"{fqn}.{name}"
        if fqn
        else name: "in eval mode nn.TransformerEncoderLayer reads its weight "
        "itself, and cannot read float8; torch.backends.mha.set_fastpath_enabled(False) before the "
        "conversion lets the layer run"
        for fqn, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for name in ("linear1", "linear2")
    }


def _with_static_inputs(
    configs: dict[str, Float8LinearConfig],
    scales: Mapping[str, float | Tensor] | None,
    conversion: Conversion,
) -> dict[str, Float8LinearConfig]:
    """The configs, their inputs cast with the given scales."""
    if scales is None:
        return configs
    problems = [
        f"no scale for {fqn or 'the module itself'}" for fqn in configs if fqn not in scales
    ]
    for fqn in scales:
        if fqn not in configs:
            why = conversion.skipped.get(fqn, "there is no layer of this name to convert")
            problems.append(f"a scale for {fqn}: {why}")
    found: dict[str, Float8LinearConfig] = {}
    for fqn, config in configs.items():
        if fqn in scales:
            try:
                found[fqn] = _with_static_input(config, scales[fqn])
            except (TypeError, ValueError) as error:
                problems.append(f"{fqn}: {error}")
    if problems:
        raise ValueError(
            "nothing was converted, because static_scales must name the input scale of each layer "
            "that is converted and of no other:\n  " + "\n  ".join(problems)
        )
    return found


def _with_static_input(config: Float8LinearConfig, scale: float | Tensor) -> Float8LinearConfig:
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"an input has one static scale, got a tensor of {tuple(scale.shape)}")
    value = float(scale)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"an input's scale must be finite and > 0, got {value}")
    cast = config.plan.output.a
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


def _check_weights(chosen: dict[str, Any], configs: dict[str, Float8LinearConfig]) -> None:
    problems: list[str] = []
    casts: dict[int, tuple[str, Any]] = {}
    for fqn, layer in chosen.items():
        name, weight = fqn or "the module itself", layer.weight
        cast = configs[fqn].plan.output.b
        first, its_cast = casts.setdefault(id(weight), (name, cast))
        reason = (
            refuses_resident(configs[fqn])
            or _refuses_values(layer)
            or refuses_device(weight, configs[fqn], weight.device)
        )
        if reason is not None:
            problems.append(f"{name}: {reason}")
        elif configs[fqn].enable_fsdp_float8_all_gather:
            problems.append(
                f"{name}: enable_fsdp_float8_all_gather=True is for weights that train; frozen "
                "float8 weights are not gathered. Leave it at False"
            )
        elif is_sharded(weight) or type(weight) not in (Tensor, nn.Parameter):
            if not is_resident(weight):
                problems.append(
                    f"{name}: its weight is a {type(weight).__name__}; convert plain weights, "
                    "before any distributed wrapper"
                )
        elif its_cast != cast:
            problems.append(f"{name}: its weight is {first}'s, which casts it in another way")
    if problems:
        raise ValueError(
            "nothing was converted, because some layers cannot be:\n  " + "\n  ".join(problems)
        )


def _refuses_values(layer: nn.Module) -> str | None:
    """The reason why codes could not stand for a layer's weight, or None."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return (
            "its weight is computed by a hook, as those of torch.nn.utils.prune and weight_norm "
            "do; make it a Parameter first (prune.remove, remove_weight_norm)"
        )
    if type(weight) is not nn.Parameter or is_sharded(weight) or not weight.numel():
        return None
    with torch.no_grad():
        ends = torch.stack(torch.aminmax(weight))
    if weight.device.type != "meta" and not bool(ends.isfinite().all()):
        return "its weight has NaN or inf, which would become those of every value with its scale"
    return None


def refuses_device(weight: Tensor, config: Float8LinearConfig, device: torch.device) -> str | None:
    """The reason why no call of a layer could run on a device, or None: later is too late.

    Args:
        weight: (N, K) of the layer.
        config: of the layer.
        device: asked about if it is a GPU.
    """
    if device.type != "cuda" or config.emulate:
        return None
    # One token in bfloat16: what depends on the batch is for the call to say.
    arch = architecture(device.index)
    return refuses_call(config, weight, 1, torch.bfloat16, arch, grad=False)


def hide_from_ddp(model: nn.Module) -> None:
    """Tell `DistributedDataParallel` not to broadcast weights that live in float8.

    DDP concatenates what it broadcasts, in high precision. These are frozen: ranks that convert
    the same checkpoint hold the same bits. `convert_to_float8_inference` has done it for ``model``;
    call it again where adapters, added later, have changed names or put another module on top.

    Args:
        model: the module that DDP is going to be given.
    """
    own = [name for name, p in model.named_parameters(remove_duplicate=False) if is_resident(p)]
    if not own:
        return
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    # The attribute that DDP reads.
    model._ddp_params_and_buffers_to_ignore = [*dict.fromkeys([*ignored, *own])]  # type: ignore[assignment]


def _keep_codes_only(layers: dict[str, Any], configs: dict[str, Float8LinearConfig]) -> None:
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old ones too: ids stay theirs
    for fqn, layer in layers.items():
        config, old = configs[fqn], layer.weight
        if config != layer.config:
            layer.config = config
            layer.cast_input = make_cast(
                config.cast_config_input, E4M3, config.delayed_scaling, device=old.device
            ).train(layer.training)
        if is_resident(old):
            old.requires_grad_(False)
            continue
        if id(old) not in new:
            codes = to_resident(old, config, layer.casts[1].state)
            tied = sum(other.weight is old for other in layers.values()) > 1
            layer.weight = as_parameter(old, codes, requires_grad=False)
            if tied:
                new[id(old)] = layer.weight, old
        layer.weight = new[id(old)][0] if id(old) in new else layer.weight
        layer.cached_weight = None
