"""Compare the ranks' float8 layers before a model's first forward, or whatever comes first.

Under DDP ranks that cast differently would train on in silence; under FSDP2 they would gather
different bytes and hang. Both start in the forward of the outermost module, FSDP2 in a hook that
comes before all hooks of the modules themselves. So conversion in a program of several processes
installs a hook that torch calls before the forward of *every* module. The first forward compares
what the ranks hold, and removes the hook: later steps cost nothing. While it is installed, torch
would warn that ``torch.compile`` calls it once more, which does no harm; that warning is silenced.

Which ranks hold the same layers is read from the model: those of a DDP's or FSDP1's process group,
and those of the device mesh of a parameter (FSDP2, tensor parallelism). So pipeline stages are
compared with the ranks of their own stage. A model without either is not compared: its ranks may
differ by design, or one of them tries it out before it is wrapped. The first step of an optimizer,
or a hundred forwards, end the wait for it, until DDP or FSDP1 wraps it. Where gradients or shards
are exchanged by position (DDP and FSDP1; within one unit of FSDP2) the order of the layers is
compared too.

An outermost module that was compiled in place (``model.compile()``) calls no hook outside of its
graph. It is compared only by its first gather in float8 and by the first ``sync``. While it waits
the hook stays, which costs compiled code nothing; its removal would compile that again.

With weights that are gathered in float8 ranks also have to find the scales in the same way, all by
`precompute_float8_dynamic_scale_for_fsdp` or all in their gathers. What they do is compared when
the scales are found for the second time, which is in the first place where they can differ.

Importing this file registers the callback of conversion.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from float8.distributed.agreement import PLACE, difference, facts_of, is_gathered_in_float8
from float8.distributed.rank_comparison import Facts, compare_ranks, is_one_of_many
from float8.linear.delayed import modules_by_name, ranks_of
from float8.linear.layer import Float8Linear
from float8.linear.registration import AFTER_CONVERSION
from float8.tensor.running_module import running_modules

FORWARD = "runs its first forward"
PRECOMPUTE = "calls precompute_float8_dynamic_scale_for_fsdp"
GATHER = "gathers weights without precompute_float8_dynamic_scale_for_fsdp"

# Converted models whose layers have not been compared yet.
WAITING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers
_without_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Of WAITING: those that ran with no other rank, and how many of these forwards trained.
_alone: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_given_up: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # not of WAITING any more, after that
_MANY = 100  # of such forwards
_installed: list[tuple[Any, Any]] = []  # at most one: the hook's handle, and a warnings filter


def _after_conversion(model: nn.Module) -> None:
    if _is_compared(model):
        return  # nothing was converted that had not been before
    _wait_for(model)


def _wait_for(model: nn.Module) -> None:
    WAITING.add(model)
    _without_layers.clear()
    if _may_be_one_of_many() and not _installed:
        handle = register_module_forward_pre_hook(_before_forward)
        _install_lasting_hooks()
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
        _installed.append((handle, warnings.filters[0]))


def _may_be_one_of_many() -> bool:
    """Whether there are other processes, or may be as soon as the process group is made."""
    launched = dist.is_available() and dist.is_torchelastic_launched()
    return is_one_of_many() or (launched and not dist.is_initialized())


@functools.cache
def _install_lasting_hooks() -> None:
    # Once for the process, never removed: torch iterates over its hooks while they run.
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _after_step())
    register_module_module_registration_hook(_after_registration)


def _after_step() -> None:
    if _alone:
        _give_up_on([model for model in _alone if not _is_sharded(model)])


def _after_registration(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    """Wait again for a model that one rank tried out before all of them wrap it."""
    if (_alone or _given_up) and model is not None and isinstance(wrapper, _wrappers()):
        for inner in model.modules():
            _alone.pop(inner, None)
            if inner in _given_up:
                _given_up.discard(inner)
                _wait_for(inner)


def _uninstall() -> None:
    while _installed:
        handle, ignored = _installed.pop()
        handle.remove()
        if ignored in warnings.filters:
            warnings.filters.remove(ignored)  # type: ignore[attr-defined]


def _before_forward(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or module in _without_layers:
        return
    if WAITING:
        compare_before(module, FORWARD)
    if not WAITING:
        _uninstall()


def _give_up_on(models: list[nn.Module]) -> None:
    for model in models:
        _alone.pop(model, None)
        if model in WAITING:
            WAITING.discard(model)
            _given_up.add(model)
    if _installed and not WAITING:
        _uninstall()


def compare_before(model: nn.Module, entry: str) -> None:
    """Compare the ranks' layers of a model, unless they have been.

    Args:
        model: whose forward is about to run, or that is about to be used otherwise.
        entry: what this rank does with it, for messages; all ranks must do the same first.

    Raises:
        RuntimeError: on every rank, naming the first layer that differs.
    """
    modules = set(model.modules())
    layers = [m for m in modules if isinstance(m, Float8Linear) and m not in _compared]
    roots = [root for root in WAITING if root in modules]
    if not layers and not roots:
        _without_layers.add(model)
        return
    trains = model.training and torch.is_grad_enabled()
    wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
    if wrapped and not (trains and all(m.require_backward_grad_sync for m in wrapped)):
        return  # a rank may do that alone
    if _may_be_one_of_many():
        by_ranks = _facts_by_ranks(model)
        if not by_ranks:
            for root in roots:
                _alone[root] = _alone.get(root, 0) + trains
            _give_up_on([root for root, count in _alone.items() if count >= _MANY])
            return
        for ranks, facts in sorted(by_ranks.items()):
            explain = functools.partial(difference, list(ranks), "")
            compare_ranks(list(ranks), entry, facts, explain)
        _expect_second_scales(model)
        _warn_of_weights_that_are_not_gathered(model)
    _compared.update(layers)
    for root in list(WAITING):
        if root in modules or _is_compared(root):
            WAITING.discard(root)


def _is_compared(root: nn.Module) -> bool:
    """Whether all layers of a model were compared, which may run in parts only."""
    layers = [module for module in root.modules() if isinstance(module, Float8Linear)]
    return bool(layers) and all(layer in _compared for layer in layers)


def compare_before_gather(layer: nn.Module) -> None:
    """The same where no hook was installed: of the outermost module that runs."""
    running = [module for module in running_modules() if layer in set(module.modules())]
    compare_before(running[-1] if running else layer, FORWARD)


def _facts_by_ranks(model: nn.Module) -> dict[tuple[int, ...], dict[str, Facts]]:
    """For each set of ranks that hold the same layers, the facts of those layers."""
    found: dict[tuple[int, ...], dict[str, Facts]] = defaultdict(dict)
    for parameter in model.parameters():
        if hasattr(parameter, "device_mesh"):
            found[_ranks_of(parameter)] |= {}
    units = _places_in_units(model)
    for name, module in modules_by_name(model, (Float8Linear, *_wrappers())):
        weight: Any = module._parameters.get("weight")
        if isinstance(module, Float8Linear) and hasattr(weight, "device_mesh"):
            facts = facts_of([(name, module)])[name]
            found[_ranks_of(weight)][name] = facts | _place(units.get(module))
        elif isinstance(module, _wrappers()):
            inner: Any = module
            ranks = ranks_of(inner.process_group)
            found[tuple(ranks)] |= _facts_in_order(inner)
    return {ranks: facts for ranks, facts in found.items() if len(ranks) > 1}


def _facts_in_order(wrapper: Any) -> dict[str, Facts]:
    model, ignored = wrapper.module, getattr(wrapper, "parameters_to_ignore", ())
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, Float8Linear) and f"{name}.weight" not in ignored
    ]
    places = {layer: ("the model", place) for place, layer in enumerate(layers)}
    return {
        name: facts_of([(name, module)])[name] | _place(places[module])
        for name, module in modules_by_name(model, Float8Linear)
        if module in places
    }


def _place(found: tuple[str, int] | None) -> Facts:
    return {} if found is None else {PLACE + found[0]: str(found[1])}


def _ranks_of(parameter: Any) -> tuple[int, ...]:
    return tuple(ranks_of(parameter.device_mesh))


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "device_mesh") and len(_ranks_of(p)) > 1 for p in model.parameters())


def _wrappers() -> tuple[type[nn.Module], ...]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # which takes long to import
    own = (DistributedDataParallel,)
    return own if fsdp is None else (*own, fsdp.FullyShardedDataParallel)


def _places_in_units(model: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """Of each float8 layer the unit of FSDP2 that gathers it, and its place among the unit's."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    places: dict[nn.Module, tuple[str, int]] = {}
    counts: dict[str, int] = defaultdict(int)
    units = {name for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}
    for name, module in model.named_modules():
        if not isinstance(module, Float8Linear):
            continue
        unit = name
        while unit and unit not in units:
            unit = unit.rpartition(".")[0]
        if unit in units:
            places[module] = (f"FSDP2's unit {unit or 'of the whole model'!r}", counts[unit])
            counts[unit] += 1
    return places


