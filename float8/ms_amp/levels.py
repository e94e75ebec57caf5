"""MS-AMP's levels as a table, and the weights of a model that a level stores.

`plan_weights` finds the layers whose weight and gradient are stored as a row of `LEVELS` says, and
the reasons of the others; `stored_weight` makes the Parameter. `float8.ms_amp` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.convert.conversion import ConversionPlan, plan_conversion
from float8.convert.filters import ModuleFilter
from float8.formats import E4M3
from float8.kernels.matrix import TENSOR
from float8.linear.resident import as_parameter, reason_against_resident, to_resident


@dataclass(frozen=True)
class Level:
    """A row of MS-AMP's table.

    Args:
        weight: "float16" or "float8"; the latter with a float16 master.
        first_moment, second_moment: as `float8.optim.AdamW` names them.
    """

    weight: str
    first_moment: str
    second_moment: str


LEVELS = {
    "O1": Level("float16", "float32", "float32"),
    "O2": Level("float16", "float8", "float16"),
    "O3": Level("float8", "float8", "float16"),
}
"""The levels: name -> `Level`. O3 also keeps a float16 master of each float8 weight."""


@dataclass
class MsAmp:
    """The report of `ms_amp`; it is the model's attribute ``ms_amp``.

    Args:
        level: the level's name.
        weights: the layers whose weight and gradient are stored as the level says.
        left: layer -> why its weight stayed as it was.
    """

    level: str
    weights: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def plan_weights(
    model: nn.Module,
    config: Float8LinearConfig | str | None,
    module_filter_fn: ModuleFilter | None,
    optimizer: torch.optim.Optimizer,
    level: Level,
) -> ConversionPlan:
    """Find the layers whose weight a level stores; the plan says why others are left.

    The model is not wrapped. ``config`` is for layers that are not converted yet. Only weights that
    ``optimizer`` steps take part. Raises ValueError, with all reasons, if there are none, or if
    some cannot be converted or stored so.
    """
    plan = plan_conversion(
        model, config, module_filter_fn, "ms_amp", replaces_weights=True, takes_experts=False
    )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for fqn, layer in list(plan.layers.items()):
        if id(layer.weight) not in stepped:
            plan.leave(fqn, "the optimizer does not hold its weight")
    if not plan.layers:
        raise ValueError(f"ms_amp: no layer's weight can be stored as O1 to O3 do:{plan.reasons}")
    plan.check(
        (fqn, _reason_against_weight(layer.weight, plan.configs[fqn], level))
        for fqn, layer in plan.layers.items()
    )
    return plan


BEYOND_FLOAT16 = "its weight has values beyond float16's range (65504): scale it, or take level O3"


def _reason_against_weight(weight: Tensor, config: Float8LinearConfig, level: Level) -> str | None:
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; ms_amp takes plain high-precision ones"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, of another level or yours: register them after ms_amp"
    if not weight.requires_grad:
        return "the optimizer holds its weight, which requires no gradient"
    if config.enable_fsdp_float8_all_gather:
        return "enable_fsdp_float8_all_gather=True is for FSDP2: convert, fully_shard, then ms_amp"
    if level.weight == "float16":
        overflows = not weight.is_meta and bool(weight.detach().to(torch.float16).isinf().any())
        return BEYOND_FLOAT16 if overflows else None
    cast, refusal = config.gemms.output.b, reason_against_resident(config)
    is_tensorwise = cast is not None and (cast.block, cast.format) == (TENSOR, E4M3)
    fits = is_tensorwise and not config.mxfp4_weights
    why = "O3 is for E4M3 with one scale per tensor, and not for mxfp4_weights"
    return refusal if refusal or fits else why


def stored_weight(weight: Tensor, layer: Any, level: Level) -> nn.Parameter:
    """A layer's high-precision weight as a level stores it, its attributes kept.

    Gradients come in the dtype in which they are computed. ``layer`` is the `Float8Linear` that
    reads the weight.
    """
    if level.weight == "float8":
        float8_data = to_resident(weight, layer.config, layer.states[1])
        return as_parameter(weight, float8_data, requires_grad=True)
    new = as_parameter(weight, weight.detach().to(torch.float16), requires_grad=True)
    new.grad_dtype = None
    return new
