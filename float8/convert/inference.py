"""`convert_to_float8_inference`: layers and experts that keep only the float8 copy of their weight.

::

    model = convert_to_float8_inference(model.to(torch.bfloat16))     # 0.50x of the weights' bytes
    y = model(x)                                                      # evaluation
    add_adapters(model)                                               # or a frozen base: LoRA
    loss(model(x)).backward()                                         # reaches inputs and adapters

The weight (N, K) of a layer takes this fraction of its bytes in bfloat16: ``1 / 2`` and 4 bytes
(recipe ``tensorwise``), ``1 / 2 + 2 / K`` (``rowwise``), ``1 / 2 + 1 / 8192`` (``blockwise``),
``1 / 2 + 1 / 64`` (``mxfp8``). Inputs are cast at every call, with a dynamic scale or a calibrated
constant. Gradients reach the input: grad_input runs in float8 with the same data
(`float8.linear.float8_weight` says how for each granularity, and what a checkpoint contains). The
weight itself is frozen, in ``train()`` as in ``eval()``: the mode changes only dropout, and which
amaxes a delayed recipe records.

Under `DistributedDataParallel` adapters train after `hide_from_ddp`. ``fully_shard`` stores and
gathers the frozen weights as bytes (`float8.tensor.shard`). Stacks of experts (E, N, K) have the
same scales for each expert.

``model.to(dtype)`` changes the dtype that the weights dequantise to, not their bytes. Checkpoints
of the plain model load, and are cast on loading. `convert_from_float8_training` returns plain
layers with the dequantised weights; so does a ``state_dict()`` under `high_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.convert.conversion import ConversionPlan, plan_conversion, replace_children
from float8.convert.filters import ModuleFilter
from float8.kernels import family_of
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.module import Float8Module, stacked_weights, weights_of
from float8.linear.plan import plan_for
from float8.linear.refusals import reason_against_call
from float8.linear.resident import (
    as_parameter,
    contraction_last,
    is_resident,
    reason_against_resident,
    set_input_cast,
    to_resident,
    with_static_input,
)

__all__ = ["convert_to_float8_inference", "hide_from_ddp"]


def convert_to_float8_inference(
    model: nn.Module,
    static_scales: Mapping[str, float | Tensor] | None = None,
    *,
    config: Float8LinearConfig | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Keep only a frozen float8 copy of the weights of linear layers and experts, in place.

    Takes the layers that `convert_to_float8_training` takes, and layers that it has converted, with
    the config that they have. The high-precision weights are freed, unless something else refers to
    them, such as an optimizer. Add adapters afterwards, or leave them out by ``module_filter_fn``.
    Layers whose weight another module reads, as an embedding that is tied to the head, stay in high
    precision; ``float8_conversion`` has the reason.

    Args:
        model: the model; it may itself be an ``nn.Linear``.
        static_scales: layer name -> scale of its input (``value = data * scale``), for all layers
            that are converted, experts excepted; norms that returned float8 with another scale
            become plain, and `float8.fuse_norms` may fuse them again. None casts inputs with
            dynamic scales, or as a converted layer does.
        config: of layers that are no Float8Linear yet, or its recipe's name; dynamic tensorwise by
            default.
        module_filter_fn: called with each candidate and its name; False leaves it alone.

    Returns:
        ``model``, or the new layer if ``model`` itself was one.

    Raises:
        ValueError: layers that cannot be converted, or scales whose names or values do not fit;
            nothing has been changed then.
        TypeError: arguments of other types.
    """
    caller = "convert_to_float8_inference"
    plan = plan_conversion(model, config, module_filter_fn, caller, replaces_weights=True)
    # Nothing trains, so that no first step would replace an initial scale of 1.
    own = replace(plan.config, enable_amax_init=True)
    plan.configs |= dict.fromkeys(plan.plain_layers, own)
    problems = [] if static_scales is None else list(_cast_inputs_with(static_scales, plan))
    problems += [(fqn, _reason_against(m, plan.configs[fqn])) for fqn, m in plan.layers.items()]
    plan.check(problems)
    if static_scales is not None:
        modules: list[Any] = [m for m in model.modules() if isinstance(m, Float8Module)]
        fused = [m for m in modules if not isinstance(m, Float8Linear)]  # norms, feed-forwards
        model = replace_children(model, {m: m.to_float() for m in fused})
    model = plan.convert(model)
    _keep_float8_only(plan)
    hide_from_ddp(model)
    plan.finish(model)
    return model