def _warn_of_weights_that_are_not_gathered(model: nn.Module) -> None:
    """Tell of layers whose ``enable_fsdp_float8_all_gather`` has no effect."""
    units = _places_in_units(model)
    plain: set[str] = set()  # of which conversion's report says so
    for root in model.modules():
        plain |= set(getattr(root.__dict__.get("float8_conversion"), _PLAIN, ()))
    found = [
        name
        for name, layer in modules_by_name(model, Float8Linear)
        if layer.config.enable_fsdp_float8_all_gather
        and layer.fqn not in plain
        and not (layer in units and is_gathered_in_float8(layer))
    ]
    if found:
        warnings.warn(
            f"enable_fsdp_float8_all_gather=True has no effect on {len(found)} layers (first: "
            f"{found[0] or 'the model itself'}): only weights that fully_shard (FSDP2) shards are "
            "gathered in float8. DDP gathers none, and parametrisations such as SimpleFSDP gather "
            "in high precision. Use fully_shard after conversion, or leave the option off",
            stacklevel=2,
        )


_PLAIN = "gathered_in_high_precision"


# --- how ranks find scales


class _Gathering:
    """Layers whose weights some ranks gather in float8, until their scales are found again."""

    def __init__(self, ranks: list[int], layers: Iterable[nn.Module]) -> None:
        self.ranks = ranks
        self.layers = weakref.WeakSet(layers)
        self.found: weakref.WeakSet[nn.Module] = weakref.WeakSet()


