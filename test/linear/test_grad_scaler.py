"""float16 autocast with `torch.amp.GradScaler`: overflows, and what they leave in delayed scales.

Scales of the loss are powers of two. Gradients then differ between two scales by that factor
exactly, as long as none of them is subnormal in float16, and so do the scales of dynamic casts.
"""

from __future__ import annotations

import pytest
import torch
from assertions import assert_all_bitwise
from torch import Tensor, nn

from float8 import after_step, convert_to_float8_training
from float8.config import RECIPES
from float8.distributed import sync

SCALED = sorted(set(RECIPES) - {"unit"})
OVERFLOWS = 2.0**40


class Training:
    """Two layers, 37 rows, one batch; ``step`` says whether the scaler took the step."""

    def __init__(self, recipe: str, first_scale: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 16))
        self.model = convert_to_float8_training(model, config=RECIPES[recipe])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
        self.x, self.y = torch.randn(37, 48), torch.randint(16, (37,))

    def step(self) -> bool:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        before = self.weights()
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.optimizer.zero_grad()
        after_step(self.model)
        taken = self.scaler.get_scale() >= scale
        if not taken:
            assert_all_bitwise(self.weights(), before, "a skipped step moved a weight")
        for name, buffer in self.model.named_buffers():
            assert buffer.isfinite().all(), name
        return taken

    def until(self, taken: int) -> int:
        """Take so many steps; the number that the scaler skipped."""
        steps: list[bool] = []
        while sum(steps) < taken:
            steps.append(self.step())
        return len(steps) - taken

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("recipe", SCALED)
def test_after_an_overflow_training_goes_on_as_if_it_had_not_been(recipe):
    """Bit for bit, but for delayed scales, which are larger for a while."""
    after = Training(recipe, OVERFLOWS)
    assert after.until(taken=6) > 15
    without = Training(recipe, after.scaler.get_scale())
    assert without.until(taken=6) == 0
    if recipe != "delayed":
        assert_all_bitwise(after.weights(), without.weights())
        return
    dynamic = Training("tensorwise", after.scaler.get_scale())
    dynamic.until(taken=6)
    assert 0 < distance(after, without) <= distance(dynamic, without)


def distance(a: Training, b: Training) -> float:
    return sum((x - y).square().sum().item() for x, y in zip(a.weights(), b.weights(), strict=True))


@pytest.mark.parametrize("recipe", SCALED)
@pytest.mark.parametrize("taken", [0, 1])  # delayed: before and after the first scale
def test_an_infinite_gradient_of_a_layer_is_seen_by_the_scaler(recipe, taken):
    """A cast that clamped it would hide the overflow."""
    training = Training(recipe, 1024.0)
    training.until(taken)
    plant = training.model[1].register_full_backward_hook(
        lambda module, grads, _: (grads[0].index_fill(0, torch.tensor([5]), torch.inf),)
    )
    assert not training.step()
    plant.remove()
    assert training.step()


def test_planted_scales_that_follow_an_infinite_amax_are_found(monkeypatch):
    monkeypatch.setattr(sync, "updated_history", lambda h, current, *rest: (h, current))
    with pytest.raises(AssertionError, match=r"cast_grad_output\.scale"):
        Training("delayed", OVERFLOWS).until(taken=1)
