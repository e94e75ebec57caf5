"""Converted experts: their own forward, with every grouped product in float8, and back again."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_sqnr_at_least
from mixtures import EXPERTS, Experts, Mixture, model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import Float8LinearConfig, convert_from_float8_training, high_precision
from float8.experts.modules import Float8Experts

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp8_2d", "unit")
ENDS = torch.tensor([9, 9, 30, 37], dtype=torch.int32)
pytestmark = pytest.mark.filterwarnings("ignore:recipe .unit.")


def config_of(recipe: str) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(recipe)


def only_experts(module: nn.Module, fqn: str) -> bool:
    return fqn.endswith("experts")


def convert(module: nn.Module, recipe: str = "tensorwise", **options) -> nn.Module:
    return float8.convert_to_float8_training(module, config=config_of(recipe), **options)


def results(module: nn.Module, x: torch.Tensor, *rest) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    out = module(x, *rest)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    wanted = [x, *module.parameters()]
    return [out.detach(), *torch.autograd.grad(out, wanted, g)]


def backward(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """As `results`, by ``backward``, which reentrant checkpointing needs."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def assert_same(actual, expected, replay=""):
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(one, other, f"{replay}, result {i}")


def assert_different(actual, expected):
    assert not any(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# --- what runs


class ByHand(Experts):
    def forward(self, x, ends):
        up, down = (w.mT for w in (self.up, self.down))
        gate, up = float8.grouped_mm(x, up, ends, self.by).chunk(2, -1)
        return float8.grouped_mm(F.silu(gate) * up, down, ends, self.by)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_is_float8s_grouped_mm(recipe):
    config = dataclasses.replace(config_of(recipe), pad_inner_dim=True)
    plain, by_hand, x = Experts().bfloat16(), ByHand().bfloat16(), tokens()
    by_hand.load_state_dict(plain.state_dict())
    by_hand.by = config
    converted = float8.convert_to_float8_training(copy.deepcopy(plain), config=config)
    exact, actual = results(plain, x, ENDS), results(converted, x, ENDS)
    assert_same(actual, results(by_hand, x, ENDS), recipe)
    for one, other in zip(actual, exact, strict=True):
        assert_sqnr_at_least(one, other.double(), 8 if recipe == "unit" else 17, recipe)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, ends: F.grouped_mm(mat_a=x, mat_b=w, offs=ends, bias=None),
        lambda x, w, ends: F.grouped_mm(x, w, offs=ends, out_dtype=torch.bfloat16),
        lambda x, w, ends: torch._grouped_mm(x, mat2=w, offs=ends),
        torch.ops.aten._grouped_mm,
        torch.ops.aten._grouped_mm.default,
    ],
)
def test_every_spelling_of_grouped_mm(product):
    class Spelt(Experts):
        def forward(self, x, ends):
            return product(x, self.up.mT, ends)

    float8.register_experts(Spelt)
    spelt, x = convert(Spelt().bfloat16()), tokens()
    assert_bitwise(spelt(x, ENDS), float8.grouped_mm(x, spelt.up.mT, ENDS))


class Looping(Experts):
    def forward(self, x, ends):
        starts, ends = [0, *ends.tolist()[:-1]], ends.tolist()
        parts = zip(starts, ends, self.up, self.down, strict=True)
        glu = lambda gate, up: F.silu(gate) * up  # noqa: E731
        return torch.cat([glu(*(x[a:b] @ up.T).chunk(2, -1)) @ down.T for a, b, up, down in parts])


def test_a_forward_that_calls_grouped_mm_stands_in_for_a_loop():
    plain, x = Looping().bfloat16(), tokens()
    expected = plain(x, ENDS)
    for _ in range(2):  # again changes nothing
        float8.register_experts(Looping, Experts.forward)
    reference = Experts().bfloat16()
    reference.load_state_dict(plain.state_dict())
    converted = convert(plain)
    assert_same(results(converted, x, ENDS), results(convert(reference), x, ENDS))
    with high_precision(converted):  # runs the type's own, the loop
        assert_bitwise(converted(x, ENDS), expected)


