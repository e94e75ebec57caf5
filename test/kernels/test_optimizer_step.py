"""What runs a step: refusals name the cause and the remedy; a rule survives being packed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from assertions import assert_bitwise
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.kernels import moments, optimizer_step
from float8.kernels.moments import StateMatrix
from float8.kernels.optimizer_step import OptimizerStep, WeightOfMaster, refusal, takes_kernel
from float8.kernels.update_rules import AdamWRule, LionRule, SGDMomentumRule

RULES = (
    AdamWRule(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=False, maximize=True),
    SGDMomentumRule(1e-3, 0.9, 0.1, False, 0.2, True),
    LionRule(1e-3, 0.9, 0.99, 0.1),
)
LION = RULES[2]


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """CUDA tensors without a GPU."""
    with FakeTensorMode():
        yield


def step(dtype=torch.bfloat16, rule=LION, group=128):
    p, g = (torch.empty(4, 256, dtype=dtype, device="cuda") for _ in range(2))
    m = StateMatrix(
        torch.empty(4, 256, dtype=torch.float8_e4m3fn, device="cuda"), g.new_empty(4, 2)
    )
    return OptimizerStep(rule, 1, StateMatrix(p), StateMatrix(g), [m], group, [False] * 2)


class Sign(NamedTuple):
    lr: float = 1e-3


@pytest.mark.usefixtures("fake_cuda")
def test_the_kernel_takes_what_it_can_and_names_what_it_cannot(monkeypatch):
    pytest.importorskip("triton")
    taken = step()
    assert refusal(taken) is None
    assert [takes_kernel(fused, taken) for fused in (None, True, False)] == [True, True, False]
    (m,) = taken.states
    across = taken._replace(states=[StateMatrix(m.codes.t(), m.scale)])
    for words, refused in (
        ("not contiguous", across),
        ("no rule Sign", step(rule=Sign())),
        *((f"group={group} is not a power of two", step(group=group)) for group in (96, 0, 4096)),
    ):
        assert words in str(refusal(refused))
        with pytest.warns(UserWarning, match="steps are not fused: "):
            assert not takes_kernel(None, refused)
        with pytest.raises(ValueError, match=r"fused=True, .* \(4, 256\): "):
            takes_kernel(True, refused)
    monkeypatch.setattr(optimizer_step, "architecture", lambda index: "sm_80")
    assert "sm_80 runs no kernels (sm_89, " in str(refusal(taken))
    plain = StateMatrix(torch.ones(2, 4))
    on_cpu = taken._replace(p=plain)
    assert "kernel for CUDA, and the parameter is on cpu" in str(refusal(on_cpu))
    assert not takes_kernel(None, on_cpu)


def test_fused_step_on_a_cpu_is_the_plain_step(monkeypatch):
    """The op of each rule reaches its definition, a master and its weight included."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the ops
    x, g = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    for rule in RULES:
        steps, amax = [], torch.zeros(1)
        for _ in range(2):
            made = ((x, torch.float16), (g, torch.float8_e4m3fn), (x * x, torch.float16))
            p, *states = (StateMatrix(*moments.encode_groups(y, 32, d), None, 32) for y, d in made)
            states = states if isinstance(rule, AdamWRule) else states[:1]
            steps.append(OptimizerStep(rule, 2, p, StateMatrix(g), states, 32, (True,) * 3, seed=1))
        optimizer_step.fused_step(steps[0], amax=amax)
        optimizer_step.plain_step(steps[1])
        for mine, theirs in zip(*([s.p, *s.states] for s in steps), strict=True):
            assert_bitwise(mine.codes, theirs.codes)
            assert_bitwise(mine.scale, theirs.scale)
        master = steps[0].p
        value = master.decode()
        assert amax == value.abs().max()
        assert not torch.equal(value, x)
    weight = WeightOfMaster(torch.zeros(3, 70).to(torch.float8_e4m3fn), torch.zeros(()))
    monkeypatch.setattr(optimizer_step, "LARGE_TILE", 64)  # several tiles
    optimizer_step.cast_master(master, weight, amax, torch.zeros(1))
    twin = WeightOfMaster(torch.zeros_like(weight.data), torch.zeros(()))
    optimizer_step.cast_master(master, twin)
    assert_bitwise(weight.data, twin.data)
    assert_bitwise(weight.scale, twin.scale)
    assert (weight.data.float() * weight.scale - value).abs().max() <= amax / 28
    # A skipped step leaves the master and records no amax: the weight stays.
    optimizer_step.cast_master(master, weight, torch.zeros(1), torch.ones(1))
    assert_bitwise(weight.data, twin.data)
    assert_bitwise(weight.scale, twin.scale)
    master.codes[1, 3] = math.nan
    optimizer_step.cast_master(master, weight, amax)
    assert weight.data.float().isnan().nonzero().tolist() == [[1, 3]]
