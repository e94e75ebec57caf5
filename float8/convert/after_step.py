"""`after_step`: whatever a model's recipe needs once per optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from float8.arguments import check_module
from float8.convert.calls import tell_what_ran
from float8.distributed.gathered_weights import precompute_float8_dynamic_scale_for_fsdp
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.linear.module import own_config

if TYPE_CHECKING:
    from float8.distributed.sync import Group


def after_step(model: nn.Module, group: Group | None = None) -> None:
    """Do what a model's recipe needs after an optimizer step.

    ::

        optimizer.step()
        float8.after_step(model)
        optimizer.zero_grad()

    With delayed scaling this step's amaxes become the next scales
    (`sync_float8_amax_and_scale_history`). Then, for weights that FSDP2 gathers in float8, one
    all-reduce finds the dynamic scales (`precompute_float8_dynamic_scale_for_fsdp`). The order
    saves work: a delayed weight that has its first scale needs no dynamic one. The first call logs
    how much of the model runs in float8, and names converted layers that it does not call. Other
    recipes need nothing more, so a training loop can call this for all.

    Args:
        model: any module.
        group: the ranks that hold the same layers, by default all; see
            `sync_float8_amax_and_scale_history`.

    Raises:
        RuntimeError: on every rank, at the first call: the ranks' layers differ.
        TypeError: ``model`` is no module, or ``group`` is no group.
        ValueError: this rank is not in ``group``.
    """
    check_module(model, "after_step")
    sync_float8_amax_and_scale_history(model, group)
    tell_what_ran()
    configs = [config for module in model.modules() if (config := own_config(module)) is not None]
    if any(config.enable_fsdp_float8_all_gather for config in configs):
        precompute_float8_dynamic_scale_for_fsdp(model)
