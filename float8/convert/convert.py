"""Swap a model's linear layers for float8 ones, and back.

Conversion checks everything before it changes anything, shares every parameter, and says what it
did: the returned module carries a `Conversion` under ``float8_conversion`` that
lists what was converted and what was left alone, and why.

Converted are modules whose type is exactly ``nn.Linear``, or a type for which a room above has
registered a rule (`register_module_rule`). Others are reported, among them the two torch modules
that go around their own Linears: ``nn.MultiheadAttention`` multiplies by ``out_proj.weight``
itself, and ``nn.TransformerEncoderLayer`` has a fused fast path for inference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from float8.arguments import check_module, described
from float8.config import RECIPES, Float8LinearConfig, check_config
from float8.convert.conversion import Conversion, report_bypasses, tell
from float8.convert.filters import ModuleFilter
from float8.formats import E4M3
from float8.linear.delayed import keep_ddp_from_broadcasting, remind_to_sync
from float8.linear.layer import Float8CastingLinear, Float8Linear
from float8.linear.refusals import refuses_layer
from float8.linear.resident_weight import make_plain
from float8.linear.switch import Switchable, switched_off

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ModuleRule:
    """How one module type becomes float8.

    Args:
        refuses: (module, config) -> the reason why it cannot be converted, or None.
        convert: (module, config, fqn) -> the float8 module, parameters shared.
        unit_scaled: whether the type keeps its operands near unit scale by itself, so that recipe
            ``unit`` suits it.
    """

    refuses: Callable[[nn.Module, Float8LinearConfig], str | None]
    convert: Callable[[nn.Module, Float8LinearConfig, str], nn.Module]
    unit_scaled: bool = False


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


def register_linear_type(linear_type: type[nn.Linear]) -> None:
    """Convert layers of this type too: its forward is a linear layer's, in its input's dtype.

    For a subclass whose forward is ``F.linear(x, self.weight.to(x.dtype), self.bias)``, as scripts
    without autocast write it; of others conversion cannot know. Saying it again changes nothing.

    Raises:
        TypeError, ValueError: it is no subclass of ``nn.Linear``, or has another rule.
    """
    if not (isinstance(linear_type, type) and issubclass(linear_type, nn.Linear)):
        raise TypeError(f"linear_type must be a subclass of nn.Linear, got {linear_type!r}")
    rule = ModuleRule(MODULE_RULES[nn.Linear].refuses, Float8CastingLinear.from_float)  # type: ignore[arg-type]
    if MODULE_RULES.get(linear_type) != rule:
        register_module_rule(linear_type, rule)


@dataclass(frozen=True)
class WeightRule:
    """How weights are stored for ``enable_fsdp_float8_all_gather``.

    Args:
        refuses: (layer, config) -> the reason why its weight cannot be stored so, or None.
        wrap: (model, name -> converted layer) -> name -> the reason, for weights left as they were.
        unwrap: (model): the inverse.
    """

    refuses: Callable[[nn.Module, Float8LinearConfig], str | None]
    wrap: Callable[[nn.Module, dict[str, nn.Module]], dict[str, str]]
    unwrap: Callable[[nn.Module], None]


# At most one; `WEIGHT_RULE_SOURCES` has the room imported that registers it.
WEIGHT_RULES: list[WeightRule] = []
WEIGHT_RULE_SOURCES: list[Callable[[], object]] = []


def register_weight_rule(rule: WeightRule) -> None:
    """Let conversion store weights so that FSDP2 gathers them in float8."""
    if WEIGHT_RULES:
        raise ValueError("there is a rule for enable_fsdp_float8_all_gather already")
    WEIGHT_RULES.append(rule)


def _weight_rule() -> WeightRule:
    for source in WEIGHT_RULE_SOURCES:
        source()
    assert WEIGHT_RULES, "float8/__init__.py names who registers one"
    return WEIGHT_RULES[0]


# Questions that rooms above ask before anything is converted: (the whole module) -> the reason why
# swapping its layers would be wrong, or None.
MODEL_CHECKS: list[Callable[[nn.Module], str | None]] = []


def check_model(module: nn.Module) -> None:
    """Raise if a room above says that swapping this model's layers would be wrong."""
    for check in MODEL_CHECKS:
        if (reason := check(module)) is not None:
            raise ValueError(f"nothing was converted: {reason}")


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace the linear layers of ``module`` by float8 ones, in place.

    Parameters stay the same objects; mode, hooks, dtype and device stay; a layer registered under
    two names stays one layer. Convert before building the optimizer where a distributed wrapper
    replaces parameters, as ``enable_fsdp_float8_all_gather`` does with weights. Converting again
    changes nothing. Delayed recipes need ``sync_float8_amax_and_scale_history(module)`` once per
    step.

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
        TypeError: an argument of another type.
    """
    check_arguments(module, "module", config, module_filter_fn, "convert_to_float8_training")
    config = config or Float8LinearConfig()
    check_model(module)
    conversion = Conversion()
    chosen = candidates(module, config, module_filter_fn, conversion)
    check_all(chosen, config)
    report_bypasses(module, conversion)
    warn_of_fixed_scales(chosen, config)
    swapped: dict[nn.Module, nn.Module] = {}
    for fqn, layer in chosen:
        swapped[layer] = MODULE_RULES[type(layer)].convert(layer, config, fqn)
        conversion.converted.append(fqn)
    module = replace_children(module, swapped)
    if config.enable_fsdp_float8_all_gather:
        layers = {fqn: swapped[layer] for fqn, layer in chosen}
        conversion.gathered_in_high_precision = _weight_rule().wrap(module, layers)
    module.float8_conversion = conversion  # type: ignore[assignment]
    tell(module, conversion, module_filter_fn)
    if config.uses_delayed_scaling and swapped:
        remind_to_sync(module)
        keep_ddp_from_broadcasting(module)
    for callback in AFTER_CONVERSION:
        callback(module)
    return module


def convert_from_float8_training(module: nn.Module) -> nn.Module:
    """Replace every `Float8Linear` of ``module`` by a plain ``nn.Linear``, in place.

    The inverse of `convert_to_float8_training`: parameters, mode and hooks are shared, and the
    state dict has plain keys. Weights that live in float8 are dequantised. Modules that write
    float8 for the layers become plain with them.

    Raises:
        TypeError: ``module`` is no module.
    """
    check_module(module, "convert_from_float8_training", "module")
    for rule in WEIGHT_RULES:
        rule.unwrap(module)
    make_plain(module)
    plain: dict[nn.Module, nn.Module] = {m: m.to_float() for m in _float8_modules(module)}
    module = replace_children(module, plain)
    module.__dict__.pop("float8_conversion", None)
    return module


# Called with the model after each conversion: for packages above.
AFTER_CONVERSION: list[Callable[[nn.Module], None]] = []
# Switchable modules with a method ``to_float``: rooms above add theirs.
FLOAT8_MODULES: list[type[nn.Module]] = [Float8Linear]


def _float8_modules(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, tuple(FLOAT8_MODULES))]


@contextmanager
def high_precision(model: M) -> Iterator[M]:
    """Run a converted model without float8, as for evaluation; training state is untouched.

    Within it a ``state_dict()`` has the keys of the plain model. A weight that FSDP2 has gathered
    in float8 is multiplied in high precision as it came: rounded to float8.

    It holds for the thread that enters it, and for the modules that the model has then; contexts
    may nest and overlap. The backward of a forward within it is in high precision too, wherever it
    runs, with activation checkpointing as without.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_module(model, "high_precision")
    with switched_off([m for m in model.modules() if isinstance(m, Switchable)]):
        yield model


