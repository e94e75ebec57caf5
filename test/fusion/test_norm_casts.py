"""Norms that return float8: the numbers of the unfused chain, and their state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple
from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline, assert_same_float8
from shapes import pairs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8Tensor,
    ScalingType,
    convert_from_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.fusion import norm_autograd, norm_casts
from float8.fusion.norm_autograd import _norm_backward
from float8.fusion.norm_casts import LayerNormCast, RMSNormCast
from float8.kernels import definition

K = 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATIC = CastConfig(scaling_type=ScalingType.STATIC, static_scale=0.125)
CONFIGS = {
    "tensorwise": RECIPES["tensorwise"],
    "delayed": RECIPES["delayed"],
    "dequantised": Float8LinearConfig(dequantize_in_backward=True),
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


def torchs_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def one_order_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Summed in the order of the library; torch's own CPU kernel sums in another one."""
    return definition.norm(x.flatten(0, -2), weight, bias, 1e-5, True)[0].reshape(x.shape)


class Kind(NamedTuple):
    """A module that returns float8, and the same in plain PyTorch."""

    make: Callable[..., nn.Module]  # (config, dtype, size)
    plain: Callable[..., Tensor]  # (input and parameters)
    bits: Callable[..., Tensor] | None = None  # where plain sums in another order


KINDS = {
    "rms norm": Kind(norm_of, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)),
    "layer norm": Kind(layer_norm_of, torchs_layer_norm, bits=one_order_layer_norm),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = norm_of(config)
        self.linear = Float8Linear(K, K, bias=False, config=config)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def by_ops():
    """Take the path of a GPU on the CPU: the ops, which run their references here."""
    pytest.importorskip("triton")
    norm_autograd.load_kernels("norm_cast", "swiglu_cast", "swiglu_gradients")
    return mock.patch.object(norm_casts, "runs_kernels", lambda device, emulate: not emulate)


def grads(out, g, *tensors):
    return torch.autograd.grad(out, tensors, g)


# --- values and gradients


@EVERY_KIND
@pairs(dtype=DTYPES, config=list(CONFIGS))
def test_the_result_is_the_plain_one_and_the_layers_own_cast(kind, dtype, config):
    module = kind.make(CONFIGS[config], dtype, K)
    layer = Float8Linear(K, 32, dtype=dtype, config=CONFIGS[config])
    twin = copy.deepcopy(layer)
    plain_of = kind.bits or kind.plain
    for _ in range(2):  # delayed: dynamic, then by its history
        x = (1 + torch.randn(2, 16, K)).to(dtype)
        g = torch.randn(2, 16, 32).to(dtype)
        y = module(x)
        # In float32 and rounded once.
        plain = plain_of(*(t.detach().float() for t in (x, *module.parameters())))
        plain = plain.to(dtype).requires_grad_()
        y_leaf = y if y.requires_grad else y.requires_grad_()
        assert isinstance(y, Float8Tensor) and y.dtype == dtype and y.shape == x.shape
        found, expected = layer(y_leaf), twin(plain)
        assert_bitwise(found.detach(), expected.detach())
        of_y = grads(found, g, y_leaf, layer.weight)
        for a, b in zip(of_y, grads(expected, g, plain, twin.weight), strict=True):
            assert_bitwise(a, b)
        for model in (module, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in module.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name.split(".")[-1]), "", name)


def check_gradients(kind, dtype, shape=(7, 48)):
    """Gradients of input and parameters against float64, with a random gradient."""
    module = kind.make(None, dtype, shape[-1])
    x, g = (0.5 + torch.randn(shape)).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    leaves = [x, *module.parameters()]
    found = grads(module(x), g, *leaves)

    def plain(to):
        copies = [t.detach().to(to).requires_grad_() for t in leaves]
        return grads(kind.plain(*copies), g.to(to), *copies)

    exact, baseline = plain(torch.float64), [t.to(dtype) for t in plain(torch.float32)]
    for i, (a, e, b) in enumerate(zip(found, exact, baseline, strict=True)):
        assert_error_within_baseline(a, e, b, 2.0, f"check_gradients({dtype}, {shape})", f"{i}")


@EVERY_KIND
@pairs(dtype=DTYPES, shape=[(7, 48), (2, 3, 33), (37, 1), (257,)])
def test_gradients(kind, dtype, shape):
    if kind.make is not layer_norm_of or shape[-1] > 1:  # of which nothing is left, centred
        check_gradients(kind, dtype, shape)


