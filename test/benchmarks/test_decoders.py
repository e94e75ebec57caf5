"""The decoders whose learning rates are compared differ in how they are scaled, not in size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.models.decoders import PARAMETRISATIONS

WIDTH, LAYERS, CONTEXT = 64, 2, 16


def loss_at_start(name, width=WIDTH):
    torch.manual_seed(0)
    parametrisation = PARAMETRISATIONS[name]
    model = parametrisation.model(width, LAYERS, CONTEXT)
    tokens, targets = torch.randint(256, (2, 4, CONTEXT))
    return model, parametrisation, parametrisation.loss(model)(tokens, targets)


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_every_decoder_starts_near_the_loss_of_a_guess_and_learns_a_batch(name):
    torch.manual_seed(0)
    parametrisation = PARAMETRISATIONS[name]
    model = parametrisation.model(WIDTH, LAYERS, CONTEXT)
    tokens, targets = torch.randint(256, (2, 4, CONTEXT))
    loss_of = parametrisation.loss(model)
    optimizer = parametrisation.optimizer(model, 2.0 ** parametrisation.octaves[3])
    first = loss_of(tokens, targets)
    assert first.item() == pytest.approx(math.log(256), rel=0.05)
    for _ in range(20):
        loss_of(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(tokens, targets) < 0.8 * first


def test_all_multiply_by_as_many_weights():
    def multiplied(name):
        model, *_ = loss_at_start(name)
        return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    assert len({multiplied(name) for name in PARAMETRISATIONS}) == 1


def test_only_a_unit_scaled_model_has_learning_rates_that_depend_on_the_width():
    def rates(name, width):
        model, parametrisation, _ = loss_at_start(name, width)
        groups = parametrisation.optimizer(model, 1.0).param_groups
        return sorted(group["lr"] for group in groups)

    assert rates("standard", 64) == rates("standard", 128) == [1.0]
    assert rates("u-mup", 64) != rates("u-mup", 128)
    assert max(rates("u-mup", 64)) == max(rates("u-mup", 128)) == 1.0  # embedding and readout


def test_mus_has_its_norms_behind_the_branches():
    model, *_ = loss_at_start("mus")
    assert {layer.norm for layer in model.layers} == {"res-post"}
    assert {layer.mhsa.attention for layer in model.layers} == {"sqrt_softmax"}