def _cast_inputs_with(
    scales: Mapping[str, float | Tensor], plan: ConversionPlan
) -> Iterator[tuple[str, str | None]]:
    """Have the layers of a plan cast their inputs with these scales; yields what does not fit."""
    for fqn in dict.fromkeys([*plan.layers, *scales]):
        if fqn not in scales and stacked_weights(plan.layers[fqn]):
            continue
        if fqn not in scales:
            yield fqn, "it has no scale of its input in static_scales"
        elif fqn not in plan.layers:
            why = plan.conversion.skipped.get(fqn, "there is no layer of this name to convert")
            yield fqn, f"static_scales has a scale for it, and {why}"
        else:
            try:
                plan.configs[fqn] = with_static_input(plan.configs[fqn], scales[fqn])
            except (TypeError, ValueError) as error:
                yield fqn, str(error)


def _reason_against(layer: Any, config: Float8LinearConfig) -> str | None:
    if config.enable_fsdp_float8_all_gather:
        return "enable_fsdp_float8_all_gather=True is for weights that train: leave it at False"
    weights = weights_of(layer).values()
    if not weights or not all(type(w) is nn.Parameter or is_resident(w) for w in weights):
        return "its weight is no plain Parameter: convert before any wrapper, after prune.remove"
    reasons = [reason_against_inference(weight, config, weight.device) for weight in weights]
    return reason_against_resident(config) or next(filter(None, reasons), None)


def reason_against_inference(
    weight: Tensor, config: Float8LinearConfig, device: torch.device
) -> str | None:
    """The reason why no call with this weight (N, K) or (E, N, K) could run on a device, or None.

    Only a GPU refuses. This is asked before the high-precision weight is freed.
    """
    # One token in bfloat16: each call checks what depends on its batch.
    family = family_of(device)
    plan = plan_for(config, family, torch.bfloat16, weight.dim() == 3)
    N, K = weight.shape[-2:]
    return reason_against_call(plan, N, K, 1, grad=False, grad_weight=False)


def hide_from_ddp(model: nn.Module) -> None:
    """Exclude weights that are in float8 from the broadcast of `DistributedDataParallel`.

    DDP concatenates what it broadcasts, in high precision. These weights are frozen, and ranks that
    convert the same checkpoint have the same bits. Histories of amaxes are excluded too: DDP copies
    rank 0's buffers at every forward, which would erase the amaxes of other ranks. Conversion calls
    this for ``model``; call it again where adapters, added later, have changed names or wrapped the
    model.

    Args:
        model: the module that DDP will wrap.
    """
    own = [name for name, p in model.named_parameters(remove_duplicate=False) if is_resident(p)]
    casts = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, DelayedCast)]
    own += [name for fqn, cast in casts for name, _ in cast.named_buffers(fqn)]
    if own:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
        # DDP reads this attribute. Its private setter would also search the list for every
        # parameter and buffer of the model.
        model._ddp_params_and_buffers_to_ignore = [*dict.fromkeys([*ignored, *own])]  # type: ignore[assignment]


def _keep_float8_only(plan: ConversionPlan) -> None:
    """Replace the weights of converted layers by frozen float8 ones, each freed before the next."""
    new: dict[int, nn.Parameter] = {}  # by the old one's id; layers may share a weight
    for fqn, layer in plan.layers.items():
        config, state = plan.configs[fqn], None
        if isinstance(layer, Float8Linear):
            state = layer.states[1]
            if config != layer.config:
                set_input_cast(layer, config)
        for name, old in weights_of(layer).items():
            layer.cached_weights.clear()
            if is_resident(old):
                old.requires_grad_(False)
                continue
            if id(old) not in new:
                own = to_resident(contraction_last(layer, old), config, state)
                new[id(old)] = as_parameter(old, contraction_last(layer, own), requires_grad=False)
            setattr(layer, name, new[id(old)])
