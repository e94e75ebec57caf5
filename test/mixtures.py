"""A small mixture of experts in plain PyTorch, as users write it, with a shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8

D, HIDDEN, EXPERTS, TOP = 32, 48, 4, 2


class Experts(nn.Module):
    """SwiGLU experts: (T, D) sorted by expert and the ends (E,) of its tokens -> (T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, D) / D**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, D, HIDDEN) / HIDDEN**0.5)
        self.config = "the module's own"

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.up.mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)


class Mixture(nn.Module):
    """Routes each token to the best `TOP` experts, and adds an expert that all tokens share."""

    def __init__(self, experts: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.experts = experts()
        self.shared_expert = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).float().softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int32).index_add(
            0, chosen.flatten(), torch.ones(chosen.numel(), dtype=torch.int32)
        )
        y = self.experts(x[order // TOP], counts.cumsum(0, dtype=torch.int32))
        y = torch.empty_like(y).index_copy(0, order, y).view(*chosen.shape, D)
        return (y * scores.to(y.dtype).unsqueeze(-1)).sum(1) + self.shared_expert(x)


float8.register_experts(Experts)


def model(dtype: torch.dtype = torch.bfloat16, blocks: int = 1) -> nn.Sequential:
    """Mixtures one after the other, of the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mixture() for _ in range(blocks))).to(dtype)


def tokens(count: int = 37, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """(count, D), requiring a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=generator).to(dtype).requires_grad_()
