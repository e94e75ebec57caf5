"""`fuse_feed_forwards`: the bits of the layers apart, and what is kept for backward."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline, sqnr
from meter import saved_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    E5M2,
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_from_float8_training,
    convert_to_float8_training,
    fuse_feed_forwards,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.fusion import feed_forward, norm_autograd, register_feed_forward
from float8.fusion.feed_forward import FEED_FORWARDS, SwiGLUFeedForward
from float8.kernels import definition
from float8.numerics.passes import local_part

K, F_, M = 32, 96, 24  # width, hidden features, tokens
STATIC = CastConfig(scaling_type=ScalingType.STATIC, static_scale=0.02)
CONFIGS = {
    **{name: config for name, config in RECIPES.items() if name != "unit"},
    "static": Float8LinearConfig(STATIC, STATIC, replace(STATIC, target_dtype=E5M2)),
    "dequantised": Float8LinearConfig(dequantize_in_backward=True),
    "MXFP4 weights": replace(RECIPES["mxfp8"], mxfp4_weights=True),
}
BY_ONE_SCALE = {name: CONFIGS[name] for name in ("tensorwise", "delayed", "static")}


class RoundedOnce(torch.autograd.Function):
    """SwiGLU as the definition computes it: in float32, and rounded once."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return definition.swiglu(gate, up).to(gate.dtype)

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        size = gate.shape[-1]
        both = definition.swiglu_gradients(*[t.reshape(-1, size) for t in (g, gate, up)])
        return tuple(half.reshape(gate.shape) for half in both.chunk(2, 1))


def rounded_twice(gate, up):
    return F.silu(gate) * up


class Two(nn.Module):
    """With two layers before SwiGLU."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(K, F_, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(F_, K, bias=False)
        self.act_fn = nn.SiLU()
        self.swiglu = RoundedOnce.apply

    def forward(self, x):
        return self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))


class One(nn.Module):
    """With one layer before SwiGLU."""

    def __init__(self):
        super().__init__()
        self.w13, self.w2 = nn.Linear(K, 2 * F_, bias=False), nn.Linear(F_, K, bias=False)
        self.swiglu = RoundedOnce.apply

    def forward(self, x):
        return self.w2(self.swiglu(*self.w13(x).chunk(2, -1)))


@pytest.fixture(autouse=True)
def _registered():
    register_feed_forward(Two, gate="gate_proj", up="up_proj", down="down_proj")
    register_feed_forward(One, gate="w13", down="w2")
    yield
    del FEED_FORWARDS[Two], FEED_FORWARDS[One]


EVERY_KIND = pytest.mark.parametrize("kind", [Two, One])
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TENSORWISE = RECIPES["tensorwise"]


def always(*how):
    return True


def by_ops():
    """Take the path of a GPU on the CPU: the ops, which run their definitions here."""
    pytest.importorskip("triton")
    norm_autograd.load_kernels("norm_cast", "swiglu_cast", "swiglu_gradients")
    return mock.patch.object(feed_forward, "runs_kernels", always)


def both(kind=Two, config=TENSORWISE, dtype=torch.float32, keeps_float8=False):
    """The converted module, and a copy that is fused; both inside a Sequential."""
    torch.manual_seed(3)
    apart = convert_to_float8_training(nn.Sequential(kind()).to(dtype), config=config)
    if config not in BY_ONE_SCALE.values():
        apart[0].swiglu = rounded_twice
    fused = copy.deepcopy(apart)
    assert len(fuse_feed_forwards(fused, keeps_float8=keeps_float8).fused) == 1
    assert isinstance(fused[0], SwiGLUFeedForward)
    return apart, fused


def operands(dtype=torch.float32, shape=(2, M // 2), seed=5):
    torch.manual_seed(seed)
    return torch.randn(*shape, K).to(dtype), torch.randn(*shape, K).to(dtype)


def step(model, x, g):
    """Output, grad_input, and the gradients of the parameters that have one."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(g)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return {"output": out.detach(), "grad_input": x.grad, **grads}


