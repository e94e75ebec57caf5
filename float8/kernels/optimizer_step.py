"""One optimizer step of one parameter: in plain PyTorch, or by the CUDA kernel.

A step decodes the states to float32, applies an update rule (``update_rules.py``) and encodes them
again, in place. `OptimizerStep` has all that it needs, as matrices. `plain_step` does it in PyTorch
on any device and is the definition. On CUDA one Triton kernel does it (``gpu/optimizer_step.py``):
a program holds whole groups in registers, reads gradient, parameter, codes and scales once, and
writes once. Both have the same precision: linear codes and parameters are equal to the bit; what
follows from expanded codes may differ by one code (see ``moments.py``).

`advance` chooses. ``fused=True`` raises the reason why the kernel does not take a step
(`refusal`). ``fused=None`` takes the kernel where it runs; on CUDA it warns of the reason where it
does not, and the step takes longer. ``fused=False`` never takes the kernel. In plain PyTorch at
most one tile is in float32 at any time.

The parameter is a `StateMatrix` too: a float32, bfloat16 or float16 matrix without a scale, or a
scaled float16 master (MS-AMP O3; FP8-LM, arXiv 2310.18313, section 2.2), from which the tensorwise
float8 weight follows that the model multiplies (`cast_master`). An update is far smaller than the
distance between two E4M3 values, so it would be lost without the master. The cast reads the master
after its rounding, so that a checkpoint of the master alone gives the same float8 weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.kernels import definition, plain, stochastic, update_rules
from float8.kernels.casts import KERNELS, CastSpec, cast
from float8.kernels.matrix import TENSOR
from float8.kernels.moments import StateMatrix, part, tiles
from float8.kernels.products import architecture
from float8.kernels.registration import define_op, load_kernels
from float8.kernels.update_rules import Number, UpdateRule

LARGEST_GROUP = 2048
LARGE_TILE = 2**24  # elements of a master that are in float32 at once on a GPU: 64 MB


class OptimizerStep(NamedTuple):
    """One step of one parameter; what it writes is p and the states.

    Attributes:
        rule: the update rule.
        number: which step this is, a Python number or a 0-dim tensor, counted from 1.
        p: (R, C): the parameter, or its master.
        g: its gradient, in a high precision, or in float8 with one scale.
        states: the moments, in the order of the rule.
        group: how many consecutive elements of a row share a scale.
        at_random: whether the parameter (or its master) and each of the states are rounded
            stochastically, where they are not float32; see ``stochastic.py``.
        seed: which parameter this is: random numbers depend on it, on the step and on the index of
            an element.
        first: the index of p's first element, where p is a part of a larger parameter.
    """

    rule: UpdateRule
    number: Number
    p: StateMatrix
    g: StateMatrix
    states: Sequence[StateMatrix]
    group: int
    at_random: Sequence[bool]
    seed: int = 0
    first: int = 0

    def tile(self, rows: slice, cols: slice) -> OptimizerStep:
        """The step of some rows, and of some columns that begin with a group."""
        return self._replace(
            p=self.p.tile(rows, cols),
            g=self.g.tile(rows, cols),
            states=[state.tile(rows, cols) for state in self.states],
            first=self.first + rows.start * self.p.codes.shape[1] + cols.start,
        )


class WeightOfMaster(NamedTuple):
    """The tensorwise float8 weight of a master: data (R, C), and its scale of one element."""

    data: Tensor
    scale: Tensor


def advance(
    step: OptimizerStep,
    fused: bool | None,
    weight: WeightOfMaster | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Advance one parameter and its states by one step, in place.

    ``weight`` is that of a master, and is cast from it. ``grad_scale`` and ``found_inf`` are
    `fused_step`'s; only the kernel reads them.
    """
    if not takes_kernel(fused, step):
        for rows, cols in tiles(step.p.codes.shape, step.group):
            plain_step(step.tile(rows, cols))
        if weight is not None:
            cast_master(step.p, weight)
        return
    device = step.p.codes.device
    amax = None if weight is None else torch.zeros(1, dtype=torch.float32, device=device)
    fused_step(step, grad_scale, found_inf, amax)
    if weight is not None:
        cast_master(step.p, weight, amax, found_inf)
    elif not torch.compiler.is_compiling():  # the kernel's write does not increase it
        torch.autograd.graph.increment_version(step.p.codes)


