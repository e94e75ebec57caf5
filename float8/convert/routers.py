"""Routers: the small layers of a mixture of experts that choose the experts of each token.

A rounded score sends a token to another expert, and a router is too small to gain from float8, so
conversion leaves routers alone. They are found by their place: beside a module whose name has
``expert`` in it, one called ``gate``, ``router``, ``*_gate`` or ``*_router``, or of a type whose
name has ``Router`` in it. To convert one nevertheless, convert it by itself::

    block.gate = convert_to_float8_training(block.gate)
"""

from __future__ import annotations

import re

from torch import nn

from float8.linear.module import Float8Module

ROUTES = "it routes tokens to experts, and rounded scores would choose others"
_ROUTER = re.compile(r"(^|_)(gate|router)$")


def routers_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model that multiply for a router -> why they stay in high precision."""
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        children = dict(parent.named_children())
        if not any("expert" in name.lower() for name in children):
            continue
        for name, child in children.items():
            if _ROUTER.search(name) or "Router" in type(child).__name__:
                found |= {m: ROUTES for m in child.modules() if _multiplies(m)}
    return found


def _multiplies(module: nn.Module) -> bool:
    return module._parameters.get("weight") is not None and not isinstance(module, Float8Module)
