"""Who runs a step: refusals name the cause and the way out; a rule survives being packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from float8.kernels import optimizer_step
from float8.kernels.optimizer_step import AdamW, Lion, SGDMomentum, Stored, refusal, takes_kernel

RULES = (
    AdamW(1e-3, 0.9, 0.999, 1e-8, 0.1, 5, decoupled=False, maximize=True),
    SGDMomentum(1e-3, 0.9, 2, 0.1, False, 0.2, True),
    Lion(1e-3, 0.9, 0.99, 0.1),
)


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """CUDA tensors without a GPU."""
    with FakeTensorMode():
        yield


def operands(dtype=torch.bfloat16, g_dtype=torch.bfloat16):
    p, g = (torch.empty(4, 256, dtype=d, device="cuda") for d in (dtype, g_dtype))
    m = Stored(torch.empty(4, 256, dtype=torch.float8_e4m3fn, device="cuda"), g.new_empty(4, 2))
    return Stored(p), g, (m,)


@pytest.mark.usefixtures("fake_cuda")
def test_the_kernel_takes_what_it_can():
    p, g, states = operands()
    pytest.importorskip("triton")
    assert refusal(p, g, states, 128) is None
    assert takes_kernel(None, p, g, states, 128)
    assert takes_kernel(True, p, g, states, 128)
    assert not takes_kernel(False, p, g, states, 128)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("group", [96, 0, 4096, -128])
def test_a_group_that_is_no_power_of_two_is_refused_by_name(group, monkeypatch):
    p, g, states = operands()
    monkeypatch.setattr(optimizer_step, "_WARNED", set())
    with pytest.warns(UserWarning, match=rf"steps are not fused: group={group} is not a power"):
        assert not takes_kernel(None, p, g, states, group)
    assert not takes_kernel(None, p, g, states, group)  # and says so once
    assert not takes_kernel(False, p, g, states, group)
    with pytest.raises(ValueError, match=rf"\(4, 256\): group={group} is not a power of two"):
        takes_kernel(True, p, g, states, group)


@pytest.mark.usefixtures("fake_cuda")
def test_dtypes_and_strides_are_refused():
    pytest.importorskip("triton")
    assert "parameter is torch.float64" in str(refusal(*operands(torch.float64), 128))
    assert "gradient is torch.float64" in str(refusal(*operands(g_dtype=torch.float64), 128))
    p, g, (m,) = operands()
    assert "not contiguous" in str(refusal(p, g, (Stored(m.codes.t(), m.scale),), 128))


def test_a_cpu_is_refused_and_says_what_to_do():
    p = Stored(torch.ones(2, 4))
    with pytest.raises(
        ValueError, match=r"kernel for CUDA, and the parameter is on cpu; use fused"
    ):
        takes_kernel(True, p, p.codes, (p,), 128)
    assert not takes_kernel(None, p, p.codes, (p,), 128)


@pytest.mark.usefixtures("fake_cuda")
def test_an_unknown_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(optimizer_step, "architecture", lambda index: "sm_80")
    assert "sm_80 is not known to convert float8" in str(refusal(*operands(), 128))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_survives_being_packed(rule):
    name, numbers, lr, step = optimizer_step.packed(rule)
    assert lr is None and step is None
    assert optimizer_step.unpacked(name, numbers, lr, step) == rule
    tensors = rule._replace(lr=torch.tensor(0.5))
    name, numbers, lr, step = optimizer_step.packed(tensors)
    assert lr is tensors.lr and step is None
    assert optimizer_step.unpacked(name, numbers, lr, step).lr is lr


def test_fused_step_on_a_cpu_is_the_reference():
    """The op of each rule reaches its reference, a master and its weight included."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the ops
    x, g = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    for rule in RULES:
        results = []
        for step in (optimizer_step.fused_step, optimizer_step.reference_step):
            p, *states = (
                Stored(*optimizer_step.moments.encode(y, 32, dtype))
                for y, dtype in (
                    (x, torch.float16),
                    (g, torch.float8_e4m3fn),
                    (x * x, torch.float16),
                )
            )
            amax = torch.zeros(1)
            states = states if isinstance(rule, AdamW) else states[:1]
            step(rule, p, g, states, 32, rounds=(True,) * 3, seed=1, offset=2, amax=amax)
            results.append((p, states, amax))
        (p, states, amax), (p2, states2, amax2) = results
        assert torch.equal(p.codes, p2.codes) and torch.equal(amax, amax2)
        assert all(torch.equal(a.scale, b.scale) for a, b in zip(states, states2, strict=True))
        value = optimizer_step.load(p, 32)
        assert amax == value.abs().max()
        assert not torch.equal(value, x)
    data, scale = torch.zeros(3, 70).to(torch.float8_e4m3fn), torch.zeros(())
    optimizer_step.cast_weight(p, data, scale, 32, amax)
    assert (data.float() * scale - value).abs().max() <= amax / 28  # half a spacing of the largest


def test_a_rule_that_the_kernel_does_not_have_is_refused_by_name():
    class Sign(NamedTuple):
        lr: float = 1e-3

    with pytest.raises(
        TypeError, match=r"the kernel has no rule Sign \(it has adamw, .*fused=False"
    ):
        optimizer_step.packed(Sign())
    for name, kind in optimizer_step.RULES.items():
        numbers = {field: 0.5 for field in kind._fields}
        assert optimizer_step.packed(kind(**numbers))[0] == name
