"""Saved activations under FSDP2 on two processes."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from float8.activations import saved_activations


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def trains_like_one_process(rank):
    """Gradients equal those of one process: equal data on both ranks average exactly."""
    torch.manual_seed(0)
    whole = nn.Sequential(Layer(), Layer())
    sharded = copy.deepcopy(whole)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    x, g = torch.randn(128, 64), torch.randn(128, 64)
    for model in (whole, sharded):
        with saved_activations(model):
            y = model(x)
            assert "SavedCopies" in str(_names(y.grad_fn)), "the norm and SwiGLU are reached"
            y.backward(g)
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.full_tensor()), name


def _names(node):
    if node is None:
        return []
    return [node.name(), *(n for child, _ in node.next_functions for n in _names(child))]
