"""When the ranks' float8 layers are compared (`rank_comparison`), and which ranks compare.

**When**: before the first of these, whichever comes first in a process group:

- A model's first forward. Under DDP, ranks that cast differently would train without an error.
  Under FSDP2 they would gather different numbers of bytes and hang. FSDP2 gathers in a hook that
  runs before all hooks of the modules themselves. So conversion installs a hook that torch calls
  before the forward of *every* module. The first comparison removes it: later steps cost nothing.
- The first gather of a weight in float8, if no hook was installed.
- The first `precompute_float8_dynamic_scale_for_fsdp`, and the first ``sync``.
- The second time that dynamic scales of gathered weights are computed. All ranks must compute them
  in the same way: by `precompute_float8_dynamic_scale_for_fsdp`, or in their gathers. Ranks can
  differ in that from the second time on.

**Which ranks**: those of the process group of DDP or FSDP1, and those of the device mesh of a
parameter (FSDP2, tensor parallelism). So a rank of a pipeline stage is compared with the ranks of
its own stage. Where values are exchanged by position (DDP, FSDP1, within one unit of FSDP2), the
order of the layers is compared too. ``sync`` compares the ranks that it reduces over.

A model that is neither wrapped nor sharded is not compared: its ranks may differ by design, or one
rank may run it before it is wrapped. The first step of an optimizer, or a hundred training
forwards, removes the hook. It is installed again when DDP or FSDP1 wraps such a model.

A root module that was compiled in place (``model.compile()``) calls no hook outside of its graph.
Only its first gather in float8 and the first ``sync`` compare it. The hook stays until then. It
costs nothing in compiled code, and removing it would cause a recompilation. torch warns that
``torch.compile`` calls such a hook once more, which is harmless; the warning is suppressed.

Importing this file registers the callbacks of conversion and of ``sync``.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
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

from float8.convert.conversion import own_config
from float8.distributed.rank_comparison import (
    LAYERS,
    PLACE,
    SAME_LAYERS,
    Facts,
    compare_ranks,
    facts_of,
    is_gathered_in_float8,
    is_one_of_many,
    weights_of,
)
from float8.linear.delayed import DelayedCast, modules_by_name, ranks_of
from float8.linear.registration import AFTER_CONVERSION, FIRST_SYNC_CHECKS
from float8.tensor.running_module import running_modules

FORWARD = "runs its first forward"
PRECOMPUTE = "calls precompute_float8_dynamic_scale_for_fsdp"
GATHER = "gathers weights without precompute_float8_dynamic_scale_for_fsdp"
SYNC = "calls sync_float8_amax_and_scale_history"

# Converted models whose layers have not been compared yet.
WAITING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers
_without_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Converted models that ran before they were wrapped or sharded -> number of training forwards.
# When one of them is wrapped, it is put in WAITING again.
_ran_alone: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_MANY = 100  # the number of such forwards after which the hook is removed
_installed: list[tuple[Any, Any]] = []  # at most one: the hook's handle, and a warnings filter


# --- the hook, and when it is removed


def _after_conversion(model: nn.Module) -> None:
    if not _is_compared(model):  # else this conversion changed nothing
        _wait_for(model)


def _wait_for(model: nn.Module) -> None:
    WAITING.add(model)
    _ran_alone.pop(model, None)
    _without_layers.clear()
    if _may_be_one_of_many() and not _installed:
        handle = register_module_forward_pre_hook(_before_forward)
        _install_lasting_hooks()
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
        _installed.append((handle, warnings.filters[0]))


def _may_be_one_of_many() -> bool:
    """Whether there are other processes, or there may be when the process group is made."""
    launched = dist.is_available() and dist.is_torchelastic_launched()
    return is_one_of_many() or (launched and not dist.is_initialized())


@functools.cache
def _install_lasting_hooks() -> None:
    # Once per process, never removed: torch iterates over its hooks while they run.
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _after_step())
    register_module_module_registration_hook(_after_registration)


def _after_step() -> None:
    if WAITING:
        _stop_waiting_for(model for model in _ran_alone if not _is_sharded(model))


def _after_registration(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    """Compare a model that ran on one rank when all ranks wrap it."""
    if _ran_alone and model is not None and isinstance(wrapper, _wrappers()):
        for inner in model.modules():
            if inner in _ran_alone:
                _wait_for(inner)


def _stop_waiting_for(models: Iterable[nn.Module]) -> None:
    for model in list(models):
        WAITING.discard(model)
    if not WAITING:
        _uninstall()


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


# --- comparing a model


def compare_before(model: nn.Module, entry: str) -> None:
    """Compare the ranks' layers of a model, unless they have been compared.

    Args:
        model: the model that is about to run, or to be synchronised.
        entry: the call that this rank makes, for messages; it must be the same on all ranks.

    Raises:
        RuntimeError: on every rank, with the name of the first layer that differs.
    """
    modules = set(model.modules())
    layers = [m for m in modules if isinstance(m, LAYERS) and m not in _compared]
    roots = [root for root in WAITING if root in modules]
    if not layers and not roots:
        _without_layers.add(model)
        return
    trains = model.training and torch.is_grad_enabled()
    wrapped = [m for m in modules if isinstance(m, DistributedDataParallel)]
    if wrapped and not (trains and all(m.require_backward_grad_sync for m in wrapped)):
        return  # one rank alone may run such a forward
    if _may_be_one_of_many():
        by_ranks = _facts_by_ranks(model)
        if not by_ranks:
            for root in roots:
                _ran_alone[root] = _ran_alone.get(root, 0) + trains
            _stop_waiting_for(root for root, count in _ran_alone.items() if count >= _MANY)
            return
        for ranks, facts in sorted(by_ranks.items()):
            compare_ranks(list(ranks), entry, facts)
        _expect_second_scales(model)
        _warn_of_weights_that_are_not_gathered(model)
    _compared.update(layers)
    for root in list(WAITING):
        if root in modules or _is_compared(root):
            WAITING.discard(root)
            _ran_alone.pop(root, None)


def _is_compared(root: nn.Module) -> bool:
    """Whether all layers of a model were compared, perhaps in forwards of its parts."""
    layers = [module for module in root.modules() if isinstance(module, LAYERS)]
    return bool(layers) and all(layer in _compared for layer in layers)


def compare_before_gather(layer: nn.Module) -> None:
    """Compare the layers of the outermost running module, before its first gather in float8."""
    running = [module for module in running_modules() if layer in set(module.modules())]
    compare_before(running[-1] if running else layer, FORWARD)


def _facts_by_ranks(model: nn.Module) -> dict[tuple[int, ...], dict[str, Facts]]:
    """The facts of a model's layers, by the ranks that must hold the same layers."""
    found: dict[tuple[int, ...], dict[str, Facts]] = defaultdict(dict)
    for parameter in model.parameters():
        if hasattr(parameter, "device_mesh"):
            found[_ranks_of(parameter)] |= {}
    places = _places_in_units(model)
    for name, module in modules_by_name(model, (*LAYERS, *_wrappers())):
        is_layer = isinstance(module, LAYERS)
        weight = next(iter(weights_of(module).values()), None) if is_layer else None
        if hasattr(weight, "device_mesh"):
            found[_ranks_of(weight)][name] = _facts_with_place(name, module, places.get(module))
        elif isinstance(module, _wrappers()):
            inner: Any = module
            found[tuple(ranks_of(inner.process_group))] |= _facts_in_order(inner)
    return {ranks: facts for ranks, facts in found.items() if len(ranks) > 1}


