"""Replace a model's linear layers and experts by float8 ones for training, and back.

Conversion checks everything before it changes anything, shares every parameter, and reports what it
did: the returned module has a `Conversion` as its attribute ``float8_conversion``, which lists the
converted layers, the others, and the reasons.

Converted are modules whose type is exactly ``nn.Linear``, or a type that has a rule
(`register_linear_type`, `register_module_rule`, `float8.register_experts`). Others are reported,
among them the two torch modules that go around their own linear layers: ``nn.MultiheadAttention``
multiplies by ``out_proj.weight`` itself, and ``nn.TransformerEncoderLayer`` has a fused path for
inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from float8.arguments import check_module
from float8.config import Float8LinearConfig
from float8.convert.conversion import plan_conversion, replace_children
from float8.convert.filters import ModuleFilter
from float8.convert.inference import hide_from_ddp
from float8.convert.reasons import sharded_before
from float8.distributed.gathered_weights import unwrap_weights, wrap_weights
from float8.distributed.sync import remind_to_sync
from float8.linear.layer import Float8CastingLinear, Float8Linear
from float8.linear.module import (
    MODULE_RULES,
    Float8Module,
    ModuleRule,
    register_module_rule,
    switchable_parts,
    switched_off,
)
from float8.linear.refusals import reason_against_layer
from float8.linear.resident import make_plain

_Model = TypeVar("_Model", bound=nn.Module)

register_module_rule(
    nn.Linear,
    ModuleRule(
        refuses=lambda module, config: reason_against_layer(module.weight, config),  # type: ignore[arg-type]
        convert=Float8Linear.from_float,  # type: ignore[arg-type]
    ),
)


def register_linear_type(linear_type: type[nn.Linear]) -> None:
    """Convert layers of this type too: its forward is a linear layer's, in its input's dtype.

    For a subclass whose forward is ``F.linear(x, self.weight.to(x.dtype), self.bias)``, as scripts
    without autocast write it. A type that has a rule keeps it.

    Args:
        linear_type: exactly this type; its subclasses are not converted.

    Raises:
        TypeError: it is no subclass of ``nn.Linear``.
    """
    if not (isinstance(linear_type, type) and issubclass(linear_type, nn.Linear)):
        raise TypeError(f"linear_type must be a subclass of nn.Linear, got {linear_type!r}")
    rule = ModuleRule(MODULE_RULES[nn.Linear].refuses, Float8CastingLinear.from_float)  # type: ignore[arg-type]
    MODULE_RULES.setdefault(linear_type, rule)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Replace the linear layers and the experts of ``module`` by float8 ones, in place.

    Experts are modules that multiply by stacked weights with ``grouped_mm``: those of Transformers
    and torchtitan, and types given to `float8.register_experts`. Routers stay in high precision.
    Parameters stay the same objects. Mode, hooks, dtype and device stay. A layer that is registered
    under two names stays one layer. GPUs multiply only in_features and out_features that are
    multiples of 16 (of 32 for experts in recipe ``mxfp8``). Other layers are left alone unless the
    config has ``pad_inner_dim`` or ``emulate``. Build the optimizer after the conversion if a
    distributed wrapper or ``enable_fsdp_float8_all_gather`` replaces parameters. Converting again
    changes nothing. With delayed recipes, call `float8.after_step` once per optimizer step.

    Args:
        module: the model; it may itself be an ``nn.Linear``.
        config: a config or the name of a recipe; dynamic tensorwise by default.
        module_filter_fn: called with each candidate, a linear layer or experts, and its name; False
            leaves it alone. See `float8.filters`. None takes all, but on an H100 or H200 no experts
            that are predicted to lose: see `float8.faster_layers`, which knows the tokens.

    Returns:
        ``module``, or the new layer if ``module`` itself was one.

    Raises:
        ValueError: layers that cannot be converted, each with its name and the reason; nothing
            has been changed then.
        TypeError: an argument of another type.
    """
    caller = "convert_to_float8_training"
    check_module(module, caller, "module")
    plan = plan_conversion(module, config, module_filter_fn, caller)
    plan.check(sharded_before(module, plan.plain_layers, plan.config))
    module = plan.convert(module)
    if plan.config.enable_fsdp_float8_all_gather:
        plan.conversion.gathered_in_high_precision = wrap_weights(module, plan.layers)
    plan.finish(module)
    if plan.config.uses_delayed_scaling and plan.layers:
        remind_to_sync(module)
        hide_from_ddp(module)
    return module


def convert_from_float8_training(module: nn.Module) -> nn.Module:
    """Replace every `Float8Linear` of ``module`` by a plain ``nn.Linear``, in place; experts too.

    The inverse of `convert_to_float8_training`: parameters, mode and hooks are shared, and the
    state dict has plain keys. Weights that are in float8 are dequantised. Fused norms and
    feed-forwards become plain too.

    Args:
        module: a converted model.

    Returns:
        ``module``, or the new layer if ``module`` itself was one.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: the ``forward`` of a converted module was replaced after the conversion; nothing
            has been changed then.
    """
    check_module(module, "convert_from_float8_training", "module")
    plain = {m: m.to_float() for m in module.modules() if isinstance(m, Float8Module)}
    unwrap_weights(module)
    make_plain(module)
    for old, new in plain.items():
        new._parameters.update(old._parameters)
    module = replace_children(module, plain)  # type: ignore[arg-type]
    module.__dict__.pop("float8_conversion", None)
    return module


@contextmanager
def high_precision(model: _Model) -> Iterator[_Model]:
    """Run a converted model without float8, for example in an evaluation.

    Training state does not change. Inside the context a ``state_dict()`` has the keys of the plain
    model. A weight that FSDP2 has gathered in float8 keeps its float8 values and is multiplied in
    high precision.

    The context applies to the modules that the model has when it opens, in all threads. Contexts
    may nest and overlap. The backward of a forward inside is in high precision too. With activation
    checkpointing, which runs the forward again, call backward inside.

    Args:
        model: a converted model, or any module.

    Yields:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_module(model, "high_precision")
    with switched_off(switchable_parts(model)):
        yield model
