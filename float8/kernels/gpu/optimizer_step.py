"""`optimizer_step`: decode, update and encode the states of one parameter, in one launch.

A program processes GROUPS groups. Example: bfloat16 parameters and gradients, first moments in
E4M3 and second moments in expanded E4M3, in groups of 128. Per element the kernel then reads
2 + 2 + 1 + 1 bytes and writes 2 + 1 + 1, and 24 / 128 bytes for scales and exponents. Each byte is
read and written once.

=========== ===================================================================================
form        memory that a program reads and writes
=========== ===================================================================================
FLAT        all tensors are row-major and groups divide rows: memory is one sequence of groups
otherwise   a row's last group may be shorter; parameter and gradient have their own strides
=========== ===================================================================================

The update rules are compiled from the source of ``kernels/update_rules.py``. A rule's numbers are
passed by value. The learning rate and the step may also be passed by pointer, so that a CUDA graph
replays with new ones. Each program then computes the bias corrections in float64, as the definition
does. Random bits are a hash of seed, step and element.

If the parameter is a master, the kernel also writes the amax of the new one, by an atomic maximum,
which does not depend on the order: the weight is cast by it. A step that GradScaler's
``found_inf`` skips reads and writes nothing.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.granularity import ceil_div
from float8.kernels import stochastic, update_rules
from float8.kernels.gpu.launch import (
    NO_FUSION,
    check_device,
    launch,
    pointer,
    register_kernel,
)
from float8.kernels.gpu.moments import load_state, positions, store_state
from float8.kernels.update_rules import AdamWRule, LionRule, MuonMove, unpacked

_ELEMENTS = 2048  # per program: 16 per thread, so that a thread's codes are 16 bytes
_OPTIONS = {"num_warps": 4, **NO_FUSION}


@triton.jit
def _adam_factors(lr, step, LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr):
    """`float8.kernels.update_rules.adam_factors`."""
    step64 = tl.cast(step, tl.float64)
    step_size = tl.cast(lr, tl.float64) / (1.0 - tl.exp2(step64 * LOG2_BETA1))
    root = 1.0 / tl.sqrt(1.0 - tl.exp2(step64 * LOG2_BETA2))
    return step_size.to(tl.float32), root.to(tl.float32)


@triton.jit
def _quotient(x, y):
    return tl.div_rn(x, y)


@triton.jit
def _root(x):
    return tl.sqrt_rn(x)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))  # 0 and NaN are kept


def _compiled(function: Any) -> Any:
    """A function of `update_rules` in Triton: its source, with Triton's roots and quotients."""
    names = {"quotient": _quotient, "root": _root, "sign": _sign, "Any": tl.tensor, "tl": tl}
    names["__name__"] = __name__
    return triton.jit(FunctionType(function.__code__, names, function.__name__))


_decayed, _adamw, _sgd_momentum, _lion, _muon_direction, _muon_move = (
    _compiled(rule)
    for rule in (
        update_rules.decayed,
        update_rules.adamw,
        update_rules.sgd_momentum,
        update_rules.lion,
        update_rules.muon_direction,
        update_rules.muon_move,
    )
)


