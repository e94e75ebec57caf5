"""A model that runs its own forward under transforms.

A transform changes what the functions mean that a forward calls: ``F.linear`` becomes
``U.linear``, or multiplies in float8. It is a `Transform`, a small value that describes the change,
and makes for each call a `Mode`, a torch function mode that carries it out. Nothing is traced and
nothing generated: the model's own Python runs, in eager mode and under ``torch.compile``, with its
control flow, hooks and shapes.

`transformed` returns a copy of a model whose class is a subclass of the model's, with a forward
that enters the modes. Parameters, names, state dict and methods are the model's; copies and pickles
keep their transforms. The order in which modes are entered follows from the transforms
(`Transform.depth`), not from the order in which they were applied. Only calls of the model itself
run under its transforms: a submodule that is called directly runs without them.
"""

from __future__ import annotations

import copy
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from float8.linear.module import HasTransforms
from float8.unit_scaling.registry import Function, decomposition_of, respelt
from float8.unit_scaling.transforms.contractions import CONTRACTIONS
from float8.unit_scaling.transforms.refusals import RefusesCheckpointing, check_reach

M = TypeVar("M", bound=nn.Module)
Handler = Callable[..., Any]
_UNFINISHED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Mode(TorchFunctionMode):
    """Carries out a transform during one forward.

    ``handlers`` maps a function to what is called in its place. A handler runs with this mode off:
    its calls go to the modes below. Of other functions that are `overridable` the implementation
    runs with this mode on.
    """

    def __init__(self, handlers: Mapping[Callable[..., Any], Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called before a forward with its arguments; returns what it is called with."""
        return args, kwargs

    def finish(self, result: Any) -> None:
        """Called after a forward that returned ``result``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = respelt(func)
        if func not in self.handlers and (inside := self.inside(func)) is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def inside(self, func: Any) -> Callable[..., Any] | None:
        """The function to run under this mode instead of one that hides calls, or None."""
        return getattr(func, "implementation", None) or decomposition_of(func)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out one call."""
        return self.handlers.get(func, func)(*args, **kwargs)


class Transform(ABC):
    """The change of a model's forward; copies and pickles of the model have it too."""

    # A call goes to the mode of the least depth first; the calls that this one makes in its place
    # go to the next. 0 records scales, 1 rescales, 2 simulates formats, 3 runs in float8.
    depth: ClassVar[int]

    @abstractmethod
    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode for one call of the transformed model, with ``args`` and ``kwargs``."""


class Transformed(HasTransforms):
    """The part of a transformed model's class that enters the modes, of the largest depth first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, under its transforms."""
        plain = super().forward  # type: ignore[misc]
        modes = [t.mode(self, args, kwargs) for t in self.transforms]
        for mode in modes:
            args, kwargs = mode.begin(args, kwargs)
        # torch.compile refuses checkpoints by itself.
        checks = [] if torch.compiler.is_compiling() else [RefusesCheckpointing()]
        result = _under([*modes, *checks], plain, args, kwargs)
        if isinstance(result, _UNFINISHED):
            raise TypeError(
                f"the forward returned a {type(result).__name__}, whose body would run after the "
                "transforms have ended: transform a module that returns tensors"
            )
        for mode in modes:
            mode.finish(result)
        return result

    @property
    def reason_against_conversion(self) -> str:
        """Why `float8.convert_to_float8_training` takes no model with this part."""
        return (
            "the model is transformed, and transforms do not see the functions that a Float8Linear "
            "calls. Use float8.unit_scaling.transforms.float8(model, config) in place of conversion"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the model's own class, from which this one is made again."""
        base = type(self).__bases__[1]
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _new, (base,), state


def _under(modes: list[Any], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not modes:
        return forward(*args, **kwargs)
    with modes[0]:
        return _under(modes[1:], forward, args, kwargs)


def _make_subclass(cls: Any) -> Any:
    return type(f"Transformed{cls.__name__}", (Transformed, cls), {"__module__": __name__})


_subclass: Callable[[Any], Any] = functools.cache(_make_subclass)


def _new(cls: type[nn.Module]) -> nn.Module:
    made = _subclass(cls)
    return made.__new__(made)


def transformed(model: M, transform: Transform) -> M:
    """A copy of a model that runs under ``transform``, and under those that it already has.

    Raises TypeError or ValueError if ``model`` is not a module, if a transform would not reach all
    of it (`refusals.check_reach`), or if it has a transform of this kind already.
    """
    check_reach(model)
    earlier: tuple[Transform, ...] = getattr(model, "transforms", ())
    if any(type(t) is type(transform) for t in earlier):
        raise ValueError(
            f"the model has the transform {type(transform).__name__} already; apply it once, to "
            "the model as it was"
        )
    new = copy.deepcopy(model)
    copied: tuple[Transform, ...] = getattr(new, "transforms", ())
    if not isinstance(model, Transformed):
        new.__class__ = _subclass(type(model))
    ordered = sorted((*copied, transform), key=lambda t: t.depth, reverse=True)
    new.transforms = tuple(ordered)  # type: ignore[assignment]
    return new


def compile(module: M, **kwargs: Any) -> M:
    """``torch.compile`` of a module with any transforms, which it traces in one graph.

    Transforms come first, since they do not reach into compiled code::

        model = compile(simulate_fp8(unit_scale(model)))

    Args:
        module: it shares its parameters with the result.
        kwargs: those of ``torch.compile``, such as ``fullgraph=True``.
    """
    return torch.compile(module, **kwargs)  # type: ignore[return-value]


# --- transforms of contractions


class OnProducts(Transform):
    """Abstract: calls `product` in place of the contractions of the kinds ``kinds``.

    Two transforms are of this form: `simulate` rounds operands, and `in_float8` multiplies in
    float8.
    """

    kinds: ClassVar[frozenset[str]]

    def mode(self, model: nn.Module, args: Any, kwargs: Any) -> Mode:
        """The mode for one call."""
        state = self.state(model)
        functions = [f for f, c in CONTRACTIONS.items() if c.kind in self.kinds]
        return Mode({f: functools.partial(self.product, state, f) for f in functions})

    def state(self, model: nn.Module) -> Any:
        """The first argument of `product` in one forward of a model."""
        return model

    @abstractmethod
    def product(self, state: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        """What a contraction returns."""


def parameter_of(model: nn.Module, weight: Tensor) -> str | None:
    """The name of a parameter, of which ``weight`` may be a view; of a tied one the last."""
    # Found at each call: FSDP2 and torch.func.functional_call replace the parameters meanwhile.
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    return names.get(id(weight if weight._base is None else weight._base), names.get(id(weight)))
