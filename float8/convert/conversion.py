"""The plan of a conversion, and the report that a converted model carries.

`plan_conversion` decides which layers of a model become float8, by which config, and why the others
do not. Conversion for training and for inference, `float8.calibrate` and `float8.ms_amp` start with
it; torchtitan's converter fills a `ConversionPlan` from its own tree of configs. The steps are

1. `plan_conversion`: choose the layers;
2. `ConversionPlan.check`: raise, with all reasons, if one of them cannot be converted;
3. `ConversionPlan.convert`: replace the layers, all parameters shared;
4. `ConversionPlan.finish`: complete the report, attach it to the model and log it.

Nothing is changed before the third.
"""

from __future__ import annotations

import importlib
import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.backends import mha
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from float8.arguments import check_module
from float8.config import RECIPES, Float8LinearConfig, check_config
from float8.config.linear import recipe_of
from float8.convert.filters import ModuleFilter, all_of, divisible_by, unmatched_patterns, why_not
from float8.convert.folding import folded, named
from float8.convert.routers import routers_of
from float8.experts.modules import rule_of_experts
from float8.kernels import is_sharded
from float8.linear.layer import Float8Linear
from float8.linear.module import (
    MODULE_RULES,
    WEIGHT_RULES,
    Float8Module,
    ModuleRule,
    Switch,
    stacked_weights,
    weights_of,
)
from float8.linear.refusals import multiple_of_features

logger = logging.getLogger("float8")

NO_HISTORY = (
    "delayed scaling keeps a history for each operand of a linear layer, and experts have none. "
    "Convert them first, by a config with dynamic scales and a module_filter_fn that takes them"
)
# Converted models -> their report, and for each matrix in float8 its elements and the switches of
# its layers, whose names may change; until `float8.convert.calls` has told what ran.
Matrices = list[tuple[int, set[Switch]]]
UNTOLD: weakref.WeakKeyDictionary[nn.Module, tuple[Conversion, Matrices]] = (
    weakref.WeakKeyDictionary()
)
FUSED = "in eval mode nn.TransformerEncoderLayer reads the weights of its layers itself"


@dataclass
class Conversion:
    """Names of converted layers, and name -> reason of the others.

    Attributes:
        converted: the layers that are float8 now.
        experts: those of them that are experts, with stacked weights.
        skipped: name -> why it was left alone.
        gathered_in_high_precision: under enable_fsdp_float8_all_gather, name -> why its weight is
            gathered in high precision.
        unmatched_patterns: patterns of `float8.filters.skip_names` that match no layer, with the
            nearest name.
        recipe: the recipe of the converted layers and its flags; several if layers differ.
        elements: of the matrices of float8 layers.
        all_elements: of all parameters with two dimensions and more, without embeddings.
        unnamed: kind of module -> elements of those that no line above names, as of an ``LSTM``.
    """

    converted: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    gathered_in_high_precision: dict[str, str] = field(default_factory=dict)
    unmatched_patterns: list[str] = field(default_factory=list)
    recipe: str = ""
    elements: int = 0
    all_elements: int = 0
    unnamed: dict[str, int] = field(default_factory=dict)

    def share_of(self, elements: int) -> str:
        """A number of elements as a percentage of those of all matrices."""
        return f"{100 * elements / max(self.all_elements, 1):.1f} % of the matrix elements"

    def __str__(self) -> str:
        gathered = self.gathered_in_high_precision
        experts = f", {len(self.experts)} of them experts" if self.experts else ""
        if self.elements < self.all_elements:
            experts += f", {self.share_of(self.elements)}"
        lines = [f"converted to float8 ({self.recipe}): {len(self.converted)} layers{experts}"]
        lines += [f"left alone: {line}" for line in folded(self.skipped.items())]
        kinds = sorted(self.unnamed.items(), key=lambda item: -item[1])
        lines += [f"left alone: {kind}: {self.share_of(n)}" for kind, n in kinds]
        lines += [f"weight gathered in high precision: {x}" for x in folded(gathered.items())]
        lines += [f"skip_names: no layer is called {name}" for name in self.unmatched_patterns]
        return "\n  ".join(lines)


