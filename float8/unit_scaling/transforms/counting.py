"""A forward without side effects, in which `unit_scale` counts a model's residual layers.

Parameters are shared, buffers and arguments are copied, and the random state is put back. Objects
that a forward reaches in another way, a global variable for example, are not copied.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


def copied(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Copies of a model, which shares its parameters, and of the arguments of a forward.

    Raises ValueError if an argument, or a part of the model, cannot be copied.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    try:
        with _CopiesWithoutGraphs():
            return copy.deepcopy((model, args, kwargs), shared)
    except Exception as error:
        raise ValueError(
            "unit_scale: the first forward counts the model's residual layers on copies of the "
            f"model and its arguments, and copying fails: {type(error).__name__}: {error}. "
            "Call the model once with arguments that copy.deepcopy can copy"
        ) from error


class _CopiesWithoutGraphs(TorchFunctionMode):
    """Copies tensors without their autograd graphs, which ``copy.deepcopy`` refuses to do.

    The forward may differentiate its arguments, or change them in place: a copy requires gradients
    where its tensor does, and is a leaf where its tensor is one.
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
def traceless(model: nn.Module) -> Iterator[None]:
    """Leaves no trace of a forward in random states, outer modes and saved-tensor hooks.

    Modes of outer transformed models would record the forward. Hooks, for example a checkpoint's,
    would save its tensors: the recomputation, which counts no more, saves fewer.
    """
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((d.type for d in devices), "cuda")
    state, modes = random.getstate(), []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
        if isinstance(modes[-1], DeviceContext):  # torch.set_default_device's, always the last one
            _push_mode(modes.pop())
            break
    try:
        with (
            torch.random.fork_rng([d.index or 0 for d in devices], device_type=kind),
            torch.autograd.graph.saved_tensors_hooks(_same, _same),
        ):
            yield
    finally:
        random.setstate(state)
        for mode in reversed(modes):
            _push_mode(mode)


def _same(tensor: Tensor) -> Tensor:
    return tensor
