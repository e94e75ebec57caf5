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

If the parameter is a master, `cast_weight` is a second launch. The first launch writes the amax of
the new master by an atomic maximum, which does not depend on the order. A step that GradScaler's
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
from float8.kernels import optimizer_step as host
from float8.kernels import stochastic, update_rules
from float8.kernels.gpu.jit import magnitude_bits
from float8.kernels.gpu.launch import (
    NO_FUSION,
    check_device,
    launch,
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
from float8.kernels.moments import StateMatrix

_ELEMENTS = 2048  # per program: 16 per thread, so that a thread's codes are 16 bytes
_OPTIONS = {"num_warps": 4, **NO_FUSION}
_NO_DECAY, _DECOUPLED, _COUPLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _positions(
    n, N, C, p_stride_r, p_stride_c, g_stride_r, g_stride_c, GROUP: tl.constexpr, FLAT: tl.constexpr
):
    """Offsets of groups n in the states, in p and in g, (GROUPS, GROUP); and which ones exist.

    Then the offset of each group's first element in the states, (GROUPS,).
    """
    lane = tl.arange(0, GROUP)
    if FLAT:
        start = n * GROUP
        at = start[:, None] + lane[None, :]
        inside = (n < N)[:, None] & (lane < GROUP)[None, :]
        p_at, g_at = at, at
    else:
        G = tl.cdiv(C, GROUP)
        row = (n // G)[:, None]
        col = (n % G)[:, None] * GROUP + lane[None, :]
        inside = (n < N)[:, None] & (col < C)
        start = (n // G) * C + (n % G) * GROUP
        at = row * C + col
        p_at = row * p_stride_r + col * p_stride_c
        g_at = row * g_stride_r + col * g_stride_c
    return at, p_at, g_at, inside, start


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


_decayed, _adamw, _sgd_momentum, _lion = (
    _compiled(rule)
    for rule in (
        update_rules.decayed,
        update_rules.adamw,
        update_rules.sgd_momentum,
        update_rules.lion,
    )
)


@triton.jit
def _store_master(
    p, p_ptr, scale_ptr, amax_ptr, at, inside, n, N, index, seed, step, RANDOM: tl.constexpr
):
    """Write a master in scaled float16, and record the amax of the values written."""
    codes, scale = encode_linear(p, True, index, seed, step, -1, RANDOM)
    tl.store(p_ptr + at, codes, inside)
    tl.store(scale_ptr + n, scale, n < N)
    largest = tl.max(largest_of(values(codes) * scale[:, None]))
    tl.atomic_max(amax_ptr, magnitude_bits(largest), sem="relaxed")


@triton.jit
def _store_plain(p, p_ptr, at, inside, index, seed, step, RANDOM: tl.constexpr):
    """Write a parameter in its own dtype."""
    DTYPE: tl.constexpr = p_ptr.dtype.element_ty
    if RANDOM:
        p = stochastic_round(p, index, seed, step, DTYPE)
    tl.store(p_ptr + at, p.to(DTYPE), inside)


@triton.jit(do_not_specialize=["seed", "first"])
def _step_kernel(
    p_ptr,
    p_scale_ptr,
    g_ptr,
    m_ptr,
    m_scale_ptr,
    m_exponent_ptr,
    v_ptr,
    v_scale_ptr,
    v_exponent_ptr,
    amax_ptr,  # int32 bits, if the parameter is a master
    grad_scale_ptr,
    found_inf_ptr,
    lr,  # a number or a pointer, and so is step
    step,
    seed,
    first,
    kept,
    weight_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    step_size,
    root,
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
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    N = tl.full((), 1, tl.int64) * R * tl.cdiv(C, GROUP)  # R may be a constant, without .to()
    if SKIPS:  # a skipped step reads and writes nothing
        N = tl.where(tl.load(found_inf_ptr) != 0, 0, N)
    at, p_at, g_at, inside, start = _positions(
        n, N, C, p_stride_r, p_stride_c, g_stride_r, g_stride_c, GROUP, FLAT
    )
    index = (start + first).to(tl.int32)  # in the whole parameter, modulo 2^32

    g = tl.load(g_ptr + g_at, inside, 0).to(tl.float32)
    if P_FORM == LINEAR:
        p = load(p_ptr, p_scale_ptr, p_scale_ptr, at, inside, n, N, LINEAR)
    else:
        p = tl.load(p_ptr + p_at, inside, 0).to(tl.float32)
    m = load(m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N, M_FORM)
    if RULE == "adamw":
        v = load(v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N, V_FORM)

    if LR_IS_TENSOR:
        lr = tl.load(lr).to(tl.float32)
        kept = 1.0 - lr * weight_decay
    if STEP_IS_TENSOR:
        step = tl.load(step)
    number = tl.cast(step, tl.int32)  # a Python float in the interpreter
    if SCALED:
        g = tl.div_rn(g, tl.load(grad_scale_ptr) + tl.zeros_like(g))
    if MAXIMIZE:
        g = -g
    if DECAY != _NO_DECAY:
        p, g = _decayed(p, g, kept, weight_decay, DECAY == _DECOUPLED)
    if RULE == "adamw":
        if LR_IS_TENSOR or STEP_IS_TENSOR:
            step_size, root = _adam_factors(lr, step, LOG2_BETA1, LOG2_BETA2)
        p, m, v = _adamw(p, g, m, v, rest1, beta2, rest2, eps, step_size, root)
    elif RULE == "sgd_momentum":
        if STEP_IS_TENSOR:
            rest1 = tl.where(step == 1, 1.0, rest1)
        p, m = _sgd_momentum(p, g, m, lr, beta1, rest1, NESTEROV)
    else:
        p, m = _lion(p, g, m, lr, beta1, rest1, beta2, rest2)
    # First: encoding the moments takes the most registers, and p needs none of them then.
    if P_FORM == LINEAR:
        _store_master(
            p, p_ptr, p_scale_ptr, amax_ptr, at, inside, n, N, index, seed, number, P_RANDOM
        )
    else:
        _store_plain(p, p_ptr, p_at, inside, index, seed, number, P_RANDOM)
    if RULE == "adamw":
        store(
            v, v_ptr, v_scale_ptr, v_exponent_ptr, at, inside, n, N, V_FORM,
            index, seed, number, 1, V_RANDOM,
        )  # fmt: skip
    store(
        m, m_ptr, m_scale_ptr, m_exponent_ptr, at, inside, n, N, M_FORM,
        index, seed, number, 0, M_RANDOM,
    )  # fmt: skip


def _form(scale: Tensor | None, exponent: Tensor | None = None) -> int:
    return (DENSE if scale is None else LINEAR if exponent is None else EXPANDED).value


def _numbers(rule: Any, step: float, is_captured: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kernel's arguments from ``kept`` to ``root``, and the constants that are compiled in.

    ``rule`` is one of `KERNEL_RULES`. ``is_captured`` says that the learning rate or the step is a
    tensor. A learning rate that is a tensor counts as 0; ``step`` is 0 if it is a tensor.
    """
    numbers: dict[str, Any] = {
        "kept": 1 - rule.lr * rule.weight_decay,
        "weight_decay": rule.weight_decay,
        **dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps", "step_size", "root"), 0.0),
    }
    constants: dict[str, Any] = {"NESTEROV": False, "MAXIMIZE": bool(rule.maximize)}
    constants |= {"LOG2_BETA1": 0.0, "LOG2_BETA2": 0.0}
    decay = _DECOUPLED
    if isinstance(rule, update_rules.SGDMomentum):
        undampened = 1.0 if step == 1 else 1 - rule.dampening
        numbers |= {"beta1": rule.momentum, "rest1": undampened}
        constants["NESTEROV"] = bool(rule.nesterov)
        decay = _COUPLED
    else:
        beta1, beta2 = rule.beta1, rule.beta2
        numbers |= {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}
    if isinstance(rule, update_rules.AdamW):
        numbers["eps"] = rule.eps
        decay = _DECOUPLED if rule.decoupled else _COUPLED
        if is_captured:
            constants |= {"LOG2_BETA1": _log2(beta1), "LOG2_BETA2": _log2(beta2)}
        else:
            factors = update_rules.adam_factors(rule.lr, beta1, beta2, step)
            numbers |= zip(("step_size", "root"), factors, strict=True)
    if decay is _COUPLED and rule.weight_decay == 0:
        decay = _NO_DECAY
    return numbers, {**constants, "DECAY": decay.value}


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf


def _bytes(codes: Tensor | None) -> Tensor | None:
    return codes if codes is None or codes.element_size() > 1 else codes.view(torch.uint8)


def _launch(
    rule: str, numbers: list[float], lr: Tensor | None, step: float, step_tensor: Tensor | None,
    p: Tensor, p_scale: Tensor | None, g: Tensor,
    m: Tensor, m_scale: Tensor | None, m_exponent: Tensor | None,
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
    R, C = p.shape
    plain = host.unpacked(rule, numbers, None)
    arguments, constants = _numbers(plain, step, lr is not None or step_tensor is not None)
    if p_scale is not None and amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=p.device)
    tensors = (
        p, p_scale, g, _bytes(m), m_scale, m_exponent, _bytes(v), v_scale, v_exponent,
        None if amax is None else amax.view(torch.int32), grad_scale, found_inf,
    )  # fmt: skip
    p_random, m_random, v_random = (
        r and x is not None and x.dtype != torch.float32
        for r, x in zip((*at_random, False)[:3], (p, m, v), strict=True)
    )
    groups = max(1, _ELEMENTS // group)
    programs = ceil_div(R * ceil_div(C, group), groups)
    launch(
        _step_kernel, programs, p,
        *(p if x is None else x for x in tensors[1:]),  # a pointer that is not read needs a value
        plain.lr if lr is None else lr, step if step_tensor is None else step_tensor,
        stochastic.as_int32(seed), stochastic.as_int32(first), *arguments.values(),
        R, C, *p.stride(), *g.stride(),
        GROUPS=groups, GROUP=group,
        FLAT=C % group == 0 and p.is_contiguous() and g.is_contiguous(),
        RULE=rule, P_FORM=_form(p_scale), M_FORM=_form(m_scale, m_exponent),
        V_FORM=_form(v_scale, v_exponent),
        LR_IS_TENSOR=lr is not None, STEP_IS_TENSOR=step_tensor is not None,
        P_RANDOM=p_random, M_RANDOM=m_random, V_RANDOM=v_random,
        SCALED=grad_scale is not None, SKIPS=found_inf is not None,
        **constants, **_OPTIONS,
    )  # fmt: skip


def _reference(
    rule: str, numbers: list[float], lr: Tensor | None, step: float, step_tensor: Tensor | None,
    p: Tensor, p_scale: Tensor | None, g: Tensor,
    m: Tensor, m_scale: Tensor | None, m_exponent: Tensor | None,
    v: Tensor | None, v_scale: Tensor | None, v_exponent: Tensor | None,
    group: int, at_random: list[bool], seed: int, first: int,
    grad_scale: Tensor | None, found_inf: Tensor | None, amax: Tensor | None,
) -> None:  # fmt: skip
    """`plain_step`, with the inputs of GradScaler and the amax of the new master."""
    if found_inf is not None and found_inf.item() != 0:
        return
    target = StateMatrix(p, p_scale, None, group)
    states = [StateMatrix(m, m_scale, m_exponent, group)]
    if v is not None:
        states.append(StateMatrix(v, v_scale, v_exponent, group))
    gradient = g.to(torch.float32)
    if grad_scale is not None:
        gradient = gradient / grad_scale.reshape(())
    host.plain_step(
        host.Step(
            host.unpacked(rule, numbers, lr), step if step_tensor is None else step_tensor, target,
            StateMatrix(gradient), states, group, at_random, seed, first,
        )
    )  # fmt: skip
    if amax is not None and p.numel():
        amax.copy_(torch.maximum(amax, target.decode().abs().nan_to_num(nan=0.0).amax()))


def _fake(*args: Any) -> None:
    return None


optimizer_step = register(
    "optimizer_step(str rule, float[] numbers, Tensor? lr, float step, Tensor? step_tensor, "
    "Tensor(a!) p, Tensor(b!)? p_scale, Tensor g, "
    "Tensor(c!) m, Tensor(d!)? m_scale, Tensor(e!)? m_exponent, "
    "Tensor(f!)? v, Tensor(g!)? v_scale, Tensor(h!)? v_exponent, "
    "int group, bool[] at_random, int seed, int first, "
    "Tensor? grad_scale, Tensor? found_inf, Tensor(i!)? amax) -> ()",
    kernel=_launch,
    definition=_reference,
    fake=_fake,
)
