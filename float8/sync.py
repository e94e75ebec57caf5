"""Once per step: turn the amaxes that delayed casts recorded into the scales of the next step.

`sync_float8_amax_and_scale_history` works on all delayed casts of a model at once: the recorded
amaxes are stacked, reduced over ranks in one collective, rolled into the histories, and turned into
scales, with a number of kernels that does not grow with the number of layers (stack, update,
``_foreach_copy_``). It may be compiled: after the first step, in one graph.

Call it once per optimizer step, before or after ``optimizer.step()``, never between a forward and
its backward: autograd would then find the scales changed that forward saved. Forgetting it leaves
every cast dynamic, at its cost, so the first optimizer that steps twice without it says so.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.cast import DelayedCast
from float8.config import DelayedScalingConfig
from float8.scaling import updated_history

Key = tuple[DelayedScalingConfig, float, bool]


def sync_float8_amax_and_scale_history(model: nn.Module) -> None:
    """Roll this step's amaxes into the histories and compute the next scales.

    All ranks of the default process group, if there is one, take part with the same casts and end
    with equal scales. A model without delayed casts is left alone.

    Args:
        model: any module; every delayed cast below it takes part.
    """
    by_device: dict[torch.device, list[DelayedCast]] = {}
    for module in model.modules():
        if isinstance(module, DelayedCast):
            by_device.setdefault(module.scale.device, []).append(module)
    with torch.no_grad():
        for casts in by_device.values():
            _sync_on_one_device(casts)
    for callback in AFTER_SYNC:
        callback(model)


# Called with the model after each sync: for rooms above, which keep what follows from scales.
AFTER_SYNC: list[Callable[[nn.Module], None]] = []


def _sync_on_one_device(casts: list[DelayedCast]) -> None:
    groups = _groups(casts)
    casts = [cast for group in groups.values() for cast in group]
    currents = _reduced_over_ranks(torch.stack([c.current_amax for c in casts]))
    parts = currents.split([len(group) for group in groups.values()])
    for (key, group), part in zip(groups.items(), parts, strict=True):
        _update(group, part, key)
    torch._foreach_zero_([c.current_amax for c in casts])
    for cast in casts:
        cast.synced = True
    _mark_ready([c for c in casts if not c.history_ready])


def _mark_ready(casts: list[DelayedCast]) -> None:
    """Note which operands have their first scale; the others stay dynamic.

    An operand without an amax (an expert that no token reached, a frozen layer in eval mode) has no
    scale yet. Only then is the device asked, usually once in a training.
    """
    if casts:
        for cast, scale in zip(casts, torch.stack([c.scale for c in casts]).tolist(), strict=True):
            cast.history_ready = scale > 0


def _groups(casts: list[DelayedCast]) -> dict[Key, list[DelayedCast]]:
    """The casts that can be updated together: those of equal format and config."""
    groups: dict[Key, list[DelayedCast]] = {}
    for cast in casts:
        key = (cast.delayed, cast.format_on_device.max, cast.config.power_of_two_scale)
        groups.setdefault(key, []).append(cast)
    return groups


def _update(casts: list[DelayedCast], currents: Tensor, key: Key) -> None:
    delayed, format_max, power_of_two = key
    histories, scales = updated_history(
        torch.stack([c.amax_history for c in casts]),
        currents,
        torch.stack([c.scale for c in casts]),
        delayed,
        format_max,
        power_of_two,
    )
    torch._foreach_copy_([c.amax_history for c in casts], list(histories.unbind()))
    torch._foreach_copy_([c.scale for c in casts], list(scales.unbind()))


def _reduced_over_ranks(currents: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return currents
    # gloo's MAX loses a NaN that is not on rank 0; inf survives everywhere, and enters as 0.
    currents = torch.where(currents.isfinite(), currents, torch.inf)
    dist.all_reduce(currents, dist.ReduceOp.MAX)
    return currents


# Converted models that have not been synced yet -> how often each optimizer of theirs has stepped.
_waiting: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()


def remind_to_sync(model: nn.Module) -> None:
    """Warn once if one optimizer of this model steps twice and nobody has called ``sync``."""
    _waiting[model] = {}
    _install_hook()


@functools.cache
def _install_hook() -> None:
    # One hook for the process, never removed: torch iterates over its hooks while they run.
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _after_step(optimizer))


def _after_step(optimizer: Optimizer) -> None:
    for model, steps in list(_waiting.items()):
        layers = [m for m in model.modules() if _is_unsynced(m)]
        if not layers:
            del _waiting[model]
            continue
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in stepped for layer in layers for p in layer.parameters()):
            continue
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] == 2:
            del _waiting[model]
            warnings.warn(
                "this model uses delayed scaling, and its optimizer has stepped twice without "
                "sync_float8_amax_and_scale_history(model): call it once per step, or the amax "
                "histories stay empty and no scale ever follows from them",
                stacklevel=5,
            )


def _is_unsynced(layer: nn.Module) -> bool:
    return any(isinstance(c, DelayedCast) and not c.synced for c in layer.children())
