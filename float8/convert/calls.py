"""Which converted layers a model calls.

A model may read a layer's ``weight`` itself, as timm's BEiT in ``F.linear(x, self.qkv.weight)``.
Such a layer is converted, but never multiplies in float8. The first `float8.after_step` in which
another layer of the model has run says so, once.

A layer notes its calls (`float8.linear.module.Switch.note_call`). A compiled graph notes one while
it is traced, and layers of one form may share a graph: then one of the form counts for all.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from float8.config import Float8LinearConfig
from float8.convert.conversion import UNTOLD, own_config
from float8.convert.folding import folded
from float8.linear.module import weights_of
from float8.linear.plan import USED
from float8.linear.sync import name_in_model

logger = logging.getLogger("float8")
NOT_CALLED = (
    "it is converted, but was not called. If the model reads its weight itself, that product is "
    "not in float8: leave it out by float8.filters.skip_names in module_filter_fn"
)


def tell_what_ran() -> None:
    """Log what runs in float8, of each converted model that has run since its conversion."""
    for model, (conversion, matrices) in list(UNTOLD.items()):
        layers = {n: m for n, m in model.named_modules() if own_config(m) is not None}
        on = {n for n, m in layers.items() if m.switch.was_on}
        if not on:
            continue
        del UNTOLD[model]
        forms = {_form_in_graphs(layers[n]) for n in on} - {None}
        maybe = {n for n, m in layers.items() if n not in on and _form_in_graphs(m) in forms}
        off = [(name_in_model(n), NOT_CALLED) for n in layers if n not in on | maybe]
        ran = {layers[n].switch for n in on | maybe}
        share = conversion.share_of(sum(size for size, of in matrices if of & ran))
        name, most = type(model).__name__.removeprefix("FSDP"), "up to " if maybe else ""
        lines = [f"{name}: {most}{share} have run in float8", *folded(off)]
        logger.log(logging.WARNING if off else logging.INFO, "%s", "\n  ".join(lines))


def _form_in_graphs(layer: Any) -> tuple[Any, ...] | None:
    """What layers that share a compiled graph have in common; None where nothing was compiled."""
    key = cast(Float8LinearConfig, own_config(layer)).key
    if not any(compiling and key == traced for traced, *_, compiling in USED):
        return None
    return (type(layer), key, *(tuple(w.shape) for w in weights_of(layer).values()))


tell_what_ran._dynamo_marked_constant = True  # type: ignore[attr-defined]