def test_a_planted_fault_is_seen():
    """The gradient of x without its projection."""

    def wrong(g, x, w, b, mean, rstd):
        return rstd * (g * w), (g * x * rstd).sum(0), None

    check_gradients(KINDS["rms norm"], torch.float32)
    fault = mock.patch.object(norm_autograd, "_norm_backward", wrong)
    with fault, pytest.raises(AssertionError, match="replay"):
        check_gradients(KINDS["rms norm"], torch.float32)


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
@pytest.mark.parametrize("centred", [True, False])
def test_torchs_own_backward_takes_its_arguments(affine, centred):
    """On CUDA tensors without CUDA: the op exists, and returns what autograd expects."""
    with FakeTensorMode():
        x, (mean, rstd) = torch.empty(6, K, device="cuda"), torch.empty(2, 6, 1, device="cuda")
        weight = torch.empty(K, device="cuda") if "weight" in affine else None
        bias = torch.empty(K, device="cuda") if "bias" in affine and centred else None
        of = _norm_backward(x, x, weight, bias, mean if centred else None, rstd)
        shapes = [None if grad is None else tuple(grad.shape) for grad in of]
        assert shapes == [(6, K), *(None if p is None else (K,) for p in (weight, bias))]


def test_kernels_run_on_cuda_alone():
    pytest.importorskip("triton")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    of = ((cuda, False), (cuda, True), (cpu, False))
    found = [norm_autograd.runs_kernels(*each) for each in of]
    assert found == [True, False, False]


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
    assert_bitwise(y.float8_data, codes)


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (0, K), (2, 0, K)])
def test_inputs_of_any_rank_and_empty_batches(shape):
    for module in (norm_of(), layer_norm_of()):
        x = torch.randn(shape, requires_grad=True)
        y = module(x)
        assert y.shape == shape and y.block == (-1,) * len(shape)
        out = Float8Linear(K, 16)(y)
        out.backward(torch.randn_like(out))
        assert x.grad.shape == x.shape


def test_strides_do_not_matter():
    norm, x = norm_of(CONFIGS["static"]), torch.randn(K, 16).t()
    exact = F.rms_norm(x.double(), (K,), norm.weight.double(), 1e-6)
    straight = norm(x.contiguous()).dequantize()  # which sums in another order
    assert_error_within_baseline(norm(x).dequantize(), exact, straight, 1.01)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_without_training_the_codes_are_the_same_and_nothing_is_recorded(mode):
    for module in (norm_of(CONFIGS["delayed"]), layer_norm_of(CONFIGS["delayed"])):
        x = torch.randn(4, K)
        expected = module(x)
        module.cast_output.reset_parameters()
        with nullcontext() if mode == "eval" else getattr(torch, mode)():
            y = module.train(mode != "eval")(x)
        assert_bitwise(y.float8_data, expected.float8_data)
        assert module.cast_output.current_amax == 0


# --- the path of a GPU, with the ops' references


@EVERY_CONFIG
def test_the_ops_compute_what_plain_torch_does(config):
    plain = nn.Sequential(layer_norm_of(config), Float8Linear(K, K, config=config), Block(config))
    plain[0].to_float()  # which leaves it as it is
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


def test_results_have_a_transpose_where_backward_may_need_it():
    norm, x = norm_of(), torch.randn(2, 8, K)
    with by_ops():
        for y in (norm(x), layer_norm_of()(x)):
            assert_bitwise(y.data_t, y.float8_data.flatten(0, -2).t())
            assert y.data_t.is_contiguous()
        with torch.no_grad():
            assert norm(x).data_t is None
    assert norm_of()(x).data_t is None  # on a CPU a reader takes a view


@pytest.mark.cuda
@EVERY_KIND
@EVERY_CONFIG
def test_on_a_gpu_it_is_close_to_the_unfused_chain(kind, config):
    module = kind.make(config, torch.bfloat16, 256).cuda()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def plain(x):
        return kind.plain(x, *(p.to(x.dtype) for p in module.parameters()))

    y = module(x)
    exact, scale = plain(x.detach().double()), y.scale.reshape(1, 1)
    baseline = Float8Tensor.from_high_precision(plain(x).detach(), y.format, scale=scale)
    assert_error_within_baseline(y.detach().dequantize(), exact, baseline.dequantize())
    assert_bitwise(y.data_t, y.float8_data.t())
    x64 = x.detach().double().requires_grad_()
    (want,), (base,) = grads(plain(x64), g.double(), x64), grads(plain(x), g, x)
    assert_error_within_baseline(grads(y, g, x)[0], want, base, 2.0)


# --- state


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
    bare = RMSNormCast(K, elementwise_affine=False, config=CONFIGS["delayed"])
    bare.load_state_dict(copy.deepcopy(bare).state_dict())
    norm.cast_output.hidden = True
    assert list(norm.state_dict()) == ["weight"]


