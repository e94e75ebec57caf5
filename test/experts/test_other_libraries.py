"""Mixtures of experts of Transformers: found, trained in every recipe, and plain again."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import published_models
import torch
from assertions import assert_bitwise, assert_sqnr_at_least
from torch.distributed.fsdp import FSDPModule
from transformers.integrations import moe
from transformers.models.mixtral import modeling_mixtral as mixtral
from unwritten_rows import unwritten_rows

import float8
from float8 import Float8LinearConfig, filters

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp8_2d", "unit")
pytestmark = pytest.mark.filterwarnings("ignore:recipe .unit.")

MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
EXPERTS = {"deepseek_v3": ["model.layers.1.mlp.experts"]}


def model_of(name, dtype=torch.bfloat16):
    experts = {"num_local_experts": 4} if name == "mixtral" else {}
    torch.manual_seed(0)
    return published_models.MODELS[name](**experts).to(dtype)


def convert(model, recipe="rowwise", **options):
    options = {"module_filter_fn": filters.skip_names("lm_head")} | options
    # Padded: of experts mxfp8 takes multiples of 32 only.
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    return float8.convert_to_float8_training(model, config=config, **options)


def batch():
    """17 tokens, and 11 of another text."""
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def trained(model, steps=4):
    """The losses, and the gradients of the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses, gradients = [], {}
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.fixture(scope="module")
def in_bfloat16():
    return {name: trained(model_of(name)) for name in MODELS}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_bfloat16_within_two_percent(name, recipe, in_bfloat16):
    """Over 4 steps in which they decrease by a fifth; float8 changes what routers choose too."""
    model = convert(model_of(name), recipe)
    names = EXPERTS.get(name, [f"model.layers.{i}.mlp.experts" for i in (0, 1)])
    assert model.float8_conversion.experts == names
    losses, gradients = trained(model)
    expected, exact = in_bfloat16[name]
    assert expected[-1] < 0.8 * expected[0]
    assert losses != expected
    assert losses == pytest.approx(expected, rel=0.02)
    watched = [n for n in exact if ".experts." in n or n.endswith(("gate.weight", "router.weight"))]
    assert len(watched) == len(names) * (5 if name == "gpt_oss" else 3)
    for parameter in watched:
        assert gradients[parameter].isfinite().all()
        assert gradients[parameter].abs().max() > 0, parameter


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_state_after_converting_back_are_the_plain_models(name):
    plain, inputs = model_of(name), batch()
    expected = plain(**inputs).logits
    converted = convert(copy.deepcopy(plain))
    assert converted.state_dict().keys() == plain.state_dict().keys()
    assert not torch.equal(converted(**inputs).logits, expected)
    with float8.high_precision(converted):
        assert_bitwise(converted(**inputs).logits, expected)
    back = float8.convert_from_float8_training(converted)
    assert_bitwise(back(**inputs).logits, expected)
    for one, other in zip(back.modules(), plain.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() - {"float8_conversion"} == vars(other).keys()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_float8_whatever_the_config_says(implementation):
    plain, inputs = model_of("mixtral"), batch()
    plain.set_experts_implementation(implementation)
    expected = plain(**inputs).logits
    converted = convert(plain, module_filter_fn=lambda module, fqn: fqn.endswith("experts"))
    actual = converted(**inputs).logits
    reference = convert(
        model_of("mixtral"), module_filter_fn=lambda m, fqn: fqn.endswith("experts")
    )
    assert_bitwise(actual, reference(**inputs).logits)
    with float8.high_precision(converted):
        assert_bitwise(converted(**inputs).logits, expected)


def routed(dtype=torch.bfloat16, seed=0):
    """What a router hands to 4 experts, one without tokens: (T, D), (T, k) and (T, k)."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(21, 32, generator=random).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(21)])
    return x, index, torch.rand(21, 2, generator=random).to(dtype)


def results(experts, x, index, weights):
    """The output, and the gradients of the input and of all parameters."""
    y = experts(x, index, weights)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *experts.parameters()], g)]


def experts_of(name, dtype=torch.bfloat16, recipe="rowwise"):
    plain = model_of(name, dtype).model.layers[1].mlp.experts
    return plain, convert(torch.nn.ModuleDict({"experts": copy.deepcopy(plain)}), recipe)["experts"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_experts_are_as_exact_as_their_casts(name, recipe):
    plain, converted = experts_of(name, recipe=recipe)
    exact, actual = results(plain, *routed()), results(converted, *routed())
    for one, other in zip(actual, exact, strict=True):
        assert_sqnr_at_least(one, other.double(), 12 if recipe == "unit" else 18, (name, recipe))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_in_one_graph_with_products_in_float8(dtype):
    """Transformers calls torch's function in bfloat16, and a function of its own in float32."""
    _, converted = experts_of("mixtral", dtype)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(converted, fullgraph=True, backend=backend)
        for seed in range(2):  # other experts have no tokens, other numbers of tokens
            inputs = routed(dtype, seed)
            for one, other in zip(
                results(compiled, *inputs), results(converted, *inputs), strict=True
            ):
                assert_bitwise(one, other)
    (graph,) = graphs
    assert "grouped_mm" not in graph.code


# --- rows beyond the last offset


# The experts of each row. A rank that has the experts 0 to 3 gives rows of others the index 4, and
# the weight 0, with which a NaN or an inf in these rows would be NaN.
ROUTES = {
    "some rows have no expert here": [[0, 4]] * 4 + [[4, 4]] * 2 + [[3, 1]] * 11 + [[4, 0]] * 2,
    "no row has an expert here": [[4, 4]] * 5,
}
# Experts without a gate, and transposed experts without a bias.
OTHERS = ("nemotron_h", "aria_text")


def experts_of_a_rank(name, recipe):
    model = published_models.mixture_of(name) if name in OTHERS else model_of(name)
    experts = next(m for fqn, m in model.named_modules() if fqn.endswith(".experts")).bfloat16()
    experts._is_expert_parallel = True
    return convert(torch.nn.ModuleDict({"experts": experts}), recipe)["experts"]


def results_of_a_rank(experts, route):
    """The output, and the gradients of the input, of the router's weights and of parameters."""
    index, random = torch.tensor(ROUTES[route]), torch.Generator().manual_seed(1)
    x = torch.randn(len(index), 32, generator=random).bfloat16().requires_grad_()
    weights = torch.rand(index.shape, generator=random).masked_fill(index == 4, 0)
    weights = weights.bfloat16().requires_grad_()
    y = experts(x, index, weights)
    assert y[index.eq(4).all(1)].eq(0).all()
    g = torch.randn(y.shape, generator=random).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *experts.parameters()], g)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_rows_of_other_ranks_experts_change_nothing(name, recipe, route):
    """A GPU leaves them unwritten; they are zero here."""
    experts = experts_of_a_rank(name, recipe)
    expected = results_of_a_rank(experts, route)
    assert all(each.isfinite().all() for each in expected)
    assert any(each.any() for each in expected) == (route == "some rows have no expert here")
    for fill in (math.nan, math.inf):
        with unwritten_rows(fill):
            found = results_of_a_rank(experts, route)
        for one, other in zip(found, expected, strict=True):
            assert_bitwise(one, other, (name, recipe, route, fill))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_rows_of_other_ranks_experts_change_nothing_compiled(recipe):
    experts, (route, _) = experts_of_a_rank("gpt_oss", recipe), ROUTES
    expected = results_of_a_rank(experts, route)
    with unwritten_rows(math.nan):
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        found = results_of_a_rank(compiled, route)
    for one, other in zip(found, expected, strict=True):
        assert_bitwise(one, other, recipe)


