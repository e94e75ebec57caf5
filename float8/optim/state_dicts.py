"""State dicts: plain tensors out, and in from any way of keeping states.

An entry of ``state_dict()["state"][i]`` is

========================= =====================================================================
``step``                  float32, 0-dim
a moment in few bits      ``{"codes": uint8 or float16, "scale": float32[, "exponent": float32]}``:
                          codes of the parameter's shape, scale and exponent (R, ceil(C / group))
any other moment          float32 of the parameter's shape, as torch.optim has it
``master``                as a moment; of parameters kept in float8 only
========================= =====================================================================

and ``param_groups`` says the group size. Where the parameter is a DTensor every tensor of an entry
is one too, with its placements. Sharded along the first dimension, codes, scales and exponents are
cut between the same rows, so that any other number of ranks reads the same bits.

A cut through a row would cut groups. Such a state has a float32 entry instead, which is quantised
again when loaded: that of a shard along the second dimension that does not end with a group, of a
shard along a later one, and of every parameter of one dimension. (Of these always, sharded or not,
so that a checkpoint's keys do not depend on the number of ranks; FSDP1's flat parameters are such.)
The codes are then the same, but scales differ in their last bits: a training resumes closely, where
others resume bit for bit.

Loading takes all of this, whatever the kind and the group size, and what torch.optim's own
optimizers save. Codes of this optimizer's own kind and group size are taken over bit for bit; the
rest goes through float32. Everything is read and checked before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from float8.arguments import check_type
from float8.kernels.moments import groups_shape
from float8.linear.casts import placed
from float8.optim.moment import Moment
from float8.optim.options import STORAGE, describe
from float8.tensor import Float8Tensor

MASTER = "float16"  # the kind of `Moment` that the master of a float8 parameter is

# Options of torch.optim's groups about how a step is computed.
FOREIGN = ("foreach", "differentiable", "decoupled_weight_decay", "fused")

# (parameter, its group) -> state's name -> the kind of `Moment`, or None for float32
KindsOf = Callable[[Tensor, dict[str, Any]], dict[str, str | None]]


def float32_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as ``torch.optim``'s optimizer of the same name loads it, all moments in float32.

    Args:
        optimizer: one of `float8.optim`.

    Returns:
        ``{"state": ..., "param_groups": ...}``. Masters of float8 parameters are left out: they are
        weights, for the model of a training without float8.
    """
    check_type(optimizer, torch.optim.Optimizer, "float32_state_dict", "optimizer", "an optimizer")
    packed = torch.optim.Optimizer.state_dict(optimizer)
    packed = with_plain_entries(parameters_of(optimizer), packed, _in_float32, ("master",))
    groups = [
        {name: value for name, value in group.items() if name not in STORAGE}
        for group in packed["param_groups"]
    ]
    return {**packed, "param_groups": groups}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters, in the order of the state dict's indices."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def new_master(p: Float8Tensor, group: int, value: Tensor | None = None) -> Moment:
    """A master that holds ``value``, of p's shape, or what the parameter holds."""
    return Moment.quantize(p.dequantize(torch.float32) if value is None else value, MASTER, group)


def _entry(p: Tensor, moment: Moment) -> Tensor | dict[str, Tensor]:
    if not _rows_stay_whole(p, moment.group):
        return _in_float32(p, moment)
    groups = groups_shape(p.shape, moment.group)
    codes = moment.codes if moment.kind == "float16" else moment.codes.view(torch.uint8)
    entry = {"codes": like(p, codes, p.shape), "scale": like(p, moment.scale, groups)}
    if moment.exponent is not None:
        entry["exponent"] = like(p, moment.exponent, groups)
    return entry


def _in_float32(p: Tensor, moment: Moment) -> Tensor:
    return like(p, moment.dequantize(), p.shape)


