"""`optimizer_step`: one launch has the numbers of the plain PyTorch step.

Linear codes, scales, float32 states and gradients agree to the bit. The parameter may differ by the
last bits of its update where a square root does (MKL's on a CPU is not correctly rounded) or a code
of the expanded second moment; expanded codes may differ by one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_bitwise
from interpreter import launcher
from shapes import DEVICES, pairs

from float8.kernels import moments, update_rules
from float8.kernels.optimizer_step import reference
from float8.kernels.update_rules import (
    AdamWRule,
    LionRule,
    MuonDirection,
    MuonMove,
    SGDMomentumRule,
)
from scripts.kernel_tools.forms import compile_for
from scripts.kernel_tools.shipped import variants

NAMES = ("p", "p.scale", "g", "g.scale", "m", "m.scale", "m.exponent", "v", "v.scale", "v.exponent")
# name -> rule, step
RULES = {
    "adamw": (AdamWRule(1e-2, 0.9, 0.99, 1e-6, 0.1), 3.0),
    "adam": (AdamWRule(1e-2, 0.9, 0.99, 1e-6, 0.1, False, True), 1.0),
    "sgd": (SGDMomentumRule(1e-2, 0.9, 0.5, False, 0.1), 1.0),
    "sgd, dampened": (SGDMomentumRule(1e-2, 0.9, 0.5, False, 0.1), 2.0),
    "nesterov": (SGDMomentumRule(1e-2, 0.9, 0.0, True, 0.0, True), 2.0),
    "lion": (LionRule(1e-2, 0.9, 0.99, 0.1), 7.0),
    "muon": (MuonDirection(0.9), 2.0),
    "muon, maximize": (MuonDirection(0.8, False, True), 2.0),
    "muon's move": (MuonMove(1e-2, 3.0, 0.1), 2.0),
}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LAYOUTS = ("contiguous", "transposed", "sliced")
OPTIONS = {"at_random": (False, False, False), "seed": 0, "first": 0}


def stored(x, kind, group):
    """Codes, scale and exponent of x in one of the forms that a state has."""
    if kind is None:  # no such state
        return None, None, None
    if kind == "float32":
        return x, None, None
    if kind == "expanded":
        return moments.encode_expanded(x, group)
    dtype = {"e4m3": torch.float8_e4m3fn, "float16": torch.float16}[kind]
    return *moments.encode_groups(x, group, dtype), None


def laid_out(x, layout):
    if layout == "transposed":
        return x.t().contiguous().t()
    return torch.stack([x, x], 2)[..., 0] if layout == "sliced" else x


def operands(shape, group, dtype, m_kind, v_kind, layout="contiguous", device="cpu"):
    """p, p's scale, g, g's scale, m and v, flat, as the op takes them.

    In "e4m3" and "e5m2" is the gradient, of float16 parameters, as of MS-AMP.
    """
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = torch.randn(4, *shape, generator=generator)
    v = (v.square() * 1e-3).to(device)
    states = (*stored((m * 0.1).to(device), m_kind, group), *stored(v, v_kind, group))
    if dtype == "master":
        weight = stored(p.to(device), "float16", group)
        return [*weight[:2], laid_out(g.to(device, torch.bfloat16), layout), None, *states]
    if dtype in FLOAT8:
        scale = torch.full((1, 1), 0.37, device=device)
        p, g = (laid_out(x.to(device), layout) for x in (p.half(), (g * 9).to(FLOAT8[dtype])))
        return [p, None, g, scale, *states]
    p, g = (laid_out(x.to(device, dtype), layout) for x in (p, g))
    return [p, None, g, None, *states]


def both(name, tensors, group, device, *, lr=None, step_tensor=None, step=None, **others):
    """What the kernel and the definition make of the same operands."""
    rule, default_step = RULES[name] if isinstance(name, str) else name
    op_name, numbers, _ = update_rules.packed(rule)
    at_random, seed, first = (others.get(k, d) for k, d in OPTIONS.items())
    rest = [others.get(k) for k in ("grad_scale", "found_inf", "amax")]
    results = []
    for run in (launcher("optimizer_step", "_launch", device), reference):
        mine = [None if x is None else x.clone() for x in (*tensors, *rest)]
        operands, rest_of = mine[:10], mine[10:]
        number = 0.0 if step_tensor is not None else step or default_step
        run(
            op_name, numbers, lr, number, step_tensor, *operands, group, list(at_random), seed,
            first, *rest_of,
        )  # fmt: skip
        results.append([*operands, rest_of[2]])
    return results


def assert_same_step(found, expected, before, replay):
    for name, mine, theirs, old in zip((*NAMES, "amax"), found, expected, before, strict=False):
        if theirs is None:
            continue
        if name == "v" and found[9] is not None:
            nan = theirs.float().isnan()
            assert torch.equal(mine.float().isnan(), nan), replay
            apart = (mine.view(torch.uint8).int() - theirs.view(torch.uint8).int())[~nan]
            assert apart.abs().max() <= 1, replay
            assert (apart != 0).double().mean() <= 0.01, replay
        elif name.startswith("v.") and found[9] is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
        elif name == "p" and theirs.dtype == torch.float32:
            update = (theirs - old).abs().max() + 2.0**-24 * theirs.abs().max()
            assert (mine - theirs).abs().max() <= 2e-6 * update + 2.0**-23, replay
        elif name in ("p", "p.scale", "amax"):  # rounded: nearly always to the same
            # One of few elements may differ: processors round fused sums differently.
            assert (mine != theirs).sum() <= max(1, 0.01 * mine.numel()), (name, replay)
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=2.0**-7, atol=1e-6)
        else:
            assert_bitwise(mine, theirs, replay, name)


@pytest.mark.parametrize("device", DEVICES)
@pairs(
    rule=tuple(RULES),
    shape=((4, 256), (3, 300), (1, 7), (37, 1)),
    group=(128, 32, 2048),
    dtype=(torch.float32, torch.bfloat16, torch.float16, "master", *FLOAT8),
    m_kind=("e4m3", "float16", "float32"),
    layout=LAYOUTS,
    at_random=((False, False, False), (False, True, True), (True, False, True)),
    in_tensors=(False, True),
)
def test_agrees(rule, shape, group, dtype, m_kind, layout, at_random, in_tensors, device):
    """With a learning rate and a step in tensors too, with which a CUDA graph replays."""
    replay = (rule, shape, group, dtype, m_kind, layout, at_random, in_tensors)
    kinds = {"float32": "e4m3", "e4m3": "expanded", "float16": "float16"}
    v_kind = kinds[m_kind] if rule.startswith("adam") else None
    m_kind = None if rule == "muon's move" else m_kind
    tensors = operands(shape, group, dtype, m_kind, v_kind, layout, device)
    amax = torch.zeros(1, device=device) if dtype == "master" else None
    flags = at_random[: 1 + (m_kind is not None) + (v_kind is not None)]
    options = {"at_random": flags, "seed": 5, "first": 1 << 31}
    if in_tensors:
        options["lr"] = torch.tensor(1e-2, device=device)
        options["step_tensor"] = torch.tensor(RULES[rule][1], device=device)
    found, expected = both(rule, tensors, group, device, amax=amax, **options)
    assert_same_step(found, expected, [*tensors, amax], replay)
    changed = [bool((x != y).any()) for x, y in zip(tensors, found, strict=False) if x is not None]
    assert any(changed) or tensors[0].numel() < 40


@pytest.mark.parametrize("device", DEVICES)
def test_a_shard_of_rows_draws_what_the_whole_draws(device):
    tensors = operands((4, 128), 128, torch.bfloat16, "e4m3", "expanded", device=device)
    options = {"at_random": (True, True, True), "seed": 3}
    whole, _ = both("adamw", tensors, 128, device, **options)
    shard = [None if x is None else x[1:] for x in tensors]
    found, _ = both("adamw", shard, 128, device, first=128, **options)
    for name, mine, theirs in zip(NAMES, found, whole, strict=False):
        if mine is not None:
            assert_bitwise(mine, theirs[1:], what=name)


@pytest.mark.parametrize("device", DEVICES)
def test_grad_scalers_protocol(device):
    """The gradient is divided on the way; where an inf was found nothing is written."""
    tensors = operands((2, 200), 64, "master", "e4m3", "expanded", device=device)
    plain, _ = both("adamw", tensors, 64, device, amax=torch.zeros(1, device=device))
    scaled = list(tensors)
    scaled[2] = tensors[2] * 1024
    one = {"amax": torch.zeros(1, device=device)}
    for inf in (0.0, 1.0):
        found, expected = both(
            "adamw",
            scaled,
            64,
            device,
            grad_scale=torch.tensor([1024.0], device=device),
            found_inf=torch.tensor(inf, device=device),
            **one,
        )
        wanted = plain if inf == 0 else [*scaled, one["amax"]]
        for name, mine, theirs, its in zip(NAMES, found, wanted, expected, strict=False):
            if mine is not None and name != "g":
                assert_bitwise(mine, theirs, inf, name)
                assert inf == 0 or torch.equal(mine, its)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("special", [torch.nan, torch.inf, 1e15, 0.0])
def test_a_special_gradient_reaches_its_own_element(special, device):
    tensors = operands((2, 160), 128, torch.float32, "e4m3", "expanded", device=device)
    tensors[2][:, 77:] = 0.0  # in a group with zeros, too
    tensors[2][1, 40] = special
    found, expected = both("adamw", tensors, 128, device)
    for i in (0, 4, 7):
        nan = found[i].float().isnan()
        assert torch.equal(nan, expected[i].float().isnan())
        assert nan.sum() == (0 if special in (0.0, 1e15) else 1)
    assert (found[7].float() != 0).all()  # no second moment has become zero
    if special == 0.0:
        assert_same_step(found, expected, tensors, special)


KINDS = ("e4m3", "expanded"), ("float16", "float16")  # of the two moments


def rows_of_every_kind():
    """Random bits; narrow and wide ranges; zeros, a zero in lane 0, specials, tiny and huge."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (32, 64), dtype=torch.int64, generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    exponents = torch.rand(16, 64, generator=generator)
    x[:16] = torch.exp2(exponents * torch.arange(16)[:, None] * 6 - 40)
    x[3, 0] = x[4, 5] = 0
    x[5], x[6], x[7] = 0, 3.0, 1e-38
    x[8, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[9] = 1e-45
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("kinds", KINDS)
def test_states_of_any_numbers(kinds, at_random, device):
    """Both moments are the gradient and its square: their codes are those of the definition."""
    for g in (rows_of_every_kind(), rows_of_every_kind().abs().sqrt()):
        p = torch.zeros_like(g)
        states = (*stored(p, kinds[0], 64), *stored(p, kinds[1], 64))
        tensors = [None if t is None else t.to(device) for t in (p, None, g, None, *states)]
        rule = AdamWRule(1e-2, 0.0, 0.0, 1e-6, 0.0), 1.0
        how = {"at_random": (False, at_random, at_random), "seed": 5}
        found, expected = both(rule, tensors, 64, device, **how)
        assert_same_step([None] * 4 + found[4:], [None] * 4 + expected[4:], tensors, (kinds, how))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    """Of the forms that torch's checker can compare: it knows no float8 that is written to."""
    name, numbers, lr = update_rules.packed(RULES["adamw"][0])
    for dtype, m_kind, v_kind, checks in (
        (torch.bfloat16, "float16", "float32", ("test_schema", "test_faketensor")),
        ("master", "e4m3", "expanded", ("test_faketensor",)),
    ):
        tensors = operands((2, 130), 64, dtype, m_kind, v_kind, device=device)
        rest = (64, [True] * 3, 3, 0, None, None, torch.zeros(1, device=device))
        arguments = (name, numbers, lr, 4.0, None, *tensors, *rest)
        torch.library.opcheck(torch.ops.float8.optimizer_step.default, arguments, test_utils=checks)


def test_a_vector_and_a_column_compile():
    """Triton makes a constant of a size that is 1."""
    ragged = next(v for v in variants(("optimizer_step",)) if "ragged" in v.name)
    types = {name: kind for name, kind in ragged.types.items() if name not in ("R", "C")}
    one = replace(ragged, types=types, constants={**ragged.constants, "R": 1, "C": 1})
    assert compile_for(one, "sm_90").asm["cubin"]