@pytest.mark.parametrize("name", MODELS)
def test_without_the_masks_of_transformers_unwritten_rows_are_seen(name, monkeypatch):
    """The two tests above would find a row that is read."""
    experts, (route, _) = experts_of_a_rank(name, "rowwise"), ROUTES
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda x, *_: x)
    with unwritten_rows(math.nan), pytest.raises(AssertionError):
        results_of_a_rank(experts, route)


class WithAForwardOfItsOwn(mixtral.MixtralExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


class OfFullyShard(FSDPModule, mixtral.MixtralExperts):
    """Such a type makes fully_shard of a module's."""


class WithOtherFunctions(torch.nn.Module):
    """As Transformers' experts whose weights are in float8."""

    def __init__(self, config):
        super().__init__()
        self.up = torch.nn.Parameter(torch.ones(2, 16, 16))

    def forward(self, x):
        return x


WithOtherFunctions = moe.use_experts_implementation(experts_interface=moe.ExpertsInterface())(
    WithOtherFunctions
)


@pytest.mark.parametrize("kind", [WithAForwardOfItsOwn, OfFullyShard, WithOtherFunctions])
def test_types_that_are_not_known(kind):
    made = mixtral.MixtralExperts if kind is OfFullyShard else kind
    experts = made(model_of("mixtral").config)
    experts.__class__ = kind
    model = torch.nn.ModuleDict({"experts": experts, "x": torch.nn.Linear(16, 16)})
    assert convert(model).float8_conversion.experts == []
