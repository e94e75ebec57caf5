"""torchtitan: float8 layers by its converters, or by its overrides from the command line.

torchtitan builds a model from a tree of ``Config`` objects, so float8 means another ``Config`` in
the place of each ``Linear.Config``, and of each ``GroupedExperts.Config``, whose grouped products
then run in float8. Routers stay in high precision; with a delayed recipe, experts do too. In a
config registry, for any of `float8.config.RECIPES`::

    def llama3_8b_float8() -> Trainer.Config:
        config = llama3_8b()
        float8 = Float8Converter.Config(recipe="rowwise", filter_fqns=["lm_head"])
        config.model_spec = model_registry("8B", converters=[float8])
        return config

or of any model, without a line of code (kwargs as JSON)::

    torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
        --compile.enable --override.imports \\
        'float8.integrations.torchtitan.float8={"recipe": "rowwise", "filter_fqns": ["lm_head"]}'

The layers are `Float8Linear`s that keep torchtitan's Module protocol: ``init_states``, declared
initialisers, declared shardings. From that follows:

- *Parallelism*: under tensor parallelism with the backend ``spmd_types``, torchtitan's default, a
  layer sees local tensors, and its scales are those of a rank's part. With the DTensor backends
  recipes must be dynamic. Activations travel in high precision, as torchtitan sends them.
- *Once per step*: a hook behind ``OptimizersContainer.step`` calls `float8.after_step` where a
  recipe needs it. Pipeline stages agree on scales among the ranks of a stage.
- *Checkpoints* have the plain model's keys. A delayed recipe adds its histories, so that a run
  resumes exactly. DCP would miss them in a checkpoint of a plain model, and adapters to Hugging
  Face refuse unknown keys: ``plain_checkpoint=True`` leaves them out, and then the histories start
  anew when a run resumes.
- *MFU*, as torchtitan logs it, is relative to bfloat16's peak.
- `float8.inspect`, `float8.compare` and `float8.find_nan` take ``trainer.model_parts[0]``.
  `float8.fuse_norms` leaves torchtitan's norms alone and says so: they have types of their own,
  and are wrapped before a user first sees them.

Tested with torchtitan 0.3.0 on torch 2.13, where its default backend runs on one rank only, with or
without float8; on more ranks, ``--parallelism.spmd_backend partial_dtensor`` was tested (FSDP2,
tensor parallel; not pipelines). Its trainer does not import on torch 2.11. Earlier versions of
torchtitan swapped modules instead of configs and are not supported.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module

from float8.config import Float8LinearConfig, check_config
from float8.config.linear import recipe_of
from float8.convert.after_step import after_step
from float8.convert.conversion import ConversionPlan
from float8.convert.filters import all_of, skip_names, unmatched_patterns, why_not
from float8.convert.reasons import NO_HISTORY, ROUTES, odd_sizes, rule_of
from float8.distributed.gathered_weights import wrap_weights
from float8.distributed.replaced_parameters import install_hook
from float8.estimate import faster_layers
from float8.experts.modules import float8_type
from float8.integrations.conversion import warn_of_version
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear

warn_of_version("torchtitan", "0.3", "0.4")

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed import ParallelDims

__all__ = ["Float8Converter", "float8"]

logger = logging.getLogger("float8")


class _DelayedCast(DelayedCast, Module):
    """With torchtitan's Module protocol, which every module of a model must have.

    ``init_states`` resets the history, by ``reset_parameters``.
    """


class Float8TitanLinear(Float8Linear, Linear):
    """A `Float8Linear` with torchtitan's Module protocol; built from its ``Config``."""

    plain_type = Linear

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """``Linear.Config`` and how to multiply.

        Args:
            recipe: what logs show.
            plain_checkpoint: leave amax histories out of state dicts.
        """

        recipe: str = "tensorwise"
        plain_checkpoint: bool = False
        # Not shown in logs, which are JSON.
        _float8: Float8LinearConfig | None = None
        _fqn: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        float8 = check_config(config._float8 or config.recipe)
        self._set_up(float8, config._fqn)
        for cast in self.casts:
            if isinstance(cast, DelayedCast):
                cast.__class__ = _DelayedCast
                cast.hidden = config.plain_checkpoint
        if float8.enable_fsdp_float8_all_gather:
            wrap_weights(self, {config._fqn: self})
        if _needs_after_step(float8):
            # torchtitan 0.3 has no hook of its own after a step.
            install_hook(register_optimizer_step_post_hook, _after_step)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Distribute parameters and wrap ``forward``, as the declared shardings say.

        Raises:
            ValueError: the layer's recipe or option does not go with the parallelism.
        """
        backend, tp = parallel_dims.spmd_backend, parallel_dims.tp
        gathers = self.config.enable_fsdp_float8_all_gather
        sees_dtensors = backend == "full_dtensor" or (backend == "partial_dtensor" and tp > 1)
        if gathers and tp > 1:
            raise ValueError(
                f"{self._name}: enable_fsdp_float8_all_gather=True is for FSDP2 alone: leave it "
                "off with tp > 1"
            )
        if sees_dtensors and (gathers or self.config.uses_delayed_scaling):
            raise ValueError(
                f"{self._name}: --parallelism.spmd_backend {backend} hands it DTensors: use "
                "spmd_types, or a dynamic recipe without enable_fsdp_float8_all_gather"
            )
        super().parallelize(parallel_dims)

    def to_float(self) -> nn.Linear:
        """The plain layer, parameters shared.

        Raises:
            ValueError: torchtitan has wrapped ``forward``, which would still run in float8.
        """
        if "forward" in self.__dict__:
            raise ValueError(
                f"{self._name}: torchtitan has wrapped its forward, which would still run in "
                "float8: evaluate under float8.high_precision(model)"
            )
        return super().to_float()


@functools.cache
def _float8_experts(experts: Any) -> Any:
    """The type of float8 experts that are built from a ``Config``, as torchtitan builds modules."""

    class Float8TitanExperts(float8_type(experts)):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(experts.Config):
            recipe: str = "tensorwise"
            _float8: Float8LinearConfig | None = None
            _fqn: str = ""

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.set_up(check_config(config._float8 or config.recipe), config._fqn)

    return Float8TitanExperts


class Float8Converter(QuantizationConverter):
    """Puts float8 layers in the place of torchtitan's linear layers and experts.

    Args:
        config: the options, a `Float8Converter.Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The options of the conversion.

        Args:
            recipe: a row of `float8.config.RECIPES`.
            config: a configuration in place of a recipe.
            filter_fqns: layers and experts whose name contains one of these stay in high precision;
                an entry that matches none raises a warning.
            enable_fsdp_float8_all_gather: FSDP2 sends weights in float8, where both products read
                one cast of them (``tensorwise``, ``delayed``, ``unit``, ``blockwise``,
                ``mxfp8_2d``), without tensor parallelism.
            faster_layers_tokens: tokens that a layer sees at once (local batch size times sequence
                length): convert only what `float8.faster_layers` predicts to gain.
            device: for that prediction.
            plain_checkpoint: leave amax histories out of checkpoints.
        """

        recipe: str = "tensorwise"
        config: Float8LinearConfig | None = None
        filter_fqns: list[str] = field(default_factory=list)
        enable_fsdp_float8_all_gather: bool = False
        faster_layers_tokens: int | None = None
        device: str = "H100"
        plain_checkpoint: bool = False

    def __init__(self, config: Config) -> None:
        self.options = config
        self.float8 = check_config(config.config or config.recipe, "Float8Converter")
        if config.enable_fsdp_float8_all_gather:
            self.float8 = replace(self.float8, enable_fsdp_float8_all_gather=True)
        self._filter = skip_names(*(f"*{part}*" for part in config.filter_fqns))
        if (tokens := config.faster_layers_tokens) is not None:
            self._filter = all_of(self._filter, faster_layers(self.float8, tokens, config.device))

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace the configs of linear layers and experts below ``model_config``, in place.

        Returns:
            ``model_config``, or the new config if it was a ``Linear.Config`` itself.

        Raises:
            ValueError: layers that cannot be converted, each with its name and the reason; nothing
                has been changed then.
        """
        plan, places = ConversionPlan("Float8Converter", self.float8, True), {}
        plan.conversion.recipe = recipe_of(self.float8)
        experts = list(model_config.traverse(GroupedExperts.Config))
        found = [*model_config.traverse(Linear.Config), *experts]
        if unknown := unmatched_patterns(self._filter, (fqn for fqn, *_ in found)):
            warnings.warn(f"filter_fqns: no layer is called {', '.join(unknown)}", stacklevel=2)
        for fqn, plain, parent, attr in found:
            layer = _on_meta(plain)
            if (reason := self._left_alone(fqn, plain, layer)) is not None:
                plan.leave(fqn, reason)
            else:
                plan.take(fqn, layer)
                places[fqn] = plain, parent, attr
        plan.check()
        plan.warn_of_fixed_scales()
        tied = getattr(model_config, "enable_weight_tying", False)
        plan.conversion.experts = [fqn for fqn, *_ in experts if fqn in places]
        for fqn, (plain, parent, attr) in places.items():
            new = self._converted(fqn, plain, tied and fqn == "lm_head")
            plan.conversion.converted.append(fqn)
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attr] = new
            else:
                setattr(parent, attr, new)
        logger.info("%s", plan.conversion)
        if not plan.conversion.converted:
            warnings.warn(f"Float8Converter: {plan.conversion}", stacklevel=2)
        return model_config

    def _left_alone(self, fqn: str, plain: Any, layer: nn.Module) -> str | None:
        """The reason why a layer or experts stay as they are, or None."""
        is_experts = isinstance(plain, GroupedExperts.Config)
        if rule_of(layer) is None if is_experts else type(plain) is not Linear.Config:
            return f"it is a {type(plain).__qualname__}: its forward may be its own, or float8"
        if "router" in fqn.split(".") or (is_experts and self.float8.uses_delayed_scaling):
            return NO_HISTORY if is_experts else ROUTES
        return odd_sizes(layer, self.float8) or why_not(self._filter, layer, fqn)

    def _converted(self, fqn: str, plain: Any, tied: bool) -> Module.Config:
        float8 = self.float8
        if tied:  # an embedding reads this weight too, and it reads no float8
            float8 = replace(float8, enable_fsdp_float8_all_gather=False)
        recipe = self.options.recipe if self.options.config is None else "own config"
        options: dict[str, Any] = {"recipe": recipe, "_float8": float8, "_fqn": fqn}
        if isinstance(plain, GroupedExperts.Config):
            experts: Any = type(_on_meta(plain))
            return derive(plain, _float8_experts(experts).Config, **options)
        options["plain_checkpoint"] = self.options.plain_checkpoint
        return derive(plain, Float8TitanLinear.Config, **options)


def _on_meta(config: Any) -> nn.Module:
    """An ``nn.Linear`` of a linear layer's sizes, or the experts that a config builds."""
    with torch.device("meta"):
        if isinstance(config, Linear.Config):
            return nn.Linear(config.in_features, config.out_features, dtype=torch.bfloat16)
        return config.build()


@override(target=BaseModel.Config, description="float8 linear layers")
def float8(model_config: BaseModel.Config, **options: Any) -> BaseModel.Config:
    """The override: ``--override.imports 'float8.integrations.torchtitan.float8={...}'``.

    Args:
        model_config: of any model.
        options: those of `Float8Converter.Config`.
    """
    return Float8Converter.Config(**options).build().convert(model_config)


# --- once per step


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, OptimizersContainer):
        return  # one of the optimizers in the container, which steps them all
    for part in optimizer.model_parts:
        layers = [m for m in part.modules() if isinstance(m, Float8TitanLinear)]
        if any(_needs_after_step(layer.config) for layer in layers):
            after_step(part, _ranks_of_stage(layers[0]))


def _needs_after_step(config: Float8LinearConfig) -> bool:
    return config.uses_delayed_scaling or config.enable_fsdp_float8_all_gather


def _ranks_of_stage(layer: Float8TitanLinear) -> DeviceMesh | None:
    """The ranks that hold the same layers, where that is not all: those that share a weight."""
    mesh = getattr(layer.weight, "device_mesh", None)
    return None if mesh is None or mesh.size() == dist.get_world_size() else mesh
