"""Delayed scaling: scales that are computed from the amaxes of past steps.

Training with a delayed recipe takes one call per optimizer step::

    loss(model, batch).backward()                # records the amaxes of this step
    optimizer.step()
    sync_float8_amax_and_scale_history(model)    # computes the scales of the next step

`updated_history` is the rule of TransformerEngine's ``DelayedScaling`` recipe. The newest amax
enters the history at index 0. ``amax`` is the maximum over the history (or its newest entry), and
``scale = 2**margin * amax / max(format)``. If that amax is 0 or not finite, the scale does not
change. A non-finite amax of one step enters the history as 0, or with ``remember_nonfinite`` as
infinity, as in TransformerEngine.

The first scale comes later. At the start of a training amaxes grow by large factors from step to
step: gradients behind a projection that is zero are zero in the first step, and small weights
double in one step. A scale of past steps would then saturate most of a tensor. So a cast without a
scale stays dynamic until the amax of ``min(history_len, DYNAMIC_STEPS) - 1`` syncs ago is above 0
too: usually for `DYNAMIC_STEPS` steps, or until the history is full. TransformerEngine starts from
a scale of 1, and changes it from the first step on (``enable_amax_init=False``).

`float8.linear.casts` has the casts and their state.

`sync_float8_amax_and_scale_history` updates all delayed casts of a model at once. It stacks the
recorded amaxes, reduces them over ranks in one collective, and computes histories and scales. The
number of kernels does not grow with the number of layers. It may be compiled, to one graph, and to
one more graph while casts have no scale yet.

Call it before or after ``optimizer.step()``, never between a forward and its backward: autograd
would raise an error, because the saved scales have changed. Without the call every cast stays
dynamic, at its cost; an optimizer that steps twice without it warns.

The collective is a maximum by position, so all ranks must list the same casts in the same order:
alphabetically by name (`modules_by_name`). The order of registration does not matter.
`float8.distributed.rank_comparison` compares the names before the first collective.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8 import kernels
from float8.arguments import check_module, described
from float8.config import DelayedScalingConfig
from float8.distributed.rank_comparison import compare_before_sync
from float8.distributed.replaced_parameters import install_hook
from float8.kernels.products import on_device
from float8.linear.casts import DELAYED_CASTS, DelayedCast, max_over_ranks
from float8.linear.module import Switchable, modules_by_name
from float8.linear.weight_cache import cast_delayed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh

DYNAMIC_STEPS = 16
"""How many steps a cast without a scale is dynamic, or ``history_len`` steps if that is less."""


def updated_history(
    history_NH: Tensor,
    current_amax_N: Tensor,
    scale_N: Tensor,
    config: DelayedScalingConfig,
    format_max: float,
    scale_format: str,
) -> tuple[Tensor, Tensor]:
    """One step of delayed scaling for N operands that share format and config.

    ``history_NH`` has the last H amaxes of each operand, newest first; ``current_amax_N`` is over
    all microbatches and ranks of this step. ``scale_N`` has the scales in use, 0 where there has
    been none yet.

    Returns the new history and the new scales, which are finite. An operand without a scale keeps
    0, which no cast uses, until its history is full or has `DYNAMIC_STEPS` amaxes.
    """
    nonfinite = torch.inf if config.remember_nonfinite else 0.0
    newest_N = torch.where(current_amax_N.isfinite(), current_amax_N, nonfinite)
    history_NH = torch.cat([newest_N.unsqueeze(1), history_NH[:, :-1]], dim=1)
    amax_N = history_NH.amax(1)
    if config.amax_compute_algo == "most_recent":  # a layer without data now may get a first scale
        amax_N = torch.where((newest_N > 0) | (scale_N != 0), newest_N, amax_N)
    largest = format_max * 2.0**-config.margin  # what the amax is mapped to
    scaled = kernels.scale_from_amax(amax_N, largest, scale_format)
    # A large margin may move the scale out of float32's range.
    is_new = (amax_N > 0) & scaled.isfinite()
    is_new = is_new & ((scale_N != 0) | (history_NH[:, :DYNAMIC_STEPS][:, -1] > 0))
    return history_NH, torch.where(is_new, scaled, scale_N)


# --- once per step


def sync_float8_amax_and_scale_history(model: nn.Module, group: Group | None = None) -> None:
    """Roll this step's amaxes into the histories and compute the next scales.

    All ranks of the group must call it with the same casts. One MAX all-reduce serves all casts, so
    all ranks get equal scales; an amax that is not finite on one rank is not finite on all. The
    first call compares the layers of the ranks. In a single process, a model without delayed casts
    does not change.

    Args:
        model: any module; every delayed cast in it is updated.
        group: the ranks that have the same layers, by default all. Pipeline stages have different
            layers: pass the process group or ``DeviceMesh`` of the ranks of one stage (data and
            tensor parallel together). A mesh of several dimensions takes one all-reduce for each.

    Raises:
        RuntimeError: on every rank, at the first call, if the layers of the ranks differ; the
            message names the first difference.
        TypeError: ``group`` is neither.
        ValueError: this rank is not in ``group``.
    """
    check_module(model, "sync_float8_amax_and_scale_history")
    groups = _process_groups(group)
    casts = [cast for _, cast in modules_by_name(model, DelayedCast)]
    # In a group of one rank too: it may be the wrong group.
    if has_other_ranks() and _is_first(model, casts):
        compare_before_sync(model, ranks_of(group), groups)
        _checked.update(_parts_checked(model))
    with torch.no_grad():
        _update_all(casts, groups)
    cast_delayed(model)


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _is_first(model: nn.Module, casts: list[DelayedCast]) -> bool:
    if casts:
        return not all([cast.synced for cast in casts])
    # Another rank's model may have delayed casts: it would wait for this rank.
    return not torch.compiler.is_compiling() and not _checked.issuperset(_parts_checked(model))


def _parts_checked(model: nn.Module) -> list[nn.Module]:
    """The layers and casts of a model, or the model if it has none: what `_checked` remembers.

    With these as keys, a new container of layers that were compared is not compared again.
    """
    return [m for m in model.modules() if isinstance(m, Switchable)] or [model]


def ranks_of(group: Group | None) -> list[int]:
    """The ranks of a group, all by default, in ascending order."""
    if group is None:
        return list(range(dist.get_world_size()))
    if isinstance(group, dist.ProcessGroup):
        return sorted(dist.get_process_group_ranks(group))
    return sorted(group.mesh.flatten().tolist())


def _process_groups(group: Any) -> list[dist.ProcessGroup]:
    """The process groups to reduce over in turn; none where this rank is alone.

    A wrong ``group`` raises in a single process too, so that the mistake is found early.
    """
    groups: list[Any]
    if group is None:
        groups = [dist.group.WORLD] if has_other_ranks() else []
    elif dist.is_available() and isinstance(group, dist.ProcessGroup):
        groups = [group]
    elif dist.is_available() and group == dist.GroupMember.NON_GROUP_MEMBER:  # an int
        raise ValueError("this rank is not in the group that sync was given: pass its own group")
    elif hasattr(group, "get_all_groups"):  # by name: DeviceMesh takes long to import
        groups = group.get_all_groups()
    else:
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {described(group)}"
        )
    return [each for each in groups if has_other_ranks() and dist.get_world_size(each) > 1]


def has_other_ranks() -> bool:
    """Whether other ranks run too: a rank that stopped early would leave them waiting."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# What casts that are updated together have in common: device, and see `updated_history`.
