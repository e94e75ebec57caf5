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
cut between the same rows, so that any other number of ranks reads the same bits. A cut through a
row would cut groups: parameters of one dimension, and shards along the second that do not end with
a group or along a later one, have a float32 entry instead, which is quantised again when loaded.
(Parameters of one dimension always, so that a checkpoint's keys do not depend on who wrote it; so
all of FSDP1's flat ones.) Such a state comes back with the same codes, but scales that differ in
their last bits: a training resumes closely, where others resume bit for bit.

Loading takes all of this, whatever the kind and the group size, and what torch.optim's own
optimizers give. Codes of this optimizer's own kind and group size are taken over bit for bit; the
rest goes through float32. Everything is read and checked before anything is changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from float8.arguments import check_type
from float8.optim import checks, masters
from float8.optim.moment import Moment, matrix_shape
from float8.tensor import Float8Tensor

if TYPE_CHECKING:
    from float8.optim.core import QuantizedOptimizer

# What belongs to this optimizer, not to a checkpoint: how states are kept.
STORAGE = (
    "first_moment",
    "second_moment",
    "group_size",
    "min_size",
    "stochastic_rounding",
    "state_rounding",
)
# Options of torch.optim's groups about how a step is computed.
FOREIGN = ("foreach", "differentiable", "decoupled_weight_decay", "fused")


def float32_state_dict(optimizer: QuantizedOptimizer) -> dict[str, Any]:
    """The state as ``torch.optim``'s optimizer of the same name loads it, all moments in float32.

    Args:
        optimizer: one of `float8.optim`.

    Returns:
        ``{"state": ..., "param_groups": ...}``. Masters of float8 parameters are left out: they are
        weights, and belong into the model of whoever goes on without float8.
    """
    check_type(
        optimizer,
        torch.optim.Optimizer,
        "float32_state_dict",
        "optimizer",
        "an optimizer of float8.optim",
    )
    packed = torch.optim.Optimizer.state_dict(optimizer)
    params = _parameters(optimizer)
    state = {
        key: {
            name: _in_float32(params[key], value) if isinstance(value, Tensor) else value
            for name, value in entry.items()
            if name != "master"
        }
        for key, entry in packed["state"].items()
    }
    groups = [
        {name: value for name, value in group.items() if name not in STORAGE}
        for group in packed["param_groups"]
    ]
    return {**packed, "state": state, "param_groups": groups}


def quantized_state_dict(optimizer: QuantizedOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """``packed``, which torch made, with every moment as plain tensors."""
    params = _parameters(optimizer)
    state = {
        key: {name: _entry(params[key], value) for name, value in entry.items()}
        if key in params
        else entry
        for key, entry in packed["state"].items()
    }
    return {**packed, "state": state}


def _parameters(optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
    """Index in the state dict -> parameter."""
    return dict(enumerate(chain.from_iterable(g["params"] for g in optimizer.param_groups)))


def _entry(p: Tensor, value: Any) -> Any:
    if not isinstance(value, Moment):
        return value
    if not _rows_stay_whole(p, value.group):
        return _in_float32(p, value)
    rows, cols = matrix_shape(p.shape)
    groups = (rows, -(-cols // value.group))
    codes = value.codes if value.kind == "float16" else value.codes.view(torch.uint8)
    entry = {"codes": _like(p, codes, p.shape), "scale": _like(p, value.scale, groups)}
    if value.exponent is not None:
        entry["exponent"] = _like(p, value.exponent, groups)
    return entry


def _in_float32(p: Tensor, value: Tensor) -> Tensor:
    return _like(p, value.dequantize(), p.shape) if isinstance(value, Moment) else value


def _like(p: Tensor, shard: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """This rank's ``shard`` of a tensor of ``shape``, as a DTensor if p is one."""
    if not isinstance(p, DTensor):
        return shard
    shape = torch.Size(shape)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
    )


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


class Loading:
    """While it is entered, `Optimizer.load_state_dict` leaves the states to it.

    torch would cast every float state to the parameter's dtype, codes too. As the last hook before
    loading, this takes the states out, reads and checks them; as the first one behind, it puts
    them in place.
    """

    def __init__(self, optimizer: QuantizedOptimizer) -> None:
        self.optimizer = optimizer
        self.states: dict[Tensor, dict[str, Any]] = {}

    def __enter__(self) -> Loading:
        optimizer = self.optimizer
        self.before = optimizer.register_load_state_dict_pre_hook(self._take)
        self.behind = optimizer.register_load_state_dict_post_hook(self._put, prepend=True)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.before.remove()
        self.behind.remove()

    def _take(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict["param_groups"]
        mine = optimizer.param_groups
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in mine]:
            return state_dict  # torch refuses it
        others = dict(state_dict["state"])
        for number, index, key in _keys(saved):
            group, p = mine[number], mine[number]["params"][index]
            if others.get(key):
                what = checks.describe(index, p, group.get("param_names"))
                entry = others.pop(key)
                reader = _Reader(optimizer, p, group, saved[number], what)
                self.states[p] = reader.state(entry)
        groups = [_kept_group(s, m) for s, m in zip(saved, mine, strict=True)]
        for group in groups:
            optimizer.check_group({**optimizer.defaults, **group})
        return {**state_dict, "state": others, "param_groups": groups}

    def _put(self, optimizer: Any) -> None:
        optimizer.state.update(self.states)


def _keys(groups: list[dict[str, Any]]) -> Iterator[tuple[int, int, Any]]:
    for number, group in enumerate(groups):
        for index, key in enumerate(group["params"]):
            yield number, index, key


def _kept_group(saved: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    if saved.get("amsgrad"):
        raise ValueError(f"cannot load: {checks.AMSGRAD}")
    kept = {name: value for name, value in saved.items() if name not in (*STORAGE, *FOREIGN)}
    return {**kept, **{name: mine[name] for name in (*STORAGE, *FOREIGN) if name in mine}}


class _Reader:
    """Reads one parameter's entry of a state dict, for this parameter and this way of keeping."""

    def __init__(
        self,
        optimizer: QuantizedOptimizer,
        p: Tensor,
        group: dict[str, Any],
        saved: dict[str, Any],
        what: str,
    ) -> None:
        self.optimizer, self.p, self.group, self.what = optimizer, p, group, what
        self.saved_group_size = saved.get("group_size", group["group_size"])

    def state(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry.get("max_exp_avg_sq") is not None:
            raise ValueError(f"{self.what}: cannot load: {checks.AMSGRAD}")
        self._check_moments(entry)
        state: dict[str, Any] = {"step": self._step(entry)}
        for name, value in entry.items():
            if name not in (*self.optimizer.moment_options, "step", "master"):
                state[name] = copy.deepcopy(value)  # somebody else's
            elif name in self.optimizer.moment_options and value is not None:
                kind = self.optimizer.kind_of(self.p, self.group, name)
                state[name] = self._moment(name, value, kind)
        if isinstance(self.p, Float8Tensor):
            if "master" in entry:
                state["master"] = self._moment("master", entry["master"], masters.MASTER)
            else:
                state["master"] = masters.new_master(self.p, self.group["group_size"])
        elif "master" in entry:
            raise ValueError(
                f"{self.what}: the loaded state holds the master of a float8 parameter, which this "
                f"parameter, a {type(self.p).__name__} in {self.p.dtype}, does not keep. Its value "
                "is more exact than the float8 weight of the same checkpoint: copy it into the "
                'parameter (in the optimizer that wrote it, state[p]["master"].dequantize()), and '
                "load what float32_state_dict(optimizer) gives"
            )
        return state

    def _check_moments(self, entry: dict[str, Any]) -> None:
        """Refuse another optimizer's state: a moment from zero beside its step would leap."""
        missing = [name for name in self.optimizer.moment_options if entry.get(name) is None]
        there = [name for name, value in entry.items() if value is not None]
        if missing and there:  # torch's SGD without momentum has an empty momentum_buffer alone
            raise ValueError(
                f"{self.what}: the loaded state has {', '.join(there)} and no "
                f"{' or '.join(missing)}, which {type(self.optimizer).__name__} needs: it is "
                "another optimizer's; load its own, or start afresh without a state"
            )

    def _step(self, entry: dict[str, Any]) -> Tensor:
        # torch's SGD counts no steps; with a momentum there has been one.
        started = any(entry.get(name) is not None for name in self.optimizer.moment_options)
        step = entry.get("step", float(started))
        on_device = self.group["capturable"] or self.group["fused"]
        device = self.p.device if on_device else "cpu"
        return torch.as_tensor(step).detach().to(device, torch.float32, copy=True)

    def _moment(self, name: str, value: Any, kind: str | None) -> Tensor:
        size = self.group["group_size"]
        if isinstance(value, dict):
            kept = self._from_parts(name, value)
            if (kept.kind, kept.group) == (kind, size):
                return kept
            dense = kept.dequantize()
        elif isinstance(value, Moment):  # of a pickled state
            dense = value.dequantize()
        else:
            dense = self._shard(name, value, tuple(self.p.shape)).float()
        if kind is not None:
            return Moment.quantize(dense, kind, size)
        return _like(self.p, dense.clone(), self.p.shape)

    def _from_parts(self, name: str, value: dict[str, Tensor]) -> Moment:
        group = self.saved_group_size
        rows, cols = matrix_shape(self.p.shape)
        groups = (rows, -(-cols // group))
        codes = self._shard(f"{name}.codes", value["codes"], tuple(self.p.shape))
        codes = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
        scale = self._shard(f"{name}.scale", value["scale"], groups)
        exponent = value.get("exponent")
        if exponent is not None:
            exponent = self._shard(f"{name}.exponent", exponent, groups)
        return Moment(codes, scale, exponent, group)

    def _shard(self, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """This rank's part of ``value`` in memory of its own, after a look at its shape."""
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{self.what}: the loaded {name} has shape {tuple(value.shape)}, not {shape}: it "
                "belongs to another parameter, or its groups are not of "
                f"{self.saved_group_size}; load the state of the same model"
            )
        if isinstance(value, DTensor) != isinstance(self.p, DTensor):
            raise ValueError(
                f"{self.what}: the loaded {name} is a {type(value).__name__}, the parameter is "
                f"not: load sharded states with torch.distributed.checkpoint's set_state_dict"
            )
        if isinstance(value, DTensor):
            assert isinstance(self.p, DTensor)
            if value.placements != self.p.placements:
                raise ValueError(
                    f"{self.what}: the loaded {name} is placed {value.placements}, the parameter "
                    f"{self.p.placements}: redistribute it first"
                )
            value = value.to_local()
        return value.detach().to(self.p.device, copy=True).contiguous()