def check_arguments(
    model: object, name: str, config: object, module_filter_fn: object, caller: str
) -> None:
    """Raise if a conversion was given something else than a model, a config and a filter.

    Args:
        model: what the caller was given as the parameter ``name``.
        name: of the parameter.
        config: None for the default.
        module_filter_fn: None for every layer.
        caller: the public function, for the message.

    Raises:
        TypeError: one of them is something else; the message says what to give.
    """
    check_module(model, caller, name)
    if config is not None:
        check_config(config, caller)
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise TypeError(
            f"{caller}: module_filter_fn must be callable, got {described(module_filter_fn)}; to "
            'skip layers by name use float8.filters.skip_names("lm_head")'
        )


def candidates(
    root: nn.Module,
    config: Float8LinearConfig,
    module_filter_fn: ModuleFilter | None,
    conversion: Conversion,
) -> list[tuple[str, nn.Module]]:
    """The layers to convert, each once under its first name; reasons for the others."""
    chosen: list[tuple[str, nn.Module]] = []
    for fqn, module in root.named_modules():
        if isinstance(module, Float8Linear):
            conversion.skipped[fqn] = "it is a Float8Linear already" + (
                ", with another config: convert_from_float8_training first, to change it"
                if module.config != config
                else ""
            )
        elif type(module) in MODULE_RULES and (reason := runs_something_else(module, fqn)):
            conversion.skipped[fqn] = reason
        elif type(module) in MODULE_RULES:
            if module_filter_fn is None or module_filter_fn(module, fqn):
                chosen.append((fqn, module))
            else:
                conversion.skipped[fqn] = "module_filter_fn returned False"
        elif isinstance(module, nn.Linear):
            conversion.skipped[fqn] = (
                f"its type is {type(module).__name__}, not nn.Linear: its own forward may not be "
                "that of a linear layer (float8.convert.register_linear_type says that it is)"
            )
    return chosen


