"""One optimizer step of one parameter: in plain PyTorch, or by the CUDA kernel.

A step decodes the states to float32, applies an update rule (``update_rules.py``) and encodes them
again, in place. `plain_step` does it in PyTorch on any device and is the definition. On CUDA one
Triton kernel does it (``gpu/optimizer_step.py``): a program holds whole groups in registers, reads
gradient, parameter, codes and scales once, and writes once. Both have the same precision: linear
codes and parameters are equal to the bit; what follows from expanded codes may differ by one code
(see ``moments.py``).

`refusal` says why the kernel does not take a step. `takes_kernel` decides: ``fused=True`` raises
that reason. ``fused=None`` takes the kernel where it runs; on CUDA it warns of the reason where it
does not, and the step takes longer. ``fused=False`` never takes the kernel.

The parameter is a `StateMatrix` too: a float32, bfloat16 or float16 matrix without a scale, or a
scaled float16 master (MS-AMP O3; arXiv 2310.18313, section 2.2), from which `cast_weight` writes
the tensorwise float8 weight that the model multiplies.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8.formats import HIGH_PRECISION_DTYPES
from float8.kernels import stochastic, update_rules
from float8.kernels.moments import StateMatrix
from float8.kernels.scaled_mm import SUPPORT, architecture
from float8.kernels.update_rules import Number, UpdateRule

# The rules that the kernel has, by the names that its op takes.
KERNEL_RULES: dict[str, Any] = {
    "adamw": update_rules.AdamW,
    "sgd_momentum": update_rules.SGDMomentum,
    "lion": update_rules.Lion,
}
LARGEST_GROUP = 2048


def plain_step(
    rule: UpdateRule,
    step: Number,
    p: StateMatrix,
    g: Tensor,
    states: Sequence[StateMatrix],
    *,
    at_random: Sequence[bool],
    seed: int = 0,
    first: int = 0,
) -> None:
    """One step in place, in plain PyTorch.

    ``step`` is counted from 1; it is a number or a 0-dim tensor. ``p`` is the parameter (R, C), or
    its master, and ``g`` its gradient in float32. ``states`` are the moments, in the order of the
    rule.

    ``at_random`` says whether the parameter (or its master) and each of the states are rounded
    stochastically, where they are not float32; see ``stochastic.py``. Random numbers depend on
    ``seed``, which stands for the parameter, on the step and on the index of an element. ``first``
    is the index of p's first element in the whole parameter, where p is a part of it.
    """
    offset = step.to(torch.int32) if isinstance(step, Tensor) else int(step)
    new = rule.update(step, p.decode(), g, *(state.decode() for state in states))
    for number, (state, x) in enumerate(zip((p, *states), new, strict=True)):
        if not at_random[number] or state.codes.dtype == torch.float32:
            state.write(x)
        elif state.scale is None:
            state.write(stochastic.stochastic_round(x, state.codes.dtype, seed, offset, first))
        else:
            key = stochastic.seed_of_state(seed, number - 1)
            state.write(x, stochastic.chances(x, key, offset, first))


def refusal(
    rule: UpdateRule, p: StateMatrix, g: Tensor, states: Sequence[StateMatrix], group: int
) -> str | None:
    """Why the Triton kernel does not take this step, and what to do; None if it does."""
    device = p.codes.device
    if device.type != "cuda":
        return f"it is a kernel for CUDA, and the parameter is on {device}; use fused=False"
    if type(rule) not in KERNEL_RULES.values():
        return (
            f"it has no rule {type(rule).__name__} (it has {', '.join(KERNEL_RULES)}); use "
            "fused=False, or add the rule to kernels/gpu/optimizer_step.py"
        )
    if not 0 < group <= LARGEST_GROUP or group & (group - 1):
        return (
            f"group={group} is not a power of two up to {LARGEST_GROUP}; "
            "choose one, or use fused=False"
        )
    for what, x in (("parameter", p.codes), ("gradient", g)):
        if x.dtype not in HIGH_PRECISION_DTYPES:
            return f"the {what} is {x.dtype}, not float32, bfloat16 or float16; use fused=False"
    if not all(x.is_contiguous() for state in states for x in state.tensors()):
        return "a state is not contiguous; make it so, or use fused=False"
    return _no_kernel(device.index)


def _no_kernel(device_index: int | None) -> str | None:
    """Why this GPU runs none of the kernels; importing them registers their ops."""
    if torch.version.hip is not None:
        return "the kernel is untested on AMD GPUs; use fused=False"
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
    fused: bool | None,
    rule: UpdateRule,
    p: StateMatrix,
    g: Tensor,
    states: Sequence[StateMatrix],
    group: int,
) -> bool:
    """Whether the kernel runs this step; ValueError if ``fused=True`` and the kernel refuses."""
    if fused is False:
        return False
    reason = refusal(rule, p, g, states, group)
    if fused and reason is not None:
        shape = tuple(p.codes.shape)
        raise ValueError(f"fused=True, and the kernel refuses a parameter of {shape}: {reason}")
    if reason is not None and p.codes.device.type == "cuda":
        _warn(reason)
    return reason is None


def _warn(reason: str) -> None:
    """Say once for every reason that steps run in plain PyTorch."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(f"this optimizer's steps are not fused: {reason}", stacklevel=2)


