"""`Float8Experts`: a module of a mixture of experts whose grouped products run in float8.

Such a module holds the weights of E experts as stacks (E, N, K), and multiplies the tokens of all
experts by one call of ``torch.nn.functional.grouped_mm`` per stack. Around these calls each library
sorts, masks, gates and adds biases in its own way. So a converted module runs its own forward,
under a torch function mode that makes `float8.grouped_mm` of each ``grouped_mm``. Parameters,
buffers, hooks and attributes are the module's, and checkpoints have the plain keys. Its class is a
subclass of the module's, made for it, so ``isinstance`` answers as before.

Which types hold experts: those that `register_experts` was told, and other libraries' types
(`float8.experts.other_libraries`). Some forwards call ``grouped_mm`` only if asked to, and loop
over experts otherwise: their type is registered with the forward that does.

The mode sees calls of the forward that runs now, in this thread. A checkpoint *around* the module
recomputes them in float8; one *inside* its forward would recompute without the mode. While dynamo
traces, a mode sees functions of a list, from which names that begin with ``_`` are missing;
``torch._grouped_mm`` is added to it, since dynamo looks through ``F.grouped_mm`` to that.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from float8.arguments import check_function, check_type
from float8.config import Float8LinearConfig
from float8.experts.grouped_mm import product_of_groups
from float8.experts.other_libraries import GROUPED_MM, Forward, forward_of_library
from float8.kernels import is_sharded
from float8.linear.float8_weight import Float8Weight
from float8.linear.module import ModuleRule, stacked_weights, with_state_of
from float8.linear.refusals import reason_against_layer
from float8.linear.resident import contraction_last
from float8.linear.weight_cache import CastsWeights
from float8.tensor import Float8Tensor

logger = logging.getLogger("float8")

# type -> the forward that runs in float8
_REGISTERED: dict[type[nn.Module], Forward] = {}
_NAMES = {"mat_a": "x", "self": "x", "input": "x", "mat_b": "w", "mat2": "w", "weight": "w"}


def register_experts(experts_type: type[nn.Module], forward: Forward | None = None) -> None:
    """Convert modules of this type: `float8.convert_to_float8_training` finds them from now on.

    Every ``torch.nn.functional.grouped_mm`` that the forward calls runs as `float8.grouped_mm`, and
    all else as it is. Registering a type again with the same forward changes nothing.

    Args:
        experts_type: exactly this type; its subclasses are not converted.
        forward: ``forward(module, ...)`` with the arguments and the result of the type's own, which
            runs in its place while the module computes in float8: for a type that loops over its
            experts. None for the type's own.

    Raises:
        TypeError: ``experts_type`` is no type of module, or ``forward`` cannot be called.
        ValueError: the type has another forward already.
    """
    check_type(experts_type, type, "register_experts", "experts_type", "a type of nn.Module")
    forward = experts_type.forward if forward is None else forward
    check_function(forward, "register_experts", "forward")
    if _forward_of(experts_type) not in (None, forward):
        raise ValueError(f"register_experts: {experts_type.__name__} has a conversion already")
    _REGISTERED[experts_type] = forward


def _forward_of(kind: type[nn.Module]) -> Forward | None:
    """The forward of a type of experts that calls ``grouped_mm``, or None for other types."""
    # A type that fully_shard has made keeps its parameters' places in the module that it was.
    is_fsdps = any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    if kind in _REGISTERED or is_fsdps or issubclass(kind, Float8Experts):
        return _REGISTERED.get(kind)
    return forward_of_library(kind)


class Float8Experts(CastsWeights):
    """Abstract: an experts module whose grouped products run in float8; see the module.

    Attributes:
        float8_config: how products run. ``config`` is often the module's own.
        float8_name: the module's name in its model, for messages.
    """

    own_names = ("float8_config", "float8_name", "cached_weights")
    float8_forward: Forward
    float8_name: str

    def set_up(self, config: Float8LinearConfig, fqn: str) -> None:
        """Compute by this config, under this name."""
        self.float8_config, self.float8_name = config, fqn
        self.cached_weights = {}
        self._add_switch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, its grouped products in float8."""
        if torch.compiler.is_dynamo_compiling():
            _show_grouped_mm_to_modes()
        if self.high_precision:
            return self._plain_forward(*args, **kwargs)
        products = _GroupedProducts(self)
        with products:
            result = self.float8_forward(*args, **kwargs)
        if products.count:
            self.switch.note_call(torch.compiler.is_compiling())
        elif torch.compiler.is_compiling():
            raise RuntimeError(f"float8 experts that call no grouped_mm: {_LEFT_FLOAT8}")
        elif self not in _told:
            _told.add(self)
            logger.warning("%s: its forward called no grouped_mm, and %s", self._name, _LEFT_FLOAT8)
        return result

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: getattr(self, name) for name in self._parameters}
        plain = {n: w.dequantize() for n, w in own.items() if isinstance(w, Float8Tensor)}
        if not plain:
            return super().forward(*args, **kwargs)
        # Attributes of the object are found before its parameters, as those of expert parallelism.
        hidden = {name: self.__dict__[name] for name in plain if name in self.__dict__}
        self.__dict__.update(plain)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in plain:
                del self.__dict__[name]
            self.__dict__.update(hidden)

    @property
    def _name(self) -> str:
        return self.float8_name or type(self).__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold the plain type, from which this one is made again."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _new, (self.plain_type,), state | {"cached_weights": {}}


