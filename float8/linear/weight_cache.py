"""`cached_weights`: cast every weight once per optimizer step instead of twice per microbatch.

A `Float8Linear` casts its weight in forward and again in backward, because keeping the bytes would
cost memory. With gradient accumulation the same weight is cast for every microbatch. Inside

    with cached_weights(model):
        for step in range(steps):
            for x, y in microbatches:
                loss(model(x), y).backward()
            optimizer.step()          # the weights change: they are cast again, once
            optimizer.zero_grad()

each weight is cast when it changes, for both GEMMs that read it, and forward and backward read the
codes. The price: two bytes per weight element of the layers, held as long as the scope is open.

The contract. Weights are cast again after

- a step of any optimizer that holds one of them (seen by a hook);
- ``sync_float8_amax_and_scale_history(model)``, where the cast is delayed: with `optimizer.step`
  that makes two casts per step;
- ``load_state_dict`` into the layer;
- ``refresh()`` of what the scope returns.

In eager mode a layer whose weight was written in any other way that torch counts (``copy_``, the
steps within an LBFGS step, an optimizer with its own fp32 masters), was replaced, or is computed
anew at each call (parametrizations, ``functional_call``) casts it as without a cache: right, and no
faster until the next of the above. What torch does not count needs ``refresh()``: writes to
``.data``, ``model.to(dtype)`` and back, averaging wrappers that write after the inner optimizer's
step; in compiled code, every write that is not in the list. The layers are those that the model has
when the scope opens.

Weights that live in float8 (`float8.linear.float8_weight`) need no cast and are passed over.

Forward and backward write no Python state: recomputation, torch.compile and CUDA graphs see
constants. Bits are those of the layer without a cache.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.arguments import check_bool, check_module, described
from float8.formats import HIGH_PRECISION_DTYPES
from float8.linear.bound_plan import autocasts, compute_dtype, plan_on
from float8.linear.float8_weight import Float8Weight, cast_weight, is_resident
from float8.linear.layer import Float8Linear
from float8.linear.registration import AFTER_SYNC


class WeightCache:
    """The cached weights of a model, as long as its `cached_weights` is open.

    Args:
        model: its Float8Linears take part.
        in_place: write new codes over the old ones.
        dtype: the compute dtype, if it is known.
    """

    def __init__(self, model: nn.Module, in_place: bool, dtype: torch.dtype | None) -> None:
        self.in_place = in_place
        # layer -> what autocast rounds its weight to; None is the weight's own dtype
        self.dtypes: dict[Float8Linear, torch.dtype | None] = {
            layer: dtype or _autocast_dtype(layer.weight)
            for layer in model.modules()
            if isinstance(layer, Float8Linear) and not is_resident(layer.weight)
        }

    def refresh(self) -> None:
        """Cast every weight again: for writes that nobody else sees."""
        for layer in self.dtypes:
            self.cast(layer)

    def cast(self, layer: Float8Linear) -> None:
        """Cast one layer's weight again."""
        weight = layer.weight
        dtype = self.dtypes[layer] or weight.dtype
        old = layer.cached_weight
        plan = plan_on(layer.config, weight.device, dtype)
        new = cast_weight(weight, plan, layer.casts[1].state)
        if self.in_place and new is not None and old is not None:
            for kept, fresh in zip(old.tensors(), new.tensors(), strict=True):
                kept.copy_(fresh)
            new = Float8Weight(old.row_major, old.transposed, dtype, old.amax, source=weight)
        layer.cached_weight = new

    def holds(self, optimizer: Optimizer) -> list[Float8Linear]:
        """The layers whose weight this optimizer steps."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [layer for layer in self.dtypes if id(layer.weight) in stepped]


def _autocast_dtype(weight: torch.Tensor) -> torch.dtype | None:
    return compute_dtype(weight) if autocasts(weight.device.type) else None


_open: weakref.WeakSet[WeightCache] = weakref.WeakSet()


@contextmanager
def cached_weights(
    model: nn.Module, in_place: bool = False, dtype: torch.dtype | None = None
) -> Iterator[WeightCache]:
    """Cast the weights of ``model`` when they change instead of when they are used.

    Args:
        model: converted; its `Float8Linear` layers take part.
        in_place: write new codes over the old ones, at one more copy per step: what a CUDA graph
            captured by hand inside the scope needs, since it reads the same memory forever.
        dtype: what the model computes in, where autocast is entered inside the scope; by default
            what autocast says when the scope opens, or each weight's own dtype.

    Yields:
        the `WeightCache`; its ``refresh()`` is for writes to weights that no hook sees.

    Raises:
        RuntimeError: the model is in another `cached_weights` already.
        TypeError: an argument of another type; or a weight is sharded (DTensor): what forward
            multiplies exists only after the gather.
    """
    check_module(model, "cached_weights")
    check_bool(in_place, "cached_weights: in_place")
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        known = ", ".join(str(each) for each in HIGH_PRECISION_DTYPES)
        raise TypeError(f"cached_weights: dtype must be one of {known}, got {described(dtype)}")
    cache = WeightCache(model, in_place, dtype)
    if not any(isinstance(module, Float8Linear) for module in model.modules()):
        warnings.warn(
            f"cached_weights: {type(model).__name__} has no float8 layer, so nothing is cached; "
            "pass what convert_to_float8_training(model) returns",
            stacklevel=3,
        )
    for layer in cache.dtypes:
        if (reason := _refuses(layer)) is not None:
            raise reason
    _install_hooks()
    _open.add(cache)
    loads = [layer.register_load_state_dict_post_hook(_after_load) for layer in cache.dtypes]
    try:
        cache.refresh()
        yield cache
    finally:
        _open.discard(cache)
        for layer, load in zip(cache.dtypes, loads, strict=True):
            load.remove()
            layer.cached_weight = None


def _refuses(layer: Float8Linear) -> RuntimeError | TypeError | None:
    name = layer.fqn or "Float8Linear"
    if layer.cached_weight is not None:
        return RuntimeError(
            f"{name}: its weight is cached by another cached_weights already; open one scope, for "
            "the whole model"
        )
    weight: torch.Tensor = layer.weight
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return TypeError(
            f"{name}: weight is a {type(weight).__name__}; cached_weights casts whole plain "
            "weights. Leave sharded models out of the scope"
        )
    return None


@functools.cache
def _install_hooks() -> None:
    # One of each for the process, never removed: torch iterates over its hooks while they run.
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _after_step(optimizer))
    AFTER_SYNC.append(_after_sync)


def _after_step(optimizer: Optimizer) -> None:
    for cache in list(_open):
        for layer in cache.holds(optimizer):
            cache.cast(layer)


def _after_load(layer: Any, incompatible_keys: Any) -> None:
    """A checkpoint was loaded into a layer, or into a copy of one, which no cache knows."""
    for cache in list(_open):
        if layer in cache.dtypes:
            cache.cast(layer)


def _after_sync(model: nn.Module) -> None:
    """Delayed scales have changed."""
    for cache in list(_open):
        for layer in model.modules():
            if (
                isinstance(layer, Float8Linear)
                and layer in cache.dtypes
                and layer.casts[1].state is not None
            ):
                cache.cast(layer)
