"""`float8_gradients`: send the gradients of a model under DDP or FSDP2 as float8.

Half the bytes of a bfloat16 reduction travel. The method is that of FP8-LM (arXiv 2310.18313,
section 2.1), on torch's own collectives. `float8.distributed.gradient_reduction` has the arithmetic
and its collectives; this file puts them where DDP or FSDP2 reduces gradients.

**DDP**: a communication hook replaces each bucket by its mean over ranks. DDP passes a bucket of
flattened gradients as soon as backward has filled it, and takes a future of the reduced bucket. On
CUDA the casts and collectives of all buckets run in one stream of their own, while backward
continues in its stream. The future carries the event that DDP waits for; the host does not wait. On
a CPU the hook returns when the bucket is reduced. Buckets are reduced in DDP's order, one after the
other: all ranks then issue the same collectives in the same order, which callbacks of futures would
not guarantee on gloo. Under ``no_sync`` DDP calls no hook.

**FSDP2**: a reduce-scatter for ``set_custom_reduce_scatter``. FSDP2 lays the gradients of one unit
out as (N ranks, shard) and calls `Float8ReduceScatter` in its own reduce-scatter stream. There is
one cast and a float32 sum. The result is rounded once, to FSDP's ``reduce_dtype``: float32 is best,
and sends no more bytes here. Under HSDP torch all-reduces the shards between replicas afterwards,
in ``reduce_dtype``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from float8.arguments import check_module
from float8.distributed.gradient_reduction import TILE_SIZE, all_reduce_mean, reduce_scatter
from float8.distributed.rank_comparison import Facts, compare_once, compare_ranks
from float8.formats import E4M3, Format, format_of

__all__ = ["float8_gradients"]


def float8_gradients(
    model: nn.Module,
    fmt: Format | torch.dtype = E4M3,
    tile: int = TILE_SIZE,
) -> None:
    """Send gradients between ranks as float8 instead of in their own precision.

    A reduction then sends half the bytes of bfloat16 (0.503 from 65536 elements on, 0.506 of 2048)
    and a quarter of float32. All ranks share one scale per tile of gradient. Sums are in float32.
    After FP8-LM, arXiv 2310.18313, section 2.1 (`gradient_reduction` says what differs). Call it
    once, after ``DistributedDataParallel(model)`` or ``fully_shard(model)`` and before the first
    backward, with the same arguments on all ranks. Whether the layers themselves are float8 does
    not matter.

    The error, as signal to noise of the reduced gradient against float64 (independent normal
    gradients on each rank):

    ====== =============== ==================== =============== ===================
    ranks  E4M3 all-reduce E4M3 reduce-scatter  E5M2 all-reduce bfloat16 all-reduce
    ====== =============== ==================== =============== ===================
    2      28.5            31.5                 22.6            52.2
    8      28.6            31.5                 22.6            47.9
    64     28.5            31.5                 22.6            40.2
    512    28.8            31.5                 22.8            31.4
    ====== =============== ==================== =============== ===================

    in dB. The error of a cast is that of three (two) mantissa bits on any number of ranks, because
    the sum is float32. A bfloat16 ring rounds at every hop, so its error grows. Where ranks agree
    on most of the gradient, the errors of the first cast average out: 32.0 dB on 512 ranks,
    bfloat16 11.6.

    A model that FSDP2 only replicates (HSDP with shards of one rank, torch's ``replicate``) has no
    reduce-scatter: its gradients are all-reduced in their own precision.

    Args:
        model: a `DistributedDataParallel`, or a module with FSDP2 units in it.
        fmt: `E4M3` (three mantissa bits) or `E5M2` (two, and a wider range), or their dtypes.
        tile: elements that share a scale, at most; rounded up to a multiple of 16.

    Raises:
        TypeError: ``model`` is not wrapped by DDP and has no FSDP2 units, or ``fmt`` is no format.
        RuntimeError: ranks were given different arguments (DDP: now; FSDP2: in the first backward).
    """
    check_module(model, "float8_gradients")
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) compiles
    fmt = format_of(fmt)
    if isinstance(model, DistributedDataParallel):
        _attach_to_ddp(model, fmt, tile)
        return
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise TypeError(
            f"float8_gradients: wrap the {type(model).__name__} in DistributedDataParallel, or "
            "fully_shard it (FSDP2), first"
        )
    reduction = Float8ReduceScatter(fmt, tile)
    for unit in units:  # the protocol is enough
        unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]


_REMEDY = "Pass float8_gradients the same arguments on all ranks"


def _arguments(fmt: Format, tile: int) -> dict[str, Facts]:
    return {"float8_gradients": {"format": str(fmt), "tile": str(tile)}}


# --- DDP


def _attach_to_ddp(model: DistributedDataParallel, fmt: Format, tile: int) -> None:
    """Register the hook; torch allows one per model, before the first backward."""
    group = model.process_group
    compare_ranks([group], _arguments(fmt, tile), _REMEDY, subject="arguments")

    # Without annotations: DDP compares them with types, and here they would be strings.
    def float8_hook(state, bucket):  # type: ignore[no-untyped-def]
        gradient = bucket.buffer()
        with torch.no_grad(), _beside_backward(gradient.device):
            all_reduce_mean(gradient, group, fmt, tile)
            devices = [gradient.device] if gradient.is_cuda else None
            future = torch.futures.Future[Tensor](devices=devices)
            future.set_result(gradient)  # completes when the work queued in this stream has run
            return future

    model.register_comm_hook(None, float8_hook)


def _beside_backward(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The stream of the reductions, ordered after the work queued in this stream so far."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# --- FSDP2


class Float8ReduceScatter:
    """The reduce-scatter that FSDP2 calls instead of its own; the protocol is torch's.

    All units of a model share it.
    """

    def __init__(self, fmt: Format, tile: int) -> None:
        self.format, self.tile = fmt, tile

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """FSDP2's buffers: ordinary ones."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce in the current stream, by SUM or AVG.

        ``input_tensor`` (N * C,) has this rank's gradients for the N ranks, shard after shard.
        ``output_tensor`` (C,) is written, in its own dtype. FSDP2 never sets ``async_op``. Raises
        ValueError for another reduction, and, in the first call, RuntimeError if ranks have other
        settings.
        """
        assert not async_op
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"float8_gradients: FSDP2 reduces with {op}, which hides its factor; call "
                "set_force_sum_reduction_for_comms(True)"
            )
        x_NC, mean = input_tensor.view(group.size(), -1), op == dist.ReduceOp.AVG
        arguments = partial(_arguments, self.format, self.tile)
        compare_once(self, [group], arguments, _REMEDY, "arguments")
        reduce_scatter(output_tensor, x_NC, group, self.format, mean, self.tile)
