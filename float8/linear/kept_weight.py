"""Cast a weight that FSDP2 keeps gathered for several microbatches once, when it is gathered.

``fully_shard`` gathers a layer's weight before forward. It frees the result after forward, or after
backward, or only after the last microbatch of a step: with ``set_reshard_after_backward(False)``,
as the stages of torch's pipelines set it. In the last case every microbatch casts the same weight
again, unless the layer keeps the casts for as long as FSDP2 keeps the weight. They take two bytes
per element.

FSDP2 replaces the Parameter of the layer at each gather and when it frees the weight, by
``setattr`` where a class has a ``__setattr__`` of its own, as `CastsWeights` has. So a cast never
outlives the weight that it is of, and compiled code reads it too.

Casts pay only if several backward passes share them. A hook of the gathered Parameter counts the
passes between one gather and the next. The answer holds from the next step of the optimizer on: a
recomputation (activation checkpointing) must find what its forward found. So the first step casts
its weights in every microbatch.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.config import Float8LinearConfig
from float8.kernels import is_sharded
from float8.linear.float8_weight import Float8Weight, cast_of
from float8.linear.module import Float8Module, weights_of
from float8.linear.plan import compute_dtype
from float8.linear.resident import gatherable_weights, join_loaded, split_saved, stay_gatherable


class CastsWeights(Float8Module):
    """Abstract: a module that casts its weights; they may also be cast before a call.

    Attributes:
        cached_weights: name -> the weight, by `float8.cached_weights` or by `cast_at_gather`.
    """

    float8_config: Float8LinearConfig
    cached_weights: dict[str, Float8Weight]

    def __setattr__(self, name: str, value: Any) -> None:
        """As ``nn.Module``; FSDP2 sets a weight at each gather, and when it frees the result."""
        own = self.__dict__.get("_parameters", {})
        old = own.get(name)
        is_swap = old is not None and (is_sharded(old) or is_sharded(value))
        if not (is_swap and isinstance(value, nn.Parameter)):
            super().__setattr__(name, value)
            return
        own[name] = value  # as FSDP2 does by itself, without the checks of ``nn.Module``
        self.cached_weights.pop(name, None)
        if is_sharded(old) and (cast := cast_at_gather(self, name, old, value)) is not None:
            self.cached_weights[name] = cast

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            split_saved(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        gatherable = gatherable_weights(self)
        join_loaded(self, state_dict, prefix, errors=args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)
        stay_gatherable(self, gatherable)


class Passes:
    """The backward passes that share a gathered weight; an attribute of its Parameter.

    Attributes:
        shard: the id of the sharded Parameter, which the optimizer steps.
        number: of passes since the last gather.
        most: the largest number between two gathers since the last step.
        are_several: whether it was above 1 in the last step.
        dtype: the compute dtype of the last forward's gather. Backward does not see autocast.
    """

    def __init__(self) -> None:
        self.shard = self.number = self.most = 0
        self.are_several = False
        self.dtype = torch.float32

    def count(self, weight: Tensor) -> None:
        """Count a pass; a hook of the gathered Parameter."""
        self.number += 1
        self.most = max(self.most, self.number)


_passes: weakref.WeakSet[Passes] = weakref.WeakSet()


def cast_at_gather(
    layer: CastsWeights, name: str, shard: Tensor, new: Tensor
) -> Float8Weight | None:
    """The casts of a weight that FSDP2 has just gathered, if microbatches share it.

    Args:
        layer, name: what has the weight.
        shard: the Parameter that was replaced.
        new: the one in its place.

    Returns:
        None for all other Parameters, such as a bias, a DTensor of tensor parallelism, or a weight
        that was gathered in float8.
    """
    if type(new) is not nn.Parameter or new.dim() < 2 or not new.requires_grad:
        return None
    passes: Passes | None = vars(new).get(_PASSES)
    if passes is None:
        is_weight = name in weights_of(layer) and not layer.float8_config.smooth_input
        if not is_weight or new.is_inference():
            return None
        passes = Passes()
        setattr(new, _PASSES, passes)
        new.register_hook(passes.count)
        _passes.add(passes)
        _install_hook()
    passes.shard, passes.number = id(shard), 0
    if torch._C._current_graph_task_id() == -1:  # outside of backward
        passes.dtype = compute_dtype(new)
    if not passes.are_several:
        return None
    cast = cast_of(layer, new, passes.dtype)
    if cast is not None:
        cast.is_gathered = True
    return cast


_PASSES = "_float8_passes"


@functools.cache
def _install_hook() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for passes in list(_passes):
        if passes.most and passes.shard in stepped:
            passes.are_several, passes.most = passes.most > 1, 0
