"""Swap a model's linear layers for float8 ones, and back.

Conversion checks everything before it changes anything, shares every parameter, and says what it
did: the returned module carries a `Conversion` under ``float8_conversion`` that lists what was
converted and what was left alone, and why.

Converted are modules whose type is exactly ``nn.Linear``, or a type for which a room above has
registered a rule (`register_module_rule`). Others are reported, among them the two torch modules
that go around their own Linears: ``nn.MultiheadAttention`` multiplies by ``out_proj.weight``
itself, and ``nn.TransformerEncoderLayer`` has a fused fast path for inference.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from float8.cast import DelayedCast
from float8.config import Float8LinearConfig
from float8.filters import ModuleFilter
from float8.linear import Float8Linear
from float8.refusals import refuses_layer
from float8.sync import remind_to_sync

logger = logging.getLogger("float8")
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ModuleRule:
    """How one module type becomes float8.

    Args:
        refuses: (module, config) -> the reason why it cannot be converted, or None.
        convert: (module, config, fqn) -> the float8 module, parameters shared.
    """

    refuses: Callable[[nn.Module, Float8LinearConfig], str | None]
    convert: Callable[[nn.Module, Float8LinearConfig, str], nn.Module]


MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


def register_module_rule(module_type: type[nn.Module], rule: ModuleRule) -> None:
    """Let conversion handle modules whose type is exactly ``module_type``."""
    if module_type in MODULE_RULES:
        raise ValueError(f"{module_type.__name__} already has a conversion rule")
    MODULE_RULES[module_type] = rule


register_module_rule(
    nn.Linear,
    ModuleRule(
        refuses=lambda module, config: refuses_layer(module.weight, config),  # type: ignore[arg-type]
        convert=Float8Linear.from_float,  # type: ignore[arg-type]
    ),
)


@dataclass
class Conversion:
    """What a conversion did: names of converted layers, and name -> reason of the others."""

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"converted to float8: {len(self.converted)} layers"]
        lines += [f"  left alone: {fqn}: {reason}" for fqn, reason in self.skipped.items()]
        return "\n".join(lines)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace the linear layers of ``module`` by float8 ones, in place.

    Parameters stay the same objects; mode, hooks, dtype and device stay; a layer registered under
    two names stays one layer. Convert before building the optimizer where a distributed wrapper
    replaces parameters. Converting again changes nothing. Delayed recipes need
    ``sync_float8_amax_and_scale_history(module)`` once per step.

    Args:
        module: the model; it may itself be an ``nn.Linear``.
        config: dynamic tensorwise by default.
        module_filter_fn: called with each candidate and its name; False leaves it alone. See
            `float8.filters`.

    Returns:
        ``module``, or the new layer if ``module`` itself was one.

    Raises:
        ValueError: layers that cannot be converted, each with its name and the reason; nothing
            has been changed then.
    """
    config = config or Float8LinearConfig()
    conversion = Conversion()
    candidates = _candidates(module, module_filter_fn, conversion)
    _check_all(candidates, config)
    _check_bypasses(module, conversion)
    swapped: dict[nn.Module, nn.Module] = {}
    for fqn, layer in candidates:
        swapped[layer] = MODULE_RULES[type(layer)].convert(layer, config, fqn)
        conversion.converted.append(fqn)
    module = _replace_children(module, swapped)
    module.float8_conversion = conversion  # type: ignore[assignment]
    _tell(module, conversion)
    if config.uses_delayed_scaling and swapped:
        remind_to_sync(module)
    return module


def convert_from_float8_training(module: nn.Module) -> nn.Module:
    """Replace every `Float8Linear` of ``module`` by a plain ``nn.Linear``, in place.

    The inverse of `convert_to_float8_training`: parameters, mode and hooks are shared, and the
    state dict has plain keys.
    """
    plain: dict[nn.Module, nn.Module] = {
        m: m.to_float() for m in module.modules() if isinstance(m, Float8Linear)
    }
    module = _replace_children(module, plain)
    module.__dict__.pop("float8_conversion", None)
    return module


@contextmanager
def high_precision(model: M) -> Iterator[M]:
    """Run a converted model without float8, as for evaluation; training state is untouched.

    Within it a ``state_dict()`` has the keys of the plain model.
    """
    layers = [m for m in model.modules() if isinstance(m, Float8Linear)]
    casts = [m for m in model.modules() if isinstance(m, DelayedCast)]
    before = [m.high_precision for m in layers], [m.in_state_dict for m in casts]
    for layer in layers:
        layer.high_precision = True
    for cast in casts:
        cast.in_state_dict = False
    try:
        yield model
    finally:
        for layer, was in zip(layers, before[0], strict=True):
            layer.high_precision = was
        for cast, was in zip(casts, before[1], strict=True):
            cast.in_state_dict = was


def _candidates(
    root: nn.Module, module_filter_fn: ModuleFilter | None, conversion: Conversion
) -> list[tuple[str, nn.Module]]:
    """The layers to convert, each once under its first name; reasons for the others."""
    chosen: list[tuple[str, nn.Module]] = []
    for fqn, module in root.named_modules():
        if isinstance(module, Float8Linear):
            conversion.skipped[fqn] = "it is a Float8Linear already"
        elif type(module) in MODULE_RULES:
            if module_filter_fn is None or module_filter_fn(module, fqn):
                chosen.append((fqn, module))
            else:
                conversion.skipped[fqn] = "module_filter_fn returned False"
        elif isinstance(module, nn.Linear):
            conversion.skipped[fqn] = (
                f"its type is {type(module).__name__}, not nn.Linear: its own forward may not be "
                "that of a linear layer"
            )
    return chosen


def _check_all(candidates: list[tuple[str, nn.Module]], config: Float8LinearConfig) -> None:
    problems = [
        f"{fqn or 'the module itself'}: {reason}"
        for fqn, layer in candidates
        if (reason := MODULE_RULES[type(layer)].refuses(layer, config)) is not None
    ]
    if problems:
        raise ValueError(
            "nothing was converted, because some layers cannot be:\n  " + "\n  ".join(problems)
        )


def _check_bypasses(root: nn.Module, conversion: Conversion) -> None:
    for fqn, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            conversion.skipped[fqn] = (
                "nn.MultiheadAttention multiplies by its weights itself and stays in high "
                "precision; write q, k, v and output projections as nn.Linear to convert them"
            )
        elif isinstance(module, nn.TransformerEncoderLayer):
            conversion.skipped[fqn] = (
                "nn.TransformerEncoderLayer has a fused inference path that goes around its float8 "
                "layers; torch.backends.mha.set_fastpath_enabled(False) avoids it"
            )


def _replace_children(root: nn.Module, swapped: dict[nn.Module, nn.Module]) -> nn.Module:
    # A list first: the tree must not change while it is walked.
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return swapped.get(root, root)


def _tell(root: nn.Module, conversion: Conversion) -> None:
    logger.info("%s", conversion)
    has_float8 = any(isinstance(m, Float8Linear) for m in root.modules())
    if not conversion.converted and not has_float8:
        reasons = "\n  ".join(f"{fqn}: {why}" for fqn, why in conversion.skipped.items())
        warnings.warn(
            "convert_to_float8_training converted no layer: "
            + (f"\n  {reasons}" if reasons else "the model has no nn.Linear"),
            stacklevel=3,
        )
