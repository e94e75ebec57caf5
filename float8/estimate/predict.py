"""Predicts which layers gain from float8: `estimate` reports it, `faster_layers` filters by it.

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
from torch import Tensor, nn

from float8.arguments import check_type
from float8.config import RECIPES, Float8LinearConfig
from float8.convert.filters import ModuleFilter, with_reason
from float8.estimate.devices import Device, find_device
from float8.estimate.roofline import (
    Shape,
    Use,
    check_count,
    kinds_of_plan,
    layer_seconds,
    saved_bytes,
)
from float8.estimate.table import Estimate, LayerEstimate, Prediction
from float8.experts.modules import Float8Experts
from float8.kernels.cublas import ALIGNMENT
from float8.linear.layer import Float8Linear
from float8.linear.plan import bind
from float8.linear.refusals import refuses_call, refuses_layer
from float8.linear.registration import rule_of, stacked_weights

Recipe = str | Float8LinearConfig
Recipes = Recipe | Sequence[Recipe] | Mapping[str, Recipe]
Shapes = Iterable[Shape | Sequence[int]]


# --- layers


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
        TypeError: neither a module nor shapes.
        ValueError: nothing to predict, ``tokens`` missing, or given beside shapes.
    """
    if isinstance(model_or_shapes, nn.Module):
        return _of_model(model_or_shapes, check_tokens(tokens), experts_per_token)
    such_as = f"a module, such as nn.Linear(64, 64), or a list of shapes {_A_SHAPE}"
    is_text = isinstance(model_or_shapes, (str, type))
    check_type(None if is_text else model_or_shapes, Iterable, "estimate", "model", such_as)
    shapes = list(model_or_shapes)
    is_shape = [isinstance(s, Shape) or _has_sizes(s) for s in shapes]
    if tokens is not None or not shapes or not all(is_shape):
        raise ValueError(
            f"each shape must be {_A_SHAPE}, and tokens None beside them; got {shapes!r} and "
            f"tokens={tokens}"
        )
    return [Layer("", s if isinstance(s, Shape) else Shape(*s)) for s in shapes]


def check_tokens(tokens: int | None) -> int:
    """``tokens``, or an error that says what it should be."""
    return check_count(tokens, "rows of a layer's input (batch size * sequence length): tokens")


_A_SHAPE = "(M, K, N): tokens, in_features, out_features; or (M, K, N, E): with experts"


def _has_sizes(shape: object) -> bool:
    return isinstance(shape, Sequence) and len(shape) in (3, 4)


def layers_in(module: nn.Module, name: str, tokens: int, experts_per_token: int) -> list[Layer]:
    """A linear layer, none if it is empty; or one layer per stack of weights of experts."""
    if not _holds_experts(module):
        N, K = (getattr(module, size) for size in ("out_features", "in_features"))
        weight: Tensor = module.weight  # type: ignore[assignment]
        shape = Shape(tokens, K, N) if N and K else None
        return [Layer(name, shape, weight.dtype, weight.requires_grad)] if shape else []
    transposed = getattr(module, "is_transposed", False)
    return [
        Layer(f"{name}.{own}", Shape(tokens * experts_per_token, K, N, E), w.dtype, w.requires_grad)
        for own, w in stacked_weights(module).items()
        for E, N, K in [(w.mT if transposed else w).shape]
    ]


def _holds_experts(module: nn.Module) -> bool:
    rule = rule_of(module)
    return isinstance(module, Float8Experts) or (rule is not None and rule.stacked)


def _of_model(model: nn.Module, tokens: int, experts_per_token: int) -> list[Layer]:
    layers = [
        layer
        for name, module in model.named_modules()
        if _holds_experts(module)
        or (isinstance(module, nn.Linear) and (rule_of(module) or isinstance(module, Float8Linear)))
        for layer in layers_in(module, name or type(module).__name__, tokens, experts_per_token)
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear: there is nothing that float8 would convert"
        )
    return layers


def refuses(layer: Layer, config: Float8LinearConfig, device: Device, use: Use) -> str | None:
    """The reason why a device would refuse a layer with this config, as training would, or None."""
    M, K, N = layer.shape.M, layer.shape.K, layer.shape.N
    weight = torch.empty(N, K, dtype=layer.dtype, device="meta", requires_grad=use.weight_trains)
    reason = refuses_layer(weight, config)
    if layer.shape.E is not None and config.uses_delayed_scaling:
        return "experts have no history of amaxes; take a recipe with dynamic scales"
    if config.smooth_input:
        return "the time of smooth_input=True is not predicted; leave it out for a lower bound"
    if reason is None and not device.emulates:
        if config.emulate:
            return (
                f"emulate=True is plain PyTorch, which {device.name} has no figures for; unset it"
            )
        # float32 parameters are assumed to run under autocast to bfloat16.
        dtype = torch.bfloat16 if layer.dtype == torch.float32 else layer.dtype
        plan = bind(config.plan, device.arch, dtype, grouped=layer.shape.E is not None)
        reason = refuses_call(plan, N, K, M, use.training, use.training and use.weight_trains)
    missing = sorted(set(kinds_of_plan(config.plan, use).values()) - set(device.products))
    if reason is None and missing:
        reason = f"{device.name} has no figures for {' and '.join(missing)} GEMMs"
    return reason


