"""Who runs an optimizer step of one parameter whose states are stored in 8 or 16 bits.

A step decodes the states to float32, applies an update rule of `float8.kernels.moments`, and
encodes them again, in place. Plain PyTorch does it on any device, tile by tile or compiled
(`float8.optim`; and `reference_step`, a whole parameter at once). On CUDA one Triton kernel does
it (``gpu/optimizer_step.py``): a program holds whole groups in registers, reads gradient,
parameter, codes and scales once, and writes once. Both have the same precision: linear codes and
parameters are equal to the bit, what follows from expanded codes may differ by a neighbouring code
(see ``moments.py``).

`refusal` says why the kernel does not take a step. `takes_kernel` decides: ``fused=True`` raises
that reason, ``fused=None`` takes the kernel where it runs and on CUDA warns of the reason where it
does not (the results have the same precision, and take longer), ``fused=False`` never takes it.

What is stored for a state is a `Stored`, whose form is read off its tensors:

============ ============ ============ ===================
codes        scale        exponent     form
============ ============ ============ ===================
float32      None         None         as it is
float16      (R, G)       None         linear
float8 E4M3  (R, G)       None         linear
float8 E4M3  (R, G)       (R, G)       expanded
============ ============ ============ ===================

The parameter is one too: a float32, bfloat16 or float16 matrix without scale, or a scaled float16
master (MS-AMP O3; arXiv 2310.18313, section 2.2), from which `cast_weight` writes the tensorwise
float8 weight that the model multiplies.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels import moments, stochastic
from float8.kernels.moments import Number
from float8.kernels.scaled_mm import SUPPORT, architecture


class Stored(NamedTuple):
    """A matrix (R, C) in memory, and what each group of its rows needs, contiguous."""

    codes: Tensor
    scale: Tensor | None = None
    exponent: Tensor | None = None


class AdamW(NamedTuple):
    """The numbers of `moments.adamw`; lr and step may be 0-dim tensors (CUDA graphs)."""

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Number
    decoupled: bool = True
    maximize: bool = False


class SGDMomentum(NamedTuple):
    """The numbers of `moments.sgd_momentum`."""

    lr: Number
    momentum: float
    step: Number
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


class Lion(NamedTuple):
    """The numbers of `moments.lion`."""

    lr: Number
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False


Rule = AdamW | SGDMomentum | Lion
RULES: dict[str, Any] = {"adamw": AdamW, "sgd_momentum": SGDMomentum, "lion": Lion}
_UPDATES: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    AdamW: moments.adamw,
    SGDMomentum: moments.sgd_momentum,
    Lion: moments.lion,
}
LARGEST_GROUP = 2048


def refusal(p: Stored, g: Tensor, states: Sequence[Stored], group: int) -> str | None:
    """Why the Triton kernel does not take this step, and what to do; None if it does."""
    device = p.codes.device
    if device.type != "cuda":
        return f"it is a kernel for CUDA, and the parameter is on {device}; use fused=False"
    if not 0 < group <= LARGEST_GROUP or group & (group - 1):
        return (
            f"group={group} is not a power of two up to {LARGEST_GROUP}; "
            "choose one, or use fused=False"
        )
    for what, x in (("parameter", p.codes), ("gradient", g)):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            return f"the {what} is {x.dtype}, not float32, bfloat16 or float16; use fused=False"
    tensors = [x for stored in states for x in stored if x is not None]
    if not all(x.is_contiguous() for x in tensors):
        return "a state is not contiguous; make it so, or use fused=False"
    return _no_kernel(device.index)


def _no_kernel(device_index: int | None) -> str | None:
    """Why this GPU runs none of the kernels; importing them registers their ops."""
    if torch.version.hip is not None:
        return "nobody has looked at the kernel on AMD GPUs; use fused=False"
    if (arch := architecture(device_index)) not in SUPPORT:
        known = ", ".join(SUPPORT)
        return f"{arch} is not known to convert float8 (known: {known}); use fused=False"
    try:
        for name in ("optimizer_step", "cast_weight"):
            importlib.import_module(f"float8.kernels.gpu.{name}")
    except ModuleNotFoundError:
        return "triton is not installed; `pip install triton`, or use fused=False"
    return None


# For torch.compile: it runs once, while tracing.
_no_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def takes_kernel(
    fused: bool | None, p: Stored, g: Tensor, states: Sequence[Stored], group: int
) -> bool:
    """Whether the kernel runs this step.

    Raises:
        ValueError: ``fused=True`` and the kernel refuses.
    """
    if fused is False:
        return False
    reason = refusal(p, g, states, group)
    if fused and reason is not None:
        shape = tuple(p.codes.shape)
        raise ValueError(f"fused=True, and the kernel refuses a parameter of {shape}: {reason}")
    if reason is not None and p.codes.device.type == "cuda":
        _warn(reason)
    return reason is None


def _warn(reason: str) -> None:
    """Say once for every reason that steps are plain PyTorch's."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(f"this optimizer's steps are not fused: {reason}", stacklevel=2)


_WARNED: set[str] = set()
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as above: once, while tracing


