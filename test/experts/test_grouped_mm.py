"""`float8.grouped_mm` computes each expert's products, forward and backward, whatever the groups.

Rows beyond the last offset hold NaN in every test, so that reading one of them shows.
"""

from __future__ import annotations

import functools
import math

import grouped_oracle
import pytest
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import float8
from float8 import E4M3, E5M2, Float8LinearConfig, Float8Tensor, kernels
from float8.experts.grouped_mm import grouped_mm_in_float8
from float8.linear import autograd
from float8.linear.autograd import (
    NO_FACTORS,
    STATELESS,
    Call,
    Float8LinearFunction,
    product,
)
from float8.linear.bound_plan import BoundPlan, plan_on
from float8.linear.refusals import refuses_float8_input

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "unit")
K, N = 96, 160
SIZES = (7, 0, 130, 1, 40)
BEYOND = 11


def config_of(recipe: str) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name(recipe)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_values(recipe, dtype):
    x, w, offs, g = make(dtype=dtype)
    out, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    end = int(offs[-1])
    wanted = grouped_oracle.expected(recipe, x.detach(), w.detach().mT, offs.tolist(), g)
    for name, actual in (("output", out), ("grad_input", grad_x), ("grad_weight", grad_w.mT)):
        assert_error_within_baseline(
            actual, wanted[name].exact, wanted[name].plain, replay=(recipe, dtype), what=name
        )
    assert not out[end:].any()
    assert not grad_x[end:].any()
    assert not grad_w[1].any(), "expert 1 has no tokens"


@pytest.mark.parametrize("beyond", [0, BEYOND])
@pytest.mark.parametrize("recipe", RECIPES)
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_channel_of_zeros_in_a_group_of_128(recipe):
    """DeepGEMM#365: such an expert's gradient was wrong, in some runs."""
    x, w, offs, g = make(sizes=(256, 128, 128, 256))
    x = x.detach()
    x[256:384, 5] = g[256:384, 3] = 0
    results = results_of(recipe, x, w, offs, g)
    wanted = grouped_oracle.expected(recipe, x, w.detach().mT, offs.tolist(), g)
    for name, actual in zip(wanted, (*results[:2], results[2].mT), strict=True):
        assert_error_within_baseline(
            actual, wanted[name].exact, wanted[name].plain, replay=recipe, what=name
        )
    assert not results[2][1, :, 5].any() and not results[2][1, 3].any()


@pytest.mark.parametrize("recipe", RECIPES)
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_needed_runs(recipe):
    x, w, offs, g = make()
    _, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    config = config_of(recipe)
    frozen = float8.grouped_mm(x, w.detach().mT, offs, config)
    kept = tensors_kept_by(lambda: float8.grouped_mm(x, w.detach().mT, offs, config))
    assert not any(t.shape in (x.shape, x.t().shape) for t in kept), "x is kept for a frozen weight"
    frozen.backward(g)
    assert_bitwise(x.grad, grad_x, recipe)
    float8.grouped_mm(x.detach(), w.mT, offs, config).backward(g)
    assert_bitwise(w.grad, grad_w, recipe)


def tensors_kept_by(run) -> list[Tensor]:
    """What autograd saves for the backward of ``run``."""
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "rowwise_with_gw_hp"])
def test_saved_for_backward(recipe):
    sizes = [512] * 8
    x, w, offs, _ = make(sizes, (512, 256), beyond=0)
    kept = tensors_kept_by(lambda: float8.grouped_mm(x, w.mT, offs, config_of(recipe)))
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    own.pop(w.untyped_storage().data_ptr())
    bfloat16 = x.numel() * 2 + offs.numel() * 4
    assert sum(own.values()) <= 0.54 * bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_checkpointing(recipe, reentrant):
    x, w, offs, g = make()
    wanted = results_of(recipe, x, w, offs, g)

    def run(x, w, offs):
        return checkpoint(
            float8.grouped_mm, x, w.mT, offs, config_of(recipe), use_reentrant=reentrant
        )

    for actual, expected in zip(step(run, x, w, offs, g), wanted, strict=True):
        assert_bitwise(actual, expected, recipe)


def test_no_gradients():
    x, w, offs, g = make()
    wanted = results_of("rowwise", x, w, offs, g)[0]
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert_bitwise(float8.grouped_mm(x, w.mT, offs, config_of("rowwise")), wanted)


def test_autocast():
    x, w, offs, g = make()
    wanted = results_of("rowwise", x, w, offs, g)
    with torch.autocast("cpu", torch.bfloat16):
        out, grad_x, grad_w = results_of("rowwise", x.float(), w.float(), offs, g)
    for actual, expected in zip((out, grad_x.bfloat16(), grad_w.bfloat16()), wanted, strict=True):
        assert_bitwise(actual, expected)