def padded(shape: Shape, config: Float8LinearConfig, device: Device) -> Shape:
    """The shape that runs: on GPUs ``pad_inner_dim`` rounds sizes up to multiples of 16."""
    if device.emulates or not config.pad_inner_dim:
        return shape
    M, K, N = (-(-size // ALIGNMENT) * ALIGNMENT for size in (shape.M, shape.K, shape.N))
    return Shape(M, K, N, shape.E)


def predict(layer: Layer, config: Float8LinearConfig, device: Device, use: Use) -> Prediction:
    """The time and memory of one layer in float8, or why the device refuses it."""
    is_float32 = layer.dtype == torch.float32
    trains = use.weight_trains and layer.trains
    use = replace(use, weight_trains=trains, converts_weight=is_float32)
    if (reason := refuses(layer, config, device, use)) is not None:
        return Prediction(refused=reason)
    shape = padded(layer.shape, config, device)
    seconds = layer_seconds(device, shape, config.plan, use)
    float8_saved = saved_bytes(shape, config.plan, use, device.emulates)
    saved = saved_bytes(layer.shape, None, use) - float8_saved
    return Prediction(seconds, saved)


def plain_seconds(layer: Layer, device: Device, use: Use) -> float:
    """The time of the plain layer, in bfloat16."""
    use = replace(use, weight_trains=use.weight_trains and layer.trains)
    return layer_seconds(device, layer.shape, None, use).total


# --- recipes


_RECIPES = "a name of a recipe or a Float8LinearConfig, one or several"


def named_configs(recipes: Recipes) -> dict[str, Float8LinearConfig]:
    """Recipe names and configs as name -> config, in order.

    Raises:
        TypeError: something that is neither.
        ValueError: no recipe, or an unknown name.
    """
    if isinstance(recipes, (str, Float8LinearConfig)):
        recipes = [recipes]
    check_type(recipes, Iterable, "estimate", "recipes", _RECIPES)
    if not recipes:
        raise ValueError(f"no recipe given; known: {', '.join(RECIPES)}")
    names = {config: name for name, config in reversed(RECIPES.items())}
    pairs = recipes.items() if isinstance(recipes, Mapping) else [(each, each) for each in recipes]
    found: dict[str, Float8LinearConfig] = {}
    for i, (name, recipe) in enumerate(pairs, 1):
        config: Any = recipe
        if isinstance(recipe, str):
            config = Float8LinearConfig.from_recipe_name(recipe)
        check_type(config, Float8LinearConfig, "estimate", "a recipe", _RECIPES)
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
    weights_cached: bool = False,
    gradient_accumulation: int = 1,
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
        weights_cached: the weight is cast once per step, not in every forward and backward; the
            2 bytes per weight element of the cache are subtracted from the memory saved.
        gradient_accumulation: microbatches per step, which share a cached cast.
        experts_per_token: how many experts of a mixture read each token.

    Returns:
        The rows and totals; printed, it is the table.

    Raises:
        TypeError: ``model`` is neither a module nor shapes, or ``device`` or a recipe is
            none of the above.
        ValueError: an unknown device or recipe, ``tokens`` < 1, or a model without ``nn.Linear``.
    """
    configs, layers = named_configs(recipes), layers_of(model, tokens, experts_per_token)
    use = Use(training, True, weights_cached, gradient_accumulation)
    found = find_device(device)
    rows = [
        LayerEstimate(
            layer.name,
            layer.shape,
            plain_seconds(layer, found, use),
            {name: predict(layer, config, found, use) for name, config in configs.items()},
            layer.dtype == torch.float32,
        )
        for layer in layers
    ]
    return Estimate(found, use, rows)


def faster_layers(
    recipe: Recipe,
    tokens: int,
    device: str | Path | Device = "H100",
    min_speedup: float = 1.0,
    *,
    training: bool = True,
    weights_cached: bool = False,
    gradient_accumulation: int = 1,
    experts_per_token: int = 1,
) -> ModuleFilter:
    """A filter for ``convert_to_float8_training`` that accepts the layers predicted to gain.

    ::

        convert_to_float8_training(
            model, config=config, module_filter_fn=faster_layers(config, tokens=16384)
        )

    Args:
        recipe: the recipe or config that the model is converted with.
        tokens, device, training, weights_cached, gradient_accumulation, experts_per_token: as
            `estimate`.
        min_speedup: convert where the predicted speed-up exceeds this. 1 means no loss; a larger
            one, such as 1.1, also skips layers that gain less than the prediction's error.

    Returns:
        ``(module, fqn) -> bool``; False also where the device would refuse the layer.

    Raises:
        TypeError: as `estimate`, or min_speedup is not a number.
        ValueError: as `estimate`, or min_speedup is not above 0.
    """
    check_type(min_speedup, (int, float), "faster_layers", "min_speedup", "a number, such as 1.1")
    if not min_speedup > 0:
        raise ValueError(f"min_speedup={min_speedup} must be above 0; 1 means no loss")
    (config,) = named_configs([recipe]).values()
    check_tokens(tokens)
    use = Use(training, True, weights_cached, gradient_accumulation)
    found = find_device(device)

    def predicted(module: nn.Module, fqn: str) -> tuple[float, str]:
        layers = layers_in(module, fqn, tokens, experts_per_token)
        if not layers:
            return 0.0, "its weight is empty"
        times = [predict(layer, config, found, use) for layer in layers]
        for time in times:
            if time.seconds is None:
                return 0.0, f"{found.name} refuses it: {time.refused}"
        plain = sum(plain_seconds(layer, found, use) for layer in layers)
        speedup = plain / sum(time.seconds.total for time in times if time.seconds)
        return speedup, f"its predicted speed-up on {found.name} is {speedup:.2f}x"

    return with_reason(
        lambda module, fqn: predicted(module, fqn)[0] > min_speedup,
        lambda module, fqn: predicted(module, fqn)[1],
    )
