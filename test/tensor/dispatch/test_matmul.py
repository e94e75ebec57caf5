"""Products of two Float8Tensors are one scaled product; anything mixed is refused by name."""

from __future__ import annotations

import oracle
import pytest
import shapes
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline
from shapes import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise

quantize = Float8Tensor.from_high_precision
GRANULARITIES = {
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "1x8": Blockwise(1, 8),
    "5x7": Blockwise(5, 7),
}
EVERY_PAIR = [
    pytest.mark.parametrize("a_name", GRANULARITIES),
    pytest.mark.parametrize("b_name", GRANULARITIES),
]


def operand(shape, name="rowwise", seed=1, dtype=torch.bfloat16, fmt=E4M3) -> Float8Tensor:
    return quantize(Case(shape, dtype, seed=seed).make(), fmt, GRANULARITIES[name])


def value(q: Float8Tensor) -> Tensor:
    return oracle.values(q.float8_data, q.scale, q.block)


def assert_is_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, replay) -> None:
    """``out`` is ``a @ b + bias`` (float64 operands) as well as out's dtype can have it."""
    exact, plain = a @ b, (a.float() @ b.float()).to(out.dtype)
    if bias is not None:  # plain arithmetic rounds the product, and then the sum
        exact, plain = exact + bias.double(), (plain + bias).to(out.dtype)
    assert type(out) is Tensor
    assert_error_within_baseline(out, exact, plain, replay=replay)


