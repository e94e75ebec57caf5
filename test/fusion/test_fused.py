"""`RMSNormCast`, `SwiGLUCast`: the numbers of the unfused chain, and its state."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline, assert_same_float8
from meter import saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    ScalingType,
    convert_from_float8_training,
    convert_to_float8_training,
    fused,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.fusion import autograd as fused_autograd
from float8.fusion.fused import LayerNormCast, RMSNormCast, SwiGLUCast
from float8.kernels import definition

K = 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATIC = CastConfig(scaling_type=ScalingType.STATIC, static_scale=0.125)
CONFIGS = {
    "tensorwise": RECIPES["tensorwise"],
    "delayed": RECIPES["delayed"],
    "static": Float8LinearConfig(STATIC),
}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def norm_of(config=None, dtype=torch.float32, size=K):
    norm = RMSNormCast(size, eps=1e-6, dtype=dtype, config=config)
    nn.init.normal_(norm.weight, 1.0, 0.5)
    return norm


def layer_norm_of(config=None, dtype=torch.float32, size=K):
    norm = LayerNormCast(size, dtype=dtype, config=config)
    nn.init.normal_(norm.weight, 1.0, 0.5)
    nn.init.normal_(norm.bias, 0.0, 0.5)
    return norm


def block(config, dim=K, hidden=64):
    """The feed-forward block of the module's docstring."""
    return Block(dim, hidden, config)


class Block(nn.Module):
    def __init__(self, dim, hidden, config):
        super().__init__()
        self.norm = norm_of(config, size=dim)
        self.w13 = Float8Linear(dim, 2 * hidden, bias=False, config=config)
        self.gate = SwiGLUCast(config)
        self.w2 = Float8Linear(hidden, dim, bias=False, config=config)

    def forward(self, x):
        return x + self.w2(self.gate(self.w13(self.norm(x))))


def by_ops():
    """Take the path of a GPU on the CPU: the ops, which run their references here."""
    pytest.importorskip("triton")
    fused_autograd._load()
    return mock.patch.object(fused, "runs_kernel", lambda device, emulate: not emulate)


def grads(out, g, *tensors):
    return torch.autograd.grad(out, tensors, g)


# --- values and gradients


@EVERY_CONFIG
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_the_plain_norm_and_the_layers_own_cast(dtype, config):
    norm = norm_of(config, dtype)
    layer = Float8Linear(K, 32, dtype=dtype, config=config)
    twin = copy.deepcopy(layer)
    for _ in range(2):  # delayed: dynamic, then by its history
        x, g = torch.randn(2, 16, K).to(dtype), torch.randn(2, 16, 32).to(dtype)
        y = norm(x)
        plain = F.rms_norm(x, (K,), norm.weight, 1e-6).detach().requires_grad_()
        assert isinstance(y, Float8Tensor) and y.dtype == dtype and y.shape == x.shape
        found, expected = layer(y), twin(plain)
        assert_bitwise(found.detach(), expected.detach())
        for a, b in zip(
            grads(found, g, y, layer.weight), grads(expected, g, plain, twin.weight), strict=True
        ):
            assert_bitwise(a, b)
        for model in (norm, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in norm.cast_output.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name), "", name)


@EVERY_CONFIG
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_is_the_plain_one_and_the_layers_own_cast(dtype, config):
    norm, layer = layer_norm_of(config, dtype), Float8Linear(K, 32, dtype=dtype, config=config)
    twin = copy.deepcopy(layer)
    for _ in range(2):  # delayed: dynamic, then by its history
        x, g = (2 + torch.randn(2, 16, K)).to(dtype), torch.randn(2, 16, 32).to(dtype)
        y = norm(x)
        # In float32 and rounded once; torch's own CPU kernel sums in another order.
        plain = definition.layer_norm(x.flatten(0, 1), norm.weight, norm.bias, norm.eps)[0]
        plain = plain.reshape(x.shape).to(dtype).detach().requires_grad_()
        assert isinstance(y, Float8Tensor) and y.dtype == dtype and y.shape == x.shape
        found, expected = layer(y), twin(plain)
        assert_bitwise(found.detach(), expected.detach())
        pair = grads(found, g, y, layer.weight), grads(expected, g, plain, twin.weight)
        for a, b in zip(*pair, strict=True):
            assert_bitwise(a, b)
        for model in (norm, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in norm.cast_output.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name), "", name)


