"""Once per step: turn the amaxes that delayed casts recorded into the scales of the next step.

`sync_float8_amax_and_scale_history` works on all delayed casts of a model at once: the recorded
amaxes are stacked, reduced over ranks in one collective, rolled into the histories, and turned into
scales, with a number of kernels that does not grow with the number of layers (stack, update,
``_foreach_copy_``). It may be compiled, in one graph; there is one more while casts have no scale
yet.

Call it once per optimizer step, before or after ``optimizer.step()``, never between a forward and
its backward: autograd would then find the scales changed that forward saved. Forgetting it leaves
every cast dynamic, at its cost, so the first optimizer that steps twice without it says so. Where
scales are to be found every few steps only (``DelayedScalingConfig.interval``), call it once per
step all the same: the histories are rolled by each call, and it counts them itself.

The collective is a maximum, element by element, so it means something only where all ranks list the
same casts in the same order. The order is that of the casts' names (`modules_by_name`), whatever
order they were registered in, and `FIRST_SYNC_CHECKS` compares the names before the first one.
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.arguments import check_module, described
from float8.config import DelayedScalingConfig
from float8.linear.cast import DELAYED_CASTS, Cast, DelayedCast
from float8.linear.registration import AFTER_SYNC, FIRST_SYNC_CHECKS
from float8.linear.scaling import updated_history

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh

logger = logging.getLogger("float8")
Key = tuple[DelayedScalingConfig, float, bool]


def sync_float8_amax_and_scale_history(model: nn.Module, group: Group | None = None) -> None:
    """Roll this step's amaxes into the histories and compute the next scales.

    All ranks of the group take part with the same casts, in one MAX all-reduce for all of them, and
    end with equal scales: an amax that is not finite on one of them is not finite on all. The first
    call compares the ranks' layers, once. In a single process a model without delayed casts is left
    alone.

    Args:
        model: any module; every delayed cast below it takes part.
        group: the ranks that hold the same layers: by default all. Pipeline stages hold different
            ones: pass the process group or ``DeviceMesh`` of the ranks of one stage (data and
            tensor parallel together). A mesh of several dimensions takes one all-reduce for each.

    Raises:
        RuntimeError: on every rank, at the first call: the ranks' layers differ; the message names
            the first one that does.
        TypeError: ``group`` is neither.
        ValueError: this rank is not in ``group``.
    """
    check_module(model, "sync_float8_amax_and_scale_history")
    groups = _process_groups(group)
    casts = [cast for _, cast in modules_by_name(model, DelayedCast)]
    if not casts:
        _tell_of_plain(model)
    # In a group of one rank too: it may be the wrong group.
    if _is_one_of_many() and _is_first(model, casts):
        for check in FIRST_SYNC_CHECKS:
            check(model, ranks_of(group))
        _checked.add(model)
    with torch.no_grad():
        _sync(casts, groups)
    for callback in AFTER_SYNC:
        callback(model)


def _tell_of_plain(model: nn.Module) -> None:
    """Log a warning, once per model: it may be the wrong one, or a baseline in high precision."""
    if torch.compiler.is_compiling() or model in _plain:
        return
    if not any(isinstance(module, Cast) for module in model.modules()):
        _plain.add(model)
        logger.warning(
            "sync_float8_amax_and_scale_history: %s has no float8 layer; pass what "
            "convert_to_float8_training(model) returns",
            type(model).__name__,
        )


_plain: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_WRAPPERS = ("._orig_mod", "._checkpoint_wrapped_module", "._fsdp_wrapped_module")


def modules_by_name(model: nn.Module, kind: Any = nn.Module) -> list[tuple[str, Any]]:
    """Each module of a type, or of several types, once, in alphabetical order of the names.

    A module with several names has the first of them. Ranks that registered the same modules in
    another order list them alike. Names do not tell whether a module was compiled or checkpointed,
    which ranks may do differently.
    """
    named = [
        (_without_wrappers(fqn), module)
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, kind)
    ]
    found, seen = [], set()
    for name, module in sorted(named, key=lambda item: item[0]):
        if id(module) not in seen:
            seen.add(id(module))
            found.append((name, module))
    return found


def _without_wrappers(fqn: str) -> str:
    name = f".{fqn}"
    for wrapper in _WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    return name[1:]


def ranks_of(group: Group | None) -> list[int]:
    """The ranks of a group, all by default, in ascending order."""
    if group is None:
        return list(range(dist.get_world_size()))
    if isinstance(group, dist.ProcessGroup):
        return sorted(dist.get_process_group_ranks(group))
    return sorted(group.mesh.flatten().tolist())


def _process_groups(group: Group | None) -> list[dist.ProcessGroup]:
    """The groups to reduce over in turn; none where there is nothing to agree about."""
    _check_group(group)
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if group is None:
        return [_default_group()] if dist.get_world_size() > 1 else []
    if isinstance(group, dist.ProcessGroup):
        return [group] if dist.get_world_size(group) > 1 else []
    return [each for each in group.get_all_groups() if dist.get_world_size(each) > 1]


def _check_group(group: object) -> None:
    """Raise if it is no group; in a single process too, so that a mistake shows there."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:  # an int
        raise ValueError("this rank is not in the group that sync was given: pass its own one")
    if not hasattr(group, "get_all_groups"):  # by name: DeviceMesh takes long to import
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {described(group)}"
        )