def assert_same_step(fused, apart, dtype=torch.float32, shape=(2, M // 2), seed=5):
    x, g = operands(dtype, shape, seed)
    got, expected = step(fused, x, g), step(apart, x, g)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert_bitwise(got[name], value, (shape, dtype, seed), name)


def assert_same_state(fused, apart):
    expected = apart.state_dict()
    assert fused.state_dict().keys() == expected.keys()
    for name, value in fused.state_dict().items():
        assert_bitwise(value, expected[name], name)


@EVERY_KIND
@EVERY_CONFIG
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_layers_apart(kind, config, dtype):
    """Over three steps, so that delayed scales are in use; the states stay equal too."""
    apart, fused = both(kind, config, dtype)
    for seed in (5, 6, 7):
        assert_same_step(fused, apart, dtype, seed=seed)
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)
    assert_same_state(fused, apart)


@EVERY_KIND
@pytest.mark.parametrize("config", BY_ONE_SCALE.values(), ids=BY_ONE_SCALE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ops_of_a_gpu_have_the_same_bits(kind, config, dtype):
    apart, fused = both(kind, config, dtype)
    for seed in (5, 6, 7):
        with by_ops():
            assert_same_step(fused, apart, dtype, seed=seed)
        for model in (apart, fused):
            sync_float8_amax_and_scale_history(model)
    assert_same_state(fused, apart)


@EVERY_KIND
@pytest.mark.parametrize("ops", [False, True])
def test_one_scale_is_known_and_the_other_is_not(kind, ops):
    """Dynamic scales serve both until both layers have a history."""
    apart, fused = both(kind, RECIPES["delayed"])
    layer = fused[0].layer_names.first[-1]
    for model in (apart, fused):
        step(model, *operands())
        sync_float8_amax_and_scale_history(model)
        for cast in model[0].get_submodule(layer).casts:
            cast.history_ready = False
    x, g = operands(seed=9)
    with by_ops() if ops else nullcontext():
        got, expected = step(fused, x, g), step(apart, x, g)
    assert all(value.isfinite().all() for value in got.values())
    assert_error_within_baseline(
        got["grad_input"], reference(apart, x, g), expected["grad_input"], 2.0
    )


def reference(model, x, g):
    """grad_input in float64, of the weights without casts."""
    plain = convert_from_float8_training(copy.deepcopy(model)).double()
    plain[0].swiglu = rounded_twice
    x = x.double().requires_grad_()
    plain(x).backward(g.double())
    return x.grad


@EVERY_KIND
@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize(
    "frozen", [("x",), ("down",), ("first",), ("x", "first"), ("down", "first")]
)
def test_what_needs_no_gradient_costs_none(kind, ops, frozen):
    apart, fused = both(kind)
    for model in (apart, fused):
        names = fused[0].layer_names
        for name in (names.down,) * ("down" in frozen) + names.first * ("first" in frozen):
            model[0].get_submodule(name).weight.requires_grad_(False)
    x, g = operands()
    found = []
    for model in (apart, fused):
        its = x.clone().requires_grad_("x" not in frozen)
        with by_ops() if ops else nullcontext():
            out = model(its)
            out.backward(g)
        found.append([out.detach(), its.grad, *[p.grad for p in model.parameters()]])
    for got, expected in zip(found[1], found[0], strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_bitwise(got, expected, frozen)


class Transposes(TorchDispatchMode):
    """Whether the op writes y's transpose, and those of the gradients."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.float8.swiglu_gradients.default:
            self.seen = args[10:12]
        return func(*args, **(kwargs or {}))


@EVERY_KIND
@pytest.mark.parametrize("frozen", ["none", "down", "first"])
def test_a_gpu_writes_no_transpose_that_nothing_reads(kind, frozen):
    _, fused = both(kind)
    names = {"none": (), "down": (fused[0].layer_names.down,), "first": fused[0].layer_names.first}
    for name in names[frozen]:
        fused[0].get_submodule(name).weight.requires_grad_(False)
    x, g = operands()
    with by_ops(), Transposes() as transposes:
        fused(x.requires_grad_()).backward(g)
    assert transposes.seen == (frozen != "down", frozen != "first")


@EVERY_KIND
@pytest.mark.parametrize("shape", [(5,), (0,), (), (2, 3, 4), (1, 1)])
@pytest.mark.parametrize("ops", [False, True])
def test_inputs_of_any_rank(kind, shape, ops):
    apart, fused = both(kind)
    with by_ops() if ops else nullcontext():
        assert_same_step(fused, apart, shape=shape)


@EVERY_KIND
def test_inputs_of_any_strides_and_gradients_too(kind):
    apart, fused = both(kind)
    x, g = operands(shape=(M,))
    for change in (lambda t: t.t().contiguous().t(), lambda t: t[:1].expand(M, K)):
        got, expected = (step(model, change(x), change(g)) for model in (fused, apart))
        for name in expected:
            assert_bitwise(got[name], expected[name], name)


@EVERY_KIND
def test_less_is_kept_for_backward(kind):
    """x in float8 once, gate and up: nothing of y."""
    apart, fused = both(kind, dtype=torch.bfloat16)
    x, _ = operands(torch.bfloat16)
    x.requires_grad_()
    kept = saved_bytes(lambda: fused(x), fused)
    scales = 4 * 8
    assert M * K + 2 * 2 * M * F_ <= kept <= M * K + 2 * 2 * M * F_ + scales
    assert kept < saved_bytes(lambda: apart(x), apart)


class AtCopies(RoundedOnce):
    """With the gradients at the values of copies, E4M3 by powers of two in groups of 128."""

    @staticmethod
    def backward(ctx, g):
        copies = [at_copy(t) for t in ctx.saved_tensors]
        return RoundedOnce.backward(SimpleNamespace(saved_tensors=copies), g)


def at_copy(x):
    groups = F.pad(x.double(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = 2 ** (groups.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    codes = (groups / scale).float().to(torch.float8_e4m3fn)
    return (codes.double() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


@EVERY_KIND
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_gate_and_up_in_float8(kind, name):
    """The bits of gradients at the copies; that of down also reads y there, and so is close."""
    apart, fused = both(kind, RECIPES[name], torch.bfloat16, keeps_float8=True)
    apart[0].swiglu = AtCopies.apply
    x, g = operands(torch.bfloat16)
    got, expected = step(fused, x, g), step(apart, x, g)
    down = f"0.{fused[0].layer_names.down}.weight"
    assert 25 < sqnr(got.pop(down), expected.pop(down)) < 40
    for each in expected:
        assert_bitwise(got[each], expected[each], each)


@EVERY_KIND
def test_gate_and_up_in_float8_keep_half(kind):
    _, fused = both(kind, RECIPES["rowwise"], torch.bfloat16, keeps_float8=True)
    x, _ = operands(torch.bfloat16)
    kept = saved_bytes(lambda: fused(x.requires_grad_()), fused)
    copies = 2 * M * (F_ + 4)
    assert M * K + copies <= kept <= M * K + copies + 4 * (M + K + 8 * F_)
    with torch.no_grad():
        assert_bitwise(fused(x), fused(x))


@EVERY_KIND
@pytest.mark.parametrize("config", BY_ONE_SCALE.values(), ids=BY_ONE_SCALE)
def test_gate_and_up_in_float8_by_the_ops_of_a_gpu(kind, config):
    _, fused = both(kind, config, torch.bfloat16, keeps_float8=True)
    x, g = operands(torch.bfloat16)
    expected = step(fused, x, g)
    with by_ops():
        got = step(fused, x, g)
    for each in expected:
        assert_bitwise(got[each], expected[each], each)


@pytest.mark.parametrize(
    ("kind", "name", "ops", "backend"),
    [
        *((Two, "delayed", True, "aot_eager"), (One, "tensorwise", True, "aot_eager")),
        (Two, "mxfp8", False, "aot_eager"),
        pytest.param(Two, "delayed", True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(kind, name, ops, backend):
    torch._dynamo.reset()
    _, fused = both(kind, RECIPES[name])
    x, g = operands()
    with by_ops() if ops else nullcontext():
        expected = step(fused, x, g)
        fused.compile(fullgraph=True, backend=backend)
        got = step(fused, x, g)
    for each in expected:
        assert_bitwise(got[each], expected[each], each)


@EVERY_KIND
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_under_checkpointing(kind, reentrant, name):
    apart, fused = both(kind, RECIPES[name])
    x, g = operands()
    expected = step(apart, x, g)
    got = step(_Checkpointed(fused, reentrant), x, g)
    assert_bitwise(got["output"], expected["output"])
    assert_bitwise(got["grad_input"], expected["grad_input"])
    assert_same_state(fused, apart)


class _Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.reentrant)


@EVERY_KIND
def test_under_autocast(kind):
    apart, fused = both(kind)
    x, g = operands()
    found = []
    for model in (apart, fused):
        its = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(its)
        out.backward(g.to(torch.bfloat16))
        found.append([out.detach(), its.grad, *[p.grad for p in model.parameters()]])
    for got, expected in zip(found[1], found[0], strict=True):
        assert got.dtype == expected.dtype
        assert_bitwise(got, expected)


@EVERY_KIND
def test_a_fused_norm_feeds_it(kind):
    """Its input is then a `Float8Tensor`."""
    apart, fused = both(kind)
    for model in (apart, fused):
        torch.manual_seed(1)
        model.insert(0, nn.RMSNorm(K))
        names = FEED_FORWARDS[kind].first
        float8.fuse_norms(model, {"0": [f"1.{name}" for name in names]})
    assert_same_step(fused, apart)


# --- when the layers run apart


def hooked(model):
    model[0].get_submodule(model[0].layer_names.down).register_forward_hook(lambda *of: None)


def hooked_activation(model):
    model[0].act_fn = nn.SiLU()
    model[0].act_fn.register_forward_hook(lambda *of: None)


def another_activation(model):
    model[0].act_fn = nn.GELU()


def wrapped(model):
    module, name = model[0], model[0].layer_names.first[0]
    setattr(module, name, nn.Sequential(module.get_submodule(name)))


def patched(model):
    layer = model[0].get_submodule(model[0].layer_names.down)
    layer.forward = layer.forward


@EVERY_KIND
@pytest.mark.parametrize(
    "change", [hooked, hooked_activation, another_activation, wrapped, patched]
)
def test_the_layers_run_apart(kind, change):
    apart, fused = both(kind)
    change(fused)
    calls = []
    fused[0].swiglu = lambda *of: calls.append(1) or RoundedOnce.apply(*of)
    x, _ = operands()
    assert_bitwise(fused(x), apart(x))
    assert calls == [1]


def with_a_bias(module, down):
    module.get_submodule(down).bias = nn.Parameter(torch.ones(K))


def with_a_layer_of(config):
    def change(module, down):
        torch.manual_seed(4)
        module.register_module(down, nn.Linear(F_, K, bias=False))
        convert_to_float8_training(module, config=config)

    return change


LATER = {
    "a bias": with_a_bias,
    "another config": with_a_layer_of("blockwise"),
    "smooth_input": with_a_layer_of(replace(TENSORWISE, smooth_input=True)),
}


@EVERY_KIND
@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_layers_that_no_longer_fit_run_apart(kind, change):
    """Their bias or config would be ignored."""
    apart, fused = both(kind, RECIPES["rowwise"])
    x, g = operands()
    before = step(fused, x, g)["output"]
    for model in (apart, fused):
        change(model[0], fused[0].layer_names.down)
    assert_same_step(fused, apart)
    assert not fused(x).equal(before)


@EVERY_KIND
def test_in_high_precision(kind):
    apart, fused = both(kind)
    x, _ = operands()
    with high_precision(fused):
        got = fused(x)
    assert_bitwise(got, convert_from_float8_training(copy.deepcopy(apart))(x))
    assert_bitwise(fused(x), apart(x))


@EVERY_KIND
def test_a_weight_that_is_stored_in_float8(kind):
    apart, fused = both(kind)
    for model in (apart, fused):
        model.requires_grad_(False)
        float8.convert_to_float8_inference(model)
    x, _ = operands()
    assert_bitwise(fused(x), apart(x))


@EVERY_KIND
def test_cached_weights(kind):
    apart, fused = both(kind)
    x, g = operands()
    expected = step(apart, x, g)
    with float8.cached_weights(fused):
        for _ in range(2):
            got = step(fused, x, g)
            for name in expected:
                assert_bitwise(got[name], expected[name], name)


# --- what is fused, and back


def test_back_to_plain_and_copies():
    apart, fused = both()
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(plain_swiglu(fused)))):
        assert isinstance(again[0], SwiGLUFeedForward)
    plain = convert_from_float8_training(fused)
    assert type(plain[0]) is Two and type(plain[0].gate_proj) is nn.Linear
    assert plain[0].__dict__.keys() == Two().__dict__.keys()
    x, _ = operands()
    assert_bitwise(plain(x), convert_from_float8_training(apart)(x))


def plain_swiglu(model):
    del model[0].swiglu  # a function, which pickle does not take
    model[0].swiglu = None
    again = copy.deepcopy(model)
    model[0].swiglu = RoundedOnce.apply
    return again


def test_checkpoints_load_into_each_other():
    apart, fused = both(config=RECIPES["delayed"])
    step(apart, *operands())
    sync_float8_amax_and_scale_history(apart)
    fused.load_state_dict(apart.state_dict())
    assert_same_step(fused, apart, seed=8)


class WithMethods(Two):
    """Of which the type has what forward reads."""

    rounds_twice = True
    swiglu = staticmethod(RoundedOnce.apply)

    def __init__(self):
        super().__init__()
        del self.swiglu

    @property
    def gate(self):
        return self.gate_proj

    def activation(self, x):
        return F.silu(x)

    def forward(self, x):
        gated = self.activation(self.gate(x)) * self.up_proj(x)
        return self.down_proj(gated) if self.rounds_twice else super().forward(x)


def test_a_fused_module_is_of_its_type_too():
    """The root of a model, too, which is fused in place."""
    module = convert_to_float8_training(WithMethods(), config="rowwise")
    assert not fuse_feed_forwards(module).fused  # Two is declared, and not its subclasses
    apart = copy.deepcopy(module)
    FEED_FORWARDS[WithMethods] = FEED_FORWARDS[Two]
    assert fuse_feed_forwards(module).fused == [("", ["gate_proj", "up_proj", "down_proj"])]
    del FEED_FORWARDS[WithMethods]
    assert isinstance(module, WithMethods) and isinstance(module, SwiGLUFeedForward)
    assert module.gate is module.gate_proj
    for again in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_step(again, apart)
    hook = module.down_proj.register_forward_hook(lambda *of: None)
    assert_same_step(module, apart)
    hook.remove()
    module.rounds_twice = apart.rounds_twice = False
    with high_precision(module), high_precision(apart):
        assert_same_step(module, apart)
    assert type(convert_from_float8_training(module)) is WithMethods


def with_bias(module):
    module.down_proj = nn.Linear(F_, K)


def of_another_width(module):
    module.up_proj = nn.Linear(K, 2 * F_, bias=False)


def with_gelu(module):
    module.act_fn = nn.GELU()


def of_another_dtype(module):
    module.down_proj.to(torch.bfloat16)


def replaced_forward(module):
    module.forward = lambda x: x


def with_hook(module):
    module.gate_proj.register_forward_hook(lambda *_: None)


REASONS = {
    with_hook: "its gate_proj has hooks, or a forward of its own",
    with_bias: "its down_proj has a bias",
    of_another_width: r"gate_proj and up_proj compute \{(96, 192|192, 96)\}",
    with_gelu: "its act_fn is a GELU, neither one of its layers nor SiLU",
    of_another_dtype: "its weights have different dtypes",
    replaced_forward: "its forward was replaced",
}


@pytest.mark.parametrize(("change", "words"), REASONS.items())
def test_why_a_module_is_left(change, words, caplog):
    module = Two()
    change(module)
    model = convert_to_float8_training(nn.Sequential(module))
    with caplog.at_level(logging.INFO, "float8"):
        fusion = fuse_feed_forwards(model)
    assert not fusion.fused and model[0] is module
    assert re.search(words, fusion.skipped["0"]) and re.search(words, caplog.text)


def test_why_a_module_is_left_by_its_configs():
    smooth = Float8LinearConfig(smooth_input=True)
    model = convert_to_float8_training(nn.Sequential(One()), config=smooth)
    assert "smooth_input=True" in fuse_feed_forwards(model).skipped["0"]
    model = nn.Sequential(Two())
    convert_to_float8_training(model, module_filter_fn=lambda module, fqn: "gate" in fqn)
    assert "its up_proj is a Linear, not a Float8Linear" in fuse_feed_forwards(model).skipped["0"]
    convert_to_float8_training(model, config="rowwise")
    assert "its layers have different configs" in fuse_feed_forwards(model).skipped["0"]


def test_the_report():
    _, fused = both()
    assert not fuse_feed_forwards(fused).fused  # nothing is left
    model = convert_to_float8_training(nn.Sequential(One()))
    assert str(fuse_feed_forwards(model)) == (
        "fused with the casts beside them: 1 feed-forwards\n  0 -> 0.w13, 0.w2"
    )


def test_errors_name_the_layer():
    _, fused = both()
    with pytest.raises(ValueError, match=r"0\.gate_proj: "):
        fused(torch.randn(4, K + 16))
    x = torch.randn(4, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("ops", [False, True])
def test_a_sync_before_backward_is_an_error(ops):
    _, fused = both(config=RECIPES["delayed"])
    step(fused, *operands())
    sync_float8_amax_and_scale_history(fused)
    x, g = operands()
    with by_ops() if ops else nullcontext():
        out = fused(x.requires_grad_())
        sync_float8_amax_and_scale_history(fused)
        with pytest.raises(RuntimeError, match="changed between the forward and the backward"):
            out.backward(g)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gathers", [False, True])
def test_under_fsdp2(rank, gathers):
    """The weights are gathered for the module, in high precision or in float8."""
    register_feed_forward(Two, gate="gate_proj", up="up_proj", down="down_proj")
    config = replace(RECIPES["rowwise"], enable_fsdp_float8_all_gather=gathers)
    apart, fused = both(config=config)
    for model in (apart, fused):
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(fused[0], SwiGLUFeedForward)
    x, g = operands(seed=rank)
    with mock.patch.object(Two, "forward", None):  # which only the other calls
        got = step(fused, x, g)
    for name, value in step(apart, x, g).items():
        assert_bitwise(local_part(got[name]), local_part(value), name)


@pytest.mark.ranks(2)
def test_sharded_layers_run_apart(rank):
    register_feed_forward(Two, gate="gate_proj", up="up_proj", down="down_proj")
    apart, fused = both(config=RECIPES["rowwise"])
    for model in (apart, fused):
        styles = {name: float8.Float8ColwiseParallel() for name in ("gate_proj", "up_proj")}
        styles["down_proj"] = float8.Float8RowwiseParallel()
        parallelize_module(model[0], init_device_mesh("cpu", (2,)), styles)
    x, g = operands()
    got = step(fused, x, g)
    for name, value in step(apart, x, g).items():
        assert_bitwise(local_part(got[name]), local_part(value), name)