@EVERY_CONFIG
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_the_plain_gate_and_the_layers_own_cast(dtype, config):
    gate, layer = SwiGLUCast(config), Float8Linear(K, 32, dtype=dtype, config=config)
    twin = copy.deepcopy(layer)
    for _ in range(2):
        x, g = torch.randn(16, 2 * K).to(dtype), torch.randn(16, 32).to(dtype)
        y = gate(x)
        a, b = x.float().chunk(2, -1)
        plain = (F.silu(a) * b).to(dtype).requires_grad_()
        found, expected = layer(y), twin(plain)
        assert_bitwise(found.detach(), expected.detach())
        assert_bitwise(grads(found, g, layer.weight)[0], grads(expected, g, twin.weight)[0])
        for model in (gate, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in gate.cast_output.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name), "", name)


def check_norm(dtype, shape=(7, 48), by=None):
    """Gradients of x and weight against float64, with a random gradient."""
    norm = norm_of(None, dtype, shape[-1])
    x, g = (torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype))
    found = grads(norm(x), g, x, norm.weight)

    def plain(to):
        x_, w = x.detach().to(to).requires_grad_(), norm.weight.detach().to(to).requires_grad_()
        return grads(F.rms_norm(x_, shape[-1:], w, 1e-6), g.to(to), x_, w)

    exact, baseline = plain(torch.float64), [t.to(dtype) for t in plain(torch.float32)]
    for name, a, e, b in zip(("grad_x", "grad_weight"), found, exact, baseline, strict=True):
        assert_error_within_baseline(a, e, b, 2.0, f"check_norm({dtype}, {shape})", name)


def check_layer_norm(dtype, shape=(7, 48), mean=0.5):
    """Gradients of x, weight and bias against float64, with a random gradient."""
    norm = layer_norm_of(None, dtype, shape[-1])
    x, g = (mean + torch.randn(shape)).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    found = grads(norm(x), g, x, norm.weight, norm.bias)

    def plain(to):
        x_, w, b = (t.detach().to(to).requires_grad_() for t in (x, norm.weight, norm.bias))
        return grads(F.layer_norm(x_, shape[-1:], w, b, norm.eps), g.to(to), x_, w, b)

    exact, baseline = plain(torch.float64), [t.to(dtype) for t in plain(torch.float32)]
    names = ("grad_x", "grad_weight", "grad_bias")
    for name, a, e, b in zip(names, found, exact, baseline, strict=True):
        assert_error_within_baseline(a, e, b, 2.0, f"check_layer_norm({dtype}, {shape})", name)


def check_gate(dtype, together, shape=(7, 48)):
    """Gradients of gate and up against float64, with a random gradient."""
    a, b = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    g = torch.randn(shape).to(dtype)
    out = SwiGLUCast()(torch.cat([a, b], -1)) if together else SwiGLUCast()(a, b)
    found = grads(out, g, a, b)

    def plain(to):
        a_, b_ = (t.detach().to(to).requires_grad_() for t in (a, b))
        return grads(F.silu(a_) * b_, g.to(to), a_, b_)

    exact, baseline = plain(torch.float64), [t.to(dtype) for t in plain(torch.float32)]
    for name, x, e, y in zip(("grad_gate", "grad_up"), found, exact, baseline, strict=True):
        assert_error_within_baseline(x, e, y, 2.0, f"check_gate({dtype}, {together})", name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 33), (37, 1), (257,)])
def test_gradients_of_a_norm(dtype, shape):
    check_norm(dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 33), (257,)])
def test_gradients_of_a_layer_norm(dtype, shape):
    check_layer_norm(dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 33), (257,)])
def test_gradients_of_a_gate(dtype, together, shape):
    check_gate(dtype, together, shape)