@triton.jit(do_not_specialize=["seed", "first"])
def _step_kernel(
    p_ptr,
    p_scale_ptr,  # of a master; like every pointer but p and g it may be None
    g_ptr,
    g_scale_ptr,  # of a gradient in float8, one number
    m_ptr,
    m_scale_ptr,
    m_exponent_ptr,
    v_ptr,
    v_scale_ptr,
    v_exponent_ptr,
    amax_ptr,  # int32 bits
    grad_scale_ptr,
    found_inf_ptr,
    lr_ptr,  # in place of lr, and step_ptr in place of step
    step_ptr,
    step,
    seed,
    first,
    lr,
    kept,  # 1 - lr * weight_decay
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    size,
    by,
    R,
    C,
    p_stride_r,
    p_stride_c,
    g_stride_r,
    g_stride_c,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
    RULE: tl.constexpr,
    DECAYS: tl.constexpr,
    DECOUPLED: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    P_RANDOM: tl.constexpr,  # rounded up or down at random
    M_RANDOM: tl.constexpr,
    V_RANDOM: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    N = tl.full((), 1, tl.int64) * R * tl.cdiv(C, GROUP)  # R may be a constant, without .to()
    if found_inf_ptr is not None:  # a skipped step reads and writes nothing
        N = tl.where(tl.load(found_inf_ptr) != 0, 0, N)
    at, inside, start, row, col = positions(n, N, C, GROUP, FLAT)
    p_at = at if FLAT else row * p_stride_r + col * p_stride_c
    g_at = at if FLAT else row * g_stride_r + col * g_stride_c
    index = (start + first).to(tl.int32)  # in the whole parameter, modulo 2^32

    g = tl.load(g_ptr + g_at, inside, 0.0).to(tl.float32)
    if g_scale_ptr is not None:
        g *= tl.load(g_scale_ptr)
    if RULE != "muon_direction":  # which writes p and does not read it
        p = load_state(p_ptr, p_scale_ptr, None, p_at, inside, n, N)
    if m_ptr is not None:
        m = load_state(m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N)
    if RULE == "adamw":
        v = load_state(v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N)

    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
        kept = 1.0 - lr * weight_decay
    if step_ptr is not None:
        step = tl.load(step_ptr)
    number = tl.cast(step, tl.int32)  # a Python float in the interpreter
    if grad_scale_ptr is not None:
        g = tl.div_rn(g, tl.load(grad_scale_ptr) + tl.zeros_like(g))
    if MAXIMIZE:
        g = -g
    if DECAYS:
        p, g = _decayed(p, g, kept, weight_decay, DECOUPLED)
    if RULE == "adamw":
        if lr_ptr is not None or step_ptr is not None:
            size, by = _adam_factors(lr, step, LOG2_BETA1, LOG2_BETA2)
        p, m, v = _adamw(p, g, m, v, rest1, beta2, rest2, eps, size, by)
    elif RULE == "sgd_momentum":
        if step_ptr is not None:
            rest1 = tl.where(step == 1, 1.0, rest1)
        p, m = _sgd_momentum(p, g, m, lr, beta1, rest1, NESTEROV)
    elif RULE == "lion":
        p, m = _lion(p, g, m, lr, beta1, rest1, beta2, rest2)
    elif RULE == "muon_direction":
        p, m = _muon_direction(g, m, rest1, NESTEROV)
    else:
        p = _muon_move(p, g, size if lr_ptr is None else lr * by)
    # First: encoding the moments takes the most registers, and p needs none of them then.
    store_state(
        p, p_ptr, p_scale_ptr, None, p_at, inside, n, N,
        index, seed, number, -1, P_RANDOM, amax_ptr,
    )  # fmt: skip
    if RULE == "adamw":
        store_state(
            v, v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N,
            index, seed, number, 1, V_RANDOM,
        )  # fmt: skip
    if m_ptr is not None:
        store_state(
            m, m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N,
            index, seed, number, 0, M_RANDOM,
        )  # fmt: skip


# The kernel's arguments from ``lr`` to ``by``, of which each rule has some.
_NUMBERS = ("lr", "kept", "weight_decay", "beta1", "rest1", "beta2", "rest2", "eps", "size", "by")


def _constants(rule: Any, is_captured: bool) -> dict[str, Any]:
    """What is compiled in; ``is_captured``: the learning rate or the step is a tensor."""
    betas = (rule.beta1, rule.beta2) if isinstance(rule, AdamWRule) and is_captured else (1.0, 1.0)
    log2_betas = (math.log2(beta) if beta > 0 else -math.inf for beta in betas)
    return {
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": bool(getattr(rule, "decoupled", isinstance(rule, LionRule | MuonMove))),
        "NESTEROV": bool(getattr(rule, "nesterov", False)),
        "MAXIMIZE": bool(rule.maximize),
        **dict(zip(("LOG2_BETA1", "LOG2_BETA2"), log2_betas, strict=True)),
    }


def _launch(
    rule: str, numbers: list[float], lr: Tensor | None, step: float, step_tensor: Tensor | None,
    p: Tensor, p_scale: Tensor | None, g: Tensor, g_scale: Tensor | None,
    m: Tensor | None, m_scale: Tensor | None, m_exponent: Tensor | None,
    v: Tensor | None, v_scale: Tensor | None, v_exponent: Tensor | None,
    group: int, at_random: list[bool], seed: int, first: int,
    grad_scale: Tensor | None, found_inf: Tensor | None, amax: Tensor | None,
) -> None:  # fmt: skip
    check_device(
        "optimizer_step", p, g=g, m=m, v=v, lr=lr, step=step_tensor, grad_scale=grad_scale,
        found_inf=found_inf, amax=amax,
    )  # fmt: skip
    if p.numel() == 0:
        return
    (R, C), known = p.shape, unpacked(rule, numbers, None)  # a rate that is a tensor counts as 0
    given = dict.fromkeys(_NUMBERS, 0.0) | known.numbers(step if step_tensor is None else 2.0)
    given |= {"lr": known.lr, "kept": 1 - known.lr * known.weight_decay}
    given["weight_decay"] = known.weight_decay
    p_random, m_random, v_random = (
        r and x is not None and x.dtype != torch.float32
        for r, x in zip((*at_random, False, False)[:3], (p, m, v), strict=True)
    )
    groups = max(1, _ELEMENTS // group)
    launch(
        _step_kernel, ceil_div(R * ceil_div(C, group), groups), p, p_scale, g, g_scale,
        pointer(m), m_scale, m_exponent, pointer(v), v_scale, v_exponent,
        None if amax is None else amax.view(torch.int32), grad_scale, found_inf, lr, step_tensor,
        step, stochastic.as_int32(seed), stochastic.as_int32(first),
        *(given[name] for name in _NUMBERS), R, C, *p.stride(), *g.stride(),
        GROUPS=groups, GROUP=group,
        FLAT=C % group == 0 and p.is_contiguous() and g.is_contiguous(),
        RULE=rule, **_constants(known, lr is not None or step_tensor is not None),
        P_RANDOM=p_random, M_RANDOM=m_random, V_RANDOM=v_random, **_OPTIONS,
    )  # fmt: skip


# ``kernels/optimizer_step.py`` defines the op.
register_kernel("optimizer_step", _launch)
