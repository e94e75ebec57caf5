"""`saved_activations`: a scope in which ops keep what their backward needs in float8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from float8.activations.groups import Groups
from float8.activations.keeper import Keeper
from float8.activations.ops import OPS, OPTIONAL, Saving
from float8.arguments import check_bool, check_integer, check_module, described
from float8.formats import E4M3, Format, format_of


class _Mode(TorchFunctionMode):
    """Gives the calls that a table knows to its rows; all others are torch's."""

    def __init__(self, ops: Sequence[Saving], keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper
        self.rows = {spelling: (op, read) for op in ops for spelling, read in op.readers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.rows and torch.is_grad_enabled() and not _is_elsewhere():
            op, reader = self.rows[func]
            read = reader(*args, **kwargs)
            if read is not None and _can_keep(read[0]):
                out = op.call(self.keeper, read)
                if out is not None:
                    return out
        if hasattr(func, "implementation"):  # a function of ours, which a mode sees whole
            with self:
                return func.implementation(*args, **kwargs)
        return func(*args, **kwargs)


def _is_elsewhere() -> bool:
    """Whether what is saved now is kept by somebody else: a checkpoint, functorch, forward mode.

    A checkpoint recomputes in backward, where the scope may be over, and compares what is saved.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Not every callable has a module: torch.Tensor.cpu has none.
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _can_keep(inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether the op is differentiated at all, and on plain tensors."""
    tensors = [x for x in inputs if x is not None]
    if any(x.is_nested or is_traceable_wrapper_subclass(x) for x in tensors):
        return False
    return any(x.requires_grad for x in tensors)


class _Forward:
    """A module's forward under a mode, while the scope is open; a copy is the plain forward.

    Args:
        plain: what ``model.forward`` was.
        before: the same as it stands in the module's ``__dict__``; None: it is the class's.
    """

    def __init__(self, plain: Callable[..., Any], mode: _Mode, before: Any) -> None:
        self.plain, self.mode, self.before = plain, mode, before
        self.is_over = False
        self.__wrapped__ = plain  # so that inspect.signature sees the arguments of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_over or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        self.mode.keeper.open()
        with self.mode:
            result = self.plain(*args, **kwargs)
        self.mode.keeper.close()
        return result

    def __reduce__(self) -> Any:
        return _same, (self.plain,)


def _same(plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain


class saved_activations:
    """``with saved_activations(model):`` what ops keep for backward is kept in float8.

    What counts is where forward runs; backward may run outside of the scope. A whole training loop
    may stand inside, and the scope may be entered again. Deep copies and pickles of the model that
    are made inside are plain. `torch.compile` works around, outside and inside of the scope. Scopes
    nest: the inner one is asked first, and an op that it skips may be kept by the outer one.

    The room's docstring says how exact the gradients are, and where nothing is saved. An inf or NaN
    in what is kept makes the gradients of its whole group NaN, also where torch's would be finite
    (``sigmoid`` of scores masked by -inf): skip that op there.

    Args:
        model: only what this module's forward calls, whoever calls it; neither its other methods
            nor a part of it that is called alone. None: every op in the ``with`` block.
        group: elements that share a scale, along the last dimension. 128 (one Triton kernel per
            tensor on CUDA) or 16, say (plain PyTorch there, several passes in eager mode).
        fmt: `E4M3` or `E5M2`, or their dtypes.
        power_of_two_scale: scales of one byte; False: float32 scales.
        skip: names of ops that keep what torch keeps, of "rms_norm", "layer_norm", "silu", "gelu",
            "sigmoid", "tanh", "mul", "pow", "relu", "dropout", "softmax" and "linear".
        also: names of ops that are off by default: "softmax", "linear".
        min_size: tensors of fewer elements are saved as they are.

    Raises:
        TypeError: ``model`` is no module, ``fmt`` no float8 format.
        ValueError: a name that is no op, or a group that is no positive number.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        group: int = 128,
        fmt: Format | torch.dtype = E4M3.dtype,
        power_of_two_scale: bool = True,
        skip: Sequence[str] = (),
        also: Sequence[str] = (),
        min_size: int = 4096,
    ) -> None:
        if model is not None:
            check_module(model, "saved_activations")
        dtype = format_of(fmt).dtype
        if not isinstance(group, int) or group < 1:
            raise ValueError(f"group={group!r} must be a number of elements, 128 or 16 say")
        check_bool(power_of_two_scale, "saved_activations: power_of_two_scale")
        check_integer(min_size, "saved_activations: min_size", 0)
        keeper = Keeper(Groups(group, dtype, power_of_two_scale), max(min_size, 1))
        self.model, self._mode = model, _Mode(_chosen(skip, also), keeper)
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> None:
        if self.model is None:
            self._mode.keeper.open()
            self._mode.__enter__()
        else:
            self._undo.append(_entered(self.model, self._mode))

    def __exit__(self, *_: object) -> None:
        if self.model is None:
            self._mode.__exit__(None, None, None)
            self._mode.keeper.close()
        else:
            self._undo.pop()()


def _chosen(skip: Sequence[str], also: Sequence[str]) -> list[Saving]:
    for argument, names in (("skip", skip), ("also", also)):
        if isinstance(names, str):
            raise ValueError(f'{argument}="{names}" is a string: give ("{names}",)')
        if not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"{argument} must be a sequence of names, got {described(names)}")
        if unknown := sorted([name for name in names if name not in OPS]):
            raise ValueError(f"{argument}: no op is called {unknown}; known: {sorted(OPS)}")
    names = [name for name in OPS if name not in OPTIONAL or name in also]
    return [OPS[name] for name in names if name not in skip]


def _entered(model: nn.Module, mode: _Mode) -> Callable[[], Any]:
    """Let the model's forward run under the mode; returns what undoes it.

    Scopes may be left in any order, and a forward that somebody put over this one stays.
    """
    ours = _Forward(model.forward, mode, model.__dict__.get("forward"))
    model.forward = ours

    def undo() -> None:
        ours.is_over = True
        while isinstance(top := model.__dict__.get("forward"), _Forward) and top.is_over:
            if top.before is None:
                del model.forward
            else:
                model.forward = top.before

    return undo
