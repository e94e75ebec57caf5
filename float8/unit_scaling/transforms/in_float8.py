"""`float8`: the linear layers of a model in float8, as modules or as functions.

Conversion (`float8.convert_to_float8_training`) swaps modules, and so cannot reach an ``F.linear``
that a forward calls as a function, nor one that another transform calls. This transform watches
functions: every ``F.linear`` and every linear layer of a unit-scaled model runs as the three float8
GEMMs of `float8.linear.autograd`, with the unit scaling factors in the GEMMs' scales::

    model = float8(unit_scale(model))          # in either order

By default weights and gradients are cast with a static scale of 1, as in recipe ``unit``, and
inputs with a dynamic scale. Inputs may outgrow a scale of 1 in a long training, as those behind a
SwiGLU do, and recipe ``unit`` then cuts them (``benchmarks/bench_quality.py``). Any recipe without
state will do; delayed scaling keeps a history per layer, which functions cannot keep.

``with float8.high_precision(model):`` turns the transform off, as it does converted layers.
`float8.inspect` and `inspect_every` measure its casts. Reports name a product after its weight. If
the weight is computed, they number the product in the order of the forward.

Contractions of two activations stay in high precision: ``F.scaled_dot_product_attention``,
``torch.matmul``, ``@``, ``torch.bmm``. Tensor cores multiply matrices, not batches of them: in
float8 they would take one GEMM per matrix and head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from float8.config import RECIPES, CastConfig, Float8LinearConfig, check_config
from float8.convert.filters import ModuleFilter
from float8.linear.autograd import NO_FACTORS, Call, Factors
from float8.linear.layer import function_of
from float8.linear.module import Switch
from float8.linear.plan import plan_of
from float8.linear.refusals import error_of_call, reason_against_layer
from float8.unit_scaling.registry import Function
from float8.unit_scaling.transforms.transformed import Mode, OnProducts, parameter_of, transformed

M = TypeVar("M", bound=nn.Module)
_DYNAMIC_INPUTS = replace(RECIPES["unit"], cast_config_input=CastConfig())
# Called after each product: name of the weight, config, input, weight, output.
Watcher = Callable[[str, Float8LinearConfig, Tensor, Tensor, Tensor], None]


class Float8Products(OnProducts):
    """Runs linear layers in float8, all with one config; see the module.

    ``skipped`` are names of modules whose ``weight`` is multiplied in high precision.
    """

    depth: ClassVar[int] = 3
    kinds: ClassVar[frozenset[str]] = frozenset({"linear", "scaled linear"})

    def __init__(self, config: Float8LinearConfig, skipped: tuple[str, ...] = ()) -> None:
        self.config, self.skipped = config, skipped
        self.switch = Switch()  # of `float8.high_precision`
        self.watchers: list[Watcher] = []  # of `float8.inspect`

    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode for one call."""
        return Mode({}) if self.switch.is_off else super().mode(model, args, kwargs)

    def state(self, model: nn.Module) -> Any:
        """The model, the weights to skip, and numbers for products of computed weights."""
        return model, [model.get_submodule(n).weight for n in self.skipped], itertools.count()

    def product(
        self,
        state: Any,
        function: Function,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        factors: Factors = NO_FACTORS,
    ) -> Any:
        """``F.linear``, or `scaled_linear` with its factors, in float8."""
        model, skipped, unnamed = state
        if any(weight is other for other in skipped):
            options = () if factors is NO_FACTORS else (factors,)
            return function(input, weight, bias, *options)
        plan = plan_of(self.config, input, weight)
        error = error_of_call(input, weight, plan)
        if error is None and (reason := reason_against_layer(weight, self.config)) is not None:
            error = ValueError(reason)
        if error is not None:
            layer = f"linear layer of input {tuple(input.shape)} and weight {tuple(weight.shape)}"
            raise type(error)(f"{layer}: {error}")
        call = Call(plan, factors=factors, has_backward=torch.is_grad_enabled())
        output = function_of(self.config).apply(input, weight, bias, call)
        for watcher in self.watchers:
            name, whole = parameter_of(model, weight), weight._base
            # Parts of one parameter are weights of their own.
            if name is None or (whole is not None and whole.numel() != weight.numel()):
                name = f"product {next(unnamed)}, weight {tuple(weight.shape)}"
            watcher(
                "" if name == "weight" else name.removesuffix(".weight"),
                self.config, input, weight, output,
            )  # fmt: skip
        return output


def float8(
    model: M,
    config: Float8LinearConfig | str | None = None,
    *,
    module_filter_fn: ModuleFilter | None = None,
) -> M:
    """A copy of a model whose linear layers run in float8, in forward and backward.

    Args:
        model: any module, plain, unit-scaled or transformed; not converted to `Float8Linear`.
        config: of the casts and GEMMs; by default recipe ``unit`` with a dynamic scale per input.
        module_filter_fn: called with each module that has a matrix for a ``weight`` and its name;
            False leaves linear layers with that weight in high precision. See `float8.filters`.

    Returns:
        The copy; ``model`` is as it was.

    Raises:
        TypeError: ``model`` is not a module, or ``config`` is not a config.
        ValueError: delayed scaling, or a model that has been converted or has this transform.
    """
    config = check_config(_DYNAMIC_INPUTS if config is None else config)
    if config.uses_delayed_scaling:
        raise ValueError(
            "the float8 transform keeps no amax history: take a dynamic or static recipe, or "
            "convert_to_float8_training for delayed scaling of uu.Linear and nn.Linear layers"
        )
    keeps = module_filter_fn or (lambda module, fqn: True)
    skipped = tuple(
        fqn
        for fqn, module in (model.named_modules() if module_filter_fn else ())
        if isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.dim() == 2
        and not keeps(module, fqn)
    )
    return transformed(model, Float8Products(config, skipped))
