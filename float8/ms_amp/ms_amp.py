"""MS-AMP's optimization levels with one call: in which dtype each tensor of a training is stored.

::

    model, optimizer = float8.ms_amp(model, torch.optim.AdamW(model.parameters()), level="O2")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

For the weights of converted ``nn.Linear`` layers each level stores (MS-AMP's documentation,
"Optimization Level"; FP8-LM, arXiv 2310.18313, sections 2.1 and 2.2; bytes per element):

===== ======= ==== ====== ====== ======== ==================== =====
level product sent weight master gradient moments              bytes
===== ======= ==== ====== ====== ======== ==================== =====
O1    FP8     E4M3 FP16   none   E4M3     FP32 and FP32        11
O2    FP8     E4M3 FP16   none   E4M3     E4M3 and scaled FP16 6
O3    FP8     E4M3 E4M3   scaled E4M3     E4M3 and scaled FP16 7
                          FP16
===== ======= ==== ====== ====== ======== ==================== =====

There is a scale per group of 128 (moments, master) or per tensor (weight, gradient). O3 saves bytes
where weights are sent or read, not where they are stored. Rounding to nearest would lose each
update of a float16 weight by less than 2^-12 of it; at fine-tuning rates that is nearly all of
them. Such weights and masters are rounded stochastically, in the same way in every run. All other
parameters stay as they are, with plain gradients: biases, norms, embeddings and weights tied to
them, layers that a filter leaves out, frozen weights. The moments of those with fewer than
``min_size`` elements stay FP32. One thing differs from MS-AMP: its FP16 weights of O1 and O2 have a
scale. These are torch.float16, whose numbers below 6e-5 are 6e-8 apart; weights beyond its range
are refused, here and when a checkpoint is loaded.

**Autocast.** Under O1 and O2 weights are float16 and activations are not: train under
``torch.autocast(device, torch.bfloat16)``, or with ``torch.float16`` and a ``GradScaler``. O3 runs
under any autocast or none. Gradients are computed in the autocast dtype and not rounded to float16
(the weights' ``grad_dtype`` is None), so that bfloat16 needs no loss scaling; compiled models
are the exception.

**Checkpoints.** ``state_dict()`` of model and optimizer contain plain tensors, and training resumes
from them to the same bits. Under O3 the optimizer's master defines a weight: loading a model's
checkpoint alone starts the masters anew, from its float8 weights. Load a high-precision checkpoint,
and move or cast the model, before `ms_amp`: ``model.to`` replaces float8 weights, which then get
plain gradients. A model that `convert_from_float8_training` made plain needs a new optimizer.

**Compilation.** Compile the model after this call. For float16 weights (O1, O2) torch.compile does
round gradients to float16, whose smallest number is 6e-8: use a ``GradScaler`` there, with bfloat16
too. A compiled ``optimizer.step`` reads gradients that are stored in float8 under O3 only (torch
2.13 cannot trace a plain parameter whose gradient has another type).

**Several processes.** A wrapper owns the memory of weights and gradients. Convert, wrap, build the
optimizer, then call `ms_amp` on the wrapped model, on all ranks::

    convert_to_float8_training(model, config=config)
    model = DistributedDataParallel(model)            # or fully_shard(...)
    model, optimizer = ms_amp(model, torch.optim.AdamW(model.parameters()), "O2")

Gradients are then sent as float8 (`float8.distributed.gradients`), weights and gradients keep their
dtypes, and the moments are the level's. O3 requires FSDP2 and a model converted with
``enable_fsdp_float8_all_gather=True``: the sharded high-precision weight is the master, and the
gathered weight is float8. DDP broadcasts weights and buckets gradients in high precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from float8.arguments import check_module
from float8.config import Float8LinearConfig
from float8.convert.conversion import ConversionPlan, plan_conversion
from float8.convert.convert import convert_to_float8_training
from float8.convert.filters import ModuleFilter
from float8.distributed.gradients import float8_gradients
from float8.distributed.replaced_parameters import mark_replaced
from float8.distributed.sharded_weight import ShardedWeight
from float8.formats import E4M3
from float8.kernels.matrix import TENSOR
from float8.linear.layer import Float8Linear
from float8.linear.resident import as_parameter, reason_against_resident, to_resident
from float8.optim import Adam, AdamW
from float8.optim.gradients import hold_gradients_in_float8
from float8.optim.optimizer import cast_from_master
from float8.optim.options import KINDS
from float8.optim.state_dicts import FOREIGN
from float8.tensor import Float8Tensor

OPTIMIZERS = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, AdamW: AdamW, Adam: Adam}
# What groups of torch.optim have that is no hyperparameter, or that a level decides.
_NOT_CARRIED = {"params", "param_names", *FOREIGN, *KINDS}
_STALE = "ms_amp has replaced a weight that this optimizer holds: step the one that it returned"
BEYOND_FLOAT16 = "its weight has values beyond float16's range (65504): scale it, or take level O3"


@dataclass(frozen=True)
class Level:
    """A row of MS-AMP's table.

    Args:
        weight: "float16" or "float8"; the latter with a float16 master.
        first_moment, second_moment: as `float8.optim.AdamW` names them.
    """

    weight: str
    first_moment: str
    second_moment: str


LEVELS = {
    "O1": Level("float16", "float32", "float32"),
    "O2": Level("float16", "float8", "float16"),
    "O3": Level("float8", "float8", "float16"),
}
"""The levels: name -> `Level`. O3 also keeps a float16 master of each float8 weight."""


@dataclass
class MsAmp:
    """The report of `ms_amp`; it is the model's attribute ``ms_amp``.

    Args:
        level: the level's name.
        weights: the layers whose weight and gradient are stored as the level says.
        left: layer -> why its weight stayed as it was.
    """

    level: str
    weights: list[str]
    left: dict[str, str]


def ms_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str = "O2",
    *,
    config: Float8LinearConfig | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    **storage: Any,
) -> tuple[nn.Module, AdamW]:
    """Store a model's weights, gradients and moments as a level of MS-AMP does, in place.

    Linear layers are converted first, as by `convert_to_float8_training`. Converted layers keep
    their config. Replaced weights are new Parameters: use the optimizer that is returned, and drop
    the old optimizer, which refers to the old weights. Build LR schedulers and call
    ``torch.compile`` after this call. Existing gradients are dropped. A deep copy is for evaluation
    only: hooks are not copied, so the gradients of the copy would not be in float8.

    Args:
        model: on one process; or a `DistributedDataParallel`, or one that `fully_shard` has taken,
            converted before.
        optimizer: AdamW or Adam, of torch.optim or `float8.optim`: hyperparameters, groups and
            states are taken over.
        level: "O1", "O2" or "O3".
        config: of layers that are not converted yet; O3 needs tensorwise weights.
        module_filter_fn: called with each candidate and its name; False leaves it alone.
        storage: of the optimizer: ``group_size``, ``min_size``, ``stochastic_rounding`` (True by
            default where float16 weights come from an optimizer of torch.optim), ``fused`` (see
            `float8.optim.AdamW`).

    Returns:
        The model (or the new layer, if it was an ``nn.Linear`` itself), and a `float8.optim.AdamW`
        or `Adam`.

    Raises:
        ValueError: unknown level, no layers, or layers, weights or options that do not fit.
        TypeError: another optimizer, or arguments of other types. Nothing has been changed after
            any of these.
    """
    check_module(model, "ms_amp")
    if type(optimizer) not in OPTIMIZERS:
        raise TypeError(
            "ms_amp takes an AdamW or Adam, of torch.optim or float8.optim, not "
            f"{type(optimizer).__name__}; for others use float8.optim by itself"
        )
    is_given = config is not None or module_filter_fn is not None
    for reason in _problems(model, optimizer, level, is_given):
        raise ValueError(f"ms_amp: {reason}")
    row = LEVELS[level]
    if _is_wrapped(model):
        new = _new_optimizer(optimizer, row, {}, storage)
        left = dict.fromkeys(_layers(model), "a distributed wrapper owns its memory")
        float8_gradients(model)
        model.ms_amp = MsAmp(level, [], left)  # type: ignore[assignment]
        return model, new
    plan = plan_weights(model, config, module_filter_fn, optimizer, row)
    if row.weight == "float16" and "stochastic_rounding" not in optimizer.defaults:
        storage = {"stochastic_rounding": True} | storage
    # With the old parameters: wrong options or states raise before anything is changed.
    _new_optimizer(optimizer, row, {}, storage)
    model = convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)
    modules = dict(model.named_modules())
    layers: list[Any] = [modules[fqn] for fqn in plan.layers]
    replaced: dict[Tensor, nn.Parameter] = {}
    for layer in layers:
        old = layer.weight
        if old not in replaced:
            replaced[old] = stored_weight(old, layer, row)
        layer.weight = replaced[old]
    new = _new_optimizer(optimizer, row, replaced, storage)
    for old, parameter in replaced.items():
        if row.weight == "float8":
            new.start_master(parameter, old.detach())
        mark_replaced(old, "the model", _STALE)
    hold_gradients_in_float8(replaced.values())
    for layer in layers:
        layer.register_load_state_dict_post_hook(_AfterLoad(new))
    model.ms_amp = MsAmp(level, list(plan.layers), plan.conversion.skipped)  # type: ignore[assignment]
    return model, new


def _problems(
    model: nn.Module, optimizer: torch.optim.Optimizer, level: str, is_given: bool
) -> Iterator[str]:
    """The reasons why a level is unknown, or would break what refers to the model or optimizer.

    ``is_given``: whether a config or a filter was given.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if level not in LEVELS:
        yield f"unknown level {level!r}; known levels: {', '.join(LEVELS)}"
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        yield "an LR scheduler has the optimizer; build it from the one that is returned"
    if any(value for name, value in vars(optimizer).items() if name.endswith("_hooks")):
        yield "the optimizer has hooks; register them on the new one"
    for fqn, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield "FullyShardedDataParallel owns all weights; shard with fully_shard (FSDP2)"
        if isinstance(module, DistributedDataParallel) and fqn:
            yield f"{fqn} is a DistributedDataParallel: give ms_amp the wrapper itself"
    if not _is_wrapped(model):
        return
    layers = _layers(model)
    if is_given or not layers:
        yield "a wrapper has taken the model: convert, wrap, then call ms_amp without a config"
    shards = (getattr(layer.weight, "_local_tensor", None) for layer in layers.values())
    if LEVELS[level].weight == "float8" and not all(isinstance(x, ShardedWeight) for x in shards):
        yield "O3 needs enable_fsdp_float8_all_gather=True before fully_shard; or take level O2"


