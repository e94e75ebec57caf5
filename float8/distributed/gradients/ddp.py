"""DDP: a communication hook that replaces each bucket by its mean over ranks, sent as float8.

DDP hands over a bucket of flattened gradients as soon as backward has filled it, and takes a future
of the reduced bucket. On CUDA the casts and collectives of all buckets run in one stream of their
own, behind the backward that goes on in its own; the future carries the event that DDP waits for,
and the host waits for nothing. On a CPU the hook returns when the bucket is reduced.

Buckets are reduced in DDP's order, one after the other: all ranks then issue the same collectives
in the same order, which callbacks of futures would not guarantee on gloo.

The last bucket ends a step for the controller. Under ``no_sync`` DDP calls no hook.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from float8.distributed.gradients.reduce import all_reduce_mean, check_gradient
from float8.distributed.gradients.state import Float8Gradients


def attach(model: DistributedDataParallel, state: Float8Gradients) -> None:
    """Register the hook; torch allows one per model, before the first backward.

    Raises:
        TypeError: a parameter's gradient cannot travel as float8.
        RuntimeError: ranks have other settings.
    """
    trained = [
        (name, p)
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    ]
    for name, parameter in trained:
        check_gradient(parameter, f"parameter {name!r}")
    group = model.process_group
    state.agree(group)
    state.prepare(trained[0][1].device, group.size())  # DDP refuses models that train nothing

    # Without annotations: DDP compares them with types, and here they would be strings.
    def float8_hook(state, bucket):  # type: ignore[no-untyped-def]
        return _reduce(state, bucket, group)

    model.register_comm_hook(state, float8_hook)


def _reduce(
    state: Float8Gradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
    group: dist.ProcessGroup,
) -> torch.futures.Future[Tensor]:
    gradient = bucket.buffer()
    check_gradient(gradient, f"bucket {bucket.index()}")
    assert state.controller is not None
    with torch.no_grad(), _beside_backward(gradient.device):
        counts = all_reduce_mean(gradient, state.controller.mu, group, state.format, state.tile)
        state.count(counts, elements=gradient.numel(), sampled=gradient.numel())
        if bucket.is_last():
            state.end_step()
        return _finished(gradient)


def _finished(gradient: Tensor) -> torch.futures.Future[Tensor]:
    """A future that is complete once what this stream holds so far has run."""
    is_cuda = gradient.device.type == "cuda"
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[gradient.device] if is_cuda else None
    )
    future.set_result(gradient)
    return future


def _beside_backward(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The stream of the reductions, behind all that this stream has been given so far."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
