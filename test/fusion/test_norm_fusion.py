"""`fuse_norms`: the numbers of the norm and its layers apart, from one copy of what they read."""

from __future__ import annotations

import copy
import logging
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline
from meter import saved_bytes
from torch import nn

import float8
from float8 import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.fusion import (
    LayerNormCast,
    RMSNormCast,
    fuse_norms,
    norm_autograd,
    register_norm,
)
from float8.fusion.norm_fusion import NORM_RULES, resolved

D = 32
STATIC = CastConfig(scaling_type=ScalingType.STATIC, static_scale=0.02)
CONFIGS = {
    "tensorwise": RECIPES["tensorwise"],
    "delayed": RECIPES["delayed"],
    "dequantised": Float8LinearConfig(dequantize_in_backward=True),
    "static": Float8LinearConfig(STATIC),
}
PAIRS = {"norm1": ["q", "k", "v"], "norm2": ["up"]}


class Block(nn.Module):
    """Attention behind a LayerNorm, a feed-forward layer behind an RMSNorm."""

    def __init__(self, dim=D):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight, 1.0, 0.3)

    def forward(self, x):
        h = self.norm1(x)
        x = x + F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def fuse(model, pairs=PAIRS):
    return fuse_norms(model, pairs)


def converted(model=None, config=None, keep=()):
    model = Block() if model is None else model
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda m, fqn: fqn not in keep
    )