@pytest.mark.parametrize("dtype", shapes.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("a_name", GRANULARITIES)
@pytest.mark.parametrize("b_name", GRANULARITIES)
def test_a_product_of_any_granularities(a_name, b_name, dtype):
    a = operand((17, 40), a_name, 1, dtype)
    w = operand((9, 40), b_name, 2, dtype, E5M2)
    out = a @ w.t()
    assert out.dtype == dtype
    assert_is_product(out, value(a), value(w).t(), None, (a_name, b_name, dtype))
    assert_bitwise(torch.mm(a, w.t()), out)
    assert_bitwise(F.linear(a, w), out)


@pytest.mark.parametrize("name", GRANULARITIES)
def test_a_row_major_right_operand_is_multiplied_too(name):
    a, b = operand((17, 40), name), operand((40, 9), name, 2)
    assert_is_product(a @ b, value(a), value(b), None, name)


@pytest.mark.parametrize("shape", [(40,), (17, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_takes_inputs_of_any_rank(shape, with_bias):
    x = operand(shape, "rowwise")
    w = operand((9, 40), "tensorwise", 2)
    bias = Case((9,), torch.bfloat16, seed=3).make() if with_bias else None
    out = F.linear(x, w, bias)
    assert out.shape == (*shape[:-1], 9)
    flat = value(x).reshape(-1, 40)
    assert_is_product(out.reshape(-1, 9), flat, value(w).t(), bias, (shape, with_bias))


def test_matmul_takes_a_batch_of_rows():
    x, w = operand((2, 3, 40)), operand((9, 40), "tensorwise", 2)
    assert_bitwise(x @ w.t(), F.linear(x, w))


def test_inference_mode_changes_nothing():
    x, w = operand((2, 3, 40)), operand((9, 40), "tensorwise", 2)
    bias = torch.ones(9, dtype=torch.bfloat16)
    expected = F.linear(x, w), F.linear(x, w, bias), x @ w.t()
    with torch.inference_mode():
        actual = F.linear(x, w), F.linear(x, w, bias), x @ w.t()
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one, other)


def test_addmm_adds_a_bias_per_column():
    a, w = operand((17, 40)), operand((9, 40), seed=2)
    bias = Case((9,), torch.bfloat16, seed=3).make()
    assert_is_product(torch.addmm(bias, a, w.t()), value(a), value(w).t(), bias, "addmm")


@pytest.mark.parametrize("sizes", [(0, 8, 5), (5, 0, 8), (5, 8, 0)], ids=str)
def test_empty_products(sizes):
    M, K, N = sizes
    out = operand((M, K), "tensorwise") @ operand((N, K), "tensorwise").t()
    assert_bitwise(out, torch.zeros(M, N, dtype=torch.bfloat16))


@pytest.mark.parametrize("names", [("tensorwise", "tensorwise"), ("rowwise", "5x7")], ids=str)
def test_a_product_compiles_to_its_eager_value(names):
    def function(a, w):
        return a @ w.t(), F.linear(a, w, torch.ones(9, dtype=torch.float32))

    a, w = operand((17, 40), names[0], dtype=torch.float32), operand((9, 40), names[1], 2)
    w = w.float()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(a, w)
    for actual, expected in zip(compiled, function(a, w), strict=True):
        assert_bitwise(actual, expected, names)


def test_a_product_has_a_shape_on_meta_and_on_fake_tensors():
    a, w = operand((16, 32), "tensorwise"), operand((48, 32), "tensorwise", 2)
    out = a.to("meta") @ w.to("meta").t()
    assert (out.shape, out.dtype, out.device.type) == ((16, 48), torch.bfloat16, "meta")
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(16, 32, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(48, 32, dtype=torch.bfloat16, device="cuda")
        out = quantize(x, E4M3) @ quantize(y, E4M3).t()
        assert (out.shape, out.device.type) == ((16, 48), "cuda")


# --- refusals

MIXED = {
    "mm": torch.mm,
    "@": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b.t()),
    "addmm": lambda a, b: torch.addmm(torch.ones(9, dtype=torch.bfloat16), a, b),
    "matmul of 3d": lambda a, b: a.view(1, 17, 40) @ b,
}


@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("plain", ["left", "right"])
def test_a_mixed_product_names_both_operands_and_the_way_out(op, plain):
    a, b = operand((17, 40)), operand((9, 40), seed=2).t()
    a, b = (a.dequantize(), b) if plain == "left" else (a, b.dequantize())
    with pytest.raises(ValueError, match="float8 multiplies float8 only") as error:
        MIXED[op](a, b)
    text = str(error.value)
    kinds = ("Tensor", "Float8Tensor") if plain == "left" else ("Float8Tensor", "Tensor")
    assert f"the left operand is a {kinds[0]}(torch.bfloat16, (17, 40))" in text
    assert f"the right operand is a {kinds[1]}(torch.bfloat16, (40, 9))" in text
    assert "from_high_precision" in text
    assert ".dequantize()" in text
    assert "aten." in text


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda a, b: a @ b.t(), ["(17, 40)", "(9, 40)", "do not multiply"]),
        (lambda a, b: F.linear(a, b[:10].t()), ["do not multiply"]),
        (lambda a, b: a @ b.float(), ["torch.bfloat16 and torch.float32", ".to(dtype)"]),
        (
            lambda a, b: torch.addmm(torch.ones(9).bfloat16(), a, b, beta=2),
            ["beta and alpha of 1, got 2"],
        ),
        (lambda a, b: torch.addmm(torch.ones(9).bfloat16(), a, b, alpha=3), ["1, 3"]),
        (
            lambda a, b: torch.addmm(torch.ones(17, 9).bfloat16(), a, b),
            ["bias has shape (17, 9), expected (9,)"],
        ),
        (lambda a, b: torch.addmm(torch.ones(()).bfloat16(), a, b), ["bias has shape ()"]),
    ],
)
def test_operands_that_do_not_fit_are_refused(run, words):
    with pytest.raises(ValueError, match="aten") as error:
        run(operand((17, 40)), operand((9, 40), seed=2).t())
    assert [word for word in words if word not in str(error.value)] == []


def test_e5m2_by_e5m2_is_refused():
    a = operand((17, 40), "tensorwise", fmt=E5M2)
    with pytest.raises(ValueError, match="no hardware multiplies E5M2 by E5M2"):
        a @ a.t()


def test_a_bias_is_not_float8():
    a, w = operand((17, 40)), operand((9, 40), seed=2)
    with pytest.raises(TypeError, match=r"the bias is a Float8Tensor; call \.dequantize"):
        F.linear(a, w, operand((9,), "tensorwise"))


def test_the_gradient_of_a_product_is_refused_rather_than_wrong():
    a = quantize(torch.randn(4, 8, requires_grad=True), E4M3)
    with pytest.raises(ValueError, match="float8 multiplies float8 only"):
        (a @ operand((5, 8), dtype=torch.float32).t()).backward(torch.randn(4, 5))
