"""How a batch is run, what of an output is looked at, and where a backward starts."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from float8.numerics.batches import (
    main_tensor,
    map_tensors,
    own_batch,
    run_model,
    start_of,
    tensors_of,
)

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Plain:
    name: str
    logits: Tensor
    loss: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    inside: UserDict
    x: Tensor


class Sum(nn.Module):
    def forward(self, a, b=None):
        return a if b is None else a + 2 * b


ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ONE, ONE),
        ((ONE,), ONE),
        ((ONE, TWO), ONE + 2 * TWO),
        ([ONE, TWO], ONE + 2 * TWO),
        ({"b": ONE, "a": TWO}, TWO + 2 * ONE),
        (UserDict(a=ONE, b=TWO), ONE + 2 * TWO),
    ],
)
def test_a_batch_is_spread_over_the_arguments(batch, expected):
    assert torch.equal(run_model(Sum(), batch), expected)


def test_tensors_are_found_in_the_outputs_that_models_have():
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    tree = (a, [Plain("x", b)], {"c": c}, None, "text", 3)
    assert [float(t[0]) for t in tensors_of(tree)] == [0, 1, 2]


def test_mapping_keeps_the_structure_and_what_is_no_tensor():
    tree = {"a": (ONE, "text"), "b": [Pair(TWO, None)]}
    found = map_tensors(lambda t: t + 1, tree)
    assert torch.equal(found["a"][0], ONE + 1)
    assert found["a"][1] == "text"
    assert isinstance(found["b"][0], Pair)
    assert torch.equal(found["b"][0].a, TWO + 1)


def test_an_own_batch_of_objects_shares_nothing_and_keeps_their_types():
    batch = Frozen(UserDict(x=torch.ones(2)), torch.ones(2, requires_grad=True))
    own = own_batch(batch)
    assert isinstance(own, Frozen)
    assert isinstance(own.inside, UserDict)
    with torch.no_grad():
        own.inside["x"] += own.x.zero_() + 1
    own.x.sum().backward()
    assert batch.x.grad is None
    for x in (batch.x, batch.inside["x"]):
        assert torch.equal(x, torch.ones(2))


def test_an_own_batch_shares_neither_memory_nor_gradients():
    x = torch.ones(3, requires_grad=True)
    copy, ids = own_batch((x, torch.tensor([1, 2])))
    assert copy.requires_grad
    assert not ids.requires_grad
    (copy * 2).sum().backward()
    with torch.no_grad():
        copy.zero_()
    assert x.grad is None
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), torch.zeros(4)),
        {"ids": torch.tensor([1]), "loss": torch.tensor(1.0), "logits": torch.ones(2, 3)},
        Plain("x", torch.ones(2, 3), torch.tensor(5.0)),
    ],
)
def test_the_main_tensor_is_the_first_that_is_no_scalar(output):
    assert torch.equal(main_tensor(output), torch.ones(2, 3))


def test_an_output_without_numbers_is_refused():
    with pytest.raises(TypeError, match="tuple without a floating point tensor"):
        main_tensor((torch.tensor([1]), "text"))


@pytest.mark.parametrize(
    "output",
    [
        OrderedDict(loss=torch.tensor(5.0), logits=torch.ones(2)),
        Plain("x", torch.ones(2), torch.tensor(5.0)),
        torch.tensor(5.0),
        torch.tensor([5.0]),
    ],
)
def test_backward_starts_from_the_loss_where_there_is_one(output):
    start = start_of(output, None, 0)
    assert start.loss == 5.0
    assert start.cotangent is None


def test_an_own_loss_comes_first():
    output = Plain("x", torch.ones(2), torch.tensor(5.0))
    assert start_of(output, lambda out: out.logits.sum(), 0).loss == 2.0


def test_without_a_loss_the_cotangent_is_random_and_follows_from_the_seed():
    x = torch.ones(64, requires_grad=True)
    gradients = []
    for seed in (1, 1, 2):
        state = torch.get_rng_state()
        assert start_of(x * 1, None, seed).backward()
        assert torch.equal(torch.get_rng_state(), state)
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])
    assert 0.5 < gradients[0].std() < 1.5


def test_nothing_runs_backward_where_nothing_asks_for_a_gradient():
    assert not start_of(torch.ones(3), None, 0).backward()


@pytest.mark.parametrize("bad", [torch.ones(3), 1.0, None])
def test_a_loss_that_is_no_scalar_is_refused(bad):
    with pytest.raises(TypeError, match="loss_fn must return a scalar tensor"):
        start_of(torch.ones(3), lambda out: bad, 0)