GATHERINGS: list[_Gathering] = []


def _expect_second_scales(model: nn.Module) -> None:
    by_ranks: dict[tuple[int, ...], list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, Float8Linear) and is_gathered_in_float8(module):
            weight = module._parameters["weight"]
            if hasattr(weight, "device_mesh"):
                by_ranks[_ranks_of(weight)].append(module)
    GATHERINGS[:] = [gathering for gathering in GATHERINGS if gathering.layers]
    GATHERINGS.extend(_Gathering(list(r), ls) for r, ls in by_ranks.items() if len(r) > 1)


def compare_before_finding_scales(layers: list[Any], entry: str) -> None:
    """Compare how ranks find dynamic scales, when they find those of a layer a second time.

    Args:
        layers: whose scales are about to be found, by collectives.
        entry: `PRECOMPUTE` or `GATHER`.

    Raises:
        RuntimeError: on every rank, if they do not do the same.
    """
    for gathering in list(GATHERINGS):
        mine = [layer for layer in layers if layer in gathering.layers]
        if any(layer in gathering.found for layer in mine):
            GATHERINGS.remove(gathering)
            compare_ranks(
                gathering.ranks, entry, {}, functools.partial(difference, gathering.ranks, "")
            )
        gathering.found.update(mine)


AFTER_CONVERSION.append(_after_conversion)
