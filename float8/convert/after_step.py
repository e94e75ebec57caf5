"""`after_step`: whatever a model's recipe needs once per optimizer step.

The first call also names converted layers that do not run. A model may read a layer's ``weight``
itself, as timm's BEiT in ``F.linear(x, self.qkv.weight)``. Such a layer is converted, but never
multiplies in float8. The first `after_step` in which another layer of the model has run says so,
once.

A layer notes its calls (`float8.linear.module.Switch.note_call`). A compiled graph notes one while
it is traced, and layers of one form may share a graph: then one of the form counts for all.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from float8.arguments import check_module
from float8.config import Float8LinearConfig
from float8.convert.folding import folded
from float8.distributed.gathered_weights import precompute_float8_dynamic_scale_for_fsdp
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.linear.module import name_in_model, own_config, weights_of

if TYPE_CHECKING:
    from float8.distributed.sync import Group

logger = logging.getLogger("float8")
NOT_CALLED = (
    "it is converted, but was not called. If the model reads its weight itself, that product is "
    "not in float8: leave it out by float8.filters.skip_names in module_filter_fn"
)
# Converted models, until they have run.
untold: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def after_step(model: nn.Module, group: Group | None = None) -> None:
    """Do what a model's recipe needs after an optimizer step.

    ::

        optimizer.step()
        float8.after_step(model)
        optimizer.zero_grad()

    With delayed scaling this step's amaxes become the next scales
    (`sync_float8_amax_and_scale_history`). Then, for weights that FSDP2 gathers in float8, one
    all-reduce finds the dynamic scales (`precompute_float8_dynamic_scale_for_fsdp`). The order
    saves work: a delayed weight that has its first scale needs no dynamic one. The first call warns
    of converted layers that the model does not call. Other recipes need nothing more, so a training
    loop can call this for all.

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
    configs = map(own_config, model.modules())
    if any(config is not None and config.enable_fsdp_float8_all_gather for config in configs):
        precompute_float8_dynamic_scale_for_fsdp(model)


# --- layers that a model does not call


def tell_what_ran() -> None:
    """Warn of layers that a model did not call, once it has run since its conversion."""
    for model in list(untold):
        layers = {n: m for n, m in model.named_modules() if own_config(m) is not None}
        ran = {m for m in layers.values() if m.switch.was_on}
        if not ran:
            continue
        untold.discard(model)
        forms = {_form(m) for m in ran if m.switch.was_traced}
        missed = [n for n, m in layers.items() if m not in ran and _form(m) not in forms]
        if missed:
            name = type(model).__name__.removeprefix("FSDP")
            lines = folded((name_in_model(n), NOT_CALLED) for n in missed)
            logger.warning("%s", "\n  ".join([f"layers of {name} do not run in float8:", *lines]))


def _form(layer: Any) -> tuple[Any, ...]:
    """What layers that share a compiled graph have in common."""
    key = cast(Float8LinearConfig, own_config(layer)).key
    return (type(layer), key, *(tuple(w.shape) for w in weights_of(layer).values()))


tell_what_ran._dynamo_marked_constant = True  # type: ignore[attr-defined]
