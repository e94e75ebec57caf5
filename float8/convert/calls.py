"""Which converted layers a model calls.

A model may read a layer's ``weight`` itself, as timm's BEiT in ``F.linear(x, self.qkv.weight)``.
Such a layer is converted, but never multiplies in float8. The first `float8.after_step` in which
another layer of the model has run says so, once.

A layer notes its calls (`float8.linear.switch.Switch.note_call`). A compiled graph notes one while
it is traced, and layers of one form may share a graph: then one of the form counts for all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from float8.convert.conversion import UNTOLD, own_config
from float8.convert.folding import folded, pattern_of
from float8.linear.delayed import name_in_model
from float8.linear.plan import BOUND
from float8.linear.registration import weights_of

logger = logging.getLogger("float8")
NOT_CALLED = "it is converted, but was not called: what reads its weight multiplies without float8"


def calls_of(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """The names of the float8 layers that have run, that may have run, and that have not."""
    layers = {fqn: (m, c) for fqn, m in model.named_modules() if (c := own_config(m)) is not None}
    traced = {key for key, *_, compiling in BOUND if compiling}

    def form(layer: Any, config: Any) -> tuple[Any, ...] | None:
        shapes = [tuple(w.shape) for w in weights_of(layer).values()]
        return (type(layer), config.key, *shapes) if config.key in traced else None

    on = [fqn for fqn, (layer, _) in layers.items() if layer.switch.was_on]
    forms = {form(*layers[fqn]) for fqn in on} - {None}
    off = [fqn for fqn in layers if fqn not in on]
    maybe = [fqn for fqn in off if form(*layers[fqn]) in forms]
    names = on, maybe, [fqn for fqn in off if fqn not in maybe]
    return tuple([name_in_model(fqn) for fqn in each] for each in names)  # type: ignore[return-value]


def filter_without(names: Collection[str], others: Collection[str]) -> str:
    """The argument of a conversion that leaves out these layers, and none of the others."""
    found = []
    for name in names:
        pattern = pattern_of(name)
        fits = pattern.strip("*.") and not any(fnmatchcase(other, pattern) for other in others)
        found.append(repr(pattern if fits else name))
    return f"module_filter_fn=float8.filters.skip_names({', '.join(dict.fromkeys(found))})"


def tell_what_ran() -> None:
    """Log what runs in float8, of each converted model that has run since its conversion."""
    for model, conversion in list(UNTOLD.items()):
        on, maybe, off = calls_of(model)
        if not on:
            continue
        del UNTOLD[model]
        share = ("up to " if maybe else "") + conversion.share_of([*on, *maybe])
        lines = [f"{share} of the matrix elements have run in float8"]
        lines += folded((fqn, NOT_CALLED) for fqn in off)
        lines += (
            [f"leave out what was not called: {filter_without(off, [*on, *maybe])}"] if off else []
        )
        logger.log(logging.WARNING if off else logging.INFO, "%s", "\n  ".join(lines))


tell_what_ran._dynamo_marked_constant = True  # type: ignore[attr-defined]
