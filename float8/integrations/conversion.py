"""The conversion of a model, as every integration makes it.

1. `require`: the framework is installed, in a version that was tested;
2. `as_config`: the user's config, in this library's terms or in those of Accelerate,
   TransformerEngine or torchao, becomes a `Float8LinearConfig`;
3. `check_optimizer`: an optimizer that holds parameters of another model, or of this one before a
   conversion, would train nothing, and is refused;
4. `convert`: layers are swapped once. Where that replaces Parameters
   (``enable_fsdp_float8_all_gather``), an optimizer that was built before gets the new ones, with
   its states;
5. `evaluate_in_high_precision`, unless the user asks for float8 there.

After each optimizer step an integration calls `float8.after_step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from float8.config import Float8LinearConfig
from float8.convert.conversion import own_config
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import ModuleFilter
from float8.distributed.replaced_parameters import refuses_optimizer
from float8.integrations.accelerate_settings import (
    is_te_recipe,
    is_torchao_recipe,
    without_evaluation,
)
from float8.linear.delayed import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.switch import Float8Module


def require(package: str, extra: str, tested: tuple[str, str]) -> None:
    """Raise ImportError if ``package`` is not installed; warn if its version is not a tested one.

    ``extra`` is the extra of this project's ``setup.py`` that installs it. ``tested`` is the first
    version that was tested, and the first one beyond them. Frameworks change what they call between
    minor versions, so a range ends at the next minor version after the newest one that the tests
    ran against.
    """
    first, beyond = tested
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"float8.integrations.{extra} needs {package}: pip install 'float8[{extra}]'"
        ) from error
    if not TorchVersion(first) <= version < TorchVersion(beyond):
        warnings.warn(
            f"float8.integrations.{extra} was tested with {package} >= {first}, < {beyond}, and "
            f"{version} is installed: it may have changed what it calls. pip install "
            f"'{package}>={first},<{beyond}' takes a tested one",
            stacklevel=3,
        )


def as_config(config: Any) -> Float8LinearConfig | None:
    """A config from the settings that a user of a framework may have.

    These are None; a `Float8LinearConfig`; a recipe's name; Accelerate's ``AORecipeKwargs`` or a
    torchao config; or TransformerEngine's arguments: Accelerate's ``TERecipeKwargs``, a recipe
    object or a mapping. Raises ValueError or TypeError for an unknown recipe or argument.
    """
    if config is None or isinstance(config, Float8LinearConfig):
        return config
    if isinstance(config, str):
        return Float8LinearConfig.from_recipe_name(config)
    if is_torchao_recipe(config):
        return Float8LinearConfig.from_torchao(config.config)
    if is_te_recipe(config):
        config = vars(config)
    if isinstance(config, Mapping):
        return Float8LinearConfig.from_te_recipe(without_evaluation(config))
    origin = type(config).__module__.partition(".")[0]
    if origin == "torchao":
        return Float8LinearConfig.from_torchao(config)
    if origin == "transformer_engine":
        return Float8LinearConfig.from_te_recipe(config)
    raise TypeError(
        f"config must be a Float8LinearConfig, the name of a recipe, or TransformerEngine's or "
        f"torchao's settings, got {config!r}"
    )


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ValueError if the optimizer was built from parameters that the model no longer has.

    The message names the layer of a weight that conversion replaced. The error is raised too if
    none of the optimizer's parameters is the model's.
    """
    if (reason := refuses_optimizer(optimizer)) is not None:
        raise ValueError(reason)
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if stepped and not any(id(p) in own for p in stepped):
        raise ValueError(
            f"none of the {len(stepped)} parameters of this {type(optimizer).__name__} is one of "
            f"the {type(model).__name__}'s: it would step what the model does not use. Build it "
            "from the model's parameters, after the last change to the model"
        )


def is_converted(model: nn.Module) -> bool:
    """Whether any layer or experts are in float8."""
    return any(own_config(m) is not None for m in model.modules())


def convert(
    model: nn.Module,
    config: Float8LinearConfig | None,
    module_filter_fn: ModuleFilter | None,
    optimizer: Optimizer | None = None,
) -> nn.Module:
    """Convert a model, and update an optimizer of it; a converted model stays as it is.

    Raises:
        ValueError: a layer was converted before with another config, or cannot be converted.
    """
    if is_converted(model):
        if config is not None:
            _check_same_config(model, config)
        return model
    before = dict(model.named_parameters(remove_duplicate=False))
    model = convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)
    if optimizer is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        replaced = {old: after[name] for name, old in before.items()}
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(p, p) for p in group["params"]]
        for old, new in replaced.items():
            if new is not old and old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
    return model


def _check_same_config(model: nn.Module, config: Float8LinearConfig) -> None:
    for fqn, layer in model.named_modules():
        own = own_config(layer)
        # Experts have no delayed scaling, and may have been converted before all else.
        differs = isinstance(layer, Float8Linear) or not config.uses_delayed_scaling
        if differs and own not in (None, config):
            raise ValueError(
                f"{fqn or 'the model'} was converted before with another config than the one given "
                "here: leave this one out to train the model as it is, or make it plain with "
                "convert_from_float8_training(model) first"
            )


def delayed_casts(model: nn.Module) -> dict[str, DelayedCast]:
    """The casts that keep a history, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, DelayedCast)}


def evaluate_in_high_precision(model: nn.Module) -> None:
    """Make a model leave float8 in eval mode where gradients are disabled.

    A framework's evaluation loop has no place for ``with float8.high_precision(model):``, so each
    module decides by itself. Wrappers (DDP, FSDP2, torch.compile) need not know, nor does code that
    calls a part of the model, as generation does with an encoder. Nothing is entered or left: an
    interrupted evaluation changes nothing, and each thread has its own gradient mode. A part of a
    model in training leaves float8 too, if it is in eval mode and under ``torch.no_grad()``.
    """
    for module in model.modules():
        if isinstance(module, Float8Module):
            module.evaluates_in_high_precision = True
