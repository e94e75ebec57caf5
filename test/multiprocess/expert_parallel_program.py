"""Experts on two and on four processes; `test_expert_parallel.py` starts them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from float8 import Float8LinearConfig
from float8.distributed.expert_parallel import Float8ExpertParallel

E, D, H = 4, 64, 96


class Experts(nn.Module):
    def __init__(self, experts=E, dtype=torch.bfloat16):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, H, D, dtype=dtype) / 8)
        self.down = nn.Parameter(torch.randn(experts, D, H, dtype=dtype) / 8)

    def forward(self, x, num_tokens_per_expert):
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        h = F.grouped_mm(x, self.up.mT, offs=offs).relu()
        return F.grouped_mm(h, self.down.mT, offs=offs)


def tokens(counts, seed):
    torch.manual_seed(seed)
    return torch.randn(sum(counts), D).bfloat16().requires_grad_()


def trains(rank, recipe):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model = nn.Sequential(Experts())
    config = None if recipe is None else Float8LinearConfig.from_recipe_name(recipe)
    parallelize_module(model, mesh, {"0": Float8ExpertParallel(config=config)})
    counts = [[3, 0, 5, 7], [9, 2, 0, 4], [0, 0, 0, 0], [1, 1, 1, 1]]
    x = tokens(counts[rank], rank)
    y = model[0](x, torch.tensor(counts[rank]))
    (y.float() ** 2).sum().backward()
    torch.manual_seed(0)
    whole = Experts()
    xs = [tokens(c, r) for r, c in enumerate(counts[: mesh.size()])]
    by_expert = [[t.split(c)[e] for t, c in zip(xs, counts)] for e in range(E)]
    z = whole(
        torch.cat([t for ts in by_expert for t in ts]), torch.tensor(counts[: mesh.size()]).sum(0)
    )
    (z.float() ** 2).sum().backward()
    print(rank, recipe, (x.grad - xs[rank].grad).norm() / xs[rank].grad.norm())
    for a, b in zip(model.parameters(), whole.parameters()):
        print(rank, (a.grad.full_tensor() - b.grad).norm() / b.grad.norm())
