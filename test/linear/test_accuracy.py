"""Numbers of a whole block, and training: float8 is close, the naive cast is not.

Bounds come from arithmetic. Rounding to m explicit mantissa bits makes an error that is uniform
over one step, so a cast has an SQNR of `cast_sqnr` dB: 32 for E4M3, 26 for E5M2. Errors of
different casts are independent and add in power: a result that depends on several casts is bounded
by the sum of their noises, as if each passed on all of its own.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from assertions import sqnr
from torch import nn

from float8 import (
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES

SCALED = [recipe for recipe in RECIPES if recipe != "unit"]  # for models that are not unit-scaled


class Block(nn.Module):
    """A pre-norm transformer block with causal attention and SwiGLU."""

    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def cast_sqnr(mantissa_bits):
    """SQNR in dB of rounding log-uniform values to a float with so many mantissa bits."""
    step = 2.0**-mantissa_bits
    # noise: step^2 / 12, the binade starting at 1; signal: the mean of v^2, v log-uniform in [1, 2)
    signal = (4 - 1) / (2 * math.log(2))
    return 10 * math.log10(signal / (step**2 / 12))


def _gradients(model, x, g):
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = model(x)
    out.backward(g)
    found = {"output": out.detach(), "grad_input": x.grad}
    return found | {name: p.grad for name, p in model.named_parameters()}


def summed_sqnr(e4m3_casts, e5m2_casts):
    """SQNR in dB of a result to which so many casts contribute."""
    noise = e4m3_casts * 10 ** (-cast_sqnr(3) / 10) + e5m2_casts * 10 ** (-cast_sqnr(2) / 10)
    return -10 * math.log10(noise)


@pytest.mark.parametrize("recipe", SCALED)
def test_a_block_keeps_the_precision_of_its_formats(recipe):
    block = Block()
    x, g = torch.randn(4, 64, 128), torch.randn(4, 64, 128)
    reference = Block().double()
    reference.load_state_dict(block.state_dict())
    exact = _gradients(reference, x.double(), g.double())
    model = convert_to_float8_training(block, config=RECIPES[recipe])
    for _ in range(2):
        found = _gradients(model, x, g)
        sync_float8_amax_and_scale_history(model)
    # Four layers: two casts each in forward, on which gradients depend as well, two in backward.
    grad_outputs = 4 if recipe in ("tensorwise", "delayed") else 0
    for name, value in found.items():
        bound = (
            summed_sqnr(8, 0) if name == "output" else summed_sqnr(16 - grad_outputs, grad_outputs)
        )
        assert sqnr(value, exact[name]) >= bound, f"{recipe}: {name}: {sqnr(value, exact[name])}"


class _Teacher:
    """Regression on a random network with noisy targets: like text, a loss that none can beat."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.first, self.second = self._randn(64, 64) / 8, self._randn(64, 32) / 8
        self.batches = [self._batch(256) for _ in range(150)]
        self.held_out = self._batch(4096)

    def _randn(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def _batch(self, size):
        x = self._randn(size, 64)
        return x, torch.tanh(x @ self.first) @ self.second + 0.2 * self._randn(size, 32)

    def train(self, config):
        """Held-out loss after one pass over the batches."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        if config is not None:
            convert_to_float8_training(model, config=config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for x, y in self.batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            (loss / 64).backward()  # one of 64 microbatches: gradients as small as in large batches
            optimizer.step()
            sync_float8_amax_and_scale_history(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x, y = self.held_out
            return F.mse_loss(model.eval()(x).float(), y).item()


@pytest.fixture(scope="module")
def teacher():
    problem = _Teacher(seed=0)
    return problem, problem.train(None)


@pytest.mark.parametrize("recipe", SCALED)
def test_training_ends_within_three_percent_of_bf16(recipe, teacher):
    problem, bf16 = teacher
    assert problem.train(RECIPES[recipe]) <= 1.03 * bf16, f"bf16 {bf16}"


def test_a_scale_of_one_does_not_train_a_plain_model(teacher):
    problem, bf16 = teacher
    assert problem.train(RECIPES["unit"]) >= 1.5 * bf16, f"bf16 {bf16}"