@dataclass
class ConversionPlan:
    """The layers that a conversion takes.

    Attributes:
        caller: the public function, for messages.
        config: of the layers that are not in float8 yet.
        module_filter_fn: the user's filter.
        layers: name -> layer, each once, under its first name.
        configs: name -> the layer's config: its own, where it is in float8 already.
        conversion: why the other layers are left alone; after `convert`, the converted layers too.
        config_is_given: whether the user asked for ``config``, which is the default otherwise.
    """

    caller: str
    config: Float8LinearConfig
    module_filter_fn: ModuleFilter | None = None
    layers: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, Float8LinearConfig] = field(default_factory=dict)
    conversion: Conversion = field(default_factory=Conversion)
    config_is_given: bool = False

    def take(self, fqn: str, layer: nn.Module) -> None:
        """Add a layer to the plan."""
        self.layers[fqn] = layer
        self.configs[fqn] = own_config(layer) or self.config

    def leave(self, fqn: str, reason: str) -> None:
        """Leave a layer as it is, for this reason."""
        self.layers.pop(fqn, None)
        self.configs.pop(fqn, None)
        self.conversion.skipped[fqn] = reason

    @property
    def plain_layers(self) -> dict[str, Any]:
        """Name -> layer, of those that are not in float8 yet."""
        return {fqn: m for fqn, m in self.layers.items() if own_config(m) is None}

    def check(self, further: Iterable[tuple[str, str | None]] = ()) -> None:
        """Raise ValueError, with all reasons, if any layer cannot be converted.

        ``further`` has names with the reason why the caller refuses the layer, or None.
        """
        problems = [*further]
        for fqn, layer in self.plain_layers.items():
            config, rule = self.configs[fqn], _rule_of(layer)
            problems.append((fqn, rule.refuses(layer, config)))
            if config.enable_fsdp_float8_all_gather and not rule.stacked:
                problems.append((fqn, WEIGHT_RULES[0].refuses(layer, config)))
        found = [(fqn, reason) for fqn, reason in problems if reason is not None]
        if found:
            lines = ["nothing was converted, because some layers cannot be:", *folded(found)]
            raise ValueError("\n  ".join(lines))

    def warn_of_fixed_scales(self) -> None:
        """Warn of recipe ``unit``, whose scale of 1 moves no tensor into the format's range."""
        layers = self.plain_layers
        scaled = [fqn for fqn, m in layers.items() if not _rule_of(m).unit_scaled]
        if self.config == RECIPES["unit"] and scaled:
            warnings.warn(
                f'recipe "unit" casts with a scale of 1, and {len(scaled)} of {len(layers)} layers '
                f"(first: {named(scaled[0])}) are not unit-scaled: small weights and gradients "
                "flush to zero. Call float8.unit_scaling's unit_scale, or take a dynamic recipe",
                stacklevel=3,
            )

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace the layers that are not in float8 yet.

        Returns:
            ``model``, or the new layer if ``model`` itself was one.
        """
        importlib.import_module("float8.kernels.flops")  # which imports Triton, where it is
        plain = self.plain_layers
        swapped = {m: _rule_of(m).convert(m, self.configs[fqn], fqn) for fqn, m in plain.items()}
        self.layers = {fqn: swapped.get(layer, layer) for fqn, layer in self.layers.items()}
        self.conversion.converted = list(self.layers)
        self.conversion.experts = [fqn for fqn, m in plain.items() if _rule_of(m).stacked]
        return replace_children(model, swapped)

    def finish(self, model: nn.Module) -> None:
        """Complete the report, attach it to the model and log it; warn of what the user may change.

        That is: no layer is in float8 by the plan's config, or experts have no history.
        """
        conversion = self.conversion
        own = {fqn: c for fqn, m in model.named_modules() if (c := own_config(m)) is not None}
        names = [*own, *conversion.skipped]
        conversion.unmatched_patterns = unmatched_patterns(self.module_filter_fn, names)
        configs = list(self.configs.values()) or [self.config]
        conversion.recipe = "; ".join(dict.fromkeys(map(recipe_of, configs)))
        UNTOLD[model] = conversion, _count_elements(model, conversion)
        model.float8_conversion = conversion  # type: ignore[assignment]
        logger.info("%s", conversion)
        kept = [(fqn, why) for fqn, why in conversion.skipped.items() if why == NO_HISTORY]
        unchanged = any(c != self.config for c in own.values())
        if not conversion.converted and (not own or (self.config_is_given and unchanged)):
            warnings.warn(f"{self.caller} converted no layer:{self.reasons}", stacklevel=3)
        elif kept:
            lines = "\n  ".join(folded(kept))
            warnings.warn(f"experts stay in high precision: {lines}", stacklevel=3)

    @property
    def reasons(self) -> str:
        """Why layers were left alone, a line each, for messages."""
        lines = folded(self.conversion.skipped.items())
        return "".join(f"\n  {line}" for line in lines) or " the model has no nn.Linear"


def plan_conversion(
    model: nn.Module,
    config: Float8LinearConfig | str | None,
    module_filter_fn: ModuleFilter | None,
    caller: str,
    *,
    argument: str = "model",
    replaces_weights: bool = False,
    takes_experts: bool = True,
) -> ConversionPlan:
    """Choose the layers of a model that a conversion takes.

    ``config``, or its recipe's name, is for layers that are not in float8 yet. ``module_filter_fn``
    is called with each candidate and its name; None takes every layer. ``caller`` and ``argument``
    name the public function and its parameter, for messages. With ``replaces_weights``, the caller
    replaces the high-precision weights. Layers that are in float8 already are then taken, and those
    whose weight another module reads are left. ``takes_experts=False`` leaves experts. Raises
    TypeError for an argument of another type, and ValueError if layers of this model cannot be
    swapped, as those of a transformed one.
    """
    check_module(model, caller, argument)
    found = Float8LinearConfig() if config is None else check_config(config, caller)
    if any(hasattr(module, "float8_products") for module in model.modules()):
        raise ValueError(
            "nothing was converted: the model is transformed, and transforms do not see the "
            "functions that a Float8Linear calls. Use "
            "float8.unit_scaling.transforms.float8(model, config) in place of conversion"
        )
    plan = ConversionPlan(caller, found, module_filter_fn, config_is_given=config is not None)
    is_wanted = module_filter_fn or all_of()
    routers = routers_of(model)
    for fqn, module in model.named_modules():
        is_candidate = own_config(module) is not None or rule_of(module) is not None
        reason = routers.get(module) or _left_alone(module, fqn, plan, replaces_weights)
        if is_candidate and stacked_weights(module) and not takes_experts:
            reason = f"{caller} takes the weights of linear layers, and none of experts"
        if reason is None and is_candidate:
            reason = why_not(is_wanted, module, fqn) or odd_sizes(module, plan.config)
        if reason is not None:
            plan.leave(fqn, reason)
        elif is_candidate:
            plan.take(fqn, module)
    if replaces_weights:
        for fqn, reason in _read_elsewhere(model, plan.layers).items():
            plan.leave(fqn, reason)
    return plan


def sharded_before(model: nn.Module, plan: ConversionPlan) -> list[tuple[str, str]]:
    """Name and reason for each linear layer whose weight ``fully_shard`` has sharded already.

    FSDP2 gathers parameters into the modules that it was given. A new layer would keep the shard.
    """
    units = [m for m in model.modules() if any(b.__name__ == "FSDPModule" for b in type(m).__mro__)]
    inside = {module for unit in units for module in unit.modules()}
    reason = "fully_shard (FSDP2) has sharded its weight: convert the model first"
    return [
        (fqn, reason)
        for fqn, layer in plan.plain_layers.items()
        if layer in inside and is_sharded(layer._parameters.get("weight"))
    ]


def _count_elements(model: nn.Module, conversion: Conversion) -> Matrices:
    """Count the elements of matrices; a tied one is in float8 if any of its layers is."""
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
    return list(matrices.values())


def own_config(module: nn.Module) -> Float8LinearConfig | None:
    """The config of a converted layer or of converted experts, or None for other modules."""
    if isinstance(module, Float8Linear):
        return module.config
    return module.float8_config if isinstance(module, Float8Module) else None


def _left_alone(
    module: nn.Module, fqn: str, plan: ConversionPlan, replaces_weights: bool
) -> str | None:
    """The reason why a module stays as it is, whatever the filter says, or None."""
    own, rule = own_config(module), rule_of(module)
    if own is not None and replaces_weights:
        return None
    if own is not None:
        other = ", with another config: convert_from_float8_training first, to change it"
        what = "a Float8Linear" if isinstance(module, Float8Linear) else "in float8"
        return f"it is {what} already" + (other if own != plan.config else "")
    if rule is None:
        return _multiplies_otherwise(module)
    if rule.stacked and plan.config.uses_delayed_scaling:
        return NO_HISTORY
    return runs_something_else(module, fqn)


def _multiplies_otherwise(m: Any) -> str | None:
    """Why a module without a rule stays, if it multiplies or goes around its linear layers."""
    kind, attention = type(m).__name__, nn.MultiheadAttention
    reasons = (
        (type(m) is NonDynamicallyQuantizableLinear, "nn.MultiheadAttention does not call it"),
        (
            isinstance(m, nn.Linear),
            f"its type is {kind}, not nn.Linear; see float8.convert.register_linear_type",
        ),
        (isinstance(m, attention), "nn.MultiheadAttention multiplies by its weights itself"),
        (isinstance(m, nn.TransformerEncoderLayer), f"{FUSED}; see mha.set_fastpath_enabled"),
        (kind == "Conv1D" and hasattr(m, "nf"), "its type is Conv1D, not nn.Linear"),
        (
            kind.endswith("Experts") and stacked_weights(m),
            f"its type is {kind}; see register_experts",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def rule_of(module: nn.Module) -> ModuleRule | None:
    """The rule of a module's type, or None where conversion leaves the type alone."""
    return MODULE_RULES.get(type(module)) or rule_of_experts(type(module))