_WARNED: set[str] = set()
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as above: once, while tracing


def fused_step(
    rule: UpdateRule,
    step: Number,
    p: StateMatrix,
    g: Tensor,
    states: Sequence[StateMatrix],
    group: int,
    *,
    at_random: Sequence[bool],
    seed: int = 0,
    first: int = 0,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """`plain_step` by the Triton kernel (`takes_kernel` must have said so).

    Args:
        rule, step, p, states, at_random, seed, first: see `plain_step`; p of any strides.
        g: the gradient (R, C) in any high precision, of any strides.
        group: elements per scale, of every `StateMatrix`.
        grad_scale: float32 of one element on the device; the gradient is divided by it on the way
            and stays as it is (``torch.amp.GradScaler``'s protocol for fused optimizers).
        found_inf: float32 of one element on the device; where it is not 0 nothing is written.
        amax: float32 of one element that holds 0 before. It records the largest finite magnitude
            of the new master, for `cast_weight`; None where the parameter is no master.
    """
    name, numbers, lr = packed(rule)
    m, v = (*(state[:3] for state in states), (None, None, None))[:2]
    number, tensor = (0.0, step) if isinstance(step, Tensor) else (float(step), None)
    torch.ops.float8.optimizer_step.default(
        name, numbers, lr, number, tensor, *p[:2], g, *m, *v, group, list(at_random), seed, first,
        grad_scale, found_inf, amax,
    )  # fmt: skip


def packed(rule: UpdateRule) -> tuple[str, list[float], Tensor | None]:
    """A rule as an op takes it: its name, its numbers, and lr where it is a tensor."""
    fields = rule._asdict()
    name = next(name for name, kind in KERNEL_RULES.items() if kind is type(rule))
    numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in fields.values()]
    return name, numbers, fields["lr"] if isinstance(fields["lr"], Tensor) else None


def unpacked(name: str, numbers: Sequence[float], lr: Tensor | None) -> Any:
    """The inverse of `packed`."""
    rule = KERNEL_RULES[name](*numbers)
    return rule if lr is None else rule._replace(lr=lr)


def cast_weight(
    master: StateMatrix,
    data_RC: Tensor,
    scale: Tensor,
    amax: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """Write a tensorwise float8 weight, its codes (R, C) and its scale, from its master, in place.

    The master is scaled float16. The codes may have any strides; the scale is float32 of one
    element. ``amax`` is what `fused_step` recorded. Where ``found_inf`` is not 0 nothing is
    written.
    """
    assert master.scale is not None
    torch.ops.float8.cast_weight.default(
        master.codes, master.scale, data_RC, scale, master.group, amax, found_inf
    )
