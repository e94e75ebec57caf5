"""`float8.unit_scaling.functional.losses`: torch's values, gradients of unit scale."""

import itertools

import pytest
import torch
from scale_assertions import assert_unit_scaled, normal, scale_of
from torch.nn import functional as F

from float8.unit_scaling import functional as U

DTYPES = [torch.float32, torch.bfloat16]


def loss_and_gradient(loss, logits, *args, **kwargs):
    logits = logits.detach().requires_grad_()
    value = loss(logits, *args, **kwargs)
    (grad,) = torch.autograd.grad(value, logits, torch.ones_like(value))
    return value.detach(), grad


def weights_of(classes):
    return torch.linspace(0.2, 3.0, classes)


# --- cross entropy: the value


SHAPES = [
    ((7,), ()),
    ((5, 7), (5,)),
    ((3, 7, 4), (3, 4)),
    ((2, 7, 3, 4), (2, 3, 4)),
    ((1, 2), (1,)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "targets"), SHAPES, ids=str)
def test_the_value_is_torchs(shape, targets, reduction):
    classes = shape[0] if len(shape) == 1 else shape[1]
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(classes, targets, generator=generator)
    if target.numel() > 2:
        target.view(-1)[1] = -100
    logits, probabilities = (normal(*shape, dtype=torch.float64, seed=seed) for seed in (0, 1))
    probabilities = probabilities.softmax(min(1, len(shape) - 1))
    weights = None, weights_of(classes).double()
    for given in itertools.product((target, probabilities), weights, (0, 0.1), (1, 3)):
        options = {"weight": given[1], "label_smoothing": given[2], "reduction": reduction}
        found = U.cross_entropy(logits, given[0], mult=given[3], **options)
        expected = F.cross_entropy(logits * given[3], given[0], **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_the_mean_of_many_float16_losses_does_not_overflow():
    logits, target = normal(30000, 64, dtype=torch.float16), torch.zeros(30000, dtype=torch.long)
    total = U.cross_entropy(logits, target, reduction="sum")
    assert total.isinf(), "this case does not overflow"
    found = U.cross_entropy(logits, target)
    expected = F.cross_entropy(logits.double(), target)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=0)


# --- cross entropy: the gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 50])
def test_the_gradient_at_even_logits_has_unit_scale(classes, weighted, smoothing, reduction):
    # every class once: exactly the average over targets for which the factor is derived
    _, grad = loss_and_gradient(
        U.cross_entropy,
        torch.zeros(classes, classes, dtype=torch.float64),
        torch.arange(classes),
        weight=weights_of(classes).double() if weighted else None,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    assert scale_of(grad) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"weight": weights_of(6)}])
@pytest.mark.parametrize("mult", [1.0, 2.5])
def test_the_gradient_is_a_multiple_of_torchs_of_the_sum(mult, options):
    logits, target = normal(9, 6), torch.tensor([0, 1, 2, 3, 4, 5, -100, 1, 0])
    _, found = loss_and_gradient(U.cross_entropy, logits, target, mult=mult, **options)
    _, plain = loss_and_gradient(F.cross_entropy, logits * mult, target, reduction="sum", **options)
    torch.testing.assert_close(found / found.norm(), plain / plain.norm())
    assert not found[6].any(), "an ignored token sends no gradient"


def test_the_gradient_of_the_mean_does_not_depend_on_the_batch_nor_on_what_is_ignored():
    logits, target = normal(8, 5), torch.arange(8) % 5
    _, whole = loss_and_gradient(U.cross_entropy, logits, target)
    _, half = loss_and_gradient(U.cross_entropy, logits[:4], target[:4])
    ignored = torch.where(torch.arange(8) < 4, target, 3)
    ignored[4:] = 1000
    _, rest = loss_and_gradient(U.cross_entropy, logits, ignored, ignore_index=1000)
    torch.testing.assert_close(whole[:4], half)
    torch.testing.assert_close(rest[:4], half)
    assert not rest[4:].any()


@pytest.mark.parametrize("target", [torch.tensor([], dtype=torch.long), torch.tensor([-100, -100])])
def test_no_tokens_give_torchs_value_and_no_gradient(target):
    logits = normal(len(target), 5)
    value, grad = loss_and_gradient(U.cross_entropy, logits, target)
    assert value.isnan() and F.cross_entropy(logits, target).isnan()
    assert not grad.any()
    value, _ = loss_and_gradient(U.cross_entropy, logits, target, reduction="sum")
    assert value == 0


# --- mean squared error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_squared_error_has_torchs_value_and_gradients_of_unit_scale(reduction, dtype):
    x, t = normal(30, 40, dtype=dtype), normal(30, 40, dtype=dtype, seed=1)
    leaves = x.requires_grad_(), t.requires_grad_()
    value = U.mse_loss(x, t, reduction=reduction)
    torch.testing.assert_close(value, F.mse_loss(x, t, reduction=reduction))
    for grad in torch.autograd.grad(value, leaves, torch.ones_like(value)):
        assert_unit_scaled(grad)
