"""`float8.grouped_mm` computes each expert's products, forward and backward, whatever the groups.

Rows beyond the last offset hold NaN in every test, so that reading one of them shows.
"""

from __future__ import annotations

import math

import grouped_oracle
import layer_check
import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from meter import saved_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import float8
from float8 import E4M3, E5M2, Float8LinearConfig, Float8Tensor, Rowwise, kernels
from float8.linear import autograd
from float8.linear.plan import USED, plan_for
from float8.linear.refusals import reason_against_float8_input

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "mxfp8_2d", "unit")
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
# Tokens have blocks of one row.
EMULATED = [name for name in layer_check.EMULATED if name != "1x32 in float32"]
K, N = 96, 160
SIZES = (7, 0, 130, 1, 40)
BEYOND = 11


def config_of(recipe: str) -> Float8LinearConfig:
    known = layer_check.EMULATED
    return known[recipe] if recipe in known else Float8LinearConfig.from_recipe_name(recipe)


def make(
    sizes=SIZES, features=(K, N), dtype=torch.bfloat16, beyond=BEYOND, seed=0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (T, K), weights (E, N, K), offsets and grad_output (T, N); experts differ in size."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (k, n) = sum(sizes) + beyond, features

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    experts = len(sizes)
    x = randn(tokens, k) * (1 + 7 * torch.rand((tokens, 1), generator=generator))
    w = randn(experts, n, k) * torch.logspace(-1, 1, experts)[:, None, None] / math.sqrt(k)
    g = randn(tokens, n)
    x[tokens - beyond :] = g[tokens - beyond :] = math.nan
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x, w, g = (t.to(dtype) for t in (x, w, g))
    return x.requires_grad_(), w.requires_grad_(), offs, g


def step(run, x, w, offs, g):
    """Output, grad_input and grad_weight (E, N, K) of ``run(x, weight, offs)``."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = run(x, w, offs)
    out.backward(g)
    return out.detach(), x.grad, w.grad


def results_of(recipe, x, w, offs, g):
    config = config_of(recipe)
    return step(lambda x, w, offs: float8.grouped_mm(x, w.mT, offs, config), x, w, offs, g)


def check_values(recipe, x, w, offs, g):
    results = results_of(recipe, x, w, offs, g)
    wanted = grouped_oracle.expected(recipe, x.detach(), w.detach().mT, offs.tolist(), g)
    for name, actual in zip(wanted, (*results[:2], results[2].mT), strict=True):
        assert_error_within_baseline(
            actual, wanted[name].exact, wanted[name].plain, replay=recipe, what=name
        )
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, *EMULATED])
def test_values(recipe, dtype):
    x, w, offs, g = make(dtype=dtype)
    out, grad_x, grad_w = check_values(recipe, x, w, offs, g)
    end = int(offs[-1])
    assert not out[end:].any()
    assert not grad_x[end:].any()
    assert not grad_w[1].any(), "expert 1 has no tokens"


@pytest.mark.parametrize("beyond", [0, BEYOND])
@EVERY_RECIPE
def test_one_group_is_a_linear_layer(recipe, beyond):
    """The rows beyond it are no part of it: TransformerEngine#3484 added them to the gradient."""
    x, w, offs, g = make(sizes=(130,), beyond=beyond)
    out, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    x, weight = x[:130].detach().requires_grad_(), w[0].detach().requires_grad_()
    expected = float8.float8_linear(x, weight, None, config_of(recipe))
    expected.backward(g[:130])
    assert_bitwise(out[:130], expected, recipe)
    assert_bitwise(grad_x[:130], x.grad, recipe)
    assert_bitwise(grad_w[0], weight.grad, recipe)


@EVERY_RECIPE
def test_a_channel_of_zeros_in_a_group_of_128(recipe):
    """DeepGEMM#365: such an expert's gradient was wrong, in some runs."""
    x, w, offs, g = make(sizes=(256, 128, 128, 256))
    x = x.detach()
    x[256:384, 5] = g[256:384, 3] = 0
    _, _, grad_w = check_values(recipe, x, w, offs, g)
    assert not grad_w[1, :, 5].any() and not grad_w[1, 3].any()


@EVERY_RECIPE
def test_any_strides(recipe):
    x, w, offs, g = make()
    wanted = results_of(recipe, x, w, offs, g)
    copied = step(
        lambda x, w, offs: float8.grouped_mm(
            x.t().contiguous().t(), w.mT.contiguous(), offs, config_of(recipe)
        ),
        *(x, w, offs, g.t().contiguous().t()),
    )
    # A high-precision GEMM reads the tokens as they lie, and may add in another order.
    exact = 2 if recipe == "rowwise_with_gw_hp" else 3
    for actual, expected in zip(copied[:exact], wanted[:exact], strict=True):
        assert_bitwise(actual, expected, recipe)


# --- what runs, and what is kept


@EVERY_RECIPE
def test_only_what_is_needed_runs_and_is_kept(recipe):
    x, w, offs, g = make()
    _, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    config, frozen = config_of(recipe), w.detach()
    kept = saved_bytes(
        lambda: float8.grouped_mm(x * 1, frozen.mT, offs, config), nn.ParameterList([frozen])
    )
    assert kept <= 4 * frozen.numel() // 32 + 64, "x is kept for a frozen weight"
    float8.grouped_mm(x, frozen.mT, offs, config).backward(g)
    assert_bitwise(x.grad, grad_x, recipe)
    float8.grouped_mm(x.detach(), w.mT, offs, config).backward(g)
    assert_bitwise(w.grad, grad_w, recipe)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "rowwise_with_gw_hp"])
