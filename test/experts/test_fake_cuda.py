"""`grouped_mm` on FakeTensors of a CUDA device: which GEMMs a step runs, forward and backward.

Torch checks the layouts that it is handed; nothing may ask for a value, which would wait for the
device.
"""

from __future__ import annotations

from dataclasses import replace

import fake_cuda
import pytest
import torch
from fake_cuda import empty
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from float8.config import RECIPES, CastConfig, ScalingType
from float8.tensor import Float8Tensor

T, K, N, E = 100, 64, 96, 4
BF16 = torch.bfloat16
TORCH, TRITON, PLAIN = "aten::_scaled_grouped_mm", "float8::grouped_mm_gpu", "aten::_grouped_mm"
BY_TRITON, BY_TORCH = (TRITON,) * 3, (TORCH,) * 3
# Of the output, grad_input and grad_weight.
RUNS = {
    ("mxfp8", "sm_100"): BY_TORCH,
    ("rowwise_with_gw_hp", "sm_89"): (TRITON, TRITON, PLAIN),
    ("rowwise_with_gw_hp", "sm_90"): (TRITON, TRITON, PLAIN),
    ("rowwise_with_gw_hp", "sm_100"): (TORCH, TORCH, PLAIN),
    ("rowwise_with_gw_hp", "sm_103"): (TRITON, TRITON, PLAIN),
    ("rowwise", "sm_100"): BY_TORCH,  # as MX, as their scales are powers of two
    ("blockwise", "sm_100"): BY_TORCH,
}
for recipe in ("tensorwise", "unit", "blockwise", "rowwise"):
    for arch in ("sm_89", "sm_90", "sm_100", "sm_103"):
        RUNS.setdefault((recipe, arch), BY_TRITON)


class Gemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sums: list[bool | None] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar" not in func.name(), "waits for the device"
        if func.name() == TRITON:
            self.sums.append(args[-1])
        if func.name() in (TORCH, TRITON, PLAIN, "float8::grouped_mm"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def gemms_of(config, arch, dtype=BF16, tokens=T, mode=None, expand=False, in_float8=False):
    """The GEMMs of a forward and backward."""
    with fake_cuda.fake_cuda(arch, mode), Gemms() as gemms:
        x, w, g = (empty(*s, dtype=dtype) for s in ((tokens, K), (E, N, K), (tokens, N)))
        if expand:  # the gradient of a sum
            g = g.new_empty(()).expand(g.shape)
        if in_float8:
            scale = empty(1, 1, dtype=torch.float32)
            x = Float8Tensor(x.to(torch.float8_e4m3fn), scale, (-1, -1), dtype)
        results = fake_cuda.step(config, x, w, g, offs=empty(E, dtype=torch.int32))
    assert {t.dtype for t in results[:3]} == {dtype}
    assert [t.shape for t in results[:3]] == [(tokens, N), (tokens, K), (E, N, K)]
    gemms_of.sums = gemms.sums
    return tuple(gemms.names)


@pytest.mark.parametrize(("recipe", "arch"), RUNS)
@pytest.mark.parametrize("expand", [False, True])
def test_the_gemms_of_a_step(recipe, arch, expand):
    assert gemms_of(RECIPES[recipe], arch, expand=expand) == RUNS[recipe, arch]


@pytest.mark.parametrize(
    ("recipe", "sums"),
    [
        ("tensorwise", [True, None, None]),
        ("rowwise", [True, None, None]),
        ("blockwise", [False] * 3),
    ],
)
def test_the_kernel_chooses_how_gradients_are_summed(recipe, sums):
    """By sizes that are no constants of compiled code."""
    gemms_of(RECIPES[recipe], "sm_90")
    assert gemms_of.sums == sums


def test_blockwise_with_grad_weight_in_high_precision():
    off = CastConfig(ScalingType.DISABLED)
    second = {f"cast_config_{x}_for_grad_weight": off for x in ("input", "grad_output")}
    assert gemms_of(replace(RECIPES["blockwise"], **second), "sm_90") == (TRITON, TRITON, PLAIN)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_experts_without_whole_blocks_of_32_are_multiplied_by_triton(recipe, monkeypatch):
    """The transposed tokens are padded for torch's product, which grad_weight is."""
    monkeypatch.setitem(globals(), "N", 48)
    assert gemms_of(RECIPES[recipe], "sm_100") == (TORCH, TRITON, TORCH)


@pytest.mark.parametrize(
    ("recipe", "arch", "options"),
    [
        *(("tensorwise", arch, {"in_float8": True}) for arch in ("sm_89", "sm_90", "sm_100")),
        *(
            (r, arch, {"dtype": torch.float32})
            for r in ("tensorwise", "rowwise", "blockwise")
            for arch in ("sm_90", "sm_100")
        ),
    ],
)
def test_tokens_in_float8_and_results_in_float32_are_tritons(recipe, arch, options):
    assert gemms_of(RECIPES[recipe], arch, **options) == BY_TRITON


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("tensorwise", "mxfp8", (TRITON, TRITON, TORCH)),
        ("mxfp8", "tensorwise", (TORCH, TORCH, TRITON)),
        ("tensorwise", "rowwise", (TRITON, TRITON, TORCH)),
    ],
)
def test_the_layout_of_transposed_tokens_is_that_of_the_gemm_that_reads_it(first, second, names):
    """Torch's grouped GEMM of MX formats needs other padding than Triton's."""
    other = RECIPES[second]
    config = replace(
        RECIPES[first],
        cast_config_input_for_grad_weight=other.cast_config_input,
        cast_config_grad_output_for_grad_weight=other.cast_config_grad_output,
    )
    assert gemms_of(config, "sm_100") == names


@pytest.mark.parametrize(("recipe", "arch"), [("rowwise", "gfx94"), ("mxfp8", "sm_90")])
def test_what_no_gpu_runs_is_refused_with_the_way_out(recipe, arch):
    with pytest.raises(ValueError, match=f"grouped_mm: {arch} does not run .* emulate=True"):
        gemms_of(RECIPES[recipe], arch)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_no_number_of_tokens_is_compiled_in(recipe, arch):
    """With a symbolic T, a step leaves no condition on it but that there are tokens."""
    env, example = ShapeEnv(), torch.empty(T, 0)
    with FakeTensorMode(shape_env=env) as mode:
        dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        tokens = mode.from_tensor(example, symbolic_context=dynamic).shape[0]
    with enable_python_dispatcher():
        assert gemms_of(RECIPES[recipe], arch, tokens=tokens, mode=mode) == RUNS[recipe, arch]
    symbol = tokens.node.expr
    for guard in env.guards:
        assert all(guard.expr.subs(symbol, other) for other in (2, 17, 4096, 100_003)), guard.expr
