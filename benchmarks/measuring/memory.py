"""Counts the bytes of a training step: parameters, states, activations and peak, without a GPU too.

Counted are storages, each once, and of a tensor subclass the plain tensors inside it. Of one step,
after another step,

    parameters, gradients, states     of the model and of the optimizer
    activations                       what is alive after forward and was not before
    peak                              the most that is alive at any moment of the step

`Allocations` sees every op and every storage that is freed, so it counts and does not estimate;
`test/benchmarks/test_memory.py` compares it with counts by hand and with torch's MemTracker. Two
things are not seen: what a kernel allocates within itself, and what CUDA's
allocator adds by rounding and fragmentation.

A model too large for this machine is traced on the meta device, whose storages have sizes and no
bytes. It runs as on CUDA (`as_on_cuda`): casts and products as the kernels there return them;
attention as FlashAttention and RMSNorm as one op, which keep their operands and a number per row,
attention its result too; updates of our optimizers in place, as by the fused kernel. Fake tensors
on "cuda" would not do: autograd asks CUDA itself for streams.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from float8.kernels.products import architecture
from float8.linear.plan import USED


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or the plain ones that a wrapper subclass is made of."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor names its mesh as well
            yield from plain_tensors(part)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each once."""
    plain = (part.untyped_storage() for tensor in tensors for part in plain_tensors(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in plain}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that an optimizer holds for its parameters."""
    leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class PlainOps(TorchDispatchMode):
    """Abstract: `saw` gets each op on plain tensors, those inside of subclasses too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs plain ops, and those come by here
        out = func(*args, **(kwargs or {}))
        self.saw(func, args, kwargs, out)
        return out

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any] | None, out: Any) -> None:
        """An op that has run."""
        raise NotImplementedError


class Allocations(PlainOps):
    """Bytes of all storages that are alive, `now` and at the `peak`.

    Tensors made before it was entered count from when they are `add`ed.
    """

    def __init__(self, *tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for each in tensors:
            self.add(each)

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self._add(plain.untyped_storage())
        self.peak = max(self.peak, self.now)

    def forget_peak(self) -> None:
        """The peak from here on."""
        self.peak = self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._alive:
            size = storage.nbytes()
            self.now += size
            # It is called before the address can be another storage's.
            self._alive[key] = weakref.ref(storage, lambda _: self._freed(key, size))

    def _freed(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size

    def saw(self, func: Any, args: Any, kwargs: dict[str, Any] | None, out: Any) -> None:
        """Count what it returned."""
        self.add(x for x in pytree.tree_leaves(out) if isinstance(x, Tensor))


@dataclass(frozen=True)
class Footprint:
    """Bytes of one training step; the peaks count everything that is alive."""

    parameters: int
    gradients: int
    states: int
    activations: int
    peak_backward: int  # of forward and backward
    peak_update: int  # of the optimizer's step

    @property
    def peak(self) -> int:
        return max(self.peak_backward, self.peak_update)


Context = Callable[[], AbstractContextManager[object]]


def footprint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, ...],
    forward: Context = ExitStack,
) -> Footprint:
    """Take two training steps, and count the second: the optimizer's states are there by then.

    Args:
        model: returns the loss of a batch.
        optimizer: of the model's parameters, which have no gradients.
        batch: what the model is called with.
        forward: makes the context of each forward pass.
    """
    allocations = Allocations(model.parameters(), model.buffers(), batch, state_tensors(optimizer))
    with allocations:
        _backward(model, batch, forward, allocations)
        optimizer.step()
        optimizer.zero_grad()
        allocations.forget_peak()
        activations = _backward(model, batch, forward, allocations)
        peak_backward = allocations.peak
        allocations.forget_peak()
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Footprint(
        parameters=bytes_of(model.parameters()),
        gradients=bytes_of(gradients),
        states=bytes_of(state_tensors(optimizer)),
        activations=activations,
        peak_backward=peak_backward,
        peak_update=allocations.peak,
    )


def _backward(
    model: nn.Module, batch: tuple[Tensor, ...], forward: Context, allocations: Allocations
) -> int:
    """Forward and backward; returns the bytes saved between them."""
    before = allocations.now
    with forward():
        loss = model(*batch)
    kept = allocations.now - before
    loss.backward()
    return kept


class _FusedOps(TorchFunctionMode):
    """Attention and RMSNorm of meta tensors as the ops that CUDA runs.

    On meta, torch would take apart both: into T x T matrices, and into float32 copies.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, enable_gqa: bool = False
) -> Tensor:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    out: Tensor = op(query, key, value, 0.0, is_causal)[0]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """Saves its input and one float32 number per row; on meta, ops that move as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, rstd = _rms_norm_and_rstd(x)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight, rstd = ctx.saved_tensors
        return _rms_norm_gradients(grads[0], x, None, rstd, weight)


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor, eps: float | None = None
) -> Any:
    return _FusedRMSNorm.apply(input, weight)


def _rms_norm_and_rstd(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.relu(x), x.new_empty(x.shape[:-1], dtype=torch.float32)  # a pass over x


def _rms_norm_gradients(
    g: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.add(g, x), torch.empty_like(weight)  # a pass over g and x


_FUSED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _flash,
    F.rms_norm: _rms_norm,
}


class _Aten:
    """The ops of `saved_activations`, whose backward no mode of functions sees."""

    _fused_rms_norm = staticmethod(_rms_norm_and_rstd)
    _fused_rms_norm_backward = SimpleNamespace(default=_rms_norm_gradients)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Ops on the meta device take the memory that they would on CUDA, eager."""
    with _FusedOps(), mock.patch("float8.activations.ops.aten", _Aten()), cuda_plans():
        yield


@contextmanager
def cuda_plans() -> Iterator[None]:
    """Our layers and optimizers on the meta device run as on CUDA."""

    def family(device: torch.device) -> str:
        return architecture()

    replaced: dict[str, Any] = {
        "float8.kernels.family_of": family,
        "float8.kernels.casts.family_of": family,
        "float8.kernels.products.family_of": family,
        "float8.kernels.moments.TILE_ELEMENTS": sys.maxsize,  # of thousands each would be traced
        "float8.optim.optimizer.advance": lambda *_: None,
    }
    with ExitStack() as stack:
        for path, value in replaced.items():
            module, _, name = path.rpartition(".")
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, value))
        USED.clear()
        stack.callback(USED.clear)
        yield