FAULTS = {
    "no projection": (
        "_rms_norm_backward",
        lambda g, x, w, rstd, needs: (rstd * (g * w), (g * x * rstd).sum(0)),
    ),
    "sign-only gradient": (
        "_rms_norm_backward",
        lambda g, x, w, rstd, needs: (g.sign() * g.abs().mean(), (g * x * rstd).sum(0)),
    ),
    "weight's gradient without rstd": (
        "_rms_norm_backward",
        lambda g, x, w, rstd, needs: (g * 0, (g * x).sum(0)),
    ),
    "mean of the gradient kept": (
        "_layer_norm_backward",
        lambda g, x, w, b, m, rstd, needs: (
            rstd * (g * w - (x - m) * rstd * (g * w * (x - m) * rstd).mean(1, keepdim=True)),
            (g * (x - m) * rstd).sum(0),
            g.sum(0),
        ),
    ),
    "weight's gradient not centred": (
        "_layer_norm_backward",
        lambda g, x, w, b, m, rstd, needs: (g * 0, (g * x * rstd).sum(0), g.sum(0)),
    ),
    "halves exchanged": (
        "swiglu_backward",
        lambda g, a, b: torch.cat([g * F.silu(a), g * b * a.sigmoid()], 1),
    ),
    "sigmoid's own slope forgotten": (
        "swiglu_backward",
        lambda g, a, b: torch.cat([g * b * a.sigmoid(), g * F.silu(a)], 1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    name, wrong = FAULTS[fault]
    checks = {"_rms_norm_backward": check_norm, "_layer_norm_backward": check_layer_norm}
    check = checks.get(name, lambda dtype: check_gate(dtype, True))
    check(torch.float32)
    home = fused_autograd if "norm" in name else definition
    with (
        mock.patch.object(home, name, wrong),
        pytest.raises(AssertionError, match="replay"),
    ):
        check(torch.float32)


def test_the_gradient_of_one_projection_is_one_tensor():
    """No concatenation: what autograd hands to the projection is what backward wrote."""
    x = torch.randn(6, 2 * K, requires_grad=True)
    seen = []
    y = x * 1
    y.register_hook(seen.append)
    SwiGLUCast()(y).backward(torch.randn(6, K))
    assert seen[0].is_contiguous() and seen[0].untyped_storage().nbytes() == 4 * 6 * 2 * K


def test_two_readers_add_their_gradients():
    norm, a, b = norm_of(), Float8Linear(K, 16), Float8Linear(K, 32)
    x, ga, gb = torch.randn(8, K, requires_grad=True), torch.randn(8, 16), torch.randn(8, 32)
    y = norm(x)
    both = torch.autograd.grad([a(y), b(y)], [x, norm.weight], [ga, gb])
    one = grads(a(norm(x)), ga, x, norm.weight)
    other = grads(b(norm(x)), gb, x, norm.weight)
    for total, first, second in zip(both, one, other, strict=True):
        torch.testing.assert_close(total, first + second)


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_only_wanted_gradients(x_grad, affine):
    norm = RMSNormCast(K, elementwise_affine=affine)
    x = torch.randn(4, K, requires_grad=x_grad)
    y = norm(x)
    assert y.requires_grad == (x_grad or affine)
    if y.requires_grad:
        y.backward(torch.randn(4, K))
    assert (x.grad is not None) == x_grad
    assert norm.weight is None or norm.weight.grad is not None


@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_norm_without_bias_or_weight(affine):
    norm = LayerNormCast(K, elementwise_affine=affine, bias=False, config=CONFIGS["static"])
    x = torch.randn(4, K, requires_grad=True)
    exact = F.layer_norm(x.double(), (K,), eps=1e-5)
    baseline = Float8Tensor.from_high_precision(exact.float(), torch.float8_e4m3fn, scale=0.125)
    y = norm(x)
    assert_error_within_baseline(y.dequantize(), exact, baseline.dequantize(), 1.01)
    y.backward(torch.randn(4, K))
    assert x.grad is not None and (norm.weight is None or norm.weight.grad is not None)
    assert {"elementwise_affine", "eps"} <= vars(norm.to_float()).keys()


def test_eps_is_float32s_by_default():
    x = (torch.randn(4, K) * 1e-3).bfloat16()
    y = RMSNormCast(K, dtype=torch.bfloat16, config=CONFIGS["static"])(x)
    plain = F.rms_norm(x, (K,), None, torch.finfo(torch.float32).eps)
    codes = oracle.cast(plain, torch.tensor([[0.125]]), (-1, -1), torch.float8_e4m3fn)
    assert_bitwise(y._data, codes)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (0, K), (2, 0, K)])
def test_inputs_of_any_rank_and_empty_batches(shape):
    for module, size in ((norm_of(), 1), (layer_norm_of(), 1), (SwiGLUCast(), 2)):
        x = torch.randn(*shape[:-1], size * K, requires_grad=True)
        y = module(x)
        assert y.shape == shape and y.block == (-1,) * len(shape)
        out = Float8Linear(K, 16)(y)
        out.backward(torch.randn_like(out))
        assert x.grad.shape == x.shape


def test_strides_do_not_matter():
    wide = torch.randn(2 * K, 16).t()
    assert_same_float8(SwiGLUCast()(wide), SwiGLUCast()(wide.contiguous()))
    norm, x = norm_of(CONFIGS["static"]), torch.randn(K, 16).t()
    exact = F.rms_norm(x.double(), (K,), norm.weight.double(), 1e-6)
    straight = norm(x.contiguous()).dequantize()  # which sums in another order
    assert_error_within_baseline(norm(x).dequantize(), exact, straight, 1.01)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_codes_are_the_same(mode):
    norm, x = norm_of(CONFIGS["delayed"]), torch.randn(4, K)
    expected = norm(x)
    norm.cast_output.reset_parameters()
    with mode():
        y = norm(x)
    assert_bitwise(y._data, expected._data)
    assert norm.cast_output.current_amax == 0  # nothing recorded


# --- the path of a GPU, with the ops' references


@EVERY_CONFIG
def test_the_ops_compute_what_plain_torch_does(config):
    plain = nn.Sequential(layer_norm_of(config), block(config))
    plain[0].to_float()  # which leaves it as it is
    plain.insert(1, Float8Linear(K, K, config=config))
    ops = copy.deepcopy(plain)
    for _ in range(2):
        x, g = torch.randn(16, K), torch.randn(16, K)
        want = grads(plain(x), g, *plain.parameters())
        with by_ops():
            found = grads(ops(x), g, *ops.parameters())
        for a, b in zip(found, want, strict=True):
            assert_bitwise(a, b)
        for a, b in zip(ops.buffers(), plain.buffers(), strict=True):
            assert_bitwise(a, b)
        sync_float8_amax_and_scale_history(plain)
        sync_float8_amax_and_scale_history(ops)


def test_the_transpose_comes_with_it_where_backward_may_want_it():
    norm, gate, x = norm_of(), SwiGLUCast(), torch.randn(2, 8, 2 * K)
    with by_ops():
        half = x[..., :K]
        for y in (norm(half), layer_norm_of()(half), gate(x), gate(half, x[..., K:])):
            assert_bitwise(y.data_t, y._data.flatten(0, -2).t())
            assert y.data_t.is_contiguous()
        with torch.no_grad():
            assert norm(x[..., :K]).data_t is None
    assert norm_of()(x[..., :K]).data_t is None  # on a CPU it is a view for whoever reads it


@pytest.mark.cuda
@EVERY_CONFIG
def test_on_a_gpu_it_is_close_to_the_unfused_chain(config):
    norm = norm_of(config, torch.bfloat16, 256).cuda()
    centred = layer_norm_of(config, torch.bfloat16, 256).cuda()
    gate = SwiGLUCast(config, "cuda")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for module, inputs, plain in (
        (norm, (x,), lambda x: F.rms_norm(x, (256,), norm.weight.to(x.dtype), 1e-6)),
        (
            centred,
            (x,),
            lambda x: F.layer_norm(
                x, (256,), centred.weight.to(x.dtype), centred.bias.to(x.dtype), 1e-5
            ),
        ),
        (gate, (x, x * 2), lambda a, b: F.silu(a) * b),
    ):
        y = module(*inputs)
        exact = plain(*(t.detach().double() for t in inputs))
        scale = y._scale.reshape(1, 1)
        baseline = Float8Tensor.from_high_precision(
            plain(*inputs).detach(), y.format, scale=scale
        ).dequantize()
        assert_error_within_baseline(y.detach().dequantize(), exact, baseline)
        assert_bitwise(y.data_t, y._data.t())
        x64 = [t.detach().double().requires_grad_() for t in inputs]
        want = torch.autograd.grad(plain(*x64), x64, g.double())
        base = torch.autograd.grad(plain(*inputs), inputs, g)
        for a, b, c in zip(torch.autograd.grad(y, inputs, g), want, base, strict=True):
            assert_error_within_baseline(a, b, c, 2.0)


# --- state


def test_recomputation_records_an_amax_once_and_casts_with_the_same_scale():
    model = block(CONFIGS["delayed"])
    twin = copy.deepcopy(model)
    for _ in range(2):
        x, g = torch.randn(16, K), torch.randn(16, K)
        found = grads(checkpoint(model, x, use_reentrant=False), g, *model.parameters())
        for a, b in zip(found, grads(twin(x), g, *twin.parameters()), strict=True):
            assert_bitwise(a, b)
        for a, b in zip(model.buffers(), twin.buffers(), strict=True):
            assert_bitwise(a, b)
        sync_float8_amax_and_scale_history(model)
        sync_float8_amax_and_scale_history(twin)


def test_sync_makes_the_scales_and_leaves_results_alone():
    norm = norm_of(CONFIGS["delayed"])
    x = torch.randn(16, K)
    norm(x)
    norm(10 * x + 1)
    sync_float8_amax_and_scale_history(norm)
    cast = norm.cast_output
    y = F.rms_norm(10 * x + 1, (K,), norm.weight, 1e-6)
    amax = torch.maximum(y.abs().max(), F.rms_norm(x, (K,), norm.weight, 1e-6).abs().max())
    assert cast.history_ready and cast.amax_history[0] == amax
    y = norm(x)
    assert_bitwise(y._scale.reshape(()), cast.scale)
    before = y.dequantize()
    with torch.no_grad():
        norm.weight.mul_(3)
    norm(x)
    sync_float8_amax_and_scale_history(norm)
    assert not torch.equal(y._scale.reshape(()), cast.scale)
    assert_bitwise(y.dequantize().detach(), before.detach())


def test_evaluation_records_nothing():
    for module in (norm_of(CONFIGS["delayed"]).eval(), SwiGLUCast(CONFIGS["delayed"]).eval()):
        module(torch.randn(4, K))
        assert module.cast_output.current_amax == 0


def test_checkpoints_copies_and_pickles():
    norm = norm_of(CONFIGS["delayed"])
    norm(torch.randn(4, K))
    sync_float8_amax_and_scale_history(norm)
    x = torch.randn(4, K)
    expected = norm(x)
    loaded = norm_of(CONFIGS["delayed"])
    loaded.load_state_dict(norm.state_dict())
    for other in (loaded, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert_same_float8(other(x), expected)
    loaded.load_state_dict(nn.RMSNorm(K).state_dict())  # strict, and a new history
    assert not loaded.cast_output.history_ready
    gate = SwiGLUCast(CONFIGS["delayed"])
    gate.load_state_dict(SwiGLUCast(CONFIGS["delayed"]).state_dict())
    norm.cast_output.hidden = True
    assert list(norm.state_dict()) == ["weight"]


def test_a_model_made_on_meta_comes_to_life():
    with torch.device("meta"):
        norm, gate = RMSNormCast(K, config=CONFIGS["delayed"]), SwiGLUCast(CONFIGS["delayed"])
    assert norm(torch.empty(4, K, device="meta")).shape == (4, K)
    assert gate(torch.empty(4, K, device="meta")).shape == (4, K // 2)
    norm.load_state_dict({"weight": torch.ones(K)}, assign=True)
    assert norm(torch.randn(4, K)).shape == (4, K)
    with pytest.raises(ValueError, match=r"SwiGLUCast: input is on cpu, cast_output on meta; mo"):
        gate(torch.randn(4, K))
    assert gate.to_empty(device="cpu")(torch.randn(4, K)).shape == (4, K // 2)


def test_from_float_shares_what_the_norm_has():
    plain = nn.RMSNorm(K, eps=1e-3).eval()
    norm = RMSNormCast.from_float(plain, CONFIGS["delayed"])
    assert norm.weight is plain.weight and norm.eps == 1e-3 and not norm.cast_output.training
    assert list(plain.state_dict()) == ["weight"]
    assert isinstance(norm, nn.RMSNorm)
    centred = LayerNormCast.from_float(nn.LayerNorm(K, eps=1e-3), fqn="layers.0.norm")
    assert centred.eps == 1e-3 and centred.bias is not None and isinstance(centred, nn.LayerNorm)
    with pytest.raises(TypeError, match=r"RMSNormCast: a LayerNorm is not nn\.RMSNorm, of"):
        RMSNormCast.from_float(nn.LayerNorm(K))
    with pytest.raises(TypeError, match=r"layers.0.norm \(LayerNormCast\): input is torch.float64"):
        centred(torch.randn(4, K).double())
    with pytest.raises(ValueError, match=r"layers.0.norm \(LayerNormCast\): input is \(4, 8\)"):
        centred(torch.randn(4, 8))


def test_high_precision_is_the_plain_module():
    norm, gate, x = norm_of(), SwiGLUCast(), torch.randn(4, 2 * K)
    expected = F.silu(x[:, :K]) * x[:, K:]
    with high_precision(nn.ModuleList([norm, gate])):
        assert_bitwise(norm(x[:, :K]), F.rms_norm(x[:, :K], (K,), norm.weight, 1e-6))
        assert_bitwise(gate(x), expected)
        assert_bitwise(gate(x[:, :K], x[:, K:]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_to_its_dtype_first(dtype):
    norm, layer, x = norm_of(), Float8Linear(K, 32), torch.randn(8, K, requires_grad=True)
    twin = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype):
        y = norm(x)
        out, expected = layer(y), twin(F.rms_norm(x, (K,), norm.weight, 1e-6))
        gate = SwiGLUCast()(torch.randn(4, 2 * K))
    assert y.dtype == gate.dtype == dtype
    assert_bitwise(out.detach(), expected.detach())
    out.backward(torch.randn(8, 32).to(dtype))
    assert x.grad.dtype == norm.weight.grad.dtype == torch.float32


def test_what_is_kept_for_backward():
    """x itself and rstd; of the result one byte per element, kept by the layer."""
    norm = norm_of(dtype=torch.bfloat16, size=64)
    layer = Float8Linear(64, 32, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    model = nn.Sequential(norm, layer)
    found = saved_bytes(lambda: model(x * 1), model)
    assert found <= 3 * 32 * 64 + 4 * 32 + 8


# --- compile


@pytest.mark.parametrize(("recipe", "ops"), [("tensorwise", False), ("delayed", True)])
def test_a_block_compiles_to_one_graph_with_the_bits_of_eager(recipe, ops):
    eager = block(CONFIGS[recipe])
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    with by_ops() if ops else mock.patch.object(fused_autograd, "_load"):
        for step in range(2):
            x, g = torch.randn(16, K), torch.randn(16, K)
            found = grads(run(x), g, *compiled.parameters())
            for a, b in zip(found, grads(eager(x), g, *eager.parameters()), strict=True):
                assert_bitwise(a, b, f"{recipe}, step {step}")
            for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
                assert_bitwise(a, b, f"{recipe}, step {step}")
            sync_float8_amax_and_scale_history(eager)
            sync_float8_amax_and_scale_history(compiled)


# --- refusals


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_refuses_casts_with_more_than_one_scale(recipe):
    with pytest.raises(
        ValueError, match=r"'dynamic (rowwise|1x128) e4m3 pow2'.*: use nn.RMSNorm and"
    ):
        RMSNormCast(K, config=RECIPES[recipe])
    with pytest.raises(
        ValueError, match=r"SwiGLUCast casts once.* use F.silu\(gate\) \* up and let"
    ):
        SwiGLUCast(RECIPES[recipe])


def test_refuses_a_disabled_cast():
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    with pytest.raises(ValueError, match=r"cast_config_input is 'high precision': use nn.RMSNorm"):
        RMSNormCast(K, config=Float8LinearConfig(off, off, off))


def test_refuses_a_second_cast_for_the_weight_gradient():
    config = Float8LinearConfig(cast_config_input_for_grad_weight=STATIC)
    with pytest.raises(ValueError, match=r", for grad_weight 'static .*scale=0.125': use nn.RMSN"):
        RMSNormCast(K, config=config)


def test_refuses_inputs_by_name():
    norm, gate, x = norm_of(), SwiGLUCast(), torch.randn(4, K)
    with pytest.raises(ValueError, match=r"normalized_shape is \(4, 48\); a GEMM reads rows"):
        RMSNormCast((4, K))
    with pytest.raises(TypeError, match=r"RMSNormCast: input is torch.float64, expected torch.f"):
        norm(x.double())
    with pytest.raises(TypeError, match=r"RMSNormCast: input is a Float8Tensor, expected torch.f"):
        norm(norm(x))
    with pytest.raises(ValueError, match=r"RMSNormCast: input is \(4, 16\), expected \(..., 48\)"):
        norm(x[:, :16])
    with pytest.raises(ValueError, match=r"SwiGLUCast: gate and up have no halves in \(4, 5\)"):
        gate(x[:, :5])
    with pytest.raises(TypeError, match=r"SwiGLUCast: gate is torch.float32 and up torch.bfloat16"):
        gate(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"SwiGLUCast: gate is \(4, 48\) and up \(2, 48\)"):
        gate(x, x[:2])


@pytest.mark.parametrize(
    "module", [norm_of(), layer_norm_of(), SwiGLUCast()], ids=["norm", "layer norm", "gate"]
)
def test_refuses_a_second_derivative(module):
    x = torch.randn(4, K, requires_grad=True)
    y = module(x)
    with pytest.raises(RuntimeError, match="Cast has no second derivative"):
        torch.autograd.grad(y, x, torch.ones(y.shape), create_graph=True)


# --- the docstring


def test_the_example_of_the_docstring_trains():
    example = re.search(r"::\n\n((?:    .*\n|\n)+)", fused.__doc__).group(1)
    names = vars(fused) | {"convert_to_float8_training": convert_to_float8_training}
    scope = dict(names)
    exec(inspect.cleandoc(example), scope)
    model = scope["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(16, 64)).backward(torch.randn(16, 64))
        optimizer.step()
        sync_float8_amax_and_scale_history(model)
    assert model.norm.cast_output.history_ready and model.gate.cast_output.history_ready
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_loading_a_plain_checkpoint_starts_every_history_anew():
    config = CONFIGS["delayed"]
    model = block(config)
    for _ in range(2):
        model(torch.randn(16, K) * 1e4).sum().backward()
        sync_float8_amax_and_scale_history(model)
    with high_precision(model):
        plain = model.state_dict()
    model.load_state_dict(plain)
    fresh = block(config)
    fresh.load_state_dict(plain)
    x = torch.randn(16, K)
    assert_bitwise(model(x), fresh(x))


@EVERY_CONFIG
def test_the_way_back_is_plain(config):
    model = block(config)
    x = torch.randn(16, K)
    with high_precision(model):
        expected, keys = model(x), set(model.state_dict())
    parameters = [p.data_ptr() for p in model.parameters()]
    convert_from_float8_training(model)
    assert (type(model.norm), type(model.gate)) == (nn.RMSNorm, fused.SwiGLU)
    assert_bitwise(model(x), expected)
    assert set(model.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters()] == parameters
    assert not hasattr(model.norm, "config")


def test_a_plain_layer_behind_a_producer_is_told_what_to_do():
    with pytest.raises(ValueError, match="Cast or SwiGLUCast, convert the layer that reads"):
        nn.Linear(K, 16)(norm_of()(torch.randn(4, K)))


def test_refuses_arguments_that_are_no_config():
    with pytest.raises(TypeError, match=r"SwiGLUCast: config must be a Float8LinearConfig, got 't"):
        SwiGLUCast("tensorwise")
    with pytest.raises(TypeError, match=r"RMSNormCast: eps must be a number.*config is a keyword"):
        RMSNormCast(K, Float8LinearConfig())
    with pytest.raises(TypeError, match=r"LayerNormCast: eps must be a number.*config is a keywo"):
        LayerNormCast(K, Float8LinearConfig())


@pytest.mark.parametrize("make", [lambda: RMSNormCast(64), SwiGLUCast], ids=["norm", "gate"])
def test_one_that_was_pickled_before_it_kept_its_name_runs_on(make):
    old = make()
    for name in ("fqn", "shares_cast"):
        del old.__dict__[name]
    x = torch.randn(4, 64)
    assert_same_float8(pickle.loads(pickle.dumps(old))(x), make()(x), "old")
    assert old.to_float()(x).dtype == x.dtype
    old.load_state_dict(make().state_dict())
