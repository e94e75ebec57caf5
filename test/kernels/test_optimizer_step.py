"""What runs a step: refusals name the cause and the remedy; a rule survives being packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from assertions import assert_bitwise
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.kernels import moments, optimizer_step
from float8.kernels.moments import StateMatrix
from float8.kernels.optimizer_step import refusal, takes_kernel
from float8.kernels.update_rules import AdamW, Lion, SGDMomentum

RULES = (
    AdamW(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=False, maximize=True),
    SGDMomentum(1e-3, 0.9, 0.1, False, 0.2, True),
    Lion(1e-3, 0.9, 0.99, 0.1),
)
LION = RULES[2]


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """CUDA tensors without a GPU."""
    with FakeTensorMode():
        yield


def operands(dtype=torch.bfloat16, g_dtype=torch.bfloat16):
    p, g = (torch.empty(4, 256, dtype=d, device="cuda") for d in (dtype, g_dtype))
    m = StateMatrix(
        torch.empty(4, 256, dtype=torch.float8_e4m3fn, device="cuda"), g.new_empty(4, 2)
    )
    return StateMatrix(p), g, (m,)


class Sign(NamedTuple):
    lr: float = 1e-3


@pytest.mark.usefixtures("fake_cuda")
def test_the_kernel_takes_what_it_can_and_names_what_it_cannot(monkeypatch):
    pytest.importorskip("triton")
    p, g, (m,) = operands()
    assert refusal(LION, p, g, (m,), 128) is None
    assert takes_kernel(None, LION, p, g, (m,), 128)
    assert takes_kernel(True, LION, p, g, (m,), 128)
    assert not takes_kernel(False, LION, p, g, (m,), 128)
    across = StateMatrix(m.codes.t(), m.scale)
    for words, rule, parts in (
        ("parameter is torch.float64", LION, operands(torch.float64)),
        ("gradient is torch.float64", LION, operands(g_dtype=torch.float64)),
        ("not contiguous", LION, (p, g, (across,))),
        ("no rule Sign (it has adamw, ", Sign(), (p, g, (m,))),
    ):
        assert words in str(refusal(rule, *parts, 128))
    monkeypatch.setattr(optimizer_step, "architecture", lambda index: "sm_80")
    assert "sm_80 is not known to convert float8" in str(refusal(LION, p, g, (m,), 128))
    p = StateMatrix(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"kernel for CUDA, and the parameter is on cpu; use"):
        takes_kernel(True, LION, p, p.codes, (p,), 128)
    assert not takes_kernel(None, LION, p, p.codes, (p,), 128)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("group", [96, 0, 4096, -128])
def test_a_group_that_is_no_power_of_two_is_refused_by_name(group, monkeypatch):
    p, g, states = operands()
    monkeypatch.setattr(optimizer_step, "_WARNED", set())
    with pytest.warns(UserWarning, match=rf"steps are not fused: group={group} is not a power"):
        assert not takes_kernel(None, LION, p, g, states, group)
    assert not takes_kernel(None, LION, p, g, states, group)  # and says so once
    assert not takes_kernel(False, LION, p, g, states, group)
    with pytest.raises(ValueError, match=rf"\(4, 256\): group={group} is not a power of two"):
        takes_kernel(True, LION, p, g, states, group)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_survives_being_packed(rule):
    name, numbers, lr = optimizer_step.packed(rule)
    assert lr is None
    assert optimizer_step.unpacked(name, numbers, lr) == rule
    tensors = rule._replace(lr=torch.tensor(0.5))
    assert optimizer_step.unpacked(*optimizer_step.packed(tensors)).lr is tensors.lr


def test_fused_step_on_a_cpu_is_the_plain_step():
    """The op of each rule reaches its definition, a master and its weight included."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the ops
    x, g = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    options = {"at_random": (True,) * 3, "seed": 1}
    for rule in RULES:
        steps, amax = [], torch.zeros(1)
        for _ in range(2):
            made = ((x, torch.float16), (g, torch.float8_e4m3fn), (x * x, torch.float16))
            p, *states = (StateMatrix(*moments.encode(y, 32, d), None, 32) for y, d in made)
            steps.append((p, g, states if isinstance(rule, AdamW) else states[:1]))
        optimizer_step.fused_step(rule, 2, *steps[0], 32, **options, amax=amax)
        optimizer_step.plain_step(rule, 2, *steps[1], **options)
        for mine, theirs in zip(*([p, *states] for p, _, states in steps), strict=True):
            assert_bitwise(mine.codes, theirs.codes)
            assert_bitwise(mine.scale, theirs.scale)
        master = steps[0][0]
        value = master.decode()
        assert amax == value.abs().max()
        assert not torch.equal(value, x)
    data, scale = torch.zeros(3, 70).to(torch.float8_e4m3fn), torch.zeros(())
    optimizer_step.cast_weight(master, data, scale, amax)
    assert (data.float() * scale - value).abs().max() <= amax / 28  # half a spacing of the largest