class _GroupedProducts(TorchFunctionMode):
    """Runs the grouped products of one forward in float8.

    ``experts`` is the module whose forward it is. Its name is read for messages only, because
    torch.compile guards on what is read.
    """

    def __init__(self, experts: Float8Experts) -> None:
        super().__init__()
        self.experts = experts
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in GROUPED_MM:
            return func(*args, **kwargs)
        self.count += 1
        names = {_NAMES.get(name, name): value for name, value in kwargs.items()}
        try:
            return self._product(*args, **names)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.experts._name}: {error}") from error

    def _product(
        self,
        x: Tensor,
        w: Tensor,
        offs: Any = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if bias is not None:  # torch 2.13 takes none either
            raise ValueError("grouped_mm takes no bias: add it to the result")
        experts = self.experts
        cached = self._cached(w) if experts.cached_weights else None
        y = product_of_groups(x, w, offs, experts.float8_config, cached)
        return y if out_dtype is None else y.to(out_dtype)

    def _cached(self, w: Tensor) -> Float8Weight | None:
        """The cast of the Parameter that w (E, K, N) is, or is a view of, if there is one."""
        root = w if w._base is None else w._base
        for cached in self.experts.cached_weights.values():
            if root is cached.source:
                stack = contraction_last(self.experts, root)
                is_whole = w.mT.shape == stack.shape and w.mT.stride() == stack.stride()
                return cached if is_whole and w.dtype == stack.dtype else None
        return None


_told: weakref.WeakSet[Float8Experts] = weakref.WeakSet()
_LEFT_FLOAT8 = (
    "has run in high precision; register_experts(type, forward) takes a forward that calls it"
)


def _show_grouped_mm_to_modes() -> None:
    # Runs while dynamo traces, which has this list in a cache.
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(torch._grouped_mm)


_show_grouped_mm_to_modes._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- the types of converted modules, and their conversion


def _make_type(plain_type: Any) -> Any:
    @functools.wraps(plain_type.forward)  # torchtitan reads its signature
    def forward(self: Float8Experts, *args: Any, **kwargs: Any) -> Any:
        return Float8Experts.forward(self, *args, **kwargs)

    body = {
        "__module__": __name__,
        "__doc__": f"A {plain_type.__name__} whose grouped products run in float8.",
        "plain_type": plain_type,
        "forward": forward,
        "float8_forward": _forward_of(plain_type),
    }
    return type(f"Float8{plain_type.__name__}", (Float8Experts, plain_type), body)


# type of experts -> the type of converted ones
float8_type: Callable[[Any], Any] = functools.cache(_make_type)


def _new(plain_type: type[nn.Module]) -> nn.Module:
    made = float8_type(plain_type)
    return made.__new__(made)


def _convert(module: nn.Module, config: Float8LinearConfig, fqn: str) -> nn.Module:
    new: Float8Experts = with_state_of(module, float8_type(type(module)))
    new.set_up(config, fqn)
    return new


def _reason(module: nn.Module, config: Float8LinearConfig) -> str | None:
    """The reason why a module's products cannot run by this config on any device, or None."""
    for name, weight in stacked_weights(module).items():
        if type(weight) not in (nn.Parameter, FakeTensor) and not is_sharded(weight):
            return f"{name} is a {type(weight).__name__}: convert the plain module"
        if (reason := reason_against_layer(weight, config)) is not None:
            return f"{name}: {reason}"
    return None


def rule_of_experts(kind: type[nn.Module]) -> ModuleRule | None:
    """The conversion rule of a type of experts, known by what it has; None for another type."""
    return ModuleRule(_reason, _convert, stacked=True) if _forward_of(kind) is not None else None