Key = tuple[torch.device, DelayedScalingConfig, float, str]


def _update_all(casts: list[DelayedCast], groups: list[dist.ProcessGroup]) -> None:
    alike: dict[Key, list[DelayedCast]] = {}
    for cast in casts:
        largest = on_device(cast.format, cast.scale.device).max
        settings = (cast.delayed, largest, cast.config.scale_format.value)
        alike.setdefault((cast.scale.device, *settings), []).append(cast)
    stacked = [torch.stack([cast.current_amax for cast in same]) for same in alike.values()]
    reduced = _reduced_over_ranks(stacked, groups)
    for (key, same), currents in zip(alike.items(), reduced, strict=True):
        _update(same, currents, key)
        torch._foreach_zero_([cast.current_amax for cast in same])
        for cast in same:
            cast.synced = True
        # The scales are read from the device only while there are casts without one, usually in the
        # first `DYNAMIC_STEPS` steps. An op does that, so that a compiled sync stays one graph.
        if new := [cast for cast in same if not cast.history_ready]:
            torch.ops.float8.mark_ready.default([c.scale for c in new], [c.number for c in new])


def _update(casts: list[DelayedCast], currents: Tensor, key: Key) -> None:
    _, delayed, format_max, scale_format = key
    histories, scales = updated_history(
        torch.stack([c.amax_history for c in casts]),
        currents,
        torch.stack([c.scale for c in casts]),
        delayed,
        format_max,
        scale_format,
    )
    torch._foreach_copy_([c.amax_history for c in casts], list(histories.unbind()))
    torch._foreach_copy_([c.scale for c in casts], list(scales.unbind()))


