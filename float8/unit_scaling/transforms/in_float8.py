"""`float8`: the products of a model in float8, whichever function makes them.

Conversion (`float8.convert_to_float8_training`) swaps modules, and so cannot reach a product that a
forward writes as a function, nor one that another transform puts in its place. This transform
watches functions: every ``F.linear`` and every product of a unit-scaled one runs as the three
float8 GEMMs of `float8.linear.autograd`, with the unit scaling factors in the GEMMs' scales::

    model = float8(unit_scale(model))          # in either order

By default the recipe is ``unit``, static scales of 1, made for unit-scaled models. Any recipe
without state will do; delayed scaling keeps a history per layer, which functions have no place for.

With ``attention=True`` the products inside attention run in float8 too: those of
``F.scaled_dot_product_attention``, ``torch.matmul``, ``@``, ``torch.mm`` and ``torch.bmm``, one
GEMM per matrix (`float8_products`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from float8.config import RECIPES, Float8LinearConfig, check_config
from float8.convert.filters import ModuleFilter
from float8.kernels.scaled_mm import architecture
from float8.linear.autograd import (
    NO_FACTORS,
    Factors,
    autocasts,
    call_of,
    compute_dtype,
    linear_in_float8,
)
from float8.linear.refusals import refuses_call, refuses_input, refuses_layer
from float8.linear.registration import MODEL_CHECKS
from float8.unit_scaling.functional.products import scaled_linear, scaled_matmul
from float8.unit_scaling.transforms.float8_products import float8_attention, float8_matmul
from float8.unit_scaling.transforms.transformed import Mode, Transform, Transformed, transformed

M = TypeVar("M", bound=nn.Module)


class Float8Products(Transform):
    """Runs products in float8; see the module.

    Args:
        config: of every product.
        attention: whether products without a weight run in float8 too.
        skipped: names of modules whose ``weight`` is multiplied in high precision.
    """

    depth: ClassVar[int] = 3

    def __init__(
        self, config: Float8LinearConfig, attention: bool = False, skipped: tuple[str, ...] = ()
    ) -> None:
        self.config, self.attention, self.skipped = config, attention, skipped

    def mode(self, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Mode:
        """The mode for one call."""
        skipped: list[Any] = [model.get_submodule(name).weight for name in self.skipped]
        handlers: dict[Callable[..., Any], Callable[..., Any]] = {
            F.linear: partial(_linear, self.config, skipped),
            scaled_linear: partial(_scaled_linear, self.config, skipped),
        }
        if self.attention:
            handlers |= {
                torch.matmul: partial(_matmul, self.config),
                torch.mm: partial(_matmul, self.config),
                torch.bmm: partial(_matmul, self.config),
                scaled_matmul: partial(_scaled_matmul, self.config),
                F.scaled_dot_product_attention: partial(float8_attention, self.config),
            }
        return Mode(handlers)


def _linear(
    config: Float8LinearConfig,
    skipped: list[Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    if _is_any_of(weight, skipped):
        return F.linear(input, weight, bias)
    return _in_float8(config, input, weight, bias, None)


def _scaled_linear(
    config: Float8LinearConfig,
    skipped: list[Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Factors,
) -> Tensor:
    if _is_any_of(weight, skipped):
        return scaled_linear(input, weight, bias, factors)
    return _in_float8(config, input, weight, bias, factors)


def _is_any_of(weight: Tensor, skipped: list[Tensor]) -> bool:
    return any(weight is other for other in skipped)


def _in_float8(
    config: Float8LinearConfig,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Factors | None,
) -> Tensor:
    _check(config, input, weight)
    call = call_of(config, input, factors=factors or NO_FACTORS)
    return linear_in_float8(input, weight, bias, call)


def _check(config: Float8LinearConfig, input: Tensor, weight: Tensor) -> None:
    name = f"linear product of input {tuple(input.shape)} and weight {tuple(weight.shape)}"
    if weight.dim() != 2:
        raise ValueError(f"{name}: float8 multiplies by weights of shape (N, K)")
    if (error := refuses_input(input, weight, autocasts(input.device.type))) is not None:
        raise type(error)(f"{name}: {error}")
    reason = refuses_layer(weight, config)
    if reason is None and input.device.type == "cuda" and not config.emulate:
        tokens = input.numel() // max(weight.shape[1], 1)
        arch, grad = architecture(input.device.index), torch.is_grad_enabled()
        reason = refuses_call(config, weight, tokens, compute_dtype(input), arch, grad)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")


def _matmul(config: Float8LinearConfig, left: Tensor, right: Tensor) -> Tensor:
    if left.dim() < 2 or right.dim() < 2:
        return torch.matmul(left, right)  # a vector: no GEMM
    return float8_matmul(left, right, config)


def _scaled_matmul(
    config: Float8LinearConfig, left: Tensor, right: Tensor, factors: Factors
) -> Tensor:
    if left.dim() < 2 or right.dim() < 2:
        return scaled_matmul(left, right, factors)
    return float8_matmul(left, right, config, factors)


def float8(
    model: M,
    config: Float8LinearConfig | None = None,
    *,
    attention: bool = False,
    module_filter_fn: ModuleFilter | None = None,
) -> M:
    """A copy of a model whose linear products run in float8.

    Args:
        model: any module, plain, unit-scaled or transformed; not converted to `Float8Linear`.
        config: of the casts and GEMMs; recipe ``unit`` by default.
        attention: whether products of two activations run in float8 too.
        module_filter_fn: called with each module that has a matrix for a ``weight`` and its name;
            False leaves the products by that weight in high precision. See `float8.filters`.

    Returns:
        The copy; ``model`` is as it was.

    Raises:
        TypeError: ``model`` or ``config`` is none.
        ValueError: delayed scaling, or a model that has been converted or has this transform.
    """
    config = RECIPES["unit"] if config is None else config
    check_config(config)
    if config.uses_delayed_scaling:
        raise ValueError(
            "the float8 transform keeps no amax history: take a dynamic or static recipe, or "
            "convert_to_float8_training for delayed scaling of uu.Linear and nn.Linear layers"
        )
    skipped = [] if module_filter_fn is None else _skipped(model, module_filter_fn)
    return transformed(model, Float8Products(config, attention, tuple(skipped)))


def _skipped(model: nn.Module, module_filter_fn: ModuleFilter) -> list[str]:
    candidates = [
        (module, fqn)
        for fqn, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 2
    ]
    return [fqn for module, fqn in candidates if not module_filter_fn(module, fqn)]


def _swaps_under_a_transform(model: nn.Module) -> str | None:
    if not any(isinstance(module, Transformed) for module in model.modules()):
        return None
    return (
        "the model is transformed: transforms see the functions that a forward calls, and a "
        "Float8Linear calls none that they know. Use float8.unit_scaling.transforms.float8(model, "
        "config) in place of conversion"
    )


MODEL_CHECKS.append(_swaps_under_a_transform)