def like(p: Tensor, shard: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """This rank's ``shard`` of a tensor of ``shape``, as a DTensor if p is one."""
    if not isinstance(p, DTensor):
        return shard
    return placed(shard, shape, p.device_mesh, p.placements)


def with_plain_entries(
    params: list[Tensor],
    packed: dict[str, Any],
    convert: Callable[[Tensor, Moment], Any] = _entry,
    without: tuple[str, ...] = (),
) -> dict[str, Any]:
    """``packed``, which torch made of an optimizer of ``params``, every moment as plain tensors.

    ``without`` are names of states that are left out.
    """
    state = {
        key: {
            name: convert(params[key], value) if isinstance(value, Moment) else value
            for name, value in entry.items()
            if name not in without
        }
        if isinstance(entry, dict)
        else entry
        for key, entry in packed["state"].items()
    }
    return {**packed, "state": state}


def _rows_stay_whole(p: Tensor, group: int) -> bool:
    """Whether scales (R, G) are cut along with p's elements, without cutting a group."""
    if p.dim() < 2:
        return False
    if not isinstance(p, DTensor):
        return True
    shards = 1
    for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Shard | _StridedShard) and placement.dim == 0:
            continue
        if not isinstance(placement, Shard) or placement.dim != 1:
            return False
        shards *= size
    cols = math.prod(p.shape[1:])
    return shards == 1 or (p.shape[1] % shards == 0 and cols // shards % group == 0)


def read_states(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], kinds_of: KindsOf
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """Read the states of a state dict, and leave the rest of it to torch.

    torch would cast every float state to the parameter's dtype, codes too. ``groups`` are the
    parameter groups that load it, and ``kinds_of`` says how the states of a parameter are kept.
    Returns the state dict without the states that were read, its groups with the loading
    optimizer's own options of storage; and the states, parameter -> name -> state.
    """
    saved = state_dict["param_groups"]
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return state_dict, {}  # torch refuses it
    rest, states = dict(state_dict["state"]), {}
    for mine, theirs in zip(groups, saved, strict=True):
        size = theirs.get("group_size", mine["group_size"])
        for index, (p, key) in enumerate(zip(mine["params"], theirs["params"], strict=True)):
            if rest.get(key):
                kinds = kinds_of(p, mine)
                reader = _Reader(p, mine, size, kinds, describe(index, p, mine))
                states[p] = reader.state(rest[key])
                own = (*kinds, "step", "master")
                rest[key] = {name: x for name, x in rest[key].items() if name not in own}
    kept = (*STORAGE, *FOREIGN)
    merged = [
        mine | {name: value for name, value in theirs.items() if name not in kept}
        for mine, theirs in zip(groups, saved, strict=True)
    ]
    return {**state_dict, "state": rest, "param_groups": merged}, states


class _Reader(NamedTuple):
    """Reads one parameter's entry of a state dict, as this optimizer keeps its states."""

    p: Tensor
    group: dict[str, Any]
    saved_group_size: int
    kinds: dict[str, str | None]
    what: str

    def state(self, entry: dict[str, Any]) -> dict[str, Any]:
        there = [name for name, value in entry.items() if value is not None]
        missing = [name for name in self.kinds if name not in there]
        # torch's SGD without momentum has an empty momentum_buffer alone.
        if missing and there:  # a step with a moment of zero would be a huge one
            raise ValueError(
                f"{self.what}: the loaded state has {', '.join(there)} and no {missing[0]}: it is "
                "another optimizer's; load its own, or start afresh without a state"
            )
        # torch's SGD counts no steps; with a momentum there has been one.
        step = torch.as_tensor(entry.get("step", float(not missing)))
        on_device = self.group["capturable"] or self.group["fused"]
        device = self.p.device if on_device else "cpu"
        state: dict[str, Any] = {"step": step.detach().to(device, torch.float32, copy=True)}
        for name, kind in self.kinds.items():
            if name not in missing:
                state[name] = self._moment(name, entry[name], kind)
        if isinstance(self.p, Float8Tensor):
            if "master" in entry:
                state["master"] = self._moment("master", entry["master"], MASTER)
            else:
                state["master"] = new_master(self.p, self.group["group_size"])
        elif "master" in entry:  # more exact than the float8 weight of the same checkpoint
            raise ValueError(
                f"{self.what}: the loaded state has the master of a float8 parameter, and this is "
                'none: copy state[p]["master"].dequantize() of the optimizer that wrote it into '
                "the parameter, and load what float32_state_dict(optimizer) gives"
            )
        return state

    def _moment(self, name: str, value: Any, kind: str | None) -> Tensor | Moment:
        size = self.group["group_size"]
        if isinstance(value, dict):
            groups = groups_shape(self.p.shape, self.saved_group_size)
            codes = self._shard(name, value["codes"], tuple(self.p.shape))
            codes = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
            scale = self._shard(f"{name}.scale", value["scale"], groups)
            exponent = value.get("exponent")
            if exponent is not None:
                exponent = self._shard(f"{name}.exponent", exponent, groups)
            saved = Moment(codes, scale, exponent, self.saved_group_size)
            if (saved.kind, saved.group) == (kind, size):
                return saved
            dense = saved.dequantize()
        else:
            dense = self._shard(name, value, tuple(self.p.shape)).float()
        if kind is not None:
            return Moment.quantize(dense, kind, size)
        return like(self.p, dense, self.p.shape)

    def _shard(self, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of ``value`` in memory of its own, after a look at its shape."""
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{self.what}: the loaded {name} has shape {tuple(value.shape)}, not {shape}: it "
                f"is another parameter's, or its groups are not of {self.saved_group_size}"
            )
        places, wanted = (getattr(x, "placements", None) for x in (value, self.p))
        if places != wanted:
            raise ValueError(
                f"{self.what}: the loaded {name} is placed {places}, the parameter {wanted} (None: "
                "not sharded): load with torch.distributed.checkpoint's set_state_dict"
            )
        shard = value.to_local() if isinstance(value, DTensor) else value
        return shard.detach().to(self.p.device, copy=True).contiguous()
