"""`fuse_feed_forwards`: SwiGLU and the layers around it as one op of autograd.

After conversion, SwiGLU reads two matrices that layers wrote and writes one that a layer casts, and
its backward writes two gradients that layers cast. A fused feed-forward casts them where it
computes them, casts its input once for gate and up, and keeps gate and up for backward, but not the
result of SwiGLU::

    register_feed_forward(LlamaMLP, gate="gate_proj", up="up_proj", down="down_proj")
    convert_to_float8_training(model, config=config)
    print(fuse_feed_forwards(model))  # the modules that were fused, and why others were not

What a type computes is declared, never guessed. It must be ``down(silu(gate(x)) * up(x))``; where
one layer computes gate and up, its output holds the gate first, and ``up`` is left out.

Outputs and gradients have the bits of the layers apart, with one exception: with tensorwise scales
SwiGLU is computed in float32 and rounded once, where ``F.silu(gate) * up`` rounds twice.
Parameters, their names and the state of delayed casts stay, so that checkpoints of both models load
into each other; `convert_from_float8_training` makes the modules plain again.

The module's own forward runs, layer by layer, while a child of it has hooks, or was wrapped or
replaced (as by adapters or by tensor parallelism), or a layer runs in high precision, got a bias or
another config, or has a weight that is stored in float8. Fuse after converting, and before
compiling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from float8.arguments import check_module
from float8.convert.reasons import runs_something_else
from float8.fusion.feed_forward_autograd import (
    FeedForwardCall,
    FeedForwardFunction,
    cast_by_one_scale,
    copies_on,
)
from float8.fusion.norm_autograd import runs_kernels
from float8.fusion.norm_fusion import Fusion
from float8.kernels import is_sharded
from float8.linear.layer import Float8Linear
from float8.linear.module import Float8Module
from float8.linear.resident import is_resident

logger = logging.getLogger("float8")


class Names(NamedTuple):
    """The names of layers in a feed-forward: gate and up, or the one that computes both; down."""

    first: tuple[str, ...]
    down: str

    @property
    def all(self) -> tuple[str, ...]:
        """All of them."""
        return *self.first, self.down


FEED_FORWARDS: dict[type[nn.Module], Names] = {}  # filled by users


def register_feed_forward(
    module_type: type[nn.Module], *, gate: str, up: str | None = None, down: str
) -> None:
    """Declare a type of modules as ``down(silu(gate(x)) * up(x))``.

    Args:
        module_type: exactly this type, such as ``LlamaMLP``.
        gate, up, down: the names of its layers. Without ``up``, the output of ``gate`` holds both,
            the gate first.
    """
    FEED_FORWARDS[module_type] = Names((gate,) if up is None else (gate, up), down)


class SwiGLUFeedForward(Float8Module):
    """Abstract: a feed-forward of a declared type; `_fused_type` makes the subclass of both."""

    own_names = ("keeps_float8",)
    layer_names: ClassVar[Names]
    keeps_float8: bool

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For copies and pickles, which do not find the subclass by its name."""
        state = super().__reduce_ex__(protocol)[2]
        return _without_state, (self.plain_type, self.layer_names), state

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., K).

        Raises what the layers raise for an input that does not fit.
        """
        layers: list[Any] = [getattr(self, name) for name in self.layer_names.all]
        is_apart = _reason_against(self, self.layer_names) is not None
        if is_apart or any([layer.high_precision for layer in layers]):
            out: Tensor = self.plain_type.forward(self, x)
            return out
        *first, down = layers
        # Of the shape and dtype of down's input, without memory.
        empty = torch.empty((), dtype=x.dtype, device=x.device)
        hidden = empty.expand(*x.shape[:-1], down.in_features)
        calls = tuple([layer.begin_call(x, layer.weight) for layer in first])
        last = down.begin_call(hidden, down.weight)
        is_once = cast_by_one_scale(last.plan)
        by_kernel = is_once and runs_kernels(x.device, down.config.emulate)
        keeps = self.keeps_float8 and torch.is_grad_enabled()
        copies = copies_on(x.device, down.config.emulate) if keeps else None
        call = FeedForwardCall(calls, last, is_once, by_kernel, copies)
        weights = [layer.weight for layer in first]
        result: Tensor = FeedForwardFunction.apply(call, x, down.weight, *weights)
        return result


@cache
def _fused_type(plain_type: Any, names: Names) -> type[SwiGLUFeedForward]:
    attributes = {"plain_type": plain_type, "layer_names": names}
    return type(f"Fused{plain_type.__name__}", (SwiGLUFeedForward, plain_type), attributes)


def _without_state(plain_type: Any, names: Names) -> SwiGLUFeedForward:
    fused_type = _fused_type(plain_type, names)
    return fused_type.__new__(fused_type)


def _reason_of(layer: Any) -> str | None:
    kind = type(layer)
    if kind is not Float8Linear:
        return f"is a {kind.__name__}, not a Float8Linear"
    if layer.bias is not None:
        return "has a bias"
    if layer.config.smooth_input:
        return "has smooth_input=True"
    if is_sharded(layer.weight) or is_resident(layer.weight):
        return "has a weight that is sharded, or stored in float8"
    return None


def _reason_against(module: nn.Module, names: Names) -> str | None:
    """Why a feed-forward runs layer by layer, or None: its own forward would do something else."""
    layers: list[Any] = [getattr(module, name, None) for name in names.all]
    for name, layer in zip(names.all, layers, strict=True):
        if (reason := _reason_of(layer)) is not None:
            return f"its {name} {reason}"
    for name, child in module.named_children():
        kind = type(child).__name__
        if child not in layers and "SiLU" not in kind:
            return f"its {name} is a {kind}, neither one of its layers nor SiLU"
        if _calls_more(child):
            return f"its {name} has hooks, or a forward of its own"
    if len({layer.config.key for layer in layers}) > 1:
        return "its layers have different configs"
    return None


def _calls_more(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, or another forward than its type's."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in module.__dict__ or any([getattr(module, name) for name in hooks])


def fuse_feed_forwards(model: nn.Module, *, keeps_float8: bool = False) -> Fusion:
    """Fuse the feed-forwards of the declared types, in place.

    Args:
        model: converted. Fusing again fuses those that were left.
        keeps_float8: keep gate and up for backward as float8 copies, E4M3 with one scale per 128
            elements of a row (COAT, arXiv 2410.19313, section 5), which halves what a feed-forward
            keeps. Outputs do not change. Gradients are those at the values of the copies.

    Returns:
        the fused modules with their layers, and the reasons why others were not fused; both are
        logged too.
    """
    check_module(model, "fuse_feed_forwards")
    fusion = Fusion("feed-forwards")
    for fqn, module in model.named_modules():
        kind: Any = type(module)
        if kind not in FEED_FORWARDS:
            continue
        names = FEED_FORWARDS[kind]
        reason = next(filter(None, _problems(module, fqn, names)), None)
        if reason is not None:
            fusion.skipped[fqn] = reason
        else:
            module.__class__ = _fused_type(kind, names)
            module._add_switch()
            module.keeps_float8 = keeps_float8
            fusion.fused.append((fqn, [f"{fqn}.{name}".lstrip(".") for name in names.all]))
    logger.info("%s", fusion)
    return fusion


def _problems(module: nn.Module, fqn: str, names: Names) -> Iterator[str | None]:
    """The reasons why a module cannot be fused; what follows one may fail."""
    yield runs_something_else(module, fqn)
    yield _reason_against(module, names)
    layers: list[Any] = [getattr(module, name) for name in names.all]
    *first, down = layers
    sizes = {layer.out_features for layer in first}
    if sizes != {down.in_features * (1 if len(first) > 1 else 2)}:
        yield f"{' and '.join(names.first)} compute {sizes}, {names.down} reads {down.in_features}"
    if len({layer.weight.dtype for layer in layers}) > 1:
        yield "its weights have different dtypes"
