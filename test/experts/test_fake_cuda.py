"""`grouped_mm` on FakeTensors of a CUDA device: which GEMMs a step runs, forward and backward.

FakeTensors have no autograd without a CUDA build, so the autograd function is called by hand. Torch
checks the layouts that it is handed; nothing may ask for a value, which would wait for the device.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from float8.config import Float8LinearConfig
from float8.linear import bound_plan
from float8.linear.autograd import NO_FACTORS, STATELESS, Call, Float8LinearFunction
from float8.tensor import Float8Tensor

T, K, N, E = 100, 64, 48, 4
BF16 = torch.bfloat16
TORCH, TRITON, PLAIN = "aten::_scaled_grouped_mm", "float8::grouped_mm_gpu", "aten::_grouped_mm"
BY_TRITON = (TRITON, TRITON, TRITON)
# Of the output, grad_input and grad_weight.
RUNS = {
    "tensorwise": dict.fromkeys(("sm_89", "sm_90", "sm_100"), BY_TRITON),
    "unit": dict.fromkeys(("sm_89", "sm_90", "sm_100"), BY_TRITON),
    "blockwise": dict.fromkeys(("sm_89", "sm_90", "sm_100"), BY_TRITON),
    "rowwise": {"sm_89": BY_TRITON, "sm_90": (TORCH, TORCH, TRITON), "sm_100": BY_TRITON},
    "mxfp8": {"sm_100": (TORCH, TORCH, TORCH)},
    "rowwise_with_gw_hp": {
        "sm_89": (TRITON, TRITON, PLAIN),
        "sm_90": (TORCH, TORCH, PLAIN),
        "sm_100": (TRITON, TRITON, PLAIN),
    },
}


class Context:
    """What the autograd function needs of its context."""

    needs_input_grad = (True, True, False, False, False)

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class Gemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar" not in func.name(), "waits for the device"
        if func.name() in (TORCH, TRITON, PLAIN, "float8::grouped_mm"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def step(recipe, arch, monkeypatch, dtype=BF16, tokens=T, mode=None, expand=False, x8=False):
    """The GEMMs of a forward and backward, and the shapes of their results."""
    monkeypatch.setattr(bound_plan.kernels, "family_of", lambda device: arch)
    config = recipe
    if isinstance(recipe, str):
        config = Float8LinearConfig.from_recipe_name(recipe)
    bound_plan._bound_once.cache_clear()
    try:
        with mode or FakeTensorMode(), torch.no_grad(), Gemms() as gemms:
            x, w, g = (
                torch.empty(*shape, dtype=dtype, device="cuda")
                for shape in ((tokens, K), (E, N, K), (tokens, N))
            )
            offs = torch.empty(E, dtype=torch.int32, device="cuda")
            g = g.new_empty(()).expand(g.shape) if expand else g
            if x8:
                scale = torch.empty(1, 1, device="cuda")
                x = Float8Tensor(x.to(torch.float8_e4m3fn), scale, (-1, -1), dtype)
            ctx, plan = Context(), bound_plan.plan_for(config, x, grouped=True)
            call = Call(plan, STATELESS, False, None, NO_FACTORS, saves=True)
            out = Float8LinearFunction.forward(ctx, x, w, None, call, offs)
            grad_x, grad_w, *_ = Float8LinearFunction.backward(ctx, g)
    finally:
        bound_plan._bound_once.cache_clear()
    assert out.dtype == grad_x.dtype == grad_w.dtype == dtype
    assert (out.shape, grad_x.shape, grad_w.shape) == ((tokens, N), (tokens, K), (E, N, K))
    return tuple(gemms.names)


@pytest.mark.parametrize(("recipe", "arch"), [(r, arch) for r, row in RUNS.items() for arch in row])
def test_the_gemms_of_a_step(recipe, arch, monkeypatch):
    assert step(recipe, arch, monkeypatch) == RUNS[recipe][arch]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100"])
def test_tokens_in_float8_take_the_same_gemms(arch, monkeypatch):
    assert step("tensorwise", arch, monkeypatch, x8=True) == BY_TRITON


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_results_in_float32_are_not_torchs(recipe, monkeypatch):
    assert step(recipe, "sm_90", monkeypatch, dtype=torch.float32) == BY_TRITON


def test_mx_products_are_torchs_on_sm_100(monkeypatch):
    assert step("mxfp8", "sm_100", monkeypatch) == (TORCH, TORCH, TORCH)


@pytest.mark.parametrize("recipe", RUNS)
def test_the_gradient_of_a_sum_is_taken(recipe, monkeypatch):
    assert step(recipe, "sm_100", monkeypatch, expand=True) == RUNS[recipe]["sm_100"]


@pytest.mark.parametrize("mx_contracts_tokens", [False, True])
def test_the_layout_of_transposed_tokens_is_that_of_the_gemm_that_reads_it(
    mx_contracts_tokens, monkeypatch
):
    """Torch's grouped GEMM of MX formats needs other padding than Triton's."""
    mx, row = (Float8LinearConfig.from_recipe_name(name) for name in ("mxfp8", "rowwise"))
    first, second = (row, mx) if mx_contracts_tokens else (mx, row)
    config = dataclasses.replace(
        first,
        cast_config_input_for_grad_weight=second.cast_config_input,
        cast_config_grad_output_for_grad_weight=second.cast_config_grad_output,
    )
    names = (TRITON, TRITON, TORCH) if mx_contracts_tokens else (TORCH, TORCH, TRITON)
    assert step(config, "sm_100", monkeypatch) == names


@pytest.mark.parametrize(("recipe", "arch"), [("rowwise", "gfx94"), ("mxfp8", "sm_90")])
def test_what_no_gpu_runs_is_refused_with_the_way_out(recipe, arch, monkeypatch):
    with pytest.raises(ValueError, match=f"grouped_mm: {arch} does not run .* emulate=True"):
        step(recipe, arch, monkeypatch)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_no_number_of_tokens_is_compiled_in(recipe, arch, monkeypatch):
    """With a symbolic T, a step leaves no condition on it but that there are tokens."""
    env, example = ShapeEnv(), torch.empty(T, 0)
    with FakeTensorMode(shape_env=env) as mode:
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        tokens = mode.from_tensor(example, symbolic_context=dynamic).shape[0]
    with enable_python_dispatcher():
        names = step(recipe, arch, monkeypatch, tokens=tokens, mode=mode)
    assert names == RUNS[recipe][arch]
    symbol = tokens.node.expr
    for guard in env.guards:
        assert all(guard.expr.subs(symbol, other) for other in (2, 17, 4096, 100_003)), guard.expr
