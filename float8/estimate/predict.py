"""Will float8 be faster here? `estimate` says what to expect, `faster_layers` acts on it.

Both ask `float8.estimate.roofline` for the time of a layer as it is and in float8, and the
library's own checks for what the device would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from float8.arguments import described
from float8.config import RECIPES, Float8LinearConfig
from float8.convert.filters import ModuleFilter
from float8.estimate.casts import Use
from float8.estimate.devices import Device
from float8.estimate.layers import Layer, Shapes, check_tokens, layer_of, layers_of, padded, refuses
from float8.estimate.lookup import find_device
from float8.estimate.roofline import layer_seconds, saved_bytes
from float8.estimate.table import Estimate, Prediction, Row

Recipe = str | Float8LinearConfig
Recipes = Recipe | Sequence[Recipe] | Mapping[str, Recipe]


def predict(layer: Layer, config: Float8LinearConfig, device: Device, use: Use) -> Prediction:
    """What one layer does in float8, or why the device refuses it."""
    is_float32 = layer.dtype == torch.float32
    trains = use.weight_trains and layer.trains
    use = replace(use, weight_trains=trains, converts_weight=is_float32)
    if (reason := refuses(layer, config, device, use)) is not None:
        return Prediction(refused=reason)
    shape = padded(layer.shape, config, device)
    seconds = layer_seconds(device, shape, config.plan, use)
    saved = saved_bytes(layer.shape, None, use) - saved_bytes(shape, config.plan, use)
    return Prediction(seconds, saved)


def plain_seconds(layer: Layer, device: Device, use: Use) -> float:
    """What the layer takes as it is, in bfloat16."""
    use = replace(use, weight_trains=use.weight_trains and layer.trains)
    return layer_seconds(device, layer.shape, None, use).total


def named_configs(recipes: Recipes) -> dict[str, Float8LinearConfig]:
    """Recipe names and configs as name -> config, in order.

    Raises:
        TypeError: something that is neither.
        ValueError: no recipe, or an unknown name.
    """
    if isinstance(recipes, (str, Float8LinearConfig)):
        recipes = [recipes]
    if not isinstance(recipes, Iterable | None):
        raise TypeError(
            "recipes must be names of recipes or Float8LinearConfigs, one or several, got "
            f"{described(recipes)}"
        )
    if not recipes:
        raise ValueError(f"no recipe given; known: {', '.join(RECIPES)}")
    if isinstance(recipes, Mapping):
        return {name: _config(recipe) for name, recipe in recipes.items()}
    return {_name(recipe, i): _config(recipe) for i, recipe in enumerate(recipes, 1)}


def _config(recipe: object) -> Float8LinearConfig:
    if isinstance(recipe, Float8LinearConfig):
        return recipe
    if isinstance(recipe, str):
        return Float8LinearConfig.from_recipe_name(recipe)
    raise TypeError(f"a recipe is a name or a Float8LinearConfig, got {described(recipe)}")


def _name(recipe: object, number: int) -> str:
    if isinstance(recipe, str):
        return recipe
    return next((name for name, row in RECIPES.items() if row == recipe), f"config {number}")


def estimate(
    model: nn.Module | Shapes,
    tokens: int | None = None,
    device: str | Device = "H100",
    recipes: Recipes = ("tensorwise", "rowwise"),
    *,
    training: bool = True,
    weights_cached: bool = False,
    gradient_accumulation: int = 1,
    show: bool = True,
) -> Estimate:
    """What float8 would do for each linear layer of a model, before anything has run.

    Times are device time of one batch of ``tokens``: forward and backward, of bfloat16 compute,
    without what `float8.estimate.roofline` leaves out. Layers whose weights are float32 are taken
    to run under autocast to bfloat16.

    Args:
        model: any module, on any device, the meta device too; or shapes ``(M, K, N)``. A layer that
            is registered several times is counted once.
        tokens: rows of every layer's input in one forward (batch size * sequence length).
        device: a name of `DEVICES`, ``"measured"`` (this machine, in some seconds), a file that
            `Device.save` wrote, or a `Device`.
        recipes: names of recipes, or configs, one or several; a mapping names them anew.
        training: False predicts forward alone.
        weights_cached: the weight is cast once per step, not in every forward and backward; the
            2 bytes per weight element that the cache holds are taken off the memory saved.
        gradient_accumulation: microbatches per step, which share a cached cast.
        show: print the table.

    Returns:
        The rows, totals and the table as ``str``.

    Raises:
        TypeError: ``model`` is neither a module nor shapes, or ``device`` or a recipe is
            none of the above.
        ValueError: an unknown device or recipe, ``tokens`` < 1, or a model without ``nn.Linear``.
    """
    configs, layers = named_configs(recipes), layers_of(model, tokens)
    use = Use(training, True, weights_cached, gradient_accumulation)
    found = find_device(device)
    rows = [
        Row(
            layer.name,
            layer.shape,
            plain_seconds(layer, found, use),
            {name: predict(layer, config, found, use) for name, config in configs.items()},
            layer.dtype == torch.float32,
        )
        for layer in layers
    ]
    result = Estimate(found, use, rows)
    if show:
        print(result)
    return result


def faster_layers(
    recipe: Recipe,
    tokens: int,
    device: str | Device = "H100",
    min_speedup: float = 1.0,
    *,
    training: bool = True,
    weights_cached: bool = False,
    gradient_accumulation: int = 1,
) -> ModuleFilter:
    """A filter for ``convert_to_float8_training`` that takes the layers predicted to gain.

    ::

        convert_to_float8_training(
            model, config=config, module_filter_fn=faster_layers(config, tokens=16384)
        )

    Args:
        recipe: the recipe or config that the model is converted with.
        tokens, device, training, weights_cached, gradient_accumulation: as `estimate`.
        min_speedup: convert where the predicted speed-up exceeds this. 1 is no loss; ask for more,
            such as 1.1, to leave alone what gains less than the prediction's error.

    Returns:
        ``(module, fqn) -> bool``; False also where the device would refuse the layer.

    Raises:
        TypeError: as `estimate`, or min_speedup is not a number.
        ValueError: as `estimate`, or min_speedup is not above 0.
    """
    if isinstance(min_speedup, bool) or not isinstance(min_speedup, (int, float)):
        raise TypeError(f"min_speedup={min_speedup!r} must be a number, such as 1.1")
    if not min_speedup > 0:
        raise ValueError(f"min_speedup={min_speedup} must be above 0; 1 means no loss")
    (config,) = named_configs([recipe]).values()
    check_tokens(tokens)
    use, found = Use(training, True, weights_cached, gradient_accumulation), find_device(device)

    def is_faster(module: nn.Module, fqn: str) -> bool:
        if 0 in (module.in_features, module.out_features):
            return False
        layer = layer_of(module, fqn, tokens)
        speedup = predict(layer, config, found, use).speedup(plain_seconds(layer, found, use))
        return speedup is not None and speedup > min_speedup

    return is_faster