def _reduced_over_ranks(currents: list[Tensor], groups: list[dist.ProcessGroup]) -> list[Tensor]:
    """The maximum over ranks of all amaxes: one collective for each group."""
    if not groups or not currents:
        return currents
    together = torch.cat([part.to(currents[0].device) for part in currents])
    for group in groups:
        together = max_over_ranks(together, group)
    parts = together.split([len(part) for part in currents])
    return [new.to(old.device) for new, old in zip(parts, currents, strict=True)]


def _mark_ready(scales: list[Tensor], numbers: list[int]) -> None:
    """Set ``history_ready`` of the casts that have their first scale; the others stay dynamic.

    An operand without an amax (an expert without tokens, a frozen layer in eval mode) gets none.
    """
    for number, scale in zip(numbers, torch.stack(scales).tolist(), strict=True):
        DELAYED_CASTS[number].history_ready = scale > 0


_LIBRARY = torch.library.Library("float8", "FRAGMENT")
# The op does not write the scales, but declares that it does: the compiler would remove an op
# without effects. It reads from the device, which is impossible during the capture of a CUDA graph.
_LIBRARY.define(
    "mark_ready(Tensor(a!)[] scales, int[] numbers) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)
_LIBRARY.impl("mark_ready", _mark_ready, "CompositeExplicitAutograd")
torch.library.register_fake("float8::mark_ready", lambda scales, numbers: None, lib=_LIBRARY)


# --- what conversion does for delayed casts

# Converted models without a sync so far -> how often each of their optimizers has stepped.
_unsynced: weakref.WeakKeyDictionary[nn.Module, dict[int, int]] = weakref.WeakKeyDictionary()


def remind_to_sync(model: nn.Module) -> None:
    """Warn, once, if an optimizer of this model steps twice and ``sync`` was never called.

    Steps that are compiled are not counted.
    """
    _unsynced[model] = {}
    install_hook(register_optimizer_step_post_hook, _count_step)


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # to read a learning rate that is a tensor would break the graph of a compiled step
    if not _unsynced or all([_is_zero(group.get("lr", 1)) for group in optimizer.param_groups]):
        return  # torch.distributed.checkpoint makes optimizers create their states by such a step
    for model, steps in list(_unsynced.items()):
        casts = [
            (m, c) for m in model.modules() for c in m.children() if isinstance(c, DelayedCast)
        ]
        layers = [layer for layer, cast in casts if not cast.synced]
        if not layers:
            del _unsynced[model]
            continue
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any([id(p) in stepped for layer in layers for p in layer.parameters()]):
            continue
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] == 2:
            del _unsynced[model]
            warnings.warn(
                "this model uses delayed scaling, and its optimizer has stepped twice without "
                "sync_float8_amax_and_scale_history(model): call it, or float8.after_step(model), "
                "once per step. Without it the histories stay empty and all casts stay dynamic",
                stacklevel=4,
            )


def _is_zero(lr: float | Tensor) -> bool:
    # A tensor on a device is not read: that would wait for the device, and fail during the capture
    # of a CUDA graph.
    return not (isinstance(lr, Tensor) and lr.device.type != "cpu") and bool(lr == 0)
