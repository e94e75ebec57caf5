"""Running a model once on copies, so that the run leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


def on_copies(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    run: Callable[[nn.Module, Any, Any], Any],
) -> Any:
    """``run(model, args, kwargs)`` with copies of all three.

    Parameters are shared, buffers and arguments are copied, and the random state is put back: the
    model, what it was called with, and what is drawn after it are as if it had not run. What a
    forward reaches by another way, a global variable say, is not copied.

    Raises:
        ValueError: an argument, or a part of the model, cannot be copied.
    """
    with _unwatched(), _random_state_of(model):
        try:
            with _Detached():
                shared: dict[int, Any] = {id(p): p for p in model.parameters()}
                twin, args, kwargs = copy.deepcopy((model, args, kwargs), shared)
        except Exception as error:
            raise ValueError(
                "unit_scale: the first forward counts the model's residual layers on copies of the "
                f"model and its arguments, and copying fails: {type(error).__name__}: {error}. "
                "Call the model once with arguments that copy.deepcopy can copy"
            ) from error
        return run(twin, args, kwargs)


class _Detached(TorchFunctionMode):
    """Tensors are copied without their graphs, which ``copy.deepcopy`` refuses to do.

    The forward may differentiate, or change in place, what it is called with: a copy requires
    gradients where its tensor does, and is a leaf where its tensor is one.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            new = tensor.detach().clone()
            if tensor.requires_grad and torch.is_grad_enabled():
                new.requires_grad_()
                new = new if tensor.is_leaf else new.clone()
            memo[id(tensor)] = new
        return memo[id(tensor)]


@contextlib.contextmanager
def _random_state_of(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    state = random.getstate()
    kind = next((d.type for d in devices), "cuda")
    with torch.random.fork_rng([d.index or 0 for d in devices], device_type=kind):
        yield
    random.setstate(state)


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Without the modes of transformed models around this one, which would see what is no call."""
    modes = []
    while torch._C._len_torch_function_stack():
        mode = _pop_mode()
        if isinstance(mode, DeviceContext):  # torch.set_default_device's, always the last one
            _push_mode(mode)
            break
        modes.append(mode)
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