def _facts_in_order(wrapper: Any) -> dict[str, Facts]:
    """The facts of the layers that DDP or FSDP1 wraps."""
    model, ignored = wrapper.module, getattr(wrapper, "parameters_to_ignore", ())
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, LAYERS)
        and any(f"{name}.{key}" not in ignored for key in weights_of(module))
    ]
    places = {layer: ("the model", place) for place, layer in enumerate(layers)}
    return {
        name: _facts_with_place(name, module, places[module])
        for name, module in modules_by_name(model, LAYERS)
        if module in places
    }


def _facts_with_place(name: str, layer: nn.Module, place: tuple[str, int] | None) -> Facts:
    facts = facts_of([(name, layer)])[name]
    return facts if place is None else facts | {PLACE + place[0]: str(place[1])}


def _ranks_of(parameter: Any) -> tuple[int, ...]:
    return tuple(ranks_of(parameter.device_mesh))


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "device_mesh") and len(_ranks_of(p)) > 1 for p in model.parameters())


def _wrappers() -> tuple[type[nn.Module], ...]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import
    own = (DistributedDataParallel,)
    return own if fsdp is None else (*own, fsdp.FullyShardedDataParallel)


def _places_in_units(model: nn.Module) -> dict[nn.Module, tuple[str, int]]:
    """For each float8 layer the unit of FSDP2 that gathers it, and its place in that unit."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    places: dict[nn.Module, tuple[str, int]] = {}
    counts: dict[str, int] = defaultdict(int)
    units = {name for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}
    for name, module in model.named_modules():
        if not isinstance(module, LAYERS):
            continue
        unit = name
        while unit and unit not in units:
            unit = unit.rpartition(".")[0]
        if unit in units:
            places[module] = (f"FSDP2's unit {unit or 'of the whole model'!r}", counts[unit])
            counts[unit] += 1
    return places


def _warn_of_weights_that_are_not_gathered(model: nn.Module) -> None:
    """Warn of layers on which ``enable_fsdp_float8_all_gather`` has no effect."""
    units = _places_in_units(model)
    reported: set[str] = set()  # conversion's report names them
    for root in model.modules():
        conversion = root.__dict__.get("float8_conversion")
        reported |= set(getattr(conversion, "gathered_in_high_precision", ()))
    found = [
        name
        for name, layer in modules_by_name(model, LAYERS)
        if (config := own_config(layer)) is not None
        and config.enable_fsdp_float8_all_gather
        and getattr(layer, "float8_name", None) not in reported
        and getattr(layer, "fqn", None) not in reported
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


# --- before the first sync


# (layer) -> the ranks that must have equal delayed scales for it, or None. Files of this package
# append theirs.
RANKS_OF_ONE_SCALE: list[Callable[[nn.Module], list[int] | None]] = []


def _compare_before_sync(model: nn.Module, ranks: list[int]) -> None:
    """Raise, on every rank, if ``ranks`` (those that ``sync`` reduces over) differ in layers."""
    remedy = SAME_LAYERS + (
        "; where ranks hold different layers by design, as pipeline stages do, pass "
        "sync_float8_amax_and_scale_history(model, group=...) the process group or DeviceMesh of "
        "the ranks that hold the same layers"
    )
    facts = facts_of(modules_by_name(model, (*LAYERS, DelayedCast)))
    compare_ranks(ranks, SYNC, facts, remedy, _error_of_missing_ranks(model, ranks))


def _error_of_missing_ranks(model: nn.Module, present: list[int]) -> str | None:
    for fqn, module in model.named_modules():
        for ranks_of_one_scale in RANKS_OF_ONE_SCALE:
            ranks = ranks_of_one_scale(module)
            if ranks is not None and not set(present).issuperset(ranks):
                return (
                    f"{fqn or 'the model itself'}: ranks {ranks} hold parts of it and send each "
                    f"other float8 data of one scale, and sync takes ranks {sorted(present)} only: "
                    "its group must hold the ranks of tensor parallelism and of FSDP2's shards too"
                )
    return None


# --- before the second time that dynamic scales of gathered weights are found


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
        if isinstance(module, LAYERS) and is_gathered_in_float8(module):
            weight = next(iter(weights_of(module).values()))
            if hasattr(weight, "device_mesh"):
                by_ranks[_ranks_of(weight)].append(module)
    GATHERINGS[:] = [gathering for gathering in GATHERINGS if gathering.layers]
    GATHERINGS.extend(_Gathering(list(r), ls) for r, ls in by_ranks.items() if len(r) > 1)


def compare_before_finding_scales(layers: list[Any], entry: str) -> None:
    """Compare how ranks find dynamic scales, when they find those of a layer a second time.

    Args:
        layers: the layers whose scales this rank is about to find, by collectives.
        entry: `PRECOMPUTE` or `GATHER`.

    Raises:
        RuntimeError: on every rank, if they do not do the same.
    """
    for gathering in list(GATHERINGS):
        mine = [layer for layer in layers if layer in gathering.layers]
        if any(layer in gathering.found for layer in mine):
            GATHERINGS.remove(gathering)
            compare_ranks(gathering.ranks, entry, {})
        gathering.found.update(mine)


AFTER_CONVERSION.append(_after_conversion)
FIRST_SYNC_CHECKS.append(_compare_before_sync)
