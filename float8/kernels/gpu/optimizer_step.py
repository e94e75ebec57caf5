"""`optimizer_step`: decode, update and encode the states of one parameter, in one launch.

A program takes GROUPS groups. Of bfloat16 parameters and gradients, E4M3 first and expanded E4M3
second moments in groups of 128, an element costs 2 + 2 + 1 + 1 bytes of reading and 2 + 1 + 1 of
writing, and 24 / 128 for scales and exponents; each byte moves once.

=========== ===================================================================================
form        what a program reads and writes
=========== ===================================================================================
FLAT        everything is row-major and groups divide rows: memory is one run of groups
otherwise   a row's last group may be shorter, parameter and gradient have strides of their own
=========== ===================================================================================

The numbers of a rule arrive by value; the learning rate, the step, and the key of random bits also
by pointer (a CUDA graph replays with new ones). Bias corrections are then computed in float64 by
each program, as the reference does.

Where the parameter is a master, `cast_weight` is the second launch: this one leaves the amax of the
new master, by an atomic maximum, which does not depend on the order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8.kernels import moments, stochastic
from float8.kernels import optimizer_step as host
from float8.kernels.gpu.jit import magnitude_bits
from float8.kernels.gpu.launch import (
    NO_FUSION,
    Variant,
    check_device,
    on_device_of,
    register,
)
from float8.kernels.gpu.moments import (
    DENSE,
    EXPANDED,
    LINEAR,
    encode_linear,
    largest_of,
    load,
    stochastic_round,
    store,
    values,
)

_ELEMENTS = 2048  # of a program: 16 a thread, so that one thread's codes are 16 bytes
_OPTIONS = {"num_warps": 4, **NO_FUSION}
RULES = {"adamw": 0, "sgd_momentum": 1, "lion": 2}
_ADAMW, _SGD = tl.constexpr(0), tl.constexpr(1)
_UNDECAYED, _DECOUPLED, _COUPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _adam_factors(lr, step, LOG2_BETA1: tl.constexpr, LOG2_BETA2: tl.constexpr):
    """`float8.kernels.moments.adam_factors`."""
    step64 = step.to(tl.float64)
    step_size = lr.to(tl.float64) / (1.0 - tl.exp2(step64 * LOG2_BETA1))
    root = 1.0 / tl.sqrt(1.0 - tl.exp2(step64 * LOG2_BETA2))
    return step_size.to(tl.float32), root.to(tl.float32)


@triton.jit(do_not_specialize=["seed", "offset", "first"])
def _step_kernel(  # noqa: PLR0915  # one launch, and a tile passed on costs registers
    p_ptr,
    p_scale_ptr,
    g_ptr,
    m_ptr,
    m_scale_ptr,
    m_exponent_ptr,
    v_ptr,
    v_scale_ptr,
    v_exponent_ptr,
    amax_ptr,  # int32 bits, where the parameter is a master
    grad_scale_ptr,
    found_inf_ptr,
    lr,  # a number, or a pointer: likewise step, seed and offset
    step,
    seed,
    offset,
    first,
    decay,
    step_size,
    root,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    weight_decay,
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
    P_FORM: tl.constexpr,
    M_FORM: tl.constexpr,
    V_FORM: tl.constexpr,
    DECAY: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    STEP_IS_TENSOR: tl.constexpr,
    P_RANDOM: tl.constexpr,  # rounded up or down at random
    M_RANDOM: tl.constexpr,
    V_RANDOM: tl.constexpr,
    SEED_IS_TENSOR: tl.constexpr,
    OFFSET_IS_TENSOR: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    G = tl.cdiv(C, GROUP)
    N = tl.full((), 1, tl.int64) * R * G  # not R.to(int64): it is a constant where it is 1
    if SKIPS:
        N = tl.where(tl.load(found_inf_ptr) == 0, N, 0)  # nothing is inside: nothing is written
    if FLAT:
        at = n[:, None] * GROUP + lane[None, :]
        inside = (n < N)[:, None] & (lane < GROUP)[None, :]
        p_at, g_at = at, at
    else:
        row = (n // G)[:, None]
        col = (n % G)[:, None] * GROUP + lane[None, :]
        inside = (n < N)[:, None] & (col < C)
        at = row * C + col
        p_at = row * p_stride_r + col * p_stride_c
        g_at = row * g_stride_r + col * g_stride_c

    g = tl.load(g_ptr + g_at, inside, 0).to(tl.float32)
    if P_FORM == LINEAR:
        p = load(p_ptr, p_scale_ptr, p_scale_ptr, at, inside, n, N, LINEAR)
    else:
        p = tl.load(p_ptr + p_at, inside, 0).to(tl.float32)
    m = load(m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N, M_FORM)
    if RULE == _ADAMW:
        v = load(v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N, V_FORM)

    if SEED_IS_TENSOR:
        seed = tl.load(seed)
    if OFFSET_IS_TENSOR:
        offset = tl.load(offset)
    index = (at + first).to(tl.int32)  # of an element in the whole parameter, modulo 2^32
    if LR_IS_TENSOR:
        lr = tl.load(lr).to(tl.float32)
        decay = 1.0 - lr * weight_decay
    if STEP_IS_TENSOR:
        step = tl.load(step)
        if RULE == _SGD:
            rest1 = tl.where(step == 1, 1.0, rest1)
    if RULE == _ADAMW and (LR_IS_TENSOR or STEP_IS_TENSOR):
        step_size, root = _adam_factors(lr, step, LOG2_BETA1, LOG2_BETA2)

    if SCALED:
        g = tl.div_rn(g, tl.load(grad_scale_ptr) + tl.zeros_like(g))
    if MAXIMIZE:
        g = -g
    if DECAY == _DECOUPLED:
        p = p * decay
    elif DECAY == _COUPLED:
        g = g + p * weight_decay
    if RULE == _ADAMW:
        m = m + (g - m) * rest1
        v = v * beta2 + (g * g) * rest2
        p = p - tl.div_rn(m, tl.sqrt_rn(v) * root + eps) * step_size
        store(
            v, v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N, V_FORM,
            index, seed, offset, 1, V_RANDOM,
        )  # fmt: skip
    elif RULE == _SGD:
        m = m * beta1 + g * rest1
        p = p - (g + m * beta1 if NESTEROV else m) * lr
    else:
        c = m * beta1 + g * rest1
        direction = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))  # 0 and NaN stay
        p = p - direction * lr
        m = m * beta2 + g * rest2
    store(
        m, m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N, M_FORM,
        index, seed, offset, 0, M_RANDOM,
    )  # fmt: skip

    if P_FORM == LINEAR:
        codes, scale = encode_linear(p, True, index, seed, offset, -1, P_RANDOM)
        tl.store(p_ptr + at, codes, inside)
        tl.store(p_scale_ptr + n, scale, n < N)
        largest = tl.max(largest_of(values(codes) * scale[:, None]))
        tl.atomic_max(amax_ptr, magnitude_bits(largest), sem="relaxed")
    elif P_RANDOM:
        DTYPE: tl.constexpr = p_ptr.dtype.element_ty
        tl.store(p_ptr + p_at, stochastic_round(p, index, seed, offset, DTYPE), inside)
    else:
        tl.store(p_ptr + p_at, p.to(p_ptr.dtype.element_ty), inside)


def _form(scale: Tensor | None, exponent: Tensor | None = None) -> int:
    return (DENSE if scale is None else LINEAR if exponent is None else EXPANDED).value


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def _rule_constants(
    name: str, numbers: list[float], lr: Tensor | None, step: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kernel's arguments from ``decay`` to ``weight_decay``, and what is compiled in."""
    rule = host.unpacked(name, numbers, None, None)
    beta1, rest1, beta2, rest2, eps = 0.0, 0.0, 0.0, 0.0, 0.0
    factors: tuple[Any, ...] = (0.0, 0.0)
    decay = _DECOUPLED
    if isinstance(rule, host.SGDMomentum):
        beta1, rest1 = rule.momentum, 1 - rule.dampening
        if step is None and rule.step == 1:
            rest1 = 1.0
        decay = _COUPLED
    else:
        beta1, rest1, beta2, rest2 = rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2
    if isinstance(rule, host.AdamW):
        eps = rule.eps
        decay = _DECOUPLED if rule.decoupled else _COUPLED
        if lr is None and step is None:
            factors = moments.adam_factors(rule.lr, beta1, beta2, rule.step)
    is_coupled = decay.value == _COUPLED.value
    if is_coupled and rule.weight_decay == 0:
        decay = _UNDECAYED
    constants = {
        "RULE": RULES[name],
        "DECAY": decay.value,
        "NESTEROV": isinstance(rule, host.SGDMomentum) and bool(rule.nesterov),
        "MAXIMIZE": bool(rule.maximize),
        "LOG2_BETA1": _log2(beta1) if step is not None or lr is not None else 0.0,
        "LOG2_BETA2": _log2(beta2) if step is not None or lr is not None else 0.0,
    }
    kept = 1 - rule.lr * rule.weight_decay
    arguments = (kept, *factors, beta1, rest1, beta2, rest2, eps, rule.weight_decay)
    return arguments, constants


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf


def _launch(
    rule: str, numbers: list[float], lr: Tensor | None, step: Tensor | None,
    p: Tensor, p_scale: Tensor | None, g: Tensor,
    m: Tensor, m_scale: Tensor | None, m_exponent: Tensor | None,
    v: Tensor, v_scale: Tensor | None, v_exponent: Tensor | None,
    group: int, rounds: list[bool], seed: int | None, seed_tensor: Tensor | None,
    offset: int | None, offset_tensor: Tensor | None, first: int,
    grad_scale: Tensor | None, found_inf: Tensor | None, amax: Tensor | None,
) -> None:  # fmt: skip
    check_device(
        "optimizer_step", p, g=g, m=m, v=v, lr=lr, step=step, grad_scale=grad_scale,
        found_inf=found_inf, seed=seed_tensor, offset=offset_tensor, amax=amax,
    )  # fmt: skip
    if p.numel() == 0:
        return
    R, C = p.shape
    scalars, constants = _rule_constants(rule, numbers, lr, step)
    plain = host.unpacked(rule, numbers, None, None)
    random = [r and x.dtype != torch.float32 for r, x in zip(rounds, (p, m, v), strict=False)]
    if p_scale is not None and amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=p.device)
    groups = max(1, _ELEMENTS // group)
    with on_device_of(p):
        _step_kernel[(triton.cdiv(R * triton.cdiv(C, group), groups),)](
            p,
            p if p_scale is None else p_scale,
            g,
            _bytes(m),
            m if m_scale is None else m_scale,
            m if m_exponent is None else m_exponent,
            _bytes(v),
            v if v_scale is None else v_scale,
            v if v_exponent is None else v_exponent,
            p if amax is None else amax.view(torch.int32),
            p if grad_scale is None else grad_scale,
            p if found_inf is None else found_inf,
            plain.lr if lr is None else lr,
            getattr(plain, "step", 0.0) if step is None else step,
            stochastic.as_int32(seed or 0) if seed_tensor is None else seed_tensor,
            stochastic.as_int32(offset or 0) if offset_tensor is None else offset_tensor,
            stochastic.as_int32(first),
            *scalars,
            *(R, C, *p.stride(), *g.stride()),
            GROUPS=groups,
            GROUP=group,
            FLAT=C % group == 0 and p.is_contiguous() and g.is_contiguous(),
            P_FORM=_form(p_scale),
            M_FORM=_form(m_scale, m_exponent),
            V_FORM=_form(v_scale, v_exponent),
            LR_IS_TENSOR=lr is not None,
            STEP_IS_TENSOR=step is not None,
            P_RANDOM=random[0],
            M_RANDOM=random[1],
            V_RANDOM=random[-1],
            SEED_IS_TENSOR=seed_tensor is not None,
            OFFSET_IS_TENSOR=offset_tensor is not None,
            SCALED=grad_scale is not None,
            SKIPS=found_inf is not None,
            **constants,
            **_OPTIONS,
        )


def _reference(
    rule: str, numbers: list[float], lr: Tensor | None, step: Tensor | None,
    p: Tensor, p_scale: Tensor | None, g: Tensor,
    m: Tensor, m_scale: Tensor | None, m_exponent: Tensor | None,
    v: Tensor, v_scale: Tensor | None, v_exponent: Tensor | None,
    group: int, rounds: list[bool], seed: int | None, seed_tensor: Tensor | None,
    offset: int | None, offset_tensor: Tensor | None, first: int,
    grad_scale: Tensor | None, found_inf: Tensor | None, amax: Tensor | None,
) -> None:  # fmt: skip
    states = [host.Stored(m, m_scale, m_exponent), host.Stored(v, v_scale, v_exponent)]
    host.reference_step(
        host.unpacked(rule, numbers, lr, step), host.Stored(p, p_scale), g,
        states if rule == "adamw" else states[:1], group,
        rounds=rounds, seed=(seed or 0) if seed_tensor is None else seed_tensor,
        offset=(offset or 0) if offset_tensor is None else offset_tensor, first=first,
        grad_scale=grad_scale, found_inf=found_inf, amax=amax,
    )  # fmt: skip


def _fake(*args: Any) -> None:
    return None


optimizer_step = register(
    "optimizer_step(str rule, float[] numbers, Tensor? lr, Tensor? step, "
    "Tensor(a!) p, Tensor(b!)? p_scale, Tensor g, "
    "Tensor(c!) m, Tensor(d!)? m_scale, Tensor(e!)? m_exponent, "
    "Tensor(f!) v, Tensor(g!)? v_scale, Tensor(h!)? v_exponent, "
    "int group, bool[] rounds, int? seed, Tensor? seed_tensor, int? offset, "
    "Tensor? offset_tensor, int first, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(i!)? amax) -> ()",
    kernel=_launch,
    definition=_reference,
    fake=_fake,
)


_ROW = {"p_stride_c": 1, "g_stride_c": 1}
_NUMBERS = (
    "decay", "step_size", "root", "beta1", "rest1", "beta2", "rest2", "eps", "weight_decay",
)  # fmt: skip


def shipped() -> list[Variant]:
    """What trains in bfloat16, in float32, under a CUDA graph, with a master, and ragged rows."""
    return [
        _variant("bf16, e4m3, expanded e4m3", "*bf16", random="v"),  # AdamW's defaults
        _variant("the same, to nearest", "*bf16"),
        _variant("fp32, e4m3, fp16", "*fp32", v="*fp16", v_form=LINEAR),
        _variant("bf16 all at random, captured", "*bf16", random="pmv", tensors=True),
        _variant("bf16, ragged groups", "*bf16", flat=False, random="v"),
        _variant("master", "*fp16", g="*bf16", p_form=LINEAR, random="pv"),
        _variant("fp32 lion", "*fp32", rule="lion", random="m"),
    ]


def _variant(
    name: str, p: str, *, g: str | None = None, v: str = "*u8", p_form: Any = DENSE,
    v_form: Any = EXPANDED, rule: str = "adamw", flat: bool = True, tensors: bool = False,
    random: str = "",
) -> Variant:  # fmt: skip
    floats = dict.fromkeys(("p_scale_ptr", "m_scale_ptr", "m_exponent_ptr"), "*fp32")
    floats |= dict.fromkeys(("v_scale_ptr", "v_exponent_ptr"), "*fp32")
    floats |= dict.fromkeys(("grad_scale_ptr", "found_inf_ptr"), "*fp32")
    number = {"lr": "fp32", "step": "fp32", "seed": "i32", "offset": "i32"}
    pointer = {"lr": "*fp32", "step": "*fp32", "seed": "*i64", "offset": "*i64"}
    types = {
        "p_ptr": p, "g_ptr": g or p, "m_ptr": "*u8", "v_ptr": v, "amax_ptr": "*i32", **floats,
        **(pointer if tensors else number), **dict.fromkeys(_NUMBERS, "fp32"),
        **dict.fromkeys(("R", "C", "p_stride_r", "g_stride_r", "first"), "i32"),
    }  # fmt: skip
    constants = {
        **_ROW, "GROUPS": _ELEMENTS // 128, "GROUP": 128, "FLAT": flat, "RULE": RULES[rule],
        "P_FORM": p_form.value, "M_FORM": LINEAR.value, "V_FORM": v_form.value, "DECAY": 1,
        "NESTEROV": False, "MAXIMIZE": False, "LR_IS_TENSOR": tensors, "STEP_IS_TENSOR": tensors,
        **{f"{x}_RANDOM": x.lower() in random for x in "PMV"},
        "SEED_IS_TENSOR": tensors, "OFFSET_IS_TENSOR": tensors,
        "SCALED": tensors, "SKIPS": tensors, "LOG2_BETA1": -0.15, "LOG2_BETA2": -0.0014,
    }  # fmt: skip
    return Variant(f"optimizer_step: {name}", _step_kernel, types, constants, _OPTIONS)
