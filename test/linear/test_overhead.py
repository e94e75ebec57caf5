"""How many functions of the library a training step calls, and what torch.compile guards.

Counted, not timed. The calls are those of one warmed-up eager forward and backward of a layer
without bias.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo import guards

import float8
from float8 import Float8Linear, Float8LinearConfig, sync_float8_amax_and_scale_history
from float8.kernels import Orientations, casts
from float8.kernels.scaled_mm import GEMMS, TORCH
from float8.linear import bound_plan

M, K, N = 128, 256, 128
LIBRARY = str(Path(float8.__file__).parent)
CALLS = {"tensorwise": 85, "rowwise": 105, "blockwise": 150, "mxfp8": 175, "delayed": 90}
CALLS_ON_CUDA = {"tensorwise": 100, "blockwise": 150}
GUARDS = 140  # on a CPU, whose compiled casts are code of the library


def warmed_up(recipe):
    """One training step, to be called again."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16, config=config)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(M, N, dtype=torch.bfloat16)

    def step():
        layer(x).backward(g)

    step()
    if config.uses_delayed_scaling:
        sync_float8_amax_and_scale_history(layer)
    step()
    return step


def calls_of(step):
    """Calls of functions of the library, of comprehensions and generators too."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("recipe", CALLS)
def test_calls_of_a_step_on_a_cpu(recipe):
    assert 40 < calls_of(warmed_up(recipe)) <= CALLS[recipe]


@contextmanager
def as_on_cuda():
    """CPU tensors take the path of CUDA ones; casts and GEMMs return empty results."""

    def family_of(device):
        return "sm_90"

    def cast(kernel, x, block, dtype, scale_format, scale, rows, cols, *_):
        extents = zip(x.shape, block, strict=True)
        blocks = [1 if extent == -1 else -(-size // extent) for size, extent in extents]
        scale = torch.ones(blocks)
        data = torch.empty(x.shape, dtype=dtype)
        return Orientations(data, scale, data.t().contiguous(), scale.t())

    def multiply(a, a_scale, b, b_scale, a_block, b_block, bias, out_dtype, fast):
        return torch.empty(a.shape[0], b.shape[0], dtype=out_dtype)

    with ExitStack() as stack:
        for module in ("float8.kernels", "float8.kernels.casts", "float8.kernels.scaled_mm"):
            stack.enter_context(mock.patch(f"{module}.family_of", family_of))
        stack.enter_context(mock.patch("float8.kernels.cast_by_kernel", cast))
        stub = TORCH._replace(multiply=multiply)
        stack.enter_context(mock.patch.dict(GEMMS, {stub.name: stub}))
        stack.callback(bound_plan._bound_once.cache_clear)
        bound_plan._bound_once.cache_clear()
        yield


@pytest.mark.parametrize("recipe", CALLS_ON_CUDA)
def test_calls_of_a_step_on_cuda(recipe):
    pytest.importorskip("triton")
    with as_on_cuda():
        step = warmed_up(recipe)
        assert 20 < calls_of(step) <= CALLS_ON_CUDA[recipe]


def test_guards_of_a_compiled_layer(monkeypatch):
    texts = []
    make = guards.CheckFunctionManager.__init__

    def init(self, *args, **kwargs):
        make(self, *args, **kwargs)
        texts.append(str(self.guard_manager))

    monkeypatch.setattr(guards.CheckFunctionManager, "__init__", init)
    layer = Float8Linear(K, N, bias=False, dtype=torch.bfloat16)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).backward(torch.randn(M, N))
    (text,) = texts
    leaves = [line for line in text.splitlines() if "+- " in line and "Manager" not in line]
    assert 20 < len(leaves) <= GUARDS


def test_a_plan_is_bound_once_per_device_and_dtype():
    config = Float8LinearConfig.from_recipe_name("rowwise")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    first = bound_plan.plan_on(config, cpu, torch.bfloat16)
    assert bound_plan.plan_on(config, cpu, torch.bfloat16) is first
    equal = Float8LinearConfig.from_recipe_name("rowwise")
    assert bound_plan.plan_on(equal, cpu, torch.bfloat16) is first
    assert bound_plan.plan_on(config, cpu, torch.float32) is not first
    assert bound_plan.plan_on(config, meta, torch.bfloat16) is not first
    assert casts.kernel_for("cpu", (1, -1)) is None
