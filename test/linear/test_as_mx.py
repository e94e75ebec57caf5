"""Layers with scales of powers of two, on Blackwell GPUs that are not there: MX products.

CPU tensors take the way of a GPU's: the plan is that of its architecture, casts and
`expand_scales` are the kernels' ops, whose CPU implementation is the definition, and
``torch._scaled_mm`` is the documented one of `pretend`, as an op that torch.compile does not see
into. It takes MX operands only in the layout of cuBLASLt.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from assertions import assert_all_bitwise, assert_bitwise
from fake_cuda import empty, fake_cuda
from fake_cuda import step as fake_step
from layer_check import check_layer
from pretend import install_torch_scaled_mm
from shapes import pairs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from float8 import (
    Float8Linear,
    Float8Tensor,
    cached_weights,
    convert_to_float8_inference,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8 import unit_scaling as uu
from float8.config import RECIPES, CastConfig, Float8LinearConfig, ScalingType
from float8.distributed.tensor_parallel import Float8RowwiseParallel
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.linear.plan import USED, plan_for

POWERS = ("rowwise", "rowwise_with_gw_hp", "blockwise")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS_E5M2 = CastConfig(granularity=Rowwise(), scale_format=ScaleFormat.POWER_OF_TWO)
CONFIGS = {name: RECIPES[name] for name in POWERS}
CONFIGS["gradients in e5m2"] = Float8LinearConfig(ROWS_E5M2, ROWS_E5M2, ROWS_E5M2)
CONFIGS["dequantised"] = replace(RECIPES["blockwise"], dequantize_in_backward=True)
documented = []  # the ``torch._scaled_mm`` of this test


@torch.library.custom_op("float8_test::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    out: Tensor = documented[-1](
        a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )  # fmt: skip
    return out


@scaled_mm.register_fake
def _(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@pytest.fixture(params=["sm_100", pytest.param("sm_103", marks=pytest.mark.slow)])
def calls(request, monkeypatch):
    """The calls of ``torch._scaled_mm`` on a Blackwell GPU."""
    importlib.import_module("torch._inductor.pattern_matcher")  # keeps torch's own product
    found = install_torch_scaled_mm(monkeypatch)
    documented.append(torch._scaled_mm)
    monkeypatch.setattr(
        torch, "_scaled_mm",
        lambda a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum: scaled_mm(
            a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum
        ),
    )  # fmt: skip
    for name in ("float8.kernels", "float8.kernels.casts", "float8.kernels.products"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "family_of", lambda device: request.param)
    monkeypatch.setattr("float8.kernels.compiler_may_cast", lambda family: True)
    USED.clear()
    yield found
    documented.pop()
    USED.clear()


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small integers in rows of other magnitudes: float8 holds them, and float32 every sum."""
    rows = 2.0 ** -(torch.arange(shape[0]) % 3)
    return (torch.randint(-8, 9, shape) * rows[:, None]).to(dtype)