def test_a_forward_without_grouped_mm_is_told_once(caplog):
    class Silent(Experts):
        def forward(self, x, ends):
            return x

    float8.register_experts(Silent)
    silent = convert(nn.Sequential(Silent()))
    for _ in range(2):
        silent[0](tokens(), ENDS)
    compiled = torch.compile(silent[0], fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="call no grouped_mm"):
        compiled(tokens(), ENDS)
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "0: its forward called no grouped_mm, and has run in high precision; "
        "register_experts(type, forward) takes a forward that calls it"
    ]


# --- the module stays what it was


def test_a_converted_module_and_the_way_back():
    plain, x, calls = model(), tokens(), []
    experts = plain[0].experts
    expected = results(plain, x)
    experts.register_forward_hook(lambda *_: calls.append(1))
    before, keys = vars(experts).keys(), plain.state_dict().keys()
    converted = convert(plain)
    module = converted[0].experts
    assert isinstance(module, Experts) and isinstance(module, Float8Experts)
    assert type(module).__name__ == "Float8Experts"
    assert module.config == "the module's own" and module.up is experts.up
    assert converted.state_dict().keys() == keys
    converted(x)
    assert calls == [1]
    back = convert_from_float8_training(converted)
    assert type(back[0].experts) is Experts and vars(back[0].experts).keys() == before
    assert_same(results(back, x), expected)