def _rule_of(layer: nn.Module) -> ModuleRule:
    """The rule of a layer that a plan has taken."""
    return cast(ModuleRule, rule_of(layer))


def odd_sizes(module: nn.Module, config: Float8LinearConfig) -> str | None:
    """The reason why no GPU multiplies by a plain layer's weights, or None."""
    if own_config(module) is not None:
        return None
    multiple = multiple_of_features(config, _rule_of(module).stacked)
    reason = why_not(divisible_by(multiple), module, "")
    return None if reason is None else f"{reason}, which GPUs need; pad_inner_dim=True converts it"


def runs_something_else(module: nn.Module, fqn: str) -> str | None:
    """The reason why replacing the module would not change what runs, or None."""
    if (forward := module.__dict__.get("forward")) is not None:
        if str(getattr(forward, "__module__", "")).startswith("transformers.distributed"):
            return (
                "Transformers' tp_plan, which is not supported, replaced its forward: load without "
                "it, convert, then parallelize_module with Float8ColwiseParallel and others"
            )
        return "its forward was replaced by a function that would still run; convert it before that"
    if module._compiled_call_impl is not None or fqn.rpartition(".")[2] == "_orig_mod":
        return "it was compiled on its own and its graph would still run; convert, then compile"
    return None


def _read_elsewhere(model: nn.Module, layers: dict[str, Any]) -> dict[str, str]:
    """Name -> reason, of the layers whose weight something else reads in high precision."""
    readers: dict[int, str] = {}  # id of a parameter -> why it is read
    chosen = set(layers.values())
    for fqn, m in model.named_modules():
        for name, parameter in m._parameters.items():
            if m not in chosen or name not in weights_of(m):
                reason = f"its weight is also {fqn}.{name} ({type(m).__name__}): untie the two"
                readers[id(parameter)] = reason
        if isinstance(m, nn.TransformerEncoderLayer) and mha.get_fastpath_enabled():
            reason = f"{FUSED}; call torch.backends.mha.set_fastpath_enabled(False) before"
            readers |= dict.fromkeys((id(m.linear1.weight), id(m.linear2.weight)), reason)
    owned = [(fqn, id(w)) for fqn, layer in layers.items() for w in weights_of(layer).values()]
    return {fqn: readers[key] for fqn, key in owned if key in readers}


def replace_children(root: nn.Module, swapped: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of a tree; returns the root, which may be one of them."""
    # A list first: the tree must not change while it is walked. A replaced module may be a parent.
    for parent in [*root.modules(), *swapped.values()]:
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return swapped.get(root, root)