def results(layer: nn.Module, x: Tensor, g: Tensor, run: nn.Module | None = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = (layer if run is None else run)(x)
    out.backward(g)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pairs(
    name=list(CONFIGS),
    sizes=[(48, 160, 96), (128, 256, 384), (16, 16, 144)],
    dtype=[BF16, F16, F32],
    how=["eager", "cached", "compiled"],
)
def test_a_layer_has_the_bits_of_the_emulation(calls, name, sizes, dtype, how):
    (M, K, N), config = sizes, CONFIGS[name]
    torch.manual_seed(0)
    x, g = integers(M, K, dtype=dtype), integers(M, N, dtype=dtype)
    layers = [Float8Linear(K, N, False, dtype=dtype, config=config) for _ in range(2)]
    layers[1].config = replace(config, emulate=True)
    for layer in layers:
        with torch.no_grad():
            torch.manual_seed(1)
            layer.weight.copy_(integers(N, K, dtype=dtype))
    expected = results(layers[1], x, g)
    run = torch.compile(layers[0], backend="aot_eager", fullgraph=True)
    if how == "cached":
        with cached_weights(layers[0]):
            found = results(layers[0], x, g)
    else:
        found = results(layers[0], x, g, run if how == "compiled" else None)
    assert_all_bitwise(found, expected, (name, sizes, dtype, how))
    products = sum(gemm.a is not None for gemm in config.gemms.all)
    assert [call.fast for call in calls] == [False] * products
    assert {call.scale_a.dtype for call in calls} == {torch.float8_e8m0fnu}


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_one_graph_serves_batches_of_any_size(calls, recipe):
    layer = Float8Linear(160, 96, False, dtype=BF16, config=recipe)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (272, 144, 400):
        x, g = integers(tokens, 160, dtype=BF16), integers(tokens, 96, dtype=BF16)
        with torch._dynamo.config.patch(error_on_recompile=tokens != 272):
            found = results(layer, x, g, run)
        layer.zero_grad()
        expected = results(layer, x, g)
        layer.zero_grad()
        assert_all_bitwise(found, expected, (recipe, tokens))
    assert len(calls) == 18


@pytest.mark.parametrize("recipe", POWERS)
@pytest.mark.parametrize("shape", [(48, 160, 96), (144, 272, 400)], ids=str)
def test_random_operands_agree_with_float64(calls, recipe, shape):
    check_layer(recipe, shape)
    assert len(calls) == 2 * (3 - (recipe == "rowwise_with_gw_hp"))


def test_zeros_infinities_and_nans_end_where_they_do_in_the_emulation(calls):
    for name in POWERS:
        layer = Float8Linear(256, 48, False, dtype=BF16, config=RECIPES[name])
        x = torch.zeros(64, 256, dtype=BF16)
        x[3, 7], x[40, 200], x[5] = torch.inf, torch.nan, 1.0
        found = layer(x)
        layer.config = replace(RECIPES[name], emulate=True)
        assert torch.equal(found.isnan(), layer(x).isnan())
        assert found.isnan().any(1).nonzero().flatten().tolist() == [3, 40]
        assert found[[0, 63]].count_nonzero() == 0


def test_scales_that_are_no_powers_of_two_are_never_rounded(calls):
    """By their format, and in a `Float8Tensor`, they take the products of other GPUs."""
    exact = [Float8LinearConfig(c, c, c) for c in (CastConfig(granularity=Rowwise()),)]
    for config in exact:
        assert not any("MX" in gemm.name for gemm in plan_for(config, "sm_100", BF16).gemms)
    layer = Float8Linear(128, 48, False, dtype=BF16, config="blockwise").requires_grad_(False)
    x = torch.randn(32, 128, dtype=BF16)
    x8 = Float8Tensor.from_high_precision(x, E4M3, Blockwise(1, 128))
    assert not (x8.scale.log2().round() == x8.scale.log2()).any()
    emulated = Float8Linear.from_float(layer.to_float(), replace(layer.config, emulate=True))
    assert_bitwise(layer(x8), emulated(x8))
    assert not calls
    layer(x)
    assert len(calls) == 1
    resident = convert_to_float8_inference(nn.Sequential(layer.to_float()), config="rowwise")
    resident[0].weight.copy_(torch.randn(48, 128))  # computes scales of its own
    out = resident(x)
    resident[0].config = replace(resident[0].config, emulate=True)
    # The scales are applied before the only rounding: an ulp apart.
    torch.testing.assert_close(out, resident(x), rtol=2.0**-7, atol=0.0)
    assert calls[-1].scale_a.dtype == torch.float32


def test_nor_are_delayed_ones_that_a_checkpoint_of_other_scales_has(calls):
    delayed = CastConfig(ScalingType.DELAYED, scale_format=ScaleFormat.POWER_OF_TWO)
    config = Float8LinearConfig(ROWS_E5M2, delayed, ROWS_E5M2)
    layer = Float8Linear(64, 48, dtype=BF16, config=config)
    x, other = torch.randn(32, 64, dtype=BF16), replace(delayed, scale_format=ScaleFormat.FLOAT32)
    source = Float8Linear(64, 48, dtype=BF16, config=replace(config, cast_config_weight=other))
    source(x)
    sync_float8_amax_and_scale_history(source)
    layer.load_state_dict(source.state_dict())
    found = layer(x)
    layer.config = replace(config, emulate=True)
    torch.testing.assert_close(found, layer(x), rtol=2.0**-7, atol=2.0**-7)


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_nor_in_a_tensor_parallel_layer_that_cuts_its_output(calls, mesh):
    """Its gradient is gathered in float8, in a function of its own."""
    whole = replace(ROWS_E5M2, granularity=Tensorwise())
    model = nn.Sequential(nn.Linear(64, 48, bias=False, dtype=BF16)).requires_grad_(False)
    parallelize_module(model, mesh, {"0": Float8RowwiseParallel(output_layouts=Shard(0))})
    convert_to_float8_training(model, config=Float8LinearConfig(ROWS_E5M2, ROWS_E5M2, whole))
    x = torch.randn(32, 32, dtype=BF16)
    model(x)
    model(Float8Tensor.from_high_precision(x, E4M3, Rowwise()))
    assert [call.scale_a.dtype for call in calls] == [torch.float8_e8m0fnu, torch.float32]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_factors_of_unit_scaling_are_not_put_into_scales(calls, recipe):
    torch.manual_seed(0)
    x, g = torch.randn(64, 96), torch.randn(64, 48)
    layer, emulated = (uu.Linear(96, 48, bias=True) for _ in range(2))
    emulated.load_state_dict(layer.state_dict())
    config = RECIPES[recipe]
    layer = convert_to_float8_training(layer, config=config)
    emulated = convert_to_float8_training(emulated, config=replace(config, emulate=True))
    for found, expected in zip(results(layer, x, g), results(emulated, x, g), strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-20, atol=2.0**-20)
    assert len(calls) == 3


@pytest.mark.parametrize("sizes", [(64, 64, 24), (64, 72, 64), (5, 64, 48)], ids=str)
def test_blocks_of_odd_sizes_are_multiplied_by_triton(calls, sizes):
    """As before there were MX products; those that the latter take are not."""
    M, K, N = sizes
    layer = Float8Linear(K, N, dtype=BF16, config="blockwise")
    emulated = Float8Linear.from_float(layer.to_float(), replace(layer.config, emulate=True))
    x, g = torch.randn(M, K, dtype=BF16), torch.randn(M, N, dtype=BF16)
    found = results(layer, x, g)
    layer.zero_grad()
    for one, other in zip(found, results(emulated, x, g), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-4)
    assert len(calls) == sum(not (n % 16 or k % 16) for n, k in ((N, K), (K, N), (K, M)))


class Names(TorchDispatchMode):
    """The ops of the library and the products that were called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), func.name()]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_103", "sm_120"])
@pytest.mark.parametrize("recipe", POWERS)
def test_the_launches_on_a_gpu(recipe, arch):
    """Of fake tensors, whose layouts torch checks. Other architectures are as they were."""
    with fake_cuda(arch), Names() as mode:
        fake_step(RECIPES[recipe], empty(64, 256), empty(512, 256), empty(64, 512), empty(512))
    products = 2 if recipe == "rowwise_with_gw_hp" else 3
    is_mx = arch in ("sm_100", "sm_103")
    assert mode.names.count("float8::expand_scales") == 2 * products * is_mx
    if is_mx:
        assert mode.names.count("aten::_scaled_mm") == products
        assert "float8::blockwise_mm" not in mode.names
