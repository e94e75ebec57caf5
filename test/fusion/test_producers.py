"""Norms and gates that return float8: the numbers of the unfused chain, and their state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
    E5M2,
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
from float8.fusion import autograd as fusion_autograd
from float8.fusion import producers
from float8.fusion.autograd import _norm_backward
from float8.fusion.producers import LayerNormCast, RMSNormCast, SwiGLUCast, swiglu_scale
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


def at_most(x: Tensor, limit: float) -> Tensor:
    """With gradient 1 at the limit, as `torch.clamp` had before torch 2.14; since then it has 0."""
    return torch.where(x > limit, limit, x)


class Kind(NamedTuple):
    """A module that returns float8, and the same in plain PyTorch."""

    make: Callable[..., nn.Module]  # (config, dtype, size of the result)
    plain: Callable[..., Tensor]  # (inputs and parameters)
    inputs: int = 1
    bits: Callable[..., Tensor] | None = None  # where plain sums in another order


KINDS = {
    "rms norm": Kind(norm_of, lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6)),
    "layer norm": Kind(layer_norm_of, torchs_layer_norm, bits=one_order_layer_norm),
    "gate": Kind(
        lambda config=None, dtype=None, size=K: SwiGLUCast(config),
        lambda a, b: F.silu(a) * b,
        inputs=2,
    ),
    "clamped gate": Kind(
        lambda config=None, dtype=None, size=K: SwiGLUCast(config, limit=0.75),
        lambda a, b: F.silu(at_most(a, 0.75)) * -at_most(-at_most(b, 0.75), 0.75),
        inputs=2,
    ),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


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
    fusion_autograd._load()
    return mock.patch.object(producers, "runs_producer", lambda device, emulate: not emulate)


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
        inputs = [(1 + torch.randn(2, 16, K)).to(dtype) for _ in range(kind.inputs)]
        g = torch.randn(2, 16, 32).to(dtype)
        y = module(*inputs)
        # In float32 and rounded once.
        plain = plain_of(*(t.detach().float() for t in (*inputs, *module.parameters())))
        plain = plain.to(dtype).requires_grad_()
        y_leaf = y if y.requires_grad else y.requires_grad_()
        assert isinstance(y, Float8Tensor) and y.dtype == dtype and y.shape == inputs[0].shape
        found, expected = layer(y_leaf), twin(plain)
        assert_bitwise(found.detach(), expected.detach())
        of_y = grads(found, g, y_leaf, layer.weight)
        for a, b in zip(of_y, grads(expected, g, plain, twin.weight), strict=True):
            assert_bitwise(a, b)
        for model in (module, layer, twin):
            sync_float8_amax_and_scale_history(model)
        for name, buffer in module.named_buffers():
            assert_bitwise(buffer, getattr(twin.cast_input, name.split(".")[-1]), "", name)


def check_gradients(kind, dtype, shape=(7, 48), together=False):
    """Gradients of inputs and parameters against float64, with a random gradient."""
    module = kind.make(None, dtype, shape[-1])
    leaves = [(0.5 + torch.randn(shape)).to(dtype).requires_grad_() for _ in range(kind.inputs)]
    g = torch.randn(shape).to(dtype)
    y = module(torch.cat(leaves, -1)) if together else module(*leaves)
    leaves += list(module.parameters())
    found = grads(y, g, *leaves)

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_one_tensor_that_holds_gate_and_up(dtype):
    check_gradients(KINDS["gate"], dtype, (2, 3, 33), together=True)
    gate, up = torch.randn(4, K).to(dtype), torch.randn(4, K).to(dtype)
    assert_same_float8(SwiGLUCast()(torch.cat([gate, up], 1)), SwiGLUCast()(gate, up))


# what is wrong -> the kind whose gradients it spoils, the function, the wrong one
FAULTS = {
    "no projection": (
        "rms norm",
        lambda g, x, w, b, mean, rstd: (rstd * (g * w), (g * x * rstd).sum(0), None),
    ),
    "halves exchanged": (
        "gate",
        lambda g, a, b, limit: torch.cat([g * F.silu(a), g * b * a.sigmoid()], 1),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    kind, wrong = FAULTS[fault]
    check_gradients(KINDS[kind], torch.float32)
    of_gate = definition, "swiglu_backward"
    place, name = of_gate if kind == "gate" else (fusion_autograd, "_norm_backward")
    with mock.patch.object(place, name, wrong), pytest.raises(AssertionError, match="replay"):
        check_gradients(KINDS[kind], torch.float32)


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
    found = [
        fusion_autograd.runs_producer(*of) for of in ((cuda, False), (cuda, True), (cpu, False))
    ]
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


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
def test_without_training_the_codes_are_the_same_and_nothing_is_recorded(mode):
    for module in (norm_of(CONFIGS["delayed"]), SwiGLUCast(CONFIGS["delayed"])):
        x = torch.randn(4, K)
        expected = module(x)
        module.cast_output.reset_parameters()
        with nullcontext() if mode == "eval" else getattr(torch, mode)():
            y = module.train(mode != "eval")(x)
        assert_bitwise(y.float8_data, expected.float8_data)
        assert module.cast_output.current_amax == 0


@pytest.mark.parametrize("limit", [10.0, 0.1])
def test_the_scale_of_a_limit_is_the_least_that_saturates_nothing(limit):
    cast = CastConfig(ScalingType.STATIC, static_scale=swiglu_scale(limit))
    module = SwiGLUCast(replace(RECIPES["tensorwise"], cast_config_input=cast), limit=limit)
    gate = torch.linspace(-4, 2 * limit, 4001)[None]
    up = torch.full_like(gate, limit)
    largest = F.silu(gate.double().clamp(max=limit)).mul(limit).abs().max()
    assert 0.99 < largest / (swiglu_scale(limit) * 448) <= 1.0001
    assert swiglu_scale(limit, E5M2) * 57344 == swiglu_scale(limit) * 448
    data = module(gate, torch.full_like(gate, 1e30)).float8_data
    assert data.float().abs().max() == 448
    plain = module.to_float()
    assert plain.limit == limit
    assert_bitwise(plain(gate, 3 * up), plain(gate, up))
    with high_precision(module):
        assert_bitwise(module(gate, -3 * up), plain(gate, -up))


# --- the path of a GPU, with the ops' references


@EVERY_CONFIG
def test_the_ops_compute_what_plain_torch_does(config):
    plain = nn.Sequential(layer_norm_of(config), block(config))
    plain[0].to_float()  # which leaves it as it is
    plain.insert(1, Float8Linear(K, K, config=config))
    ops = copy.deepcopy(plain)
    for limit in (None, 0.5):
        plain[-1].gate.limit = ops[-1].gate.limit = limit
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
    norm, gate, x = norm_of(), SwiGLUCast(), torch.randn(2, 8, 2 * K)
    with by_ops():
        half = x[..., :K]
        for y in (norm(half), layer_norm_of()(half), gate(x), gate(half, x[..., K:])):
            assert_bitwise(y.data_t, y.float8_data.flatten(0, -2).t())
            assert y.data_t.is_contiguous()
        with torch.no_grad():
            assert norm(x[..., :K]).data_t is None
    assert norm_of()(x[..., :K]).data_t is None  # on a CPU a reader takes a view


@pytest.mark.cuda
@EVERY_KIND
@EVERY_CONFIG
def test_on_a_gpu_it_is_close_to_the_unfused_chain(kind, config):
    module = kind.make(config, torch.bfloat16, 256).cuda()
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [x, (x * 2).detach().requires_grad_()][: kind.inputs]
    g = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def plain(*inputs):
        return kind.plain(*inputs, *(p.to(inputs[0].dtype) for p in module.parameters()))

    y = module(*inputs)
    exact = plain(*(t.detach().double() for t in inputs))
    scale = y.scale.reshape(1, 1)
    baseline = Float8Tensor.from_high_precision(plain(*inputs).detach(), y.format, scale=scale)
    assert_error_within_baseline(y.detach().dequantize(), exact, baseline.dequantize())
    assert_bitwise(y.data_t, y.float8_data.t())
    x64 = [t.detach().double().requires_grad_() for t in inputs]
    want = torch.autograd.grad(plain(*x64), x64, g.double())
    base = torch.autograd.grad(plain(*inputs), inputs, g)
    for a, b, c in zip(torch.autograd.grad(y, inputs, g), want, base, strict=True):
        assert_error_within_baseline(a, b, c, 2.0)


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
    gate = SwiGLUCast(CONFIGS["delayed"])
    gate.load_state_dict(SwiGLUCast(CONFIGS["delayed"]).state_dict())
    norm.cast_output.hidden = True
    assert list(norm.state_dict()) == ["weight"]


def test_modules_made_on_meta_run_once_they_have_values():
    with torch.device("meta"):
        norm, gate = RMSNormCast(K, config=CONFIGS["delayed"]), SwiGLUCast(CONFIGS["delayed"])
    assert norm(torch.empty(4, K, device="meta")).shape == (4, K)
    assert gate(torch.empty(4, K, device="meta")).shape == (4, K // 2)
    norm.load_state_dict({"weight": torch.ones(K)}, assign=True)
    assert norm(torch.randn(4, K)).shape == (4, K)
    with pytest.raises(ValueError, match="SwiGLUCast: input is on cpu, cast_output is not"):
        gate(torch.randn(4, K))
    assert gate.to_empty(device="cpu")(torch.randn(4, K)).shape == (4, K // 2)


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


# --- compiled and recomputed


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        *(("tensorwise", "compile"), ("tensorwise", "dynamic")),
        *(("delayed", "ops"), ("delayed", "checkpoint")),
    ],
)
def test_a_block_compiled_or_recomputed_has_the_bits_of_eager(recipe, how):
    eager = block(CONFIGS[recipe])
    eager.gate.limit = 1.5
    model = copy.deepcopy(eager)
    if how == "checkpoint":
        run = partial(checkpoint, model, use_reentrant=False)
    else:
        dynamic = how == "dynamic" or None
        run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with by_ops() if how == "ops" else mock.patch.object(fusion_autograd, "_load"):
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
    (lambda: SwiGLUCast(RECIPES["blockwise"]), ValueError, "SwiGLUCast casts once.*x128"),
    (lambda: RMSNormCast(K, config=TWO_CASTS), ValueError, "for grad_weight 'static .*0.125'"),
    (lambda: RMSNormCast(K, config=SMOOTH), ValueError, "finds no factors.*use nn.RMSNorm"),
    (lambda: SwiGLUCast(SMOOTH), ValueError, r"finds no factors of channels.*use F.silu\(gate\)"),
    (lambda: RMSNormCast((4, K)), ValueError, r"normalized_shape is \(4, 48\)"),
    (lambda: norm_of()(X[:, :16]), ValueError, r"RMSNormCast: input is \(4, 16\)"),
    (lambda: SwiGLUCast(limit=0.0), ValueError, "limit must be above 0, or None, got 0.0"),
    (lambda: SwiGLUCast()(X[:, :5]), ValueError, r"SwiGLUCast: .* halves, .*\(4, 5\)"),
    (lambda: nn.Linear(K, 16)(norm_of()(X)), ValueError, "multiplies two Float8Tensors"),
    (lambda: norm_of()(X.double()), TypeError, "not torch.float64"),
    (lambda: SwiGLUCast()(X, X.bfloat16()), ValueError, "float32.*torch.bfloat16"),
    (lambda: RMSNormCast.from_float(nn.LayerNorm(K)), TypeError, "a LayerNorm is not"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_refusals_name_the_module_and_the_way_out(call, error, words):
    with pytest.raises(error, match=words):
        call()


@EVERY_KIND
def test_refuses_a_second_derivative(kind):
    x = torch.randn(4, K, requires_grad=True)
    y = kind.make()(*[x] * kind.inputs)
    with pytest.raises(RuntimeError, match="_cast has no second derivative"):
        torch.autograd.grad(y, x, torch.ones(y.shape), create_graph=True)


@EVERY_CONFIG
def test_the_way_back_is_plain(config):
    model = block(config)
    x = torch.randn(16, K)
    with high_precision(model):
        expected, keys = model(x), set(model.state_dict())
    parameters = [p.data_ptr() for p in model.parameters()]
    convert_from_float8_training(model)
    assert (type(model.norm), type(model.gate)) == (nn.RMSNorm, producers.SwiGLU)
    assert_bitwise(model(x), expected)
    assert set(model.state_dict()) == keys
    assert [p.data_ptr() for p in model.parameters()] == parameters
    assert not hasattr(model.norm, "config")
