"""Why conversion leaves a module as it is: functions that return the reason, or None.

A *candidate* is a layer in float8 (`own_config`), or a module whose type has a rule (`rule_of`).
Other modules have a reason only if they multiply, so that the report names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.backends import mha
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from float8.config import Float8LinearConfig
from float8.convert.filters import divisible_by, why_not
from float8.experts.modules import rule_of_experts
from float8.kernels import is_sharded
from float8.linear.layer import Float8Linear
from float8.linear.module import (
    MODULE_RULES,
    ModuleRule,
    modules_under_fsdp,
    own_config,
    stacked_weights,
    weights_of,
)
from float8.linear.refusals import multiple_of_features

NO_HISTORY = (
    "delayed scaling keeps a history for each operand of a linear layer, and experts have none. "
    "Convert them first, by a config with dynamic scales and a module_filter_fn that takes them"
)
ROUTES = "it routes tokens to experts, and rounded scores would choose others"
_ROUTER = re.compile(r"(^|_)(gate|router)$")
_READS_WEIGHTS = "in eval mode nn.TransformerEncoderLayer reads the weights of its layers itself"


def rule_of(module: nn.Module) -> ModuleRule | None:
    """The rule of a module's type, or None where conversion leaves the type alone."""
    return MODULE_RULES.get(type(module)) or rule_of_experts(type(module))


def rule_of_candidate(layer: nn.Module) -> ModuleRule:
    """The rule of a candidate that is not in float8 yet."""
    return cast(ModuleRule, rule_of(layer))


def reason_to_leave(
    module: nn.Module, fqn: str, config: Float8LinearConfig, replaces_weights: bool
) -> str | None:
    """The reason why a module stays as it is, whatever its sizes and the user's filter say."""
    own, rule = own_config(module), rule_of(module)
    if own is not None and replaces_weights:
        return None
    if own is not None:
        other = ", with another config: convert_from_float8_training first, to change it"
        what = "a Float8Linear" if isinstance(module, Float8Linear) else "in float8"
        return f"it is {what} already" + (other if own != config else "")
    if rule is None:
        return _multiplies_otherwise(module)
    if rule.stacked and config.uses_delayed_scaling:
        return NO_HISTORY
    return runs_something_else(module, fqn)


def _multiplies_otherwise(module: nn.Module) -> str | None:
    """Why a module without a rule stays, if it multiplies or goes around its linear layers."""
    kind, reason = type(module).__name__, None
    if isinstance(module, nn.MultiheadAttention):
        reason = "nn.MultiheadAttention multiplies by its weights itself"
    elif type(module) is NonDynamicallyQuantizableLinear:
        reason = "nn.MultiheadAttention does not call it"
    elif isinstance(module, nn.TransformerEncoderLayer):
        reason = f"{_READS_WEIGHTS}; see mha.set_fastpath_enabled"
    elif isinstance(module, nn.Linear):
        reason = f"its type is {kind}, not nn.Linear; see float8.convert.register_linear_type"
    elif kind.endswith("Experts") and stacked_weights(module):
        reason = f"its type is {kind}; see register_experts"
    return reason


def runs_something_else(module: nn.Module, fqn: str) -> str | None:
    """The reason why replacing the module would not change what runs, or None."""
    if "forward" in module.__dict__:
        return "its forward was replaced by a function that would still run; convert it before that"
    if module._compiled_call_impl is not None or fqn.rpartition(".")[2] == "_orig_mod":
        return "it was compiled on its own and its graph would still run; convert, then compile"
    return None


def odd_sizes(module: nn.Module, config: Float8LinearConfig) -> str | None:
    """The reason why no GPU multiplies by a plain layer's weights, or None."""
    if own_config(module) is not None:
        return None
    multiple = multiple_of_features(config, rule_of_candidate(module).stacked)
    reason = why_not(divisible_by(multiple), module, "")
    return None if reason is None else f"{reason}, which GPUs need; pad_inner_dim=True converts it"


# --- reasons that only the whole model shows


def routers_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model that multiply for a router -> why they stay in high precision.

    Routers are the small layers of a mixture of experts that choose the experts of each token. A
    rounded score sends a token to another expert, and a router is too small to gain from float8.
    They are found by their place: beside a module whose name has ``expert`` in it, one called
    ``gate``, ``router``, ``*_gate`` or ``*_router``, or of a type whose name has ``Router`` in it.
    To convert one nevertheless, convert it by itself::

        block.gate = convert_to_float8_training(block.gate)
    """
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        children = dict(parent.named_children())
        if not any("expert" in name.lower() for name in children):
            continue
        for name, child in children.items():
            if _ROUTER.search(name) or "Router" in type(child).__name__:
                own = {m for m in child.modules() if m._parameters.get("weight") is not None}
                found |= {m: ROUTES for m in own if own_config(m) is None}
    return found


def read_elsewhere(model: nn.Module, layers: dict[str, Any]) -> dict[str, str]:
    """Name -> reason, of the layers whose weight something else reads in high precision."""
    readers: dict[int, str] = {}  # id of a parameter -> why it is read
    chosen = set(layers.values())
    for fqn, m in model.named_modules():
        for name, parameter in m._parameters.items():
            if m not in chosen or name not in weights_of(m):
                reason = f"its weight is also {fqn}.{name} ({type(m).__name__}): untie the two"
                readers[id(parameter)] = reason
        if isinstance(m, nn.TransformerEncoderLayer) and mha.get_fastpath_enabled():
            reason = f"{_READS_WEIGHTS}; call torch.backends.mha.set_fastpath_enabled(False) before"
            readers |= dict.fromkeys((id(m.linear1.weight), id(m.linear2.weight)), reason)
    owned = [(fqn, id(w)) for fqn, layer in layers.items() for w in weights_of(layer).values()]
    return {fqn: readers[key] for fqn, key in owned if key in readers}


def sharded_before(
    model: nn.Module, layers: dict[str, Any], config: Float8LinearConfig
) -> Iterator[tuple[str, str]]:
    """The layers whose weight is sharded already where that comes too early, with the reason.

    FSDP2 gathers parameters into the modules that it was given. A new layer would keep the shard.
    """
    inside = modules_under_fsdp(model)
    for fqn, layer in layers.items():
        if not is_sharded(layer._parameters.get("weight")):
            continue
        if layer in inside:
            yield fqn, "fully_shard (FSDP2) has sharded its weight: convert the model first"
        elif config.enable_fsdp_float8_all_gather:
            yield fqn, "its weight is a DTensor: leave enable_fsdp_float8_all_gather off"
