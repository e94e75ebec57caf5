"""`saved_activations`: a scope in which ops save float8 copies for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from float8.activations.autograd import CopyOp, MaskOp
from float8.activations.copies import CopyCache
from float8.activations.ops import OPS
from float8.arguments import check_integer, check_module


class saved_activations:
    """``with saved_activations(model):`` ops save float8 copies for backward.

    Only the forward must run inside the scope; backward may run outside. A whole training loop may
    run inside, and a scope may be entered again. Deep copies and pickles of the model made inside
    are plain. `torch.compile` works around, outside and inside of the scope. Scopes nest: an outer
    scope may save an op that the inner scope skips.

    `float8.activations` says how exact gradients are, and where no memory is saved. An inf or
    NaN in a copied tensor makes the gradients of its whole group NaN, also where torch's would be
    finite (``sigmoid`` of scores masked by -inf): skip that op there.

    Args:
        model: the scope covers the forward of this module. It does not cover other methods, or
            calls of a submodule alone. None covers every op in the ``with`` block.
        skip: names of ops that save what torch saves, of "rms_norm", "layer_norm", "silu", "gelu",
            "sigmoid", "tanh", "mul", "pow", "relu" and "dropout".
        min_size: tensors of fewer elements are saved as they are.

    Raises:
        TypeError: ``model`` is no module, or ``min_size`` no integer.
        ValueError: a name that is no op, or a negative ``min_size``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        skip: Sequence[str] = (),
        min_size: int = 4096,
    ) -> None:
        if model is not None:
            check_module(model, "saved_activations")
        check_integer(min_size, "saved_activations: min_size", 0)
        if unknown := sorted({*skip} - set(OPS)):  # of a string, the letters
            raise ValueError(f"skip: no op is called {unknown}; known: {sorted(OPS)}")
        ops = [op for name, op in OPS.items() if name not in skip]
        self.model, self._mode = model, _Mode(ops, CopyCache(max(min_size, 1)))
        self._forwards: list[_Forward] = []

    def __enter__(self) -> None:
        if self.model is None:
            self._mode.cache.begin()
            self._mode.__enter__()
        else:
            self._forwards.append(_Forward(self.model, self._mode))

    def __exit__(self, *_: object) -> None:
        if self.model is None:
            self._mode.__exit__(None, None, None)
            self._mode.cache.end()
        else:
            self._forwards.pop().remove(self.model)


class _Mode(TorchFunctionMode):
    """Runs the calls of the given ops with float8 copies; all other calls are torch's."""

    def __init__(self, ops: Sequence[CopyOp | MaskOp], cache: CopyCache) -> None:
        super().__init__()
        self.cache = cache
        self.ops = {function: (op, read) for op in ops for function, read in op.readers.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Dynamo finds the method of x ** y in no dictionary (seen in torch 2.13).
        known = torch.pow if func is Tensor.__pow__ else func
        is_op = known in self.ops and kwargs.get("out") is None
        if is_op and torch.is_grad_enabled() and not _is_transformed():
            op, reader = self.ops[known]
            found = reader(*args, **{k: v for k, v in kwargs.items() if k != "out"})
            if found is not None and _is_supported(found[0]):
                out = op.call(self.cache, *found)
                if out is not None:
                    return out
        if hasattr(func, "implementation"):  # a unit-scaled function, which a mode sees whole
            with self:
                return func.implementation(*args, **kwargs)
        if func is Tensor.unflatten:  # which dynamo traces as a method alone (seen in torch 2.13)
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)


def _is_transformed() -> bool:
    """Whether a checkpoint, functorch or forward mode controls the saved tensors.

    A checkpoint recomputes in backward, maybe after the scope, and compares the saved tensors.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # Not every callable has a module: torch.Tensor.cpu has none.
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


# For torch.compile: it runs once, while tracing. See `architecture`.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_supported(inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether an op is differentiated at all, and on plain tensors."""
    tensors = [x for x in inputs if x is not None]
    if any([x.is_nested or is_traceable_wrapper_subclass(x) for x in tensors]):
        return False
    return any([x.requires_grad for x in tensors])


class _Forward:
    """The forward of a model under a mode, until `remove`; a copy of it is the plain forward.

    Where scopes are not left in the order of their entry, one that is left stays as an attribute,
    and runs the plain forward.
    """

    def __init__(self, model: nn.Module, mode: _Mode) -> None:
        self.plain: Callable[..., Any] = model.forward
        self.mode: _Mode | None = mode
        self.own = model.__dict__.get("forward")  # None: the forward is the class's
        self.__wrapped__ = self.plain  # for inspect.signature
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode is None or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        self.mode.cache.begin()
        with self.mode:
            result = self.plain(*args, **kwargs)
        self.mode.cache.end()
        return result

    def __reduce__(self) -> Any:
        return _same, (self.plain,)

    def remove(self, model: nn.Module) -> None:
        """Restore the forward from before, unless another was assigned over this one."""
        self.mode = None
        if model.__dict__.get("forward") is self:
            del model.forward
            if self.own is not None:
                model.forward = self.own


def _same(plain: Callable[..., Any]) -> Callable[..., Any]:
    return plain  # a name that pickles hold