def test_no_second_derivative():
    x, w, offs, _ = make(beyond=0)
    out = float8.grouped_mm(x, w.mT, offs)
    with pytest.raises(RuntimeError, match="grouped_mm has no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 5), (5, 0, 0)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_few_tokens(recipe, sizes):
    x, w, offs, g = make(sizes=sizes, beyond=3)
    out, grad_x, grad_w = results_of(recipe, x, w, offs, g)
    end = sum(sizes)
    assert out[:end].isfinite().all()
    assert not out[end:].any()
    assert not grad_x[end:].any()
    assert grad_w.shape == w.shape
    assert all(bool(grad.any()) == (size > 0) for grad, size in zip(grad_w, sizes, strict=True))


@pytest.mark.parametrize("factor", [0.25, 3.0])
@pytest.mark.parametrize("recipe", ["unit", "mxfp8"])
def test_factors(recipe, factor):
    x, w, offs, g = make(dtype=torch.float32)
    plain = results_of(recipe, x, w, offs, g)
    factors = (factor, lambda: 2 * factor, 4 * factor)
    config = config_of(recipe)

    def run(x, w, offs):
        return grouped_mm_in_float8(x, w.mT, offs, config, factors)

    scaled = step(run, x, w, offs, g)
    for actual, expected, times in zip(scaled, plain, (1, 2, 4), strict=True):
        torch.testing.assert_close(actual, expected * (times * factor))


# --- tokens that are in float8 already


def in_float8(x: Tensor, recipe: str, fmt=E4M3) -> Float8Tensor:
    cast = config_of(recipe).cast_config_input
    return Float8Tensor.from_high_precision(
        x.detach(), fmt, cast.granularity, cast.static_scale, cast.scale_format
    )


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("recipe", ["tensorwise", "unit"])
def test_tokens_in_float8_are_used_as_they_are(recipe, align):
    """A GPU pads the groups of the transposed copy to multiples of 16."""
    x, w, offs, g = make(beyond=0)
    wanted = results_of(recipe, x, w, offs, g)
    plan = BoundPlan(config_of(recipe).plan, "cpu", x.dtype, False, False, False, grouped=True)
    plan.x.align = plan.g.align = plan.grad_weight.align = align
    call = Call(plan, STATELESS, False, None, NO_FACTORS, True)

    def run(x, w, offs):
        return Float8LinearFunction.apply(x, w, None, call, offs)

    x8 = in_float8(x, recipe)
    found = [step(run, x8, w, offs, g)]
    if align == 1:
        config = config_of(recipe)
        found.append(step(lambda x, w, o: float8.grouped_mm(x, w.mT, o, config), x8, w, offs, g))
    for results in found:
        for actual, expected in zip(results, wanted, strict=True):
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


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_tokens_in_another_format_or_granularity_are_refused(recipe):
    x, w, offs, _ = make(beyond=0)
    others = [in_float8(x, recipe, E5M2), in_float8(x, "rowwise")]
    for x8 in others:
        with pytest.raises(ValueError, match=r"^grouped_mm: .*pass input\.dequantize\(\)"):
            float8.grouped_mm(x8, w.detach().mT, offs, config_of(recipe))


def test_mx_tokens_are_refused_where_the_gemm_reads_their_scales_in_another_order():
    x, *_ = make(beyond=0)
    plan = BoundPlan(config_of("mxfp8").plan, "sm_100", x.dtype, False, False, False, grouped=True)
    reason = refuses_float8_input(in_float8(x, "mxfp8"), plan, False)
    assert reason.endswith("in an order of its own; pass input.dequantize()")


# --- torch.compile


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_to_the_same_bits(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = config_of(recipe)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(x, weight, offs):
        return float8.grouped_mm(x, weight.mT, offs, config)

    frames = []
    routings = [SIZES, (100, 20, 30, 28, 0), (9, 9, 0, 3, 40), (0, 0, 0, 0, 7)]
    for seed, sizes in enumerate(routings):
        x, w, offs, g = make(sizes, seed=seed)
        results = step(compiled, x, w, offs, g)
        for actual, expected in zip(results, results_of(recipe, x, w, offs, g), strict=True):
            assert_bitwise(actual, expected, (recipe, sizes))
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # A second graph serves every number of tokens.
    assert frames == [1, 1, 2, 2], "compiled again for another routing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_compiled_under_autocast_to_the_same_bits(recipe, dtype):
    torch._dynamo.reset()
    x, w, offs, g = make(dtype=torch.float32)
    config = config_of(recipe)

    def run(x, weight, offs):
        return float8.grouped_mm(x, weight.mT, offs, config)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for each in (compiled, run):
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.autocast("cpu", dtype):
            out = each(*leaves, offs)
        out.backward(g.to(dtype))
        found.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for actual, expected in zip(*found, strict=True):
        assert expected[: int(offs[-1])].isfinite().all()
        assert_bitwise(actual, expected, (recipe, dtype))


def test_compiled_by_a_torch_that_loses_gradients(monkeypatch):
    """The result is then made a view of itself, which must have its shape."""
    monkeypatch.setattr(autograd, "LOSES_GRADIENTS", True)
    torch._dynamo.reset()
    x, w, offs, g = make()
    run = functools.partial(grouped_mm_in_float8, config=config_of("tensorwise"))
    compiled = torch.compile(
        lambda x, w, offs: run(x, w.mT, offs), backend="aot_eager", fullgraph=True
    )
    wanted = results_of("tensorwise", x, w, offs, g)
    for actual, expected in zip(step(compiled, x, w, offs, g), wanted, strict=True):
        assert_bitwise(actual, expected, "tensorwise")


# --- planted faults


FAULTS = {
    "scales of one expert for all": lambda gemm, a, a_s, b, b_s, *rest: (
        (a, a_s, b, b_s[:1].expand_as(b_s), *rest) if b.dim() == 3 else (a, a_s, b, b_s, *rest)
    ),
    "groups shifted": lambda gemm, a, a_s, b, b_s, offs, *rest: (
        (a, a_s, b, b_s, (offs - 1).clamp(min=0), *rest)
    ),
    "experts swapped": lambda gemm, a, a_s, b, b_s, *rest: (
        (a, a_s, b.flip(0), b_s.flip(0), *rest) if b.dim() == 3 else (a, a_s, b, b_s, *rest)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    multiply = kernels.multiply_groups

    def faulty(gemm, *args):
        return multiply(gemm, *FAULTS[fault](gemm, *args))

    monkeypatch.setattr(kernels, "multiply_groups", faulty)
    with pytest.raises(AssertionError, match="output"):
        test_values("tensorwise", torch.float32)


# --- bad input


def bad_calls():
    x, w = torch.ones(8, 32), torch.ones(2, 32, 16)
    offs = torch.tensor([3, 8], dtype=torch.int32)

    def ends(*values):
        return torch.tensor(values, dtype=torch.int32)

    return {
        "int64": ((x, w, offs.long()), TypeError, r"offs is torch.int64.*offs.to\(torch.int32\)"),
        "no vector": ((x, w, offs[None]), ValueError, r"offs \(E,\), got .*\(1, 2\)"),
        "three ends": ((x, w, ends(1, 2, 3)), ValueError, "offs has 3 ends, but w has 2 experts"),
        "descending": ((x, w, ends(5, 3)), ValueError, r"offs\[1\]=3 is less than offs\[0\]=5"),
        "negative": ((x, w, ends(-1, 3)), ValueError, r"offs\[0\]=-1 is negative"),
        "beyond": ((x, w, ends(3, 9)), ValueError, r"offs\[1\]=9 is beyond the 8 rows of x"),
        "x is 3-D": ((x[None], w, offs), ValueError, r"x must be \(T, K\)"),
        "w is 2-D": ((x, w[0], offs), ValueError, r"w \(E, K, N\)"),
        "(E, N, K)": ((x, w.mT, offs), ValueError, "K=32, but w has K=16.*pass weight.mT"),
        "dtypes": ((x, w.bfloat16(), offs), TypeError, "x is torch.float32 and w is torch.bfloat"),
        "float64": (
            (x.double(), w.double(), offs),
            TypeError,
            "x is torch.float64; float8 is cast",
        ),
        "devices": ((x, w.to("meta"), offs), ValueError, "w on meta"),
        "delayed": (
            (x, w, offs, config_of("delayed")),
            ValueError,
            "a delayed config keeps a history.*take a dynamic recipe",
        ),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input(name):
    args, error, says = bad_calls()[name]
    with pytest.raises(error, match=f"^grouped_mm: .*{says}"):
        float8.grouped_mm(*args)


def test_scales_of_mx_blocks_are_e8m0():
    x, w, offs, _ = make(beyond=0)
    config = config_of("mxfp8")
    gemm = plan_on(config, x.device, x.dtype, grouped=True).output
    x8, w8 = x.detach().to(torch.float8_e4m3fn), w.detach().to(torch.float8_e4m3fn)
    scale, w_scale = torch.ones(len(x), K // 32), torch.ones(len(w), N, K // 32)
    with pytest.raises(ValueError, match=r"scales of a are torch.float32.*ScaleFormat\.E8M0"):
        product(gemm, (x8, scale), (w8, w_scale), offs=offs)


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
