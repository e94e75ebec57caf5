"""The adapter that all integrations share: convert a model, then call `after_step` once per step.

An integration is a thin file that says where its framework does either. It

1. calls `warn_of_version`: the framework changes what it calls between minor versions;
2. makes an `Adapter` of the user's settings, in this library's terms or in those of Accelerate,
   TransformerEngine or torchao;
3. calls `Adapter.convert` before the framework wraps the model, with an optimizer that was built
   before, if there is one;
4. calls `float8.after_step` after each optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from float8.config import Float8LinearConfig, check_config
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import ModuleFilter, all_of, chosen_by_default
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear
from float8.linear.module import Float8Module, own_config


def warn_of_version(package: str, first: str, beyond: str) -> None:
    """Warn if the version of ``package`` is not in the range that was tested.

    The range ends at the next minor version after the newest one that the tests ran against.
    """
    version = metadata.version(package)
    if not TorchVersion(first) <= version < TorchVersion(beyond):
        warnings.warn(
            f"float8.integrations was tested with {package} >= {first}, < {beyond}, and {version} "
            "is installed: it may have changed what it calls",
            stacklevel=3,
        )


def as_config(config: Any) -> Float8LinearConfig | None:
    """A config from the settings that a user of a framework may have.

    These are None; a `Float8LinearConfig`; a recipe's name; Accelerate's ``AORecipeKwargs`` or a
    torchao config; or TransformerEngine's arguments: Accelerate's ``TERecipeKwargs``, a recipe
    object or a mapping. Raises ValueError or TypeError for an unknown recipe or argument.
    """
    kind, origin = type(config).__name__, type(config).__module__.partition(".")[0]
    if kind == "AORecipeKwargs":
        config, origin = config.config, "torchao"
    if origin == "torchao":
        return Float8LinearConfig.from_torchao(config)
    if isinstance(config, Mapping) or kind == "TERecipeKwargs" or origin == "transformer_engine":
        return Float8LinearConfig.from_te_recipe(config)
    return None if config is None else check_config(config)


class Adapter:
    """How a framework's models become float8.

    Args:
        config: settings that `as_config` reads. Those of Accelerate may have a filter, and say how
            to evaluate.
        module_filter_fn: as in `float8.convert_to_float8_training`.
        float8_in_evaluation: keep float8 in eval mode where gradients are disabled; None: as the
            settings say, or False.
    """

    def __init__(
        self,
        config: Any = None,
        module_filter_fn: ModuleFilter | None = None,
        float8_in_evaluation: bool | None = None,
    ) -> None:
        self.config = as_config(config)
        self.module_filter_fn = module_filter_fn or getattr(config, "module_filter_func", None)
        settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        said = bool(settings.get("use_autocast_during_eval"))  # of Accelerate
        self.float8_in_evaluation = said if float8_in_evaluation is None else float8_in_evaluation

    def convert(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        default_filter: ModuleFilter | None = None,
    ) -> nn.Module:
        """Convert a model; one that is converted already keeps its layers.

        An optimizer that was built before gets the Parameters that conversion makes
        (``enable_fsdp_float8_all_gather``), with its states.

        Raises:
            ValueError: the optimizer is another model's, a layer was converted before with another
                config, or layers cannot be converted.
        """
        if optimizer is not None:
            check_optimizer(optimizer, model)
        if not is_converted(model):
            before = dict(model.named_parameters(remove_duplicate=False))
            chosen = self.module_filter_fn
            if chosen is None and default_filter is not None:
                by_default = chosen_by_default(self.config or Float8LinearConfig())
                chosen = all_of(default_filter, by_default)
            model = convert_to_float8_training(model, config=self.config, module_filter_fn=chosen)
            after = dict(model.named_parameters(remove_duplicate=False))
            replaced = {p: after[name] for name, p in before.items() if after[name] is not p}
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["params"] = [replaced.get(p, p) for p in group["params"]]
                for old in replaced.keys() & optimizer.state.keys():
                    optimizer.state[replaced[old]] = optimizer.state.pop(old)
        elif self.config is not None:
            _check_same_config(model, self.config)
        # A framework's evaluation loop has no place for `with float8.high_precision(model):`, so
        # each module decides by itself. Wrappers need not know, nor does code that calls a part of
        # the model, as generation does with an encoder.
        for module in model.modules():
            if isinstance(module, Float8Module):
                module.evaluates_in_high_precision = not self.float8_in_evaluation
        return model


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ValueError if none of the optimizer's parameters is the model's.

    One that holds some parameters which conversion has replaced raises an error in its first step.
    """
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if stepped and not any(id(p) in own for p in stepped):
        raise ValueError(
            f"none of the {len(stepped)} parameters of this {type(optimizer).__name__} is one of "
            f"the {type(model).__name__}'s: build it after the last change to the model"
        )


def is_converted(model: nn.Module) -> bool:
    """Whether any layer or experts are in float8."""
    return any(own_config(m) is not None for m in model.modules())


def _check_same_config(model: nn.Module, config: Float8LinearConfig) -> None:
    for fqn, layer in model.named_modules():
        # Experts have no delayed scaling, and may have been converted before all else.
        differs = isinstance(layer, Float8Linear) or not config.uses_delayed_scaling
        if differs and own_config(layer) not in (None, config):
            raise ValueError(
                f"{fqn or 'the model'} was converted before with another config: leave this one "
                "out, or make it plain with convert_from_float8_training(model) first"
            )


def refuse_fp8(mixed_precision: str, backend: str) -> None:
    """Raise ValueError if Accelerate's own FP8 settings have it convert the model by itself.

    ``mixed_precision`` is "no", "fp16", "bf16" or "fp8". ``backend`` is "TE", "AO", "MSAMP", or
    "NO" if none is chosen.
    """
    if mixed_precision == "fp8" or backend.upper() != "NO":
        raise ValueError(
            f"mixed_precision={mixed_precision!r} and the FP8 backend {backend} have Accelerate "
            "convert the model by another package: take bf16 (in the file of accelerate config "
            "`mixed_precision: bf16`), and give the file's fp8_config here, as a mapping"
        )


def delayed_casts(model: nn.Module) -> dict[str, DelayedCast]:
    """The casts that keep a history, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, DelayedCast)}