def gradients(model, x, g):
    out = model(x)
    return [out, *torch.autograd.grad(out, list(model.parameters()), g)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_norms_and_layers_apart(dtype, config):
    torch.manual_seed(5)
    exact = Block().double()
    apart = converted(copy.deepcopy(exact).to(dtype), config)
    together = copy.deepcopy(apart)
    names = list(dict(apart.named_parameters()))
    fusion = fuse(together)
    assert fusion.fused == [("norm1", ["q", "k", "v"]), ("norm2", ["up"])]
    assert list(dict(together.named_parameters())) == names
    for step in range(2):  # delayed: dynamic, then by its history
        x, g = torch.randn(2, 16, D).to(dtype), torch.randn(2, 16, D).to(dtype)
        found, baseline = gradients(together, x, g), gradients(apart, x, g)
        want = gradients(exact, x.double(), g.double())
        for name, a, e, b in zip(["output", *names], found, want, baseline, strict=True):
            # The bits of a bfloat16 norm may differ where float32's rounding meets a tie.
            assert_error_within_baseline(a, e, b, 1.05, f"step {step}, {dtype}", name)
        for model in (apart, together):
            sync_float8_amax_and_scale_history(model)
    if config.uses_delayed_scaling:
        assert_error_within_baseline(
            together.norm1.cast_output.amax_history, apart.q.cast_input.amax_history.double(),
            apart.k.cast_input.amax_history,
        )  # fmt: skip


def test_one_copy_is_kept_of_what_three_layers_read():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(256)  # torch's keeps its input, and two floats a row
            self.q, self.k, self.v = (nn.Linear(256, 64, bias=False) for _ in range(3))

        def forward(self, x):
            h = self.norm(x * 1)
            return self.q(h) + self.k(h) + self.v(h)

    model = converted(Reads().bfloat16())
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    before = saved_bytes(lambda: model(x), model)
    assert fuse(model, {"norm": ["q", "k", "v"]}).fused
    after = saved_bytes(lambda: model(x), model)
    one_copy, small = 128 * 256, 2 * 4 * 128 + 64
    assert abs(before - after - 2 * one_copy) <= small, "two of three copies are gone"
    assert after <= 3 * one_copy + small, "the norm's input in bfloat16, its result in float8"


def test_what_was_done_is_said_and_logged_once(caplog):
    model = converted(keep=("k", "down"))
    with caplog.at_level(logging.INFO, "float8"):
        said = str(fuse(model))
    assert [r.getMessage() for r in caplog.records if "fused" in r.getMessage()] == [said]
    assert said == (
        "fused with the casts beside them: 1 norms\n  norm2 -> up\n"
        "  left alone: norm1: k reads it, a Linear, not a Float8Linear"
    )
    again = fuse(model)
    assert again.fused == [] and again.skipped["norm2"] == "it writes float8 already"
    assert isinstance(model.norm2, RMSNormCast)


def test_a_layer_that_reads_two_norms_joins_all_their_histories():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.RMSNorm(D), nn.LayerNorm(D)
            self.shared, self.own = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            h = self.b(-x)
            return self.shared(self.a(x)) + self.shared(h) + self.own(h)

    model = converted(Shared(), RECIPES["delayed"])
    assert len(fuse(model, {"a": "shared", "b": ["shared", "own"]}).fused) == 2
    cast = model.shared.cast_input
    assert cast is model.own.cast_input is model.a.cast_output is model.b.cast_output
    model(torch.randn(16, D)).sum().backward()
    sync_float8_amax_and_scale_history(model)
    assert cast.history_ready


def set_(**modules):
    return lambda m: [setattr(m, name, make()) for name, make in modules.items()]


def replaced(name):
    return lambda m: setattr(getattr(m, name), "forward", getattr(m, name).forward)


def compiled(m):
    m.norm2._compiled_call_impl = m.norm2.forward  # as its compile() does, at once


Own = type("Own", (nn.RMSNorm,), {})
SPOILT = [
    (
        lambda m: m.norm2.register_forward_hook(print),
        "it has hooks, which would see",
    ),
    (lambda m: m.up.register_forward_pre_hook(print), "up reads it and has forward hooks, which"),
    (replaced("up"), "up reads it: its forward was replaced"),
    (replaced("norm2"), "its forward was replaced"),
    (set_(norm2=lambda: nn.LayerNorm((16, D))), "it normalises more than the last dimension"),
    (set_(norm2=lambda: Own(D)), "its type is Own, not nn.RMSNorm or nn.LayerNorm"),
    (set_(up=lambda: Float8Linear(D, D, config="rowwise")), "up reads it, and a norm casts once"),
    (set_(q=lambda: Float8Linear(D, D, config=CONFIGS["static"])), "up and q read it, and cast"),
    (compiled, "it was compiled on its own"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
def test_what_cannot_be_fused_says_why(spoil, reason):
    model = converted()
    spoil(model)
    fusion = fuse(model, {"norm2": ["up", "q"] if reason.startswith("up and q") else "up"})
    assert fusion.skipped["norm2"].startswith(reason)
    assert not isinstance(model.norm2, (RMSNormCast, LayerNormCast))


# --- declarations


def test_a_model_declares_pairs_and_a_norm_without_has_the_way_out():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    converted(model)
    assert fuse(model, {}).skipped["layers.1.norm1"] == (
        "the layers that read it are not declared: pass pairs={'layers.1.norm1': [names of "
        "layers]}, with * for a part that differs between blocks"
    )
    pairs = {"layers.*.norm1": [f"layers.*.{n}" for n in "qkv"], "layers.0.norm2": "layers.0.up"}
    found = dict(fuse(model, pairs).fused)
    assert found == {
        "layers.0.norm1": ["layers.0.q", "layers.0.k", "layers.0.v"],
        "layers.0.norm2": ["layers.0.up"],
        "layers.1.norm1": ["layers.1.q", "layers.1.k", "layers.1.v"],
    }
    model.layers[0](torch.randn(2, 16, D)).sum().backward()


NAMES = [f"layers.{i}.{part}" for i in (0, 1, 10) for part in ("norm", "at.q", "at.k", "up")]


def test_stars_stand_for_one_part_on_both_sides():
    found = resolved(NAMES, {"layers.*.norm": ["layers.*.at.q", "layers.*.at.k"]})
    assert found == {
        f"layers.{i}.norm": [f"layers.{i}.at.q", f"layers.{i}.at.k"] for i in (0, 1, 10)
    }
    assert resolved(NAMES, {"layers.1*.norm": "layers.1*.up"}).keys() == {
        "layers.1.norm",
        "layers.10.norm",
    }


def test_a_norm_that_is_declared_under_two_names_has_the_readers_of_both():
    model = nn.ModuleList([Block(), Block()])
    model[1].norm2 = model[0].norm2
    pairs = {"*.norm2": "*.up"}
    reason = fuse(converted(copy.deepcopy(model), keep=("0.up",)), pairs).skipped["0.norm2"]
    assert reason == "0.up reads it, a Linear, not a Float8Linear"
    assert ("0.norm2", ["0.up", "1.up"]) in fuse(converted(model), pairs).fused


def test_a_wrong_declaration_is_seen_at_the_first_forward():
    block, x = converted(Block(), keep=("k",)), torch.randn(2, 16, D)
    fuse(block, {"norm1": ["q", "v"], "norm2": "up"})
    with pytest.raises(ValueError, match="float8 multiplies two Float8Tensors"):
        block(x)
    block.forward = lambda x: torch.cat([x, block.norm1(x)])
    with pytest.raises(NotImplementedError, match=r"aten\.cat.* is not defined"):
        block(x)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"norm3": "up"}, "no norm 'norm3'"),
        ({"norm2": "upp"}, "no layer 'upp'"),
        ({"norm2": "*"}, r"no layer '\*'"),
    ],
)
def test_refuses_pairs_that_mean_nothing(pairs, message):
    model = converted()
    with pytest.raises(ValueError, match=message):
        fuse(model, pairs)
    assert type(model.norm1) is nn.LayerNorm


def test_high_precision_of_a_fused_model_is_the_plain_model():
    model = converted()
    x = torch.randn(2, 16, D)
    fuse(model)
    with high_precision(model):
        assert_bitwise(model(x).detach(), convert_from_float8_training(copy.deepcopy(model))(x))
    again = converted()
    with high_precision(again):  # layers dequantise what the norms cast
        fuse(again)
        assert again(x).isfinite().all()


# --- other norms


class LikeLlama(nn.Module):
    """An RMS norm as model libraries write them."""

    def __init__(self, size, eps=1e-4):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x32.to(x.dtype)