def plain_step(step: OptimizerStep) -> None:
    """One step in place, in plain PyTorch."""
    number, seed, first = step.number, step.seed, step.first
    offset = number.to(torch.int32) if isinstance(number, Tensor) else int(number)
    targets = (step.p, *step.states)
    p, *states = [target.decode() for target in targets]
    new = step.rule.update(number, p, step.g.decode(), *states)
    for index, (state, x) in enumerate(zip(targets, new, strict=True)):
        if not step.at_random[index] or state.codes.dtype == torch.float32:
            state.write(x)
        elif state.scale is None:
            state.write(stochastic.stochastic_round(x, state.codes.dtype, seed, offset, first))
        else:
            key = stochastic.seed_of_state(seed, index - 1)
            state.write(x, stochastic.chances(x, key, offset, first))


def cast_master(
    master: StateMatrix,
    weight: WeightOfMaster,
    amax: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Write a tensorwise float8 weight from its master, tile by tile.

    ``amax`` is what `fused_step` recorded, where it wrote the master. With a ``found_inf`` that is
    not 0 it wrote nothing: the weight keeps its scale, by which the master gives the same data.
    """
    how = CastSpec(TENSOR, weight.data.dtype, kernel=None if amax is None else "cast")
    places = tiles(weight.data.shape, master.group, LARGE_TILE if how.kernel else None)
    if not places:
        return
    if amax is None:
        amaxes = []
        for place in places:
            value = master.tile(*place).decode()
            # A NaN in the scale would spoil every element.
            finite = torch.where(value.isfinite(), value, 0.0)
            amaxes.append(plain.amax(finite, TENSOR))
        amax = torch.stack(amaxes).amax(0)
    scale = definition.scale_from_amax(amax.view(1, 1), torch.finfo(how.dtype).max)
    if found_inf is not None:
        scale = torch.where(found_inf.view(1, 1) == 0, scale, weight.scale.view(1, 1))
    for place in places:
        found: Any = cast(master.tile(*place).decode(), how, scale).row_major
        part(weight.data, *place).copy_(found.data)
    weight.scale.copy_(scale.view(weight.scale.shape))


def refusal(step: OptimizerStep) -> str | None:
    """Why the Triton kernel does not take this step, and what to do; None if it does."""
    device, group = step.p.codes.device, step.group
    if device.type != "cuda":
        return f"it is a kernel for CUDA, and the parameter is on {device}; use fused=False"
    if type(step.rule) not in update_rules.KERNEL_RULES.values():
        return f"it has no rule {type(step.rule).__name__}; use fused=False"
    if not 0 < group <= LARGEST_GROUP or group & (group - 1):
        return f"group={group} is not a power of two up to {LARGEST_GROUP}; use fused=False"
    if not all([x.is_contiguous() for state in step.states for x in state.tensors()]):
        return "a state is not contiguous; make it so, or use fused=False"
    return _no_kernel(device.index)


def _no_kernel(device_index: int | None) -> str | None:
    """Why this GPU runs none of the kernels; importing them registers their ops."""
    if (arch := architecture(device_index)) not in KERNELS:
        return f"{arch} runs no kernels ({', '.join(KERNELS)} do); use fused=False"
    try:
        load_kernels("optimizer_step", "cast")
    except ModuleNotFoundError:
        return "triton is not installed; `pip install triton`, or use fused=False"
    return None


# For torch.compile: it runs once, while tracing.
_no_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def takes_kernel(fused: bool | None, step: OptimizerStep) -> bool:
    """Whether the kernel runs this step; ValueError if ``fused=True`` and the kernel refuses."""
    if fused is False:
        return False
    reason = refusal(step)
    if fused and reason is not None:
        shape = tuple(step.p.codes.shape)
        raise ValueError(f"fused=True, and the kernel refuses a parameter of {shape}: {reason}")
    if reason is not None and step.p.codes.device.type == "cuda":
        _warn(reason)
    return reason is None


def _warn(reason: str) -> None:  # Python shows it once
    warnings.warn(f"this optimizer's steps are not fused: {reason}", stacklevel=2)


_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fused_step(
    step: OptimizerStep,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """`plain_step` by the Triton kernel (`takes_kernel` must have said so).

    Args:
        step: p and the gradient may have any strides.
        grad_scale: float32 of one element on the device; the gradient is divided by it on the way
            and stays as it is (``torch.amp.GradScaler``'s protocol for fused optimizers).
        found_inf: float32 of one element on the device; where it is not 0 nothing is written.
        amax: float32 of one element that holds 0 before. It records the largest finite magnitude
            of the new master, for `cast_master`; None where the parameter is no master.
    """
    name, numbers, lr = update_rules.packed(step.rule)
    number, tensor = (0.0, step.number) if isinstance(step.number, Tensor) else (step.number, None)
    none = (None, None, None)
    m, v = (*[state[:3] for state in step.states], none, none)[:2]
    torch.ops.float8.optimizer_step.default(
        name, numbers, lr, float(number), tensor, *step.p[:2], *step.g[:2], *m, *v, step.group,
        list(step.at_random), step.seed, step.first, grad_scale, found_inf, amax,
    )  # fmt: skip


def reference(
    rule: str, numbers: Sequence[float], lr: Tensor | None, step: float,
    step_tensor: Tensor | None, p: Tensor, p_scale: Tensor | None, g: Tensor,
    g_scale: Tensor | None, m: Tensor | None, m_scale: Tensor | None, m_exponent: Tensor | None,
    v: Tensor | None, v_scale: Tensor | None, v_exponent: Tensor | None,
    group: int, at_random: Sequence[bool], seed: int, first: int,
    grad_scale: Tensor | None, found_inf: Tensor | None, amax: Tensor | None,
) -> None:  # fmt: skip
    """`plain_step`, with the inputs of GradScaler and the amax of the new master."""
    if found_inf is not None and found_inf.item() != 0:
        return
    target = StateMatrix(p, p_scale, None, group)
    given = ((m, m_scale, m_exponent), (v, v_scale, v_exponent))
    states = [StateMatrix(x, scale, e, group) for x, scale, e in given if x is not None]
    gradient = StateMatrix(g, g_scale, None, max(g.shape[1], 1)).decode()
    if grad_scale is not None:
        gradient = gradient / grad_scale.reshape(())
    number = step if step_tensor is None else step_tensor
    plain_step(
        OptimizerStep(
            update_rules.unpacked(rule, numbers, lr), number, target, StateMatrix(gradient),
            states, group, at_random, seed, first,
        )
    )  # fmt: skip
    if amax is not None and p.numel():
        amax.copy_(torch.maximum(amax, target.decode().abs().nan_to_num(nan=0.0).amax()))


define_op(
    "optimizer_step(str rule, float[] numbers, Tensor? lr, float step, Tensor? step_tensor, "
    "Tensor(a!) p, Tensor(b!)? p_scale, Tensor g, Tensor? g_scale, "
    "Tensor(c!)? m, Tensor(d!)? m_scale, Tensor(e!)? m_exponent, "
    "Tensor(f!)? v, Tensor(g!)? v_scale, Tensor(h!)? v_exponent, "
    "int group, bool[] at_random, int seed, int first, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(i!)? amax) -> ()",
    reference,
    lambda *_: None,
    "CPU",
)
