"""`float8_gradients`: send the gradients of a parallel model as float8, with one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from float8.arguments import check_module
from float8.distributed.gradients.controller import ScalingController
from float8.distributed.gradients.state import Float8Gradients
from float8.distributed.gradients.wire import TILE
from float8.formats import E4M3, Format

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def float8_gradients(
    model: nn.Module,
    fmt: Format | torch.dtype = E4M3,
    controller: ScalingController | None = None,
    tile: int = TILE,
) -> Float8Gradients:
    """Send gradients between ranks as float8 instead of in their own precision.

    Half the bytes of a bfloat16 reduction (0.502 from 65536 elements on, 0.506 of 2048), a quarter
    of a float32 one; one scale per tile of gradient, shared by all ranks; sums in float32. After
    FP8-LM, arXiv 2310.18313, section 2.1 (`wire` says what differs). Call it once, after
    ``DistributedDataParallel(model)`` or ``fully_shard(model)`` and before the first backward, with
    the same arguments on all ranks. Whether the layers themselves are float8 does not matter.

    The error, as signal to noise of the reduced gradient against float64 (independent normal
    gradients on each rank; ``python -m float8.distributed.gradients.measure``):

    ====== =============== ==================== =============== ===================
    ranks  E4M3 all-reduce E4M3 reduce-scatter  E5M2 all-reduce bfloat16 all-reduce
    ====== =============== ==================== =============== ===================
    2      28.1            31.5                 22.2            52.2
    8      28.5            31.5                 22.5            47.9
    64     28.5            31.5                 22.6            40.2
    512    28.5            31.5                 22.6            31.4
    ====== =============== ==================== =============== ===================

    in dB. Each cast costs what three (two) mantissa bits cost, however many ranks there are: the
    sum is float32. A bfloat16 ring rounds at every hop, and gets worse. Where ranks agree on most
    of the gradient, the errors of the first cast average out: 31.4 dB on 512 ranks, bfloat16 11.6.

    Args:
        model: a `DistributedDataParallel`, or a module with FSDP2 units in it.
        fmt: `E4M3` (three mantissa bits) or `E5M2` (two, and a wider range), or their dtypes.
        controller: finds the pre-scaling factor mu (DDP); None is `ScalingController()`, with the
            numbers of FP8-LM.
        tile: elements that share a scale, at most; rounded up to a multiple of 16.

    Returns:
        The state: ``report()`` counts what saturated and what was flushed to zero; ``state_dict()``
        and ``load_state_dict()`` belong into the checkpoint.

    Raises:
        TypeError: the model is neither, or a gradient's dtype cannot travel as float8.
        RuntimeError: ranks were given different arguments (DDP: now; FSDP2: in the first backward).
        ValueError: a controller for FSDP2, where nothing can saturate; a bad tile; a model that is
            only replicated (HSDP with shards of one rank, torch's ``replicate``), where FSDP2
            reduces without the reduce-scatter.
    """
    from torch.nn.parallel import DistributedDataParallel

    check_module(model, "float8_gradients")
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) compiles
    if isinstance(model, DistributedDataParallel):
        from float8.distributed.gradients import ddp

        state = Float8Gradients(fmt, controller or ScalingController(), tile)
        ddp.attach(model, state)
        return state
    units = _fsdp2_units(model)
    if not units:
        raise TypeError(
            f"float8_gradients: {type(model).__name__} reduces no gradients by itself; wrap it in "
            "DistributedDataParallel or fully_shard it (FSDP2) first. FSDP1 is not supported"
        )
    if controller is not None:
        raise ValueError(
            "float8_gradients: FSDP2 reduces with one cast that cannot saturate, so a controller "
            "has nothing to do; leave it out"
        )
    if _is_only_replicated(model):
        raise ValueError(
            "float8_gradients: this model is replicated, not sharded: FSDP2 all-reduces its "
            "gradients in their own precision, and none would travel as float8. Shard it over more "
            "than one rank, or wrap it in DistributedDataParallel"
        )
    from float8.distributed.gradients import fsdp

    state = Float8Gradients(fmt, None, tile)
    fsdp.attach(units, state)
    return state


def _fsdp2_units(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    from torch.distributed.fsdp import FSDPModule

    return [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]


def _is_only_replicated(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    spread = [p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh.size() > 1]
    cut = any(
        not placement.is_replicate() and p.device_mesh.size(dim) > 1
        for p in spread
        for dim, placement in enumerate(p.placements)
    )
    return bool(spread) and not cut
