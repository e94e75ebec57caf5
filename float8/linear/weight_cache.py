"""`cached_weights`: find scales and casts of weights once per optimizer step.

A `Float8Linear` casts its weight in forward and again in backward, to save memory, and so do
experts. With gradient accumulation the same weight is cast for every microbatch. Inside

    with cached_weights(model):
        for step in range(steps):
            for x, y in microbatches:
                loss(model(x), y).backward()
            optimizer.step()          # the weights change: they are cast again, once
            optimizer.zero_grad()

each weight is cast when it changes, for both GEMMs that read it, and forward and backward read the
cached data. The cache takes two bytes per weight element while the context is open.

Per weight element in bfloat16, a step with n microbatches moves 6 bytes in place of 8 n.

Weights are cast again after

- a step of any optimizer that holds one of them (by a hook);
- ``sync_float8_amax_and_scale_history(model)``, where the cast is delayed: together with
  ``optimizer.step`` that makes two casts per step;
- ``load_state_dict`` into the layer;
- ``refresh()`` of the `WeightCache`.

In eager mode a layer does not use its cached weight if

- the weight was written in another way that increases its version counter: ``copy_``, the steps
  within an LBFGS step, an optimizer with its own fp32 masters;
- the weight was replaced;
- the weight is computed at each call (parametrizations, ``functional_call``).

Such a layer casts its weight as without a cache, until the weight is cast again as above. Writes
that leave the version counter unchanged need ``refresh()``: writes to ``.data``,
``model.to(dtype)`` and back, averaging wrappers that write after the inner optimizer's step. In
compiled code, every write that is not in the first list needs it. Without it the layer multiplies
the old weight.

A weight that ``fully_shard`` (FSDP2) has sharded is cast when it is gathered, and the cast is freed
with the gathered weight. That pays where several microbatches share a gather: with
``reshard_after_forward=False`` and ``set_reshard_after_backward(False)``, as the stages of torch's
pipelines set it. FSDP2 replaces the Parameter of a layer at each gather and when it frees the
weight, by ``setattr`` where a class has a ``__setattr__`` of its own, as `CastsWeights` has. So a
cast never outlives the weight that it is of, and compiled code reads it too.

The cache has the layers that the model has when the context opens.

Weights in float8 (`float8.linear.float8_weight`) need no cast and are left alone. Layers with
``smooth_input=True`` are left out too, because what they cast changes with each input, and so are
experts that are sharded otherwise.

Forward and backward write no Python state: recomputation, torch.compile and CUDA graphs see
constants. The bits are those of the layer without a cache.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.arguments import check_bool, check_module, described
from float8.config import Float8LinearConfig
from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels import is_sharded
from float8.linear.float8_weight import Float8Weight, cast_of
from float8.linear.module import Float8Module, modules_under_fsdp, weights_of
from float8.linear.plan import autocasts, compute_dtype
from float8.linear.resident import join_loaded, split_saved, stay_gatherable
from float8.tensor import Float8Tensor


class CastsWeights(Float8Module):
    """Abstract: a module that casts its weights; they may also be cast before a call.

    Attributes:
        cached_weights: name -> the weight that `float8.cached_weights` has cast.
    """

    float8_config: Float8LinearConfig
    cached_weights: dict[str, Float8Weight]

    def __setattr__(self, name: str, value: Any) -> None:
        """As ``nn.Module``. FSDP2 sets a weight at each gather, and when it frees the result."""
        own = self.__dict__.get("_parameters", {})
        old = own.get(name)
        is_swap = old is not None and (is_sharded(old) or is_sharded(value))
        if not (is_swap and isinstance(value, nn.Parameter)):
            super().__setattr__(name, value)
            return
        own[name] = value  # as FSDP2 does by itself, without the checks of ``nn.Module``
        self.cached_weights.pop(name, None)
        for cache in list(_open):
            if self in cache.dtypes and name in _whole_weights(self):
                cache.cast_weight(self, name, value)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            split_saved(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        before = weights_of(self)
        join_loaded(self, state_dict, prefix, errors=args[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)
        stay_gatherable(self, before)


class WeightCache:
    """The cached weights of a model, while its `cached_weights` is open.

    Args:
        model: the weights of its float8 layers and experts are cached.
        in_place: write new data into the old memory.
        dtype: the compute dtype, if it is known.
    """

    def __init__(self, model: nn.Module, in_place: bool, dtype: torch.dtype | None) -> None:
        self.in_place = in_place
        # layer -> the dtype that autocast rounds its weights to; None is a weight's own dtype
        self.dtypes: dict[CastsWeights, torch.dtype | None] = {
            layer: dtype or _autocast_dtype(weights[0])
            for layer in model.modules()
            if isinstance(layer, CastsWeights) and not layer.float8_config.smooth_input
            if (weights := list(_weights(layer).values()))
        }

    def refresh(self) -> None:
        """Cast every weight again, after writes that neither hooks nor version counters show."""
        self.cast(list(self.dtypes))

    def cast(self, layers: Sequence[CastsWeights]) -> None:
        """Cast the weights of some layers again."""
        for layer in layers:
            for name, weight in _whole_weights(layer).items():
                self.cast_weight(layer, name, weight)

    def cast_weight(self, layer: CastsWeights, name: str, weight: Tensor) -> None:
        """Cast one weight of a layer."""
        new = cast_of(layer, weight, self.dtypes[layer] or weight.dtype)
        old = layer.cached_weights.pop(name, None)
        if self.in_place and new is not None and old is not None:
            for kept, fresh in zip(old.tensors(), new.tensors(), strict=True):
                kept.copy_(fresh)
            new = replace(old, source=weight)
        if new is not None:
            layer.cached_weights[name] = new


def _weights(layer: CastsWeights) -> dict[str, Tensor]:
    """The weights of a layer in high precision."""
    return {n: w for n, w in weights_of(layer).items() if not isinstance(w, Float8Tensor)}


def _whole_weights(layer: CastsWeights) -> dict[str, Tensor]:
    """Those that calls cast now: not the ones that FSDP2 has yet to gather."""
    return {name: weight for name, weight in _weights(layer).items() if not is_sharded(weight)}


def _autocast_dtype(weight: Tensor) -> torch.dtype | None:
    return compute_dtype(weight) if autocasts(weight.device.type) else None


# Keys alone. Other threads open and close contexts: iterate over `list(_open)`, made in one go.
_open: dict[WeightCache, None] = {}


@contextmanager
def cached_weights(
    model: nn.Module,
    in_place: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[WeightCache]:
    """Cast the weights of ``model`` when they change instead of when they are used.

    Args:
        model: a converted model. The weights of its float8 layers and experts are cached, except
            in layers with ``smooth_input=True``, which cast their weights in every call.
        in_place: write new data into the old memory, at one more copy per step. A CUDA graph that
            is captured by hand inside the context needs it, because it always reads that memory.
        dtype: the compute dtype, needed if autocast is entered inside the context. By default the
            dtype of autocast when the context opens, or else each weight's own dtype.

    Yields:
        the `WeightCache`; its ``refresh()`` is for writes to weights that no hook sees.

    Raises:
        RuntimeError: the model is in another `cached_weights` already.
        TypeError: an argument has another type; or a weight is of a tensor subclass, or sharded by
            tensor parallelism.
    """
    check_module(model, "cached_weights")
    check_bool(in_place, "cached_weights: in_place")
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(each) for each in HIGH_PRECISION_DTYPES)
        raise TypeError(f"cached_weights: dtype must be one of {known}, got {described(dtype)}")
    cache = WeightCache(model, in_place, dtype)
    if not any(isinstance(module, CastsWeights) for module in model.modules()):
        warnings.warn(
            f"cached_weights: {type(model).__name__} has no float8 layer, so nothing is cached; "
            "pass what convert_to_float8_training(model) returns",
            stacklevel=3,
        )
    gathered = modules_under_fsdp(model)
    for layer in cache.dtypes:
        if (error := _error_of(layer, layer in gathered)) is not None:
            raise error
    _install_hooks()
    _open[cache] = None
    loads = [layer.register_load_state_dict_post_hook(_after_load) for layer in cache.dtypes]
    try:
        cache.refresh()
        yield cache
    finally:
        _open.pop(cache, None)
        for layer, load in zip(cache.dtypes, loads, strict=True):
            load.remove()
            layer.cached_weights.clear()


def _error_of(layer: CastsWeights, is_gathered: bool) -> RuntimeError | TypeError | None:
    name = layer._name
    if any(layer in cache.dtypes for cache in list(_open)):
        return RuntimeError(
            f"{name}: its weight is cached by another cached_weights already; open one scope, for "
            "the whole model"
        )
    for key, weight in _weights(layer).items():
        shards = [p for p in getattr(weight, "placements", ()) if not p.is_replicate()]
        may_wait = is_sharded(weight) and (weight.dim() == 3 or (is_gathered and len(shards) == 1))
        if not may_wait and type(weight) not in (torch.Tensor, nn.Parameter):
            return TypeError(
                f"{name}: {key} is a {type(weight).__name__}; cached_weights casts plain weights, "
                "and those that fully_shard has sharded before. Leave tensor-parallel layers out"
            )
    return None


@functools.cache
def _install_hooks() -> None:
    # One for the process, never removed: torch iterates over its hooks while they run.
    after_step = torch.compiler.disable(_after_step)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _open:  # a compiled step traces this, and leaves its graph where a cache is open
            after_step(optimizer)

    register_optimizer_step_post_hook(hook)


def _after_step(optimizer: Optimizer) -> None:
    """Cast the weights that this optimizer has stepped."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for cache in list(_open):
        for layer in cache.dtypes:
            if any([id(weight) in stepped for weight in _whole_weights(layer).values()]):
                cache.cast([layer])


def _after_load(layer: Any, incompatible_keys: Any) -> None:
    """Cast a layer's weight after a load; a copy of a layer is in no cache and left alone."""
    for cache in list(_open):
        if layer in cache.dtypes:
            cache.cast([layer])


def cast_delayed(model: nn.Module) -> None:
    """Cast the cached weights of layers with delayed scales, which `sync` has changed."""
    delayed = [
        layer
        for layer in model.modules()
        if isinstance(layer, CastsWeights) and layer.float8_config.uses_delayed_scaling
    ]
    for cache in list(_open):
        cache.cast([layer for layer in delayed if layer in cache.dtypes])
