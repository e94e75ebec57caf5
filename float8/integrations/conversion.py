"""What integrations do before a framework takes over: a config, one conversion, its optimizer.

A framework is given a model and perhaps an optimizer, once; what a bare loop does in four lines has
to have happened by then, in the right order:

1. `as_config`: what the user said, in this package's words or in those of Accelerate's and
   TransformerEngine's or torchao's settings, becomes a `Float8LinearConfig`;
2. `convert`: layers are swapped once. A model that is converted already stays as it is, if its
   config is the one asked for;
3. `follow`: where conversion replaced Parameters (``enable_fsdp_float8_all_gather``), an optimizer
   that was built before holds the new ones from here on, with its states;
4. `check_optimizer`: one that still holds others would train nothing, and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from float8.config import Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import ModuleFilter
from float8.distributed.replaced_parameters import refuses_optimizer
from float8.linear.layer import Float8Linear


def as_config(config: Any) -> Float8LinearConfig | None:
    """A config from whatever a user of a framework may have at hand.

    Args:
        config: None; a `Float8LinearConfig`; a recipe's name; Accelerate's ``AORecipeKwargs`` or
            a torchao config; or TransformerEngine's arguments: Accelerate's ``TERecipeKwargs``, a
            recipe object or a mapping.

    Raises:
        ValueError, TypeError: an unknown recipe, or arguments that this library does not know.
    """
    if config is None or isinstance(config, Float8LinearConfig):
        return config
    if isinstance(config, str):
        return Float8LinearConfig.from_recipe_name(config)
    if type(config).__name__ == "AORecipeKwargs":
        return Float8LinearConfig.from_torchao(config.config)
    if type(config).__module__.startswith("torchao."):
        return Float8LinearConfig.from_torchao(config)
    if type(config).__name__ == "TERecipeKwargs":
        config = vars(config)
    if isinstance(config, Mapping):
        # How to evaluate is no matter of a config; who calls asks for it.
        given = {key: value for key, value in config.items() if not _says_how_to_evaluate(key)}
        return Float8LinearConfig.from_te_recipe(given)
    if type(config).__module__.startswith("transformer_engine."):
        return Float8LinearConfig.from_te_recipe(config)
    raise TypeError(
        f"config must be a Float8LinearConfig, the name of a recipe, or TransformerEngine's or "
        f"torchao's settings, got {config!r}"
    )


def refuses_fp8(mixed_precision: str, backend: str) -> str | None:
    """The reason why Accelerate's own FP8 leaves no room for this library's, or None.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        backend: "TE", "AO", "MSAMP", or "NO" where none is chosen.
    """
    if mixed_precision != "fp8" and backend.upper() == "NO":
        return None
    return (
        f"mixed_precision={mixed_precision!r} and the FP8 backend {backend} have Accelerate "
        "convert the model by itself, by another package. In the file of accelerate config, or of "
        "accelerate launch --config_file, write `mixed_precision: bf16` and no `fp8_config` "
        "(elsewhere leave out --mixed_precision fp8, --fp8_backend and ACCELERATE_FP8_BACKEND)"
    )


def evaluates_in_float8(config: Any) -> bool:
    """Whether Accelerate's settings ask for float8 in evaluation (``use_autocast_during_eval``)."""
    settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    return any(bool(value) for key, value in settings.items() if _says_how_to_evaluate(key))


def _says_how_to_evaluate(key: object) -> bool:
    return str(key).lower().removeprefix("fp8_") == "use_autocast_during_eval"


def is_converted(model: nn.Module) -> bool:
    """Whether any layer is a `Float8Linear`."""
    return any(isinstance(m, Float8Linear) for m in model.modules())


def convert(
    model: nn.Module,
    config: Float8LinearConfig | None,
    module_filter_fn: ModuleFilter | None,
    optimizer: Optimizer | None = None,
) -> nn.Module:
    """Convert a model, and let an optimizer follow; one that is converted stays as it is.

    Raises:
        ValueError: a layer was converted before with another config, or cannot be converted.
    """
    if is_converted(model):
        if config is not None:
            _check_same_config(model, config)
        return model
    before = _named(model)
    model = convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)
    if optimizer is not None:
        after = _named(model)
        follow(optimizer, {old: after[name] for name, old in before.items()})
    return model


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _check_same_config(model: nn.Module, config: Float8LinearConfig) -> None:
    for fqn, layer in model.named_modules():
        if isinstance(layer, Float8Linear) and layer.config != config:
            raise ValueError(
                f"{fqn or 'the model'} was converted before with another config than the one given "
                "here: leave this one out to train the model as it is, or make it plain with "
                "convert_from_float8_training(model) first"
            )


def follow(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Put new Parameters in the places of those they replaced: groups and states."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old, new in replaced.items():
        if new is not old and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if the optimizer was built from parameters that the model has no more.

    Raises:
        ValueError: a weight was replaced by conversion, named by its layer; or none of the
            optimizer's parameters is the model's.
    """
    if (reason := refuses_optimizer(optimizer)) is not None:
        raise ValueError(reason)
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if held and not any(id(p) in own for p in held):
        raise ValueError(
            f"none of the {len(held)} parameters of this {type(optimizer).__name__} is one of the "
            f"{type(model).__name__}'s: it would step what the model does not use. Build it from "
            "the model's parameters, after the last change to the model"
        )