def runs_something_else(module: nn.Module, fqn: str) -> str | None:
    """The reason why swapping the layer would not change what runs, or None."""
    if "forward" in module.__dict__:
        return "its forward was replaced by a function that would still run; convert it before that"
    if module._compiled_call_impl is not None or fqn.rpartition(".")[2] == "_orig_mod":
        return "it was compiled on its own and its graph would still run; convert, then compile"
    return None


def check_all(layers: list[tuple[str, nn.Module]], config: Float8LinearConfig) -> None:
    """Raise if any layer cannot be converted, with all their reasons."""
    gathers = [_weight_rule().refuses] if config.enable_fsdp_float8_all_gather else []
    problems = [
        f"{fqn or 'the module itself'}: {reason}"
        for fqn, layer in layers
        for refuses in (MODULE_RULES[type(layer)].refuses, *gathers)
        if (reason := refuses(layer, config)) is not None
    ]
    if problems:
        raise ValueError(
            "nothing was converted, because some layers cannot be:\n  " + "\n  ".join(problems)
        )


def warn_of_fixed_scales(layers: list[tuple[str, nn.Module]], config: Float8LinearConfig) -> None:
    """Recipe ``unit`` has no scale to move a tensor into the format's range with: warn of it."""
    plain = [(fqn, m) for fqn, m in layers if not MODULE_RULES[type(m)].unit_scaled]
    if config != RECIPES["unit"] or not plain:
        return
    warnings.warn(
        f'recipe "unit" casts with a scale of 1, and {len(plain)} of {len(layers)} layers '
        f"(first: {plain[0][0] or 'the module itself'}) are not unit-scaled"
        f"{_flushed([m.weight for _, m in plain])}; gradients are smaller yet. Build the model "  # type: ignore[misc]
        "from float8.unit_scaling's layers, transform it with unit_scale and float8 of "
        "float8.unit_scaling.transforms, or take a dynamic recipe",
        stacklevel=3,
    )


def _flushed(weights: list[Tensor]) -> str:
    """What E4M3 at a scale of 1 makes of weights, counted; nothing to say of meta tensors."""
    weights = [w.detach() for w in weights if w.device.type != "meta" and w.numel()]
    if not weights:
        return ""
    zero = sum(int(((w != 0) & (w.abs() <= E4M3.smallest_subnormal / 2)).sum()) for w in weights)
    coarse = sum(int((w.abs() < torch.finfo(E4M3.dtype).smallest_normal).sum()) for w in weights)
    total = sum(w.numel() for w in weights)
    return (
        f": {zero / total:.1%} of their weights flush to zero and {coarse / total:.1%} lose "
        "precision as subnormals"
    )


def replace_children(root: nn.Module, swapped: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put modules in others' places; returns the root, which may be one of them."""
    # A list first: the tree must not change while it is walked.
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                parent._modules[name] = swapped[child]
    return swapped.get(root, root)