def test_modules_made_on_meta_run_once_they_have_values():
    with torch.device("meta"):
        norm = RMSNormCast(K, config=CONFIGS["delayed"])
        bare = RMSNormCast(K, elementwise_affine=False, config=CONFIGS["delayed"])
    assert norm(torch.empty(4, K, device="meta")).shape == (4, K)
    norm.load_state_dict({"weight": torch.ones(K)}, assign=True)
    assert norm(torch.randn(4, K)).shape == (4, K)
    with pytest.raises(ValueError, match="RMSNormCast: input is on cpu, cast_output is not"):
        bare(torch.randn(4, K))
    assert bare.to_empty(device="cpu")(torch.randn(4, K)).shape == (4, K)


def test_high_precision_is_the_plain_module():
    norm, x = norm_of(), torch.randn(4, K)
    with high_precision(norm):
        assert_bitwise(norm(x), F.rms_norm(x, (K,), norm.weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_to_its_dtype_first(dtype):
    norm, layer, x = norm_of(), Float8Linear(K, 32), torch.randn(8, K, requires_grad=True)
    twin = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype):
        y = norm(x)
        out, expected = layer(y), twin(F.rms_norm(x, (K,), norm.weight, 1e-6))
    assert y.dtype == dtype
    assert_bitwise(out.detach(), expected.detach())
    out.backward(torch.randn(8, 32).to(dtype))
    assert x.grad.dtype == norm.weight.grad.dtype == torch.float32


# --- compiled and recomputed


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        *(("tensorwise", "compile"), ("tensorwise", "dynamic")),
        *(("delayed", "ops"), ("delayed", "checkpoint")),
    ],
)
def test_a_block_compiled_or_recomputed_has_the_bits_of_eager(recipe, how):
    eager = Block(CONFIGS[recipe])
    model = copy.deepcopy(eager)
    if how == "checkpoint":
        run = partial(checkpoint, model, use_reentrant=False)
    else:
        dynamic = how == "dynamic" or None
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with by_ops() if how == "ops" else mock.patch.object(norm_autograd, "load_kernels"):
        for step in range(2):
            x, g = torch.randn(16, K), torch.randn(16, K)
            found = grads(run(x), g, *model.parameters())
            wanted = grads(eager(x), g, *eager.parameters())
            for a, b in zip((*found, *model.buffers()), (*wanted, *eager.buffers()), strict=True):
                assert_bitwise(a, b, f"{recipe}, step {step}")
            sync_float8_amax_and_scale_history(eager)
            sync_float8_amax_and_scale_history(model)


# --- refusals


X = torch.randn(4, K)
TWO_CASTS = Float8LinearConfig(cast_config_input_for_grad_weight=STATIC)
SMOOTH = Float8LinearConfig(smooth_input=True)
REFUSALS = [
    (lambda: RMSNormCast(K, config=RECIPES["rowwise"]), ValueError, "use nn.RMSNorm, and"),
    (lambda: LayerNormCast(K, config=RECIPES["blockwise"]), ValueError, "casts once.*x128"),
    (lambda: RMSNormCast(K, config=TWO_CASTS), ValueError, "for grad_weight 'static .*0.125'"),
    (lambda: RMSNormCast(K, config=SMOOTH), ValueError, "finds no factors.*use nn.RMSNorm"),
    (lambda: RMSNormCast((4, K)), ValueError, r"normalized_shape is \(4, 48\)"),
    (lambda: norm_of()(X[:, :16]), ValueError, r"RMSNormCast: input is \(4, 16\)"),
    (lambda: nn.Linear(K, 16)(norm_of()(X)), ValueError, "multiplies two Float8Tensors"),
    (lambda: norm_of()(X.double()), TypeError, "not torch.float64"),
    (lambda: RMSNormCast.from_float(nn.LayerNorm(K)), TypeError, "a LayerNorm is not nn.RMSNorm"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_refusals_name_the_module_and_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call()


@EVERY_KIND
def test_refuses_a_second_derivative(kind):
    x = torch.randn(4, K, requires_grad=True)
    y = kind.make()(x)
    with pytest.raises(RuntimeError, match="_cast has no second derivative"):
        torch.autograd.grad(y, x, torch.ones(y.shape), create_graph=True)


@EVERY_CONFIG
def test_the_way_back_is_plain(config):
    model = Block(config)
    x = torch.randn(16, K)
    with high_precision(model):
        expected, keys = model(x), set(model.state_dict())
    parameters = [p.data_ptr() for p in model.parameters()]
    convert_from_float8_training(model)
    assert type(model.norm) is nn.RMSNorm
    assert_bitwise(model(x), expected)
    assert set(model.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters()] == parameters
    assert not hasattr(model.norm, "config")
