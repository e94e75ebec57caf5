"""Predicts which layers gain from float8: `estimate` reports it, `faster_layers` filters by it.

`experts_that_gain` is the filter of conversion where the user gives none.

`float8.estimate.roofline` gives the time of a layer in bfloat16 and in float8. The library's own
checks say what a device would refuse.

The layers of a model are those that conversion would take: modules whose type is exactly
``nn.Linear`` or a registered type, and `Float8Linear`s, each once, under however many names it is
registered. Only sizes, dtypes and ``requires_grad`` are read: the model may be on the meta device.
Every layer is assumed to see the same number of tokens, in one call per batch. Where that is not so
(a layer called twice), give shapes instead of the model. Experts that conversion finds are one
grouped GEMM per stack of weights, and share ``tokens * experts_per_token`` rows: a shape
(T, K, N, E).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from float8.arguments import check_integer
from float8.config import RECIPES, Float8LinearConfig, check_config
from float8.convert.filters import DEFAULT_FILTERS, Because, ModuleFilter
from float8.convert.reasons import rule_of
from float8.estimate.devices import DEVICES, Device, find_device
from float8.estimate.roofline import Shape, Use, kinds_of_plan, layer_seconds, saved_bytes
from float8.estimate.table import Estimate, LayerEstimate, Prediction
from float8.experts.modules import Float8Experts
from float8.kernels import family_of
from float8.kernels.casts import KERNELS
from float8.kernels.cublas import ALIGNMENT
from float8.linear.layer import Float8Linear
from float8.linear.module import stacked_weights
from float8.linear.plan import LinearPlan, plan_for
from float8.linear.refusals import reason_against_call, reason_against_layer

Recipe = str | Float8LinearConfig
Recipes = Recipe | Sequence[Recipe] | Mapping[str, Recipe]
Shapes = Iterable[Shape | Sequence[int]]


@dataclass(frozen=True)
class Layer:
    """One layer and its batch; ``dtype`` and ``trains`` describe its weight."""

    name: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    trains: bool = True


def layers_of(
    model_or_shapes: nn.Module | Shapes, tokens: int | None, experts_per_token: int = 1
) -> list[Layer]:
    """The layers of a model for a batch of ``tokens``, or one layer per shape.

    Raises:
        ValueError: nothing to predict, or ``tokens`` beside shapes.
        TypeError: a model without ``tokens``.
    """
    if isinstance(model_or_shapes, nn.Module):
        check_integer(tokens, "tokens (batch size * sequence length)", 1)
        assert tokens is not None
        layers = [
            layer
            for name, module in model_or_shapes.named_modules()
            for layer in layers_in(module, name or type(module).__name__, tokens, experts_per_token)
        ]
    else:
        shapes = [s if isinstance(s, Shape) else Shape(*s) for s in model_or_shapes]
        layers = [Layer("", shape) for shape in shapes if tokens is None]
    if not layers:
        raise ValueError(
            "estimate: nothing to predict; give a model that has an nn.Linear, or shapes without "
            "tokens: (M, K, N), which are tokens, in_features, out_features, or (M, K, N, experts)"
        )
    return layers


def layers_in(module: Any, name: str, tokens: int, experts_per_token: int) -> list[Layer]:
    """A linear layer, or one layer per stack of weights of experts; none for empty weights."""
    rule, found = rule_of(module), []
    if isinstance(module, Float8Experts) or (rule is not None and rule.stacked):
        for own, w in stacked_weights(module).items():
            E, N, K = (w.mT if getattr(module, "is_transposed", False) else w).shape
            if w.numel():
                found.append((f"{name}.{own}", Shape(tokens * experts_per_token, K, N, E), w))
    elif (rule is not None or isinstance(module, Float8Linear)) and module.weight.numel():
        shape = Shape(tokens, module.in_features, module.out_features)
        found.append((name, shape, module.weight))
    return [Layer(n, shape, w.dtype, w.requires_grad) for n, shape, w in found]


def reason_against(
    layer: Layer, config: Float8LinearConfig, device: Device, use: Use
) -> str | None:
    """The reason why a device would refuse a layer with this config, as training would, or None."""
    M, K, N, E = vars(layer.shape).values()
    if E is not None and config.uses_delayed_scaling:
        return "experts have no history of amaxes; take a recipe with dynamic scales"
    for option in ("emulate", "smooth_input", "mxfp4_weights"):
        if getattr(config, option):
            return f"the time of {option}=True is not predicted; leave it out for a lower bound"
    weight = torch.empty(N, K, dtype=layer.dtype, device="meta", requires_grad=use.weight_trains)
    if (reason := reason_against_layer(weight, config)) is not None:
        return reason
    plan = _plan(layer, config, device)
    reason = reason_against_call(plan, N, K, M, use.training, "grad_weight" in use.gemms)
    kinds = kinds_of_plan(plan, use)
    missing = sorted(set(kinds.values()) - set(device.products))
    if reason is None and missing:
        return f"{device.name} has no figures for {' and '.join(missing)} GEMMs"
    return reason


def _plan(layer: Layer, config: Float8LinearConfig, device: Device) -> LinearPlan:
    # float32 parameters are assumed to run under autocast to bfloat16.
    dtype = torch.bfloat16 if layer.dtype == torch.float32 else layer.dtype
    return plan_for(config, device.arch, dtype, grouped=layer.shape.E is not None)


def predict(layer: Layer, config: Float8LinearConfig, device: Device, use: Use) -> Prediction:
    """The time and memory of one layer in float8, or why the device refuses it."""
    use = replace(use, converts_weight=layer.dtype == torch.float32)
    plain = layer_seconds(device, layer.shape, None, use).total
    if (reason := reason_against(layer, config, device, use)) is not None:
        return Prediction(plain, refused=reason)
    shape = layer.shape
    if config.pad_inner_dim:  # to multiples of 16
        M, K, N = (-(-size // ALIGNMENT) * ALIGNMENT for size in (shape.M, shape.K, shape.N))
        shape = Shape(M, K, N, shape.E)
    plan = _plan(layer, config, device)
    seconds = layer_seconds(device, shape, plan, use)
    saved = saved_bytes(layer.shape, None, use) - saved_bytes(shape, plan, use)
    return Prediction(plain, seconds, saved)


def row_of(
    layer: Layer, configs: Mapping[str, Float8LinearConfig], device: Device, use: Use
) -> LayerEstimate:
    """The time of a layer in bfloat16, and its predictions by each config."""
    use = replace(use, weight_trains=layer.trains, plain_casts=device.arch not in KERNELS)
    plain = layer_seconds(device, layer.shape, None, use).total
    recipes = {name: predict(layer, config, device, use) for name, config in configs.items()}
    return LayerEstimate(layer.name, layer.shape, plain, recipes)


def named_configs(recipes: Recipes) -> dict[str, Float8LinearConfig]:
    """Recipe names and configs as name -> config, in order.

    Raises:
        TypeError: something that is neither.
        ValueError: an unknown name.
    """
    if isinstance(recipes, (str, Float8LinearConfig)):
        recipes = [recipes]
    names = {config: name for name, config in reversed(RECIPES.items())}
    pairs = recipes.items() if isinstance(recipes, Mapping) else [(each, each) for each in recipes]
    found: dict[str, Float8LinearConfig] = {}
    for i, (name, recipe) in enumerate(pairs, 1):
        config = check_config(recipe, "estimate")
        found[name if isinstance(name, str) else names.get(config, f"config {i}")] = config
    return found


# --- public functions


def estimate(
    model: nn.Module | Shapes,
    tokens: int | None = None,
    device: str | Path | Device = "H100",
    recipes: Recipes = ("tensorwise", "rowwise"),
    *,
    training: bool = True,
    cached_microbatches: int = 0,
    experts_per_token: int = 1,
) -> Estimate:
    """Predict time and memory in float8 of each layer of a model, without running it.

    Times are device time of one batch of ``tokens``, forward and backward, with bfloat16 as the
    compute dtype. `float8.estimate.roofline` lists what is not modelled. Layers with float32
    weights are assumed to run under autocast to bfloat16.

    Args:
        model: any module, on any device, the meta device too; or shapes ``(M, K, N)``, or
            ``(M, K, N, E)`` for `float8.grouped_mm`. A layer that is registered several times is
            counted once.
        tokens: rows of every layer's input in one forward (batch size * sequence length).
        device: a name of `DEVICES`, a file that `Device.save` wrote, or a `Device`.
        recipes: names of recipes, or configs, one or several; a mapping gives
            each its name in the table.
        training: False predicts forward alone.
        cached_microbatches: of a step, that share a cast of each weight (`float8.cached_weights`);
            0 casts it in every forward and backward. The 2 bytes per weight element of the cache (1
            under ``dequantize_in_backward``) are subtracted from the memory saved.
        experts_per_token: how many experts of a mixture read each token.

    Returns:
        The rows and totals; printed, it is the table.

    Raises:
        TypeError: a recipe is none of the above.
        ValueError: an unknown device or recipe, ``tokens`` < 1, or a model without ``nn.Linear``.
    """
    configs, layers = named_configs(recipes), layers_of(model, tokens, experts_per_token)
    use = Use(training, True, cached_microbatches)
    found = find_device(device)
    return Estimate(found, use, [row_of(layer, configs, found, use) for layer in layers])


def faster_layers(
    recipe: Recipe,
    tokens: int,
    device: str | Path | Device = "H100",
    min_speedup: float = 1.0,
    *,
    training: bool = True,
    cached_microbatches: int = 0,
    experts_per_token: int = 1,
) -> ModuleFilter:
    """A filter for ``convert_to_float8_training`` that accepts the layers predicted to gain.

    ::

        convert_to_float8_training(
            model, config=config, module_filter_fn=faster_layers(config, tokens=16384)
        )

    Args:
        recipe: the recipe or config that the model is converted with.
        tokens, device, training, cached_microbatches, experts_per_token: as `estimate`.
        min_speedup: convert where the predicted speed-up exceeds this. 1 means no loss; a larger
            one, such as 1.1, also skips layers that gain less than the prediction's error.

    Returns:
        ``(module, fqn) -> bool``; False also where the device would refuse the layer.

    Raises:
        TypeError, ValueError: as `estimate`.
    """
    config = check_config(recipe, "faster_layers")
    check_integer(tokens, "tokens (batch size * sequence length)", 1)
    use = Use(training, True, cached_microbatches)
    found = find_device(device)

    def reason(module: nn.Module, fqn: str) -> str | None:
        layers = layers_in(module, fqn, tokens, experts_per_token)
        if not layers:
            return "its weight is empty"
        speedup = _speedup(layers, config, found, use)
        if isinstance(speedup, str):
            return f"{found.name} refuses it: {speedup}"
        if speedup > min_speedup:
            return None
        return f"its predicted speed-up on {found.name} is {speedup:.2f}x"

    return Because(reason)


def _speedup(
    layers: Iterable[Layer], config: Float8LinearConfig, device: Device, use: Use
) -> float | str:
    """The predicted speed-up of layers together, or why the device refuses one of them."""
    rows = [row_of(layer, {"": config}, device, use) for layer in layers]
    refused = [why for row in rows if (why := row.recipes[""].refused) is not None]
    return refused[0] if refused else Estimate(device, use, rows).total("").speedup


# --- which experts conversion takes by default


BATCH_ROWS = 16_384  # of all experts together: 8,192 tokens on a GPU, each read by two experts


def experts_that_gain(config: Float8LinearConfig) -> ModuleFilter:
    """The filter of `convert_to_float8_training` where a user gives none.

    On Hopper (an H100, or an H200) it leaves experts in high precision that are predicted to lose.
    Their tokens are not known: `BATCH_ROWS` are assumed, the same number for each expert, and
    weights in bfloat16, as FSDP2 gathers them. Other layers, experts on other machines, and those
    without a prediction are converted.

    Args:
        config: the conversion's.
    """

    def reason(module: nn.Module, fqn: str) -> str | None:
        rule = rule_of(module)
        if rule is None or not rule.stacked or not torch.cuda.is_available():
            return None
        stacks = layers_in(module, "", BATCH_ROWS, 1)
        if not stacks or family_of(torch.device("cuda")) != "sm_90":
            return None
        device = "H200" if "H200" in torch.cuda.get_device_name().split() else "H100"
        gathered = [replace(stack, dtype=torch.bfloat16) for stack in stacks]
        speedup = _speedup(gathered, config, DEVICES[device], Use())
        if isinstance(speedup, str) or speedup > 1:
            return None
        return (
            f"its predicted speed-up on an {device} is {speedup:.2f}x with {BATCH_ROWS:,} rows. A "
            "module_filter_fn that accepts it converts it; faster_layers(config, tokens=...) "
            "decides by your tokens"
        )

    return Because(reason)


DEFAULT_FILTERS.append(experts_that_gain)
