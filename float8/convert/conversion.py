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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from float8.arguments import check_module
from float8.config import RECIPES, Float8LinearConfig, check_config
from float8.config.linear import recipe_of
from float8.convert.after_step import untold
from float8.convert.filters import (
    ModuleFilter,
    all_of,
    chosen_by_default,
    unmatched_patterns,
    why_not,
)
from float8.convert.folding import folded, named
from float8.convert.reasons import (
    NO_HISTORY,
    odd_sizes,
    read_elsewhere,
    reason_to_leave,
    routers_of,
    rule_of,
    rule_of_candidate,
)
from float8.linear.module import own_config, stacked_weights, weights_of

logger = logging.getLogger("float8")


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

    def _count(self, model: nn.Module) -> None:
        """Count the elements of matrices; a tied one is in float8 if any of its layers is."""
        layers = [layer for layer in model.modules() if own_config(layer) is not None]
        sizes = {id(w): w.numel() for layer in layers for w in weights_of(layer).values()}
        self.elements = sum(sizes.values())
        for fqn, m in model.named_modules():
            kind, is_table = type(m).__name__, isinstance(m, (nn.Embedding, nn.EmbeddingBag))
            for p in m._parameters.values():
                if p is None or is_lazy(p) or p.dim() < 2 or is_table or id(p) in sizes:
                    continue
                sizes[id(p)] = p.numel()
                if fqn not in self.skipped:
                    self.unnamed[kind] = self.unnamed.get(kind, 0) + p.numel()
        self.all_elements = sum(sizes.values())

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


def plan_conversion(
    model: nn.Module,
    config: Float8LinearConfig | str | None,
    module_filter_fn: ModuleFilter | None,
    caller: str,
    *,
    replaces_weights: bool = False,
    takes_experts: bool = True,
) -> ConversionPlan:
    """Choose the layers of a model that a conversion takes.

    ``config``, or its recipe's name, is for layers that are not in float8 yet. ``module_filter_fn``
    is called with each candidate and its name; None takes every layer, or for training what
    `chosen_by_default` takes. ``caller`` is the public function, for messages. With
    ``replaces_weights``, the caller replaces the high-precision weights. Layers that are in float8
    already are then taken, and those whose weight another module reads are left.
    ``takes_experts=False`` leaves experts. Raises TypeError for an argument of another type, and
    ValueError if a module of the model has a ``reason_against_conversion``, as a transformed one
    does.
    """
    check_module(model, caller)
    found = Float8LinearConfig() if config is None else check_config(config, caller)
    for module in model.modules():
        if (reason := getattr(module, "reason_against_conversion", None)) is not None:
            raise ValueError(f"nothing was converted: {reason}")
    plan = ConversionPlan(caller, found, config is not None, module_filter_fn)
    is_wanted = module_filter_fn or (all_of() if replaces_weights else chosen_by_default(found))
    routers = routers_of(model)
    for fqn, module in model.named_modules():
        is_candidate = own_config(module) is not None or rule_of(module) is not None
        reason = routers.get(module) or reason_to_leave(module, fqn, found, replaces_weights)
        if is_candidate and stacked_weights(module) and not takes_experts:
            reason = f"{caller} takes the weights of linear layers, and none of experts"
        if reason is None and is_candidate:
            reason = why_not(is_wanted, module, fqn) or odd_sizes(module, found)
        if reason is not None:
            plan.leave(fqn, reason)
        elif is_candidate:
            plan.take(fqn, module)
    if replaces_weights:
        for fqn, reason in read_elsewhere(model, plan.layers).items():
            plan.leave(fqn, reason)
    return plan


@dataclass
class ConversionPlan:
    """The layers that a conversion takes.

    Attributes:
        caller: the public function, for messages.
        config: of the layers that are not in float8 yet.
        config_is_given: whether the user asked for ``config``, which is the default otherwise.
        module_filter_fn: the user's filter.
        layers: name -> layer, each once, under its first name.
        configs: name -> the layer's config: its own, where it is in float8 already.
        conversion: why the other layers are left alone; after `convert`, the converted layers too.
    """

    caller: str
    config: Float8LinearConfig
    config_is_given: bool
    module_filter_fn: ModuleFilter | None = None
    layers: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, Float8LinearConfig] = field(default_factory=dict)
    conversion: Conversion = field(default_factory=Conversion)

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
            problems.append((fqn, rule_of_candidate(layer).refuses(layer, self.configs[fqn])))
        found = [(fqn, reason) for fqn, reason in problems if reason is not None]
        if found:
            lines = ["nothing was converted, because some layers cannot be:", *folded(found)]
            raise ValueError("\n  ".join(lines))

    def warn_of_fixed_scales(self) -> None:
        """Warn of recipe ``unit``, whose scale of 1 moves no tensor into the format's range."""
        layers = self.plain_layers
        scaled = [fqn for fqn, m in layers.items() if not rule_of_candidate(m).unit_scaled]
        if self.config == RECIPES["unit"] and scaled:
            warnings.warn(
                f'recipe "unit" casts with a scale of 1, and {len(scaled)} of {len(layers)} layers '
                f"(first: {named(scaled[0])}) are not unit-scaled: small weights and gradients "
                "flush to zero. Call float8.unit_scaling's unit_scale, or take a dynamic recipe",
                stacklevel=4,
            )

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace the layers that are not in float8 yet.

        Returns:
            ``model``, or the new layer if ``model`` itself was one.
        """
        self.warn_of_fixed_scales()
        importlib.import_module("float8.kernels.flops")  # which imports Triton, where it is
        plain, swapped = self.plain_layers, {}
        for fqn, layer in plain.items():
            swapped[layer] = rule_of_candidate(layer).convert(layer, self.configs[fqn], fqn)
        self.layers = {fqn: swapped.get(layer, layer) for fqn, layer in self.layers.items()}
        self.conversion.converted = list(self.layers)
        self.conversion.experts = [fqn for fqn, m in plain.items() if rule_of_candidate(m).stacked]
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
        conversion._count(model)
        untold.add(model)
        model.float8_conversion = conversion  # type: ignore[assignment]
        logger.info("%s", conversion)
        kept = [(fqn, why) for fqn, why in conversion.skipped.items() if why == NO_HISTORY]
        is_other = self.config_is_given and any(c != self.config for c in own.values())
        if not conversion.converted and (not own or is_other):
            warnings.warn(f"{self.caller} converted no layer:{self.reasons}", stacklevel=3)
        elif kept:
            lines = "\n  ".join(folded(kept))
            warnings.warn(f"experts stay in high precision: {lines}", stacklevel=3)

    @property
    def reasons(self) -> str:
        """Why layers were left alone, a line each, for messages."""
        lines = folded(self.conversion.skipped.items())
        return "".join(f"\n  {line}" for line in lines) or " the model has no nn.Linear"


def replace_children(root: nn.Module, swapped: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules of a tree; returns the root, which may be one of them."""
    # A list first: the tree must not change while it is walked. A replaced module may be a parent.
    for parent in [*root.modules(), *swapped.values()]:
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return swapped.get(root, root)