def fused_step(
    rule: Rule,
    p: Stored,
    g: Tensor,
    states: Sequence[Stored],
    group: int,
    *,
    rounds: Sequence[bool] = (False, False, False),
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    first: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """One step in place by the Triton kernel (`takes_kernel` must have said so).

    Args:
        rule: which rule, and its numbers.
        p: the parameter (R, C), of any strides; or its master.
        g: the gradient (R, C), plain, of any strides.
        states: the moments, as many as the rule has.
        group: elements per scale, of every `Stored`.
        rounds: whether the parameter (or its master) and each of the states are rounded at random,
            where they are not float32; see ``stochastic.py``.
        seed, offset: what their random numbers are drawn from: which parameter, and which step.
        first: the number of p's first element, where p is a shard of rows.
        grad_scale: float32 of one element on the device; the gradient is divided by it on the way
            and stays as it is (``torch.amp.GradScaler``'s protocol for fused optimizers).
        found_inf: float32 of one element on the device; where it is not 0 nothing is written.
        amax: float32 of one element, of a master: records the largest finite magnitude that the
            new master holds, for `cast_weight`; holds 0 before.
    """
    name, numbers, lr, step = packed(rule)
    m, v = (*states, Stored(torch.empty(0, device=g.device)))[:2]  # v, even of a rule with m alone
    torch.ops.float8.optimizer_step.default(
        name, numbers, lr, step, *p[:2], g, *m, *v, group, list(rounds),
        *_number_or_tensor(seed), *_number_or_tensor(offset), first, grad_scale, found_inf, amax,
    )  # fmt: skip


def _number_or_tensor(x: int | Tensor) -> tuple[int | None, Tensor | None]:
    return (None, x) if isinstance(x, Tensor) else (x, None)


def packed(rule: Rule) -> tuple[str, list[float], Tensor | None, Tensor | None]:
    """A rule as an op takes it: its name, its numbers, and lr and step where they are tensors.

    Raises:
        TypeError: the kernel has no such rule.
    """
    names = {kind: name for name, kind in RULES.items()}
    if type(rule) not in names:
        raise TypeError(
            f"the kernel has no rule {type(rule).__name__} (it has {', '.join(RULES)}): give the "
            "optimizer fused=False, or add the rule to RULES in kernels/optimizer_step.py and "
            "kernels/gpu/optimizer_step.py"
        )
    fields, name = rule._asdict(), names[type(rule)]
    numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in fields.values()]
    tensors = [x if isinstance(x, Tensor) else None for x in (fields["lr"], fields.get("step"))]
    return name, numbers, tensors[0], tensors[1]


def unpacked(name: str, numbers: Sequence[float], lr: Tensor | None, step: Tensor | None) -> Rule:
    """The inverse of `packed`."""
    kind = RULES[name]
    fields: dict[str, Any] = dict(zip(kind._fields, numbers, strict=True))
    fields |= {key: x for key, x in (("lr", lr), ("step", step)) if x is not None}
    rule: Rule = kind(**fields)
    return rule


def reference_step(
    rule: Rule,
    p: Stored,
    g: Tensor,
    states: Sequence[Stored],
    group: int,
    *,
    rounds: Sequence[bool] = (False, False, False),
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    first: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """`fused_step` in plain PyTorch, the whole parameter at once: what the kernel is tested by."""
    g32 = g.to(torch.float32)
    if grad_scale is not None:
        g32 = g32 / grad_scale.reshape(())
    old = [load(x, group) for x in (p, *states)]
    new_p, *new = _UPDATES[type(rule)](old[0], g32, *old[1:], **rule._asdict())
    skip = torch.zeros((), device=g.device) if found_inf is None else found_inf.reshape(())

    def chance(number: int, like: Tensor) -> Tensor | None:
        if not rounds[number + 1]:
            return None
        return stochastic.chances(like, stochastic.seed_of_state(seed, number), offset, first)

    for number, (stored, x32) in enumerate(zip(states, new, strict=True)):
        _write(stored, encoded(stored, x32, group, chance(number, x32)), skip)
    if p.scale is not None:
        master = encoded(p, new_p, group, chance(-1, new_p))
        _write(p, master, skip)
        if amax is not None:
            kept = load(master, group).abs().nan_to_num(nan=0.0)
            amax.copy_(torch.maximum(amax, kept.amax()))
    elif rounds[0] and p.codes.dtype != torch.float32:
        new_codes = stochastic.stochastic_round(new_p, p.codes.dtype, seed, offset, first)
        _write(p, Stored(new_codes), skip)
    else:
        _write(p, Stored(new_p.to(p.codes.dtype)), skip)


def _write(stored: Stored, new: Stored, skip: Tensor) -> None:
    for mine, theirs in zip(stored, new, strict=True):
        if mine is not None and theirs is not None:
            width = torch.uint8 if mine.element_size() == 1 else mine.dtype
            old = mine.view(width)
            old.copy_(torch.where(skip == 0, theirs.view(width), old))


def load(stored: Stored, group: int) -> Tensor:
    """float32 (R, C)."""
    codes, scale, exponent = stored
    if scale is None:
        return codes.to(torch.float32)
    if exponent is None:
        return moments.decode(codes, scale, group)
    return moments.decode_expanded(codes, scale, exponent, group)


def encoded(stored: Stored, x32_RC: Tensor, group: int, chance: Tensor | None = None) -> Stored:
    """x32 in the form of ``stored``, in new tensors; rounded at random with a chance."""
    if stored.scale is None:
        return Stored(x32_RC.to(stored.codes.dtype))
    if stored.exponent is None:
        return Stored(*moments.encode(x32_RC, group, stored.codes.dtype, chance))
    return Stored(*moments.encode_expanded(x32_RC, group, chance))


def cast_weight(
    master: Stored,
    data_RC: Tensor,
    scale: Tensor,
    group: int,
    amax: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Write a tensorwise float8 weight, its codes (R, C) and its scale, from its master, in place.

    Args:
        master: scaled float16.
        data_RC: float8 codes, of any strides.
        scale: float32 of one element.
        group: of the master.
        amax: what `fused_step` recorded.
        found_inf: where it is not 0 nothing is written.
    """
    assert master.scale is not None
    torch.ops.float8.cast_weight.default(
        master.codes, master.scale, data_RC, scale, group, amax, found_inf
    )