def test_a_model_trains_and_loads_plain_checkpoints(caplog):
    converted, other, x = convert(model(), "rowwise"), model(), tokens()
    done = converted.float8_conversion
    assert done.experts == ["0.experts"] and done.converted == ["0.experts", "0.shared_expert"]
    assert "routes tokens" in done.skipped["0.gate"] and "2 layers, 1 of them experts" in str(done)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    converted.load_state_dict(other.state_dict())
    expected, actual = results(other, x), results(converted, x)
    assert_different(actual, expected)
    for one, exact in zip(actual, expected, strict=True):
        assert_sqnr_at_least(one, exact.double(), 15)
        assert one.abs().max() > 0
    with caplog.at_level(logging.WARNING, logger="float8"):
        float8.after_step(converted)
    assert caplog.messages == []
    assert_same(actual, results(convert(other, "rowwise"), x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_in_float8_with_weights_of_their_own(copied):
    converted, x = convert(model()), tokens()
    twin = copied(converted)
    assert type(twin[0].experts) is type(converted[0].experts)
    assert_same(results(twin, x), results(converted, x))
    expected = results(converted, x)
    with torch.no_grad():
        twin[0].experts.up.zero_()
    assert_same(results(converted, x), expected)
    with high_precision(converted):
        assert not twin[0].experts.high_precision


def test_tied_experts_stay_tied():
    plain = nn.Sequential(Mixture(), Mixture(), Mixture())
    plain[1].experts = plain[0].experts
    plain[2].experts.up = plain[0].experts.up
    converted = convert(plain)
    assert converted[0].experts is converted[1].experts is not converted[2].experts
    assert converted[2].experts.up is converted[0].experts.up
    assert converted.float8_conversion.experts == ["0.experts", "2.experts"]


class Deep(Experts):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(32, 32)

    def forward(self, x, ends):
        return self.last(super().forward(x, ends))


def test_experts_that_hold_linear_layers():
    float8.register_experts(Deep)
    converted = convert(Mixture(Deep))
    assert type(converted.experts.last) is float8.Float8Linear
    assert converted.experts.last in set(converted.modules())
    assert type(convert_from_float8_training(converted).experts.last) is nn.Linear


# --- how it runs


@pytest.mark.parametrize("compiled", [False, True])
def test_high_precision_leaves_float8_also_in_backward_and_compiled(compiled):
    plain, x = Experts().bfloat16(), tokens()
    expected = results(plain, x, ENDS)
    converted = run = convert(copy.deepcopy(plain))
    if compiled:
        run = torch.compile(converted, fullgraph=True, backend="aot_eager")
    in_float8 = results(run, x, ENDS)
    with high_precision(converted):
        assert_same(results(run, x, ENDS), expected)
    assert_different(in_float8, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_in_float8_too(reentrant):
    class Again(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    converted, x = convert(model(), "rowwise"), tokens()
    assert_same(backward(Again(converted), x), backward(converted, x))


def test_autocast_rounds_first():
    plain, x = model(torch.float32), tokens(dtype=torch.float32)
    x = x.detach().bfloat16().float().requires_grad_()
    low = copy.deepcopy(plain).bfloat16()
    with torch.no_grad():
        for p, q in zip(plain.parameters(), low.parameters(), strict=True):
            p.copy_(q)
    plain, low = convert(plain), convert(low)
    with torch.autocast("cpu", torch.bfloat16):
        y = plain[0].experts(x, ENDS)
    assert y.dtype is torch.bfloat16
    assert_bitwise(y, low[0].experts(x.bfloat16(), ENDS))


def test_compiled_to_the_same_bits_whatever_the_routing():
    """In one graph, which changed routing does not compile again."""
    converted = convert(model(torch.float32), "rowwise")
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(converted, fullgraph=True, backend="aot_eager", dynamic=False)
        for seed in range(3):
            x = tokens(dtype=torch.float32, seed=seed)
            assert_same(results(compiled, x), results(converted, x), seed)


# --- which modules


def test_a_delayed_recipe_leaves_experts_and_says_so():
    with pytest.warns(UserWarning, match=r"experts stay .*: \*\.experts \(2 layers\): delayed"):
        converted = convert(model(blocks=2), "delayed")
    done = converted.float8_conversion
    assert done.converted == ["0.shared_expert", "1.shared_expert"]
    assert "keeps a history" in done.skipped["0.experts"]
    # The way out that it names:
    converted = convert(model(), "rowwise", module_filter_fn=only_experts)
    converted = convert(converted, "delayed")
    assert isinstance(converted[0].experts, Float8Experts)
    results(converted, tokens())
    float8.after_step(converted)


def test_experts_of_sizes_that_no_gpu_multiplies_are_left_alone():
    odd = model()
    odd[0].experts.down = nn.Parameter(torch.randn(EXPERTS, 32, 40))
    done = convert(odd).float8_conversion
    assert done.converted == ["0.shared_expert"]
    assert "in_features=40, out_features=32: not multiples of 16" in done.skipped["0.experts"]
    done = convert(model(), "mxfp8").float8_conversion  # 48 features between up and down
    assert "not multiples of 32" in done.skipped["0.experts"]
    padded = dataclasses.replace(config_of("tensorwise"), pad_inner_dim=True)
    done = float8.convert_to_float8_training(odd, config=padded, module_filter_fn=only_experts)
    assert done.float8_conversion.experts == ["0.experts"]


def call(*ends):
    return lambda: convert(nn.ModuleDict({"mine": Experts()}))["mine"](tokens().float(), *ends)


REFUSED = [
    (
        lambda: convert(model(torch.float64), module_filter_fn=only_experts),
        ValueError,
        r"0\.experts: up: weight is torch.float64",
    ),
    (call(ENDS.long()), TypeError, r"mine: grouped_mm: offs is torch.int64"),
    (call(ENDS[:3]), ValueError, r"mine: .*\(3,\)"),
    (call(None), TypeError, r"mine: grouped_mm: offs must be a torch.Tensor, got None"),
    (
        lambda: float8.register_experts(Experts, lambda module, x, ends: x),
        ValueError,
        "Experts has a conversion already",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refusals(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- what else takes a converted model


def test_frozen_experts_compute_what_they_computed_in_training():
    plain, x = model(), tokens()
    converted = convert(plain)
    expected = converted(x)
    frozen = float8.convert_to_float8_inference(converted)
    assert "0.experts" in frozen.float8_conversion.converted
    assert isinstance(frozen[0].experts, Float8Experts)
    weights = list(frozen[0].experts.parameters())
    assert any(isinstance(w, float8.Float8Tensor) and not w.requires_grad for w in weights)
    assert_bitwise(frozen(x), expected)


def test_what_takes_linear_layers_only_leaves_experts():
    found = float8.calibrate(model(), [tokens()] * 2)
    assert list(found.static_scales()) == ["0.shared_expert"]
    frozen = float8.convert_to_float8_inference(model(), found.static_scales())
    assert frozen.float8_conversion.converted == ["0.experts", "0.shared_expert"]