def _default_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_first(model: nn.Module, casts: list[DelayedCast]) -> bool:
    if casts:
        return not all(cast.synced for cast in casts)
    # Another rank's model may have some: it would wait for this one.
    return not torch.compiler.is_compiling() and model not in _checked


def _sync(casts: list[DelayedCast], groups: list[dist.ProcessGroup]) -> None:
    by_device: dict[torch.device, list[DelayedCast]] = {}
    for cast in casts:
        by_device.setdefault(cast.scale.device, []).append(cast)
    ordered = [[c for same in _groups(own).values() for c in same] for own in by_device.values()]
    stacked = [torch.stack([c.current_amax for c in own]) for own in ordered]
    for own, currents in zip(ordered, _reduced_over_ranks(stacked, groups), strict=True):
        _sync_on_one_device(own, currents)


def _sync_on_one_device(casts: list[DelayedCast], currents: Tensor) -> None:
    groups = _groups(casts)
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
    scale yet. Only then is the device asked, usually once in a training. An op asks, so that a
    compiled sync stays one graph.
    """
    if casts:
        torch.ops.float8.mark_ready.default([c.scale for c in casts], [c.number for c in casts])


def _mark_ready_now(scales: list[Tensor], numbers: list[int]) -> None:
    for number, scale in zip(numbers, torch.stack(scales).tolist(), strict=True):
        DELAYED_CASTS[number].history_ready = scale > 0


_LIBRARY = torch.library.Library("float8", "FRAGMENT")
# The scales are declared as written, which they are not: an op without effect would be dropped. It
# reads the device, which the capture of a CUDA graph cannot.
_LIBRARY.define(
    "mark_ready(Tensor(a!)[] scales, int[] numbers) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)
_LIBRARY.impl("mark_ready", _mark_ready_now, "CompositeExplicitAutograd")
torch.library.register_fake("float8::mark_ready", lambda scales, numbers: None, lib=_LIBRARY)


def _groups(casts: list[DelayedCast]) -> dict[Key, list[DelayedCast]]:
    """The casts that can be updated together: those of equal format and config."""
    groups: dict[Key, list[DelayedCast]] = {}
    for cast in casts:
        key = (cast.delayed, cast.format_on_device.max, cast.config.power_of_two_scale)
        groups.setdefault(key, []).append(cast)
    return groups


def _update(casts: list[DelayedCast], currents: Tensor, key: Key) -> None:
    delayed, format_max, power_of_two = key
    aged = [c.scale_age for c in casts] if delayed.interval > 1 else []
    histories, scales, ages = updated_history(
        torch.stack([c.amax_history for c in casts]),
        currents,
        torch.stack([c.scale for c in casts]),
        delayed,
        format_max,
        power_of_two,
        torch.stack(aged) if aged else None,
    )
    torch._foreach_copy_([c.amax_history for c in casts], list(histories.unbind()))
    torch._foreach_copy_([c.scale for c in casts], list(scales.unbind()))
    if ages is not None:
        torch._foreach_copy_(aged, list(ages.unbind()))


def _reduced_over_ranks(currents: list[Tensor], groups: list[dist.ProcessGroup]) -> list[Tensor]:
    """The maximum over ranks of each device's amaxes: one collective for each group."""
    if not groups or not currents:
        return currents
    device = _meeting_place([part.device for part in currents], groups[0])
    together = torch.cat([part.to(device) for part in currents])
    # gloo's MAX loses a NaN that is not on rank 0; inf survives everywhere.
    together = torch.where(together.isfinite(), together, torch.inf)
    for group in groups:
        dist.all_reduce(together, dist.ReduceOp.MAX, group)
    parts = together.split([len(part) for part in currents])
    return [new.to(old.device) for new, old in zip(parts, currents, strict=True)]


def _meeting_place(devices: list[torch.device], group: Any) -> torch.device:
    """A device on which the group's backend reduces: one that has amaxes, if there is one."""
    if torch.compiler.is_compiling():
        return devices[0]
    types = [device.type for device in group._device_types]
    for device in devices:
        if device.type in types:
            return device
    return torch.device(types[0], torch.accelerator.current_device_index())


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
    if not _waiting or all(_is_zero(group.get("lr", 1)) for group in optimizer.param_groups):
        return  # torch.distributed.checkpoint makes optimizers create their states by such a step
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


def _is_zero(lr: float | Tensor) -> bool:
    # Not asked of a device: that would wait for it, and fail while a CUDA graph captures.
    return not (isinstance(lr, Tensor) and lr.device.type != "cpu") and bool(lr == 0)


def _is_unsynced(layer: nn.Module) -> bool:
    return any(isinstance(c, DelayedCast) and not c.synced for c in layer.children())


def keep_ddp_from_broadcasting(root: nn.Module) -> None:
    """DDP copies rank 0's buffers at every forward, which would erase other ranks' amaxes.

    DDP asks the module that it wraps, so that must be the one that was converted.
    """
    own = [
        f"{fqn}.{name}" if fqn else name
        for fqn, module in root.named_modules()
        if isinstance(module, DelayedCast)
        for name in module._buffers
    ]
    ignored = getattr(root, "_ddp_params_and_buffers_to_ignore", [])
    # The attribute that DDP reads. Its private setter would also search every parameter and buffer
    # of the model in the list.
    root._ddp_params_and_buffers_to_ignore = [*ignored, *own]  # type: ignore[assignment]
