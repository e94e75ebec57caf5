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

from float8 import E4M3, E5M2, Blockwise, Float8Tensor, Rowwise, Tensorwise

quantize = Float8Tensor.from_high_precision
GRANULARITIES = {
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "1x8": Blockwise(1, 8),
    "5x7": Blockwise(5, 7),
}


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
    b = operand((40, 9), b_name, 2, dtype, E5M2)
    assert_is_product(a @ b, value(a), value(b), None, ("row-major", a_name, b_name))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(40,), (17, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (5, 0)], ids=str
)
def test_linear_takes_inputs_of_any_rank(shape, with_bias, inference):
    bias = Case((9,), torch.bfloat16, seed=3).make() if with_bias else None
    with torch.inference_mode(inference):
        x, w = operand(shape, "rowwise"), operand((9, shape[-1]), "tensorwise", 2)
        out = F.linear(x, w, bias)
        assert out.shape == (*shape[:-1], 9)
        flat, replay = value(x).reshape(out.numel() // 9, shape[-1]), (shape, with_bias)
        assert_is_product(out.reshape(-1, 9), flat, value(w).t(), bias, replay)
        if with_bias and len(shape) == 2:
            assert_bitwise(torch.addmm(bias, x, w.t()), out)
        elif not with_bias and len(shape) > 1:
            assert_bitwise(x @ w.t(), out)


@pytest.mark.parametrize("names", [("tensorwise", "tensorwise"), ("rowwise", "5x7")], ids=str)
def test_a_product_compiles_to_its_eager_value(names):
    def function(a, w):
        return a @ w.t(), F.linear(a, w, torch.ones(9, dtype=torch.float32))

    a, w = operand((17, 40), names[0], dtype=torch.float32), operand((9, 40), names[1], 2)
    w = w.float()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(a, w)
    for actual, expected in zip(compiled, function(a, w), strict=True):
        assert_bitwise(actual, expected, names)


BIAS = torch.ones(9).bfloat16()
REFUSED = [
    *(
        (run, "multiplies two Float8Tensors.*got .*Tensor .*dequantize")
        for run in (
            lambda a, b: a.dequantize() @ b,
            lambda a, b: F.linear(a, b.t().dequantize()),
            lambda a, b: torch.addmm(BIAS, a, b.dequantize()),
            lambda a, b: a.view(1, 17, 40).dequantize() @ b,
            lambda a, b: a @ b.t(),
            lambda a, b: a[:, :0] @ b,
            lambda a, b: a @ b.float(),
            lambda a, b: torch.addmm(BIAS, a, b, beta=2),
            lambda a, b: torch.addmm(BIAS, a, b, alpha=3),
            lambda a, b: F.linear(a, b.t(), operand((9,), "tensorwise")),
        )
    ),
    (lambda a, b: (e5m2 := operand((17, 40), fmt=E5M2)) @ e5m2.t(), "multiplies E5M2 by E5M2"),
]


@pytest.mark.parametrize(("run", "words"), REFUSED)
def test_operands_that_do_not_fit_are_refused(run, words):
    with pytest.raises((ValueError, TypeError), match=f"(?s){words}"):
        run(operand((17, 40)), operand((9, 40), seed=2).t())


def test_the_gradient_of_a_product_is_refused_rather_than_wrong():
    a = quantize(torch.randn(4, 8, requires_grad=True), E4M3)
    with pytest.raises(ValueError, match="multiplies two Float8Tensors"):
        (a @ operand((5, 8), dtype=torch.float32).t()).backward(torch.randn(4, 5))