def test_saved_for_backward(recipe):
    x, w, offs, _ = make([512] * 8, (512, 256), beyond=0)
    holder = nn.ParameterList([nn.Parameter(w.detach())])
    weight = holder[0]
    kept = saved_bytes(lambda: float8.grouped_mm(x * 1, weight.mT, offs, config_of(recipe)), holder)
    assert kept <= 0.54 * (x.numel() * 2 + offs.numel() * 4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_checkpointing_and_no_gradients(recipe, reentrant):
    x, w, offs, g = make()
    wanted = results_of(recipe, x, w, offs, g)
    run = lambda x, w, offs: float8.grouped_mm(x, w.mT, offs, config_of(recipe))  # noqa: E731
    again = lambda *args: checkpoint(run, *args, use_reentrant=reentrant)  # noqa: E731
    for actual, expected in zip(step(again, x, w, offs, g), wanted, strict=True):
        assert_bitwise(actual, expected, recipe)
    with torch.inference_mode():
        assert_bitwise(run(x, w, offs), wanted[0])


def test_autocast():
    x, w, offs, g = make()
    wanted = results_of("rowwise", x, w, offs, g)
    with torch.autocast("cpu", torch.bfloat16):
        out, grad_x, grad_w = results_of("rowwise", x.float(), w.float(), offs, g)
    for actual, expected in zip((out, grad_x.bfloat16(), grad_w.bfloat16()), wanted, strict=True):
        assert_bitwise(actual, expected)


# --- tokens that are in float8 already


def in_float8(x: Tensor, recipe: str, fmt=E4M3) -> Float8Tensor:
    cast = config_of(recipe).cast_config_input
    return Float8Tensor.from_high_precision(
        x.detach(), fmt, cast.granularity, cast.static_scale, cast.scale_format
    )


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("recipe", ["tensorwise", "unit"])
def test_tokens_in_float8_are_used_as_they_are(recipe, align, monkeypatch):
    """A GPU pads the groups of the transposed copy to multiples of 16."""
    monkeypatch.setattr(kernels, "group_alignment", lambda gemm: align)
    USED.clear()
    try:
        x, w, offs, g = make(beyond=0)
        wanted = results_of(recipe, x, w, offs, g)
        found = results_of(recipe, in_float8(x, recipe), w, offs, g)
    finally:
        USED.clear()
    for actual, expected in zip(found, wanted, strict=True):
        assert_bitwise(actual, expected, (recipe, align))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_tokens_in_float8_have_no_scales_along_the_tokens_of_a_group(recipe):
    x, w, offs, g = make(beyond=0)
    out, grad_x, _ = results_of(recipe, x, w, offs, g)
    x8, config = in_float8(x, recipe), config_of(recipe)
    with pytest.raises(ValueError, match=r"^grouped_mm: .*freeze the weight, or use a tensorwise"):
        float8.grouped_mm(x8, w.mT, offs, config)
    x8 = x8.requires_grad_()
    frozen = float8.grouped_mm(x8, w.detach().mT, offs, config)
    frozen.backward(g)
    assert_bitwise(frozen, out, recipe)
    assert_bitwise(x8.grad, grad_x, recipe)


def test_mx_tokens_are_refused_where_the_gemm_reads_their_scales_in_another_order():
    x, *_ = make(beyond=0)
    plan = plan_for(config_of("mxfp8"), "sm_100", x.dtype, grouped=True)
    reason = reason_against_float8_input(in_float8(x, "mxfp8"), plan, False)
    assert reason.endswith("in an order of its own; pass input.dequantize()")


# --- torch.compile


@pytest.mark.parametrize(
    "recipe",
    [
        *("tensorwise", "rowwise", "mxfp8"),
        *(pytest.param(r, marks=pytest.mark.slow) for r in (*RECIPES[2:4], *RECIPES[5:])),
    ],
)
def test_compiled_to_the_same_bits_whatever_the_routing_and_under_autocast(recipe):
    dtype = torch.float16 if recipe == "rowwise" else torch.bfloat16
    torch._dynamo.utils.counters.clear()
    config, autocast = config_of(recipe), torch.autocast("cpu", dtype)

    def run(x, w, offs):
        with autocast:
            return float8.grouped_mm(x, w.mT, offs, config)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    routings = [SIZES, (100, 20, 30, 28, 0), (9, 9, 0, 3, 40), (0, 0, 0, 0, 7)]
    for seed, sizes in enumerate(routings):
        x, w, offs, g = make(sizes, seed=seed, dtype=torch.float32)
        found, wanted = (step(each, x, w, offs, g.to(dtype)) for each in (compiled, run))
        for actual, expected in zip(found, wanted, strict=True):
            assert expected[: int(offs[-1])].isfinite().all()
            assert_bitwise(actual, expected, (recipe, sizes))
        # A second graph serves every number of tokens.
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 1 + (seed >= 2), "compiled again for another routing"


def test_compiled_by_a_torch_that_loses_gradients(monkeypatch):
    """The result is then made a view of itself, which must have its shape."""
    monkeypatch.setattr(autograd, "LOSES_GRADIENTS", True)
    torch._dynamo.reset()
    x, w, offs, g = make()
    compiled = torch.compile(
        lambda x, w, offs: float8.grouped_mm(x, w.mT, offs), backend="aot_eager", fullgraph=True
    )
    wanted = results_of("tensorwise", x, w, offs, g)
    for actual, expected in zip(step(compiled, x, w, offs, g), wanted, strict=True):
        assert_bitwise(actual, expected, "tensorwise")


# --- planted faults


FAULTS = {
    "scales of one expert for all": lambda b, offs: (
        (b._replace(scale=b.scale[:1].expand_as(b.scale)) if b.data.dim() == 3 else b, offs)
    ),
    "groups shifted": lambda b, offs: (b, (offs - 1).clamp(min=0)),
    "experts swapped": lambda b, offs: (
        b._replace(data=b.data.flip(0), scale=b.scale.flip(0)) if b.data.dim() == 3 else b,
        offs,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    multiply = kernels.multiply_groups

    def faulty(a, b, gemm, offs):
        b, offs = FAULTS[fault](b, offs)
        return multiply(a, b, gemm, offs)

    monkeypatch.setattr(kernels, "multiply_groups", faulty)
    with pytest.raises(AssertionError, match="output"):
        test_values("tensorwise", torch.float32)


# --- bad input


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


X, W, OFFS = torch.ones(8, 32), torch.ones(2, 32, 16), ends(3, 8)
X8 = Float8Tensor.from_high_precision(X, E5M2), Float8Tensor.from_high_precision(X, E4M3, Rowwise())
REFUSED = [
    ((X, W, OFFS.long()), TypeError, r"offs\.to"),
    ((X, W, OFFS[None]), ValueError, r"\(1, 2\)"),
    ((X, W, ends(1, 2, 3)), ValueError, r"\(3,\)"),
    ((X, W, ends(5, 3)), ValueError, r"offs=\[5, 3\] must ascend"),
    ((X, W, ends(-1, 3)), ValueError, "from 0"),
    ((X, W, ends(3, 9)), ValueError, "at most 8"),
    ((X[None], W, OFFS), ValueError, r"\(T, K\)"),
    ((X, W[0], OFFS), ValueError, r"\(E, K, N\)"),
    ((X, W.mT, OFFS), ValueError, r"weight\.mT"),
    ((X, W.bfloat16(), OFFS), TypeError, "bfloat16"),
    ((X.double(), W.double(), OFFS), TypeError, "float64"),
    ((X, W.to("meta"), OFFS), ValueError, "meta"),
    ((X, W, OFFS, "delayed"), ValueError, "history"),
    ((X, W, OFFS, Float8LinearConfig(smooth_input=True)), ValueError, "smooth_input=True"),
    *(
        ((x8, W, OFFS, r), ValueError, "dequantize")
        for x8 in X8
        for r in ("tensorwise", "blockwise")
    ),
]


@pytest.mark.parametrize(("args", "error", "word"), REFUSED)
def test_bad_input(args, error, word):
    with pytest.raises(error, match=f"^grouped_mm: .*{word}"):
        float8.grouped_mm(*args)


def test_no_second_derivative():
    x = X.clone().requires_grad_()
    out = float8.grouped_mm(x, W, OFFS)
    with pytest.raises(RuntimeError, match="grouped_mm has no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("op", ["cast_groups", "grouped_mm"])
def test_the_ops_are_what_they_say(op):
    x, w, offs, _ = make(beyond=4)
    x, w = x.detach(), w.detach()
    if op == "cast_groups":
        args = (x, offs, (1, 32), torch.float8_e4m3fn, "float32", None, 16, True, True)
    else:
        one = torch.ones(1, 1)
        # In bfloat16, as float8 data decoded: torch checks inputs by arithmetic that float8 lacks.
        args = (x.nan_to_num(), one, w, one[None], offs, (-1, -1), (1, -1, -1), torch.bfloat16, 1)
    torch.library.opcheck(getattr(torch.ops.float8, op).default, args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_in_high_precision_reads_no_row_beyond_its_group(dtype):
    # An odd group in a gradient by columns: some CPUs' 16-bit GEMM reads one number too many.
    x, g = torch.randn(40, 92).to(dtype), torch.randn(48, 40).to(dtype).t()
    x[33:] = g[33:] = torch.nan
    w = torch.randn(1, 92, 48).to(dtype).requires_grad_()
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    float8.grouped_mm(x, w, torch.tensor([33], dtype=torch.int32), config).backward(g)
    expected = x[:33].double().t() @ g[:33].double()
    torch.testing.assert_close(w.grad[0].double(), expected, rtol=0, atol=0.25)