def _layers(model: nn.Module) -> dict[str, Float8Linear]:
    return {fqn: m for fqn, m in model.named_modules() if isinstance(m, Float8Linear)}


def _is_wrapped(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return is_sharded or isinstance(model, DistributedDataParallel)


def _new_optimizer(
    old: torch.optim.Optimizer,
    row: Level,
    replaced: dict[Tensor, nn.Parameter],
    storage: dict[str, Any],
) -> AdamW:
    groups = []
    for group in old.param_groups:
        params: list[Any] = [replaced.get(p, p) for p in group["params"]]
        if "param_names" in group:
            params = list(zip(group["param_names"], params, strict=True))
        groups.append({**_carried(group), **storage, "params": params})
    moments: dict[str, Any] = {"first_moment": row.first_moment, "second_moment": row.second_moment}
    defaults = _carried(old.defaults) | moments | storage  # of groups that are added later
    new = OPTIMIZERS[type(old)](groups, **defaults)
    if old.state:
        carried = {"state": old.state_dict()["state"]}
        new.load_state_dict(carried | {"param_groups": new.state_dict()["param_groups"]})
    return new


def _carried(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in _NOT_CARRIED}


# --- the weights that a level stores


def plan_weights(
    model: nn.Module,
    config: Float8LinearConfig | str | None,
    module_filter_fn: ModuleFilter | None,
    optimizer: torch.optim.Optimizer,
    level: Level,
) -> ConversionPlan:
    """Find the layers whose weight a level stores; the plan says why others are left.

    The model is not wrapped. ``config`` is for layers that are not converted yet. Only weights that
    ``optimizer`` steps take part. Raises ValueError, with all reasons, if there are none, or if
    some cannot be converted or stored so.
    """
    plan = plan_conversion(
        model, config, module_filter_fn, "ms_amp", replaces_weights=True, takes_experts=False
    )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for fqn, layer in list(plan.layers.items()):
        if id(layer.weight) not in stepped:
            plan.leave(fqn, "the optimizer does not hold its weight")
    if not plan.layers:
        raise ValueError(f"ms_amp: no layer's weight can be stored as O1 to O3 do:{plan.reasons}")
    plan.check(
        (fqn, _reason_against_weight(layer.weight, plan.configs[fqn], level))
        for fqn, layer in plan.layers.items()
    )
    return plan


def _reason_against_weight(weight: Tensor, config: Float8LinearConfig, level: Level) -> str | None:
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; ms_amp takes plain high-precision ones"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks, of another level or yours: register them after ms_amp"
    if not weight.requires_grad:
        return "the optimizer holds its weight, which requires no gradient"
    if config.enable_fsdp_float8_all_gather:
        return "enable_fsdp_float8_all_gather=True is for FSDP2: convert, fully_shard, then ms_amp"
    if level.weight == "float16":
        overflows = not weight.is_meta and bool(weight.detach().to(torch.float16).isinf().any())
        return BEYOND_FLOAT16 if overflows else None
    cast, refusal = config.gemms.output.b, reason_against_resident(config)
    is_tensorwise = cast is not None and (cast.block, cast.format) == (TENSOR, E4M3)
    fits = is_tensorwise and not config.mxfp4_weights
    why = "O3 is for E4M3 with one scale per tensor, and not for mxfp4_weights"
    return refusal if refusal or fits else why


def stored_weight(weight: Tensor, layer: Any, level: Level) -> nn.Parameter:
    """A layer's high-precision weight as a level stores it, its attributes kept.

    Gradients come in the dtype in which they are computed. ``layer`` is the `Float8Linear` that
    reads the weight.
    """
    if level.weight == "float8":
        float8_data = to_resident(weight, layer.config, layer.states[1])
        return as_parameter(weight, float8_data, requires_grad=True)
    new = as_parameter(weight, weight.detach().to(torch.float16), requires_grad=True)
    new.grad_dtype = None
    return new


# --- checkpoints


class _AfterLoad:
    """Refuses weights that a level cannot hold after a checkpoint was loaded into their layer.

    The master of a float8 weight is made anew: otherwise the next step would restore the old
    weight. A master whose cast equals the loaded weight stays, with the bits that float8 lost: the
    optimizer was loaded before.
    """

    def __init__(self, optimizer: AdamW | None) -> None:
        self.optimizer = optimizer

    @torch.no_grad()
    def __call__(self, layer: Any, incompatible_keys: Any) -> None:
        weight = layer.weight
        if self.optimizer is None or not isinstance(layer, Float8Linear):
            return
        stepped = any(weight is p for g in self.optimizer.param_groups for p in g["params"])
        is_float8, reason = isinstance(weight, Float8Tensor), None
        if weight.requires_grad and not stepped:
            reason = "load_state_dict(assign=True) has replaced its weight; load with assign=False"
        elif stepped and not is_float8 and weight.isinf().any():
            reason = f"of the loaded checkpoint: {BEYOND_FLOAT16}"
        if reason is not None:
            raise RuntimeError(f"{layer.fqn or 'Float8Linear'}: {reason}")
        if not stepped or not is_float8:
            return
        cast: Any = weight.detach().clone()
        cast_from_master(cast, self.optimizer.state[weight]["master"])
        pairs = ((cast.float8_data, weight.float8_data), (cast.scale, weight.scale))
        if not all(torch.equal(a, b) for a, b in pairs):
            loaded = weight.detach().clone()
            self.optimizer.start_master(weight, weight.dequantize(torch.float32))
            weight.copy_(loaded)  # the cast of the new master may round its scale otherwise

    def __reduce__(self) -> Any:
        # This optimizer does not step copies of the model, and must not be copied with them.
        return _AfterLoad, (None,)
