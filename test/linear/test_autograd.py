"""The CUDA path without a GPU: FakeTensors go through the layer's forward and backward.

The tests check the ops that run, their layouts, dtypes and scale shapes, and the saved tensors.
Autograd itself cannot handle CUDA tensors in a CPU build, so the autograd function's forward and
backward are called directly.
"""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from meter import TORCH_PRODUCTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import Float8Tensor
from float8.config import RECIPES
from float8.linear.autograd import NO_FACTORS, STATELESS, Call, Float8LinearFunction
from float8.linear.bound_plan import plan_on
from float8.linear.float8_weight import float8_weight
from float8.linear.scaling import DelayedState

scaled_mm = importlib.import_module("float8.kernels.scaled_mm")  # float8.kernels has its function
aten = torch.ops.aten
SAVING = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]


class _Context:
    """What the autograd function needs of its context."""

    needs_input_grad = (True,) * 4

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _ScaledMms(TorchDispatchMode):
    """Records the operands of every scaled_mm, and refuses what the hardware would refuse."""

    def __init__(self):
        super().__init__()
        self.scales, self.scale_dtype = [], torch.float32

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in TORCH_PRODUCTS:
            a, b, scale_a, scale_b = args[:4]
            if func is not aten._scaled_mm.default:  # each operand stands beside its scales
                b, scale_a, scale_b = scale_a.t(), b, scale_b.t()
            assert a.stride() == (a.shape[1], 1), "a must be row-major"
            assert b.stride() == (1, b.shape[0]), "b must be column-major"
            assert a.shape[1] % 16 == b.shape[1] % 16 == 0
            assert (a.dtype, b.dtype) != (torch.float8_e5m2,) * 2
            assert scale_a.dtype == scale_b.dtype == self.scale_dtype
            self.scales.append((tuple(scale_a.shape), tuple(scale_b.shape)))
        assert func not in (aten.mm.default, aten.addmm.default) or "hp" in self.allowed
        return func(*args, **kwargs)


def _run(config, m=512, k=1024, n=4096, allowed=()):
    """Forward and backward on fake CUDA tensors: the mode, the context, results."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, device="cuda", dtype=dtype)

    scale_format = config.cast_config_input.scale_format
    arch = mock.Mock(return_value="sm_100" if scale_format.is_e8m0 else "sm_90")
    with (
        mock.patch.object(scaled_mm, "architecture", arch),
        FakeTensorMode(),
        torch.no_grad(),
        _ScaledMms() as mode,
    ):
        mode.allowed, mode.scale_dtype = allowed, scale_format.dtype
        x, w, bias, g = empty(m, k), empty(n, k), empty(n), empty(m, n)
        scalar = {"dtype": torch.float32}
        states = STATELESS
        if config.uses_delayed_scaling:
            states = tuple(DelayedState(empty(**scalar), empty(**scalar), True) for _ in range(3))
        ctx = _Context()
        plan = plan_on(config, x.device, torch.bfloat16)
        call = Call(plan, states, record=True, weight=None, factors=NO_FACTORS, saves=True)
        out = Float8LinearFunction.forward(ctx, x, w, bias, call)
        grads = Float8LinearFunction.backward(ctx, g)[:3]
        return mode, ctx, (out, *grads), w


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_products_reach_the_tensor_cores_in_the_right_layout(recipe):
    allowed = ("hp",) if recipe == "rowwise_with_gw_hp" else ()
    mode, _, (out, grad_x, grad_w, grad_b), _ = _run(RECIPES[recipe], allowed=allowed)
    assert len(mode.scales) == (2 if allowed else 3)
    assert (out.shape, grad_x.shape) == ((512, 4096), (512, 1024))
    assert (grad_w.shape, grad_b.shape) == ((4096, 1024), (4096,))
    assert {t.dtype for t in (out, grad_x, grad_w, grad_b)} == {torch.bfloat16}


def test_scales_have_the_shapes_that_the_hardware_reads():
    assert _run(RECIPES["tensorwise"])[0].scales == [((), ())] * 3
    rows = _run(RECIPES["rowwise"])[0].scales
    assert rows == [((512, 1), (1, 4096)), ((512, 1), (1, 1024)), ((4096, 1), (1, 1024))]
    blocks = _run(RECIPES["blockwise"])[0].scales
    assert blocks == [((512, 8), (8, 32)), ((512, 32), (32, 8)), ((4096, 4), (4, 1024))]


def test_no_operand_is_copied_where_blocks_do_not_come_in_fours():
    """The scales of 5 and of 6 blocks are padded in the op that multiplies, and nothing else is."""
    pads = []

    class Pads(_ScaledMms):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is aten.constant_pad_nd.default:
                pads.append(args)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Pads() as mode:
        mode.allowed = ()
        found = _run(RECIPES["blockwise"], 256, 640, 768)[0].scales
    assert found == [((256, 5), (5, 6)), ((256, 6), (6, 5)), ((768, 2), (2, 640))]
    assert pads == []


@pytest.mark.parametrize("recipe", SAVING)
@pytest.mark.parametrize("shape", [(512, 1024, 4096), (4096, 512, 512)])
def test_backward_saves_one_byte_per_input_element(recipe, shape):
    m, k, _ = shape
    _, ctx, _, weight = _run(RECIPES[recipe], *shape)
    saved = {t.untyped_storage(): t for t in ctx.saved_tensors if t is not None and t is not weight}
    found = sum(t.numel() * t.element_size() for t in saved.values())
    assert any(t is weight for t in ctx.saved_tensors)
    assert found <= 0.52 * (2 * m * k)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(24, 40, 72), (64, 64, 1), (1, 64, 64), (64, 1, 64)])
def test_sizes_that_need_padding_are_padded_when_asked(recipe, shape):
    m, k, n = shape
    config = replace(RECIPES[recipe], pad_inner_dim=True)
    mode, _, (out, grad_x, grad_w, _), _ = _run(config, m, k, n)
    assert len(mode.scales) == 3
    assert (out.shape, grad_x.shape, grad_w.shape) == ((m, n), (m, k), (n, k))


def test_the_codes_of_a_weight_in_float8_are_its_own_bytes():
    weight = Float8Tensor.from_high_precision(torch.randn(8, 4), torch.float8_e4m3fn)
    layer = SimpleNamespace(weight=weight, cached_weight=None)
    plan = plan_on(RECIPES["tensorwise"], weight.device, torch.float32)
    found = float8_weight(layer, plan)
    assert found.row_major[0] is weight.float8_data
    assert found.transposed[0].data_ptr() == weight.float8_data.data_ptr()
    assert found.transposed[0].shape == (4, 8)
    assert found.row_major[1] is weight.scale
    assert found.amax is None  # the gather has recorded it
