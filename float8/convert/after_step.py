"""`after_step`: whatever a model's recipe needs once per optimizer step.

The first call also says what of a converted model runs in float8. A model may read a layer's
``weight`` itself, as timm's BEiT in ``F.linear(x, self.qkv.weight)``. Such a layer is converted,
but never multiplies in float8. The first `after_step` in which another layer of the model has run
says so, once.

A layer notes its calls (`float8.linear.module.Switch.note_call`). A compiled graph notes one while
it is traced, and layers of one form may share a graph: then one of the form counts for all.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.parameter import is_lazy

from float8.arguments import check_module
from float8.config import Float8LinearConfig
from float8.convert.folding import folded
from float8.distributed.gathered_weights import precompute_float8_dynamic_scale_for_fsdp
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.linear.module import Switch, name_in_model, own_config, weights_of

if TYPE_CHECKING:
    from float8.convert.conversion import Conversion
    from float8.distributed.sync import Group

logger = logging.getLogger("float8")
NOT_CALLED = (
    "it is converted, but was not called. If the model reads its weight itself, that product is "
    "not in float8: leave it out by float8.filters.skip_names in module_filter_fn"
)
# Converted models, until it is told what of them runs -> their report, and for each matrix its
# elements and the switches of the layers that multiply by it, whose names may change.
_Matrices = list[tuple[int, set[Switch]]]
_untold: weakref.WeakKeyDictionary[nn.Module, tuple[Conversion, _Matrices]] = (
    weakref.WeakKeyDictionary()
)


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
    configs = map(own_config, model.modules())
    if any(config is not None and config.enable_fsdp_float8_all_gather for config in configs):
        precompute_float8_dynamic_scale_for_fsdp(model)


# --- what of a model runs


def expect_calls(model: nn.Module, conversion: Conversion) -> None:
    """Count the elements of matrices in the report; `tell_what_ran` says how many have run.

    A tied matrix is in float8 if any of its layers is.
    """
    switches: dict[int, set[Switch]] = defaultdict(set)
    for layer in model.modules():
        for weight in {} if own_config(layer) is None else weights_of(layer).values():
            switches[id(weight)].add(cast(Any, layer).switch)
    matrices: dict[int, tuple[int, set[Switch]]] = {}
    for fqn, m in model.named_modules():
        for p in m._parameters.values():
            is_table = isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and id(p) not in switches
            if p is None or is_lazy(p) or p.dim() < 2 or is_table or id(p) in matrices:
                continue
            matrices[id(p)] = p.numel(), switches.get(id(p), set())
            if id(p) not in switches and fqn not in conversion.skipped:
                kind = type(m).__name__
                conversion.unnamed[kind] = conversion.unnamed.get(kind, 0) + p.numel()
    conversion.elements = sum(size for size, layers in matrices.values() if layers)
    conversion.all_elements = sum(size for size, _ in matrices.values())
    _untold[model] = conversion, list(matrices.values())


def tell_what_ran() -> None:
    """Log what runs in float8, of each converted model that has run since its conversion."""
    for model, (conversion, matrices) in list(_untold.items()):
        layers = {n: m for n, m in model.named_modules() if own_config(m) is not None}
        on = {n for n, m in layers.items() if m.switch.was_on}
        if not on:
            continue
        del _untold[model]
        forms = {_form(layers[n]) for n in on if layers[n].switch.was_traced}
        maybe = {n for n, m in layers.items() if n not in on and _form(m) in forms}
        off = [(name_in_model(n), NOT_CALLED) for n in layers if n not in on | maybe]
        ran = {layers[n].switch for n in on | maybe}
        share = conversion.share_of(sum(size for size, of in matrices if of & ran))
        name, most = type(model).__name__.removeprefix("FSDP"), "up to " if maybe else ""
        lines = [f"{name}: {most}{share} have run in float8", *folded(off)]
        logger.log(logging.WARNING if off else logging.INFO, "%s", "\n  ".join(lines))


def _form(layer: Any) -> tuple[Any, ...]:
    """What layers that share a compiled graph have in common."""
    key = cast(Float8LinearConfig, own_config(layer)).key
    return (type(layer), key, *(tuple(w.shape) for w in weights_of(layer).values()))


tell_what_ran._dynamo_marked_constant = True  # type: ignore[attr-defined]