def test_a_norm_of_another_type_is_registered():
    plain = nn.Sequential(LikeLlama(D), nn.Linear(D, D))
    model = converted(copy.deepcopy(plain))
    apart = copy.deepcopy(model)
    assert fuse(model, {}).skipped == {}, "nothing marks it as a norm"
    declared = fuse(model, {"0": "1"}).skipped["0"]
    assert declared.startswith("its type is LikeLlama") and "register_norm" in declared
    register_norm(LikeLlama, RMSNormCast, eps=lambda norm: norm.variance_epsilon)
    try:
        assert fuse(model, {"0": "1"}).fused == [("0", ["1"])]
    finally:
        del NORM_RULES[LikeLlama]
    x = torch.randn(16, D) / 100  # of which eps is half
    assert_error_within_baseline(model(x), plain.double()(x.double()), apart(x), 1.05)
    with high_precision(model):
        assert model[0](x).dtype == torch.float32
    back = convert_from_float8_training(model)[0]
    assert type(back) is LikeLlama and vars(back).keys() == vars(plain[0]).keys()


# --- state


def test_histories_are_joined_and_checkpoints_carry_them_on():
    model, x = converted(config=RECIPES["delayed"]), torch.randn(2, 16, D)
    model(x).sum().backward()
    sync_float8_amax_and_scale_history(model)
    before, scale = copy.deepcopy(model.state_dict()), model.q.cast_input.scale.clone()
    with torch.no_grad():
        model.k.cast_input.scale.mul_(2)  # as if the layer had also read larger inputs
    fuse(model)
    cast = model.norm1.cast_output
    assert cast is model.q.cast_input is model.k.cast_input is model.v.cast_input
    assert cast.history_ready and cast.scale == 2 * scale
    model.load_state_dict(before)  # strict, from before: the histories of the layers
    assert cast.history_ready and cast.scale == scale
    fused = copy.deepcopy(model.state_dict())
    assert fused.keys() == before.keys(), "a model that is not fused loads it too"
    model.load_state_dict(fused)
    assert cast.scale == scale and cast is model.norm1.cast_output
    twin = copy.deepcopy(model)
    assert twin.norm1.cast_output is twin.v.cast_input is not cast
    model.load_state_dict(Block().state_dict())  # a plain one, strict: a new history
    assert not cast.history_ready
    with high_precision(model):
        assert model.state_dict().keys() == Block().state_dict().keys()


def test_a_model_made_on_meta_starts_with_new_histories():
    with torch.device("meta"):
        model = converted(config=RECIPES["delayed"])
    fuse(model)

    def unwritten(t, device):
        return torch.full(t.shape, torch.nan, device=device)

    with mock.patch.object(torch, "empty_like", unwritten):
        model.to_empty(device="cpu")
    assert model.norm1.weight.isnan().all()
    assert {float(buffer.sum()) for buffer in model.buffers()} == {0.0}
    assert model.norm1.cast_output is model.v.cast_input
    # DDP does not broadcast the new buffers.
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert {name for name, _ in model.named_buffers()} <= ignored


def test_evaluation_and_the_way_back():
    plain = Block().eval()
    model = converted(copy.deepcopy(plain))
    model.norm1.register_forward_pre_hook(lambda *_: None)  # it sees the input, which is plain
    fuse(model)
    assert not model.norm1.training and model.norm1._forward_pre_hooks
    with torch.no_grad():
        model(torch.randn(2, 16, D))
    parameters = list(model.parameters())
    back = convert_from_float8_training(model)
    assert {n: type(m) for n, m in back.named_modules()} == {
        n: type(m) for n, m in plain.named_modules()
    }
    assert all(a is b for a, b in zip(back.parameters(), parameters, strict=True))
    assert vars(back.norm2).keys() == vars(plain.norm2).keys()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_calibrated_scales_are_what_fused_layers_multiply_by(config):
    model, x = converted(config=config), torch.randn(2, 16, D)
    fuse(model)
    scales = float8.calibrate(model, [x]).static_scales()
    scales |= dict.fromkeys(("q", "k", "v"), 0.125)
    float8.convert_to_float8_inference(model, static_scales=scales)
    assert type(model.norm1) is nn.LayerNorm
    apart = model(x)
    assert fuse(model).fused == [("norm1", ["q", "k", "v"]), ("norm2", ["up"])]
    assert float(model.norm1(x).scale) == 0.125
    assert_bitwise(model(x), apart)


def test_a_fused_model_compiles_to_one_graph_with_the_bits_of_eager():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            h = self.norm(x)
            return self.q(h) * self.k(h)

    model = converted(Two(), RECIPES["delayed"])
    fuse(model, {"norm": ["q", "k"]})
    twin = copy.deepcopy(model)
    run = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(16, D), torch.randn(16, D)
    with mock.patch.object(norm_autograd, "load_kernels"):
        out = run(x)
        found = [out, *torch.autograd.grad(out, list(twin.parameters()), g)]
    for a, b in zip(found, gradients(model, x, g), strict=True):
        assert_bitwise(a.detach(), b.detach())
    for a, b in zip(twin.buffers(), model.buffers(), strict=True):
        assert_bitwise(a, b)
