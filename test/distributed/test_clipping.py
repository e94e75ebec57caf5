"""One norm of all gradients, equal on all ranks and to that of one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8ExpertParallel,
    Float8LinearConfig,
    clip_grad_norm_,
    convert_to_float8_training,
    register_experts,
)

D = 18  # which four ranks do not divide
NORMS = (2.0, 1.0, torch.inf)
ROWWISE = Float8LinearConfig.from_recipe_name("rowwise")


class Block(nn.Module):
    """A norm, two layers, and a stack of eight experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.experts = nn.Module()
        self.experts.register_parameter("w", nn.Parameter(torch.randn(8, D, D)))

    def forward(self, x):
        y = self.down(self.up(self.norm(x)).relu())
        w = self.experts.w
        return y @ (w.full_tensor() if isinstance(w, DTensor) else w).sum(0)


def gradients():
    """Name -> the gradient that each parameter gets, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(p.shape, generator=generator) for n, p in Block().named_parameters()}


def set_gradients(model):
    """Gradients with the placements of the parameters, as backward leaves them."""
    for g, p in zip(gradients().values(), model.parameters(), strict=True):
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements)
        else:
            p.grad = g
    return model


def mesh_of(*names):
    world = dist.get_world_size()
    sizes = (world,) if len(names) == 1 else (world // 2, 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def spread(module, mesh):
    """Experts over a mesh, as `Float8ExpertParallel` places them."""
    w = module.experts.w
    module.experts.w = nn.Parameter(distribute_tensor(w.data, mesh, [Shard(0)]))


def ddp(model):
    return DistributedDataParallel(model)


def ep(model):
    spread(model, mesh_of("ep"))
    return model


def fsdp(model):
    return fully_shard(model, mesh=mesh_of("dp"))


def hsdp(model):
    return fully_shard(model, mesh=mesh_of("replicate", "shard"))


def tp(model):
    styles = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh_of("tp"), styles)


def tp_and_ep(model):
    return ep(tp(model))


def fsdp_and_ep(model):
    """Experts on one dimension, replicated over the other; all else sharded over both."""
    mesh = mesh_of("dp", "ep")
    spread(model, mesh["ep"])
    for child in (model.norm, model.up, model.down):
        fully_shard(child, mesh=mesh)
    return model


def hsdp_of_experts(model):
    """Experts on one dimension, and FSDP2 over the other shards each rank's part."""
    mesh = mesh_of("dp", "ep")
    spread(model, mesh["ep"])
    fully_shard(model.experts, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


FORMS = {f.__name__: f for f in (ddp, ep, fsdp, hsdp, tp, tp_and_ep, fsdp_and_ep, hsdp_of_experts)}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_parallelism_clips_as_one_process(rank, form):
    for norm_type in NORMS:
        exact = torch.cat([g.double().flatten() for g in gradients().values()])
        expected = torch.linalg.vector_norm(exact, norm_type)
        for limit in (float(expected) / 3, float(expected) * 3):
            model = set_gradients(FORMS[form](Block()))
            parameters = (p for p in model.parameters())  # a generator is read once
            total = clip_grad_norm_(parameters, limit, norm_type)
            assert type(total) is torch.Tensor and total.shape == ()
            everyone = [torch.empty_like(total) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, total)
            assert all(torch.equal(total, other) for other in everyone)
            torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0.0)
            factor = min(1.0, limit / (float(expected) + 1e-6))
            for g, p in zip(gradients().values(), model.parameters(), strict=True):
                found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                torch.testing.assert_close(found, g * factor, rtol=1e-5, atol=1e-7)
            del model


@pytest.mark.ranks(2)
def test_a_norm_that_is_not_finite(rank):
    model = set_gradients(ep(Block()))
    if rank == 1:
        model.experts.w.grad.to_local()[0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model.parameters(), 1.0).isnan()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", NORMS)
def test_one_rank_has_nothing_of_a_parameter(rank, norm_type):
    """torch refuses the largest element of an empty shard, while the other rank waits."""
    whole = [torch.randn(shape) for shape in ((1, 3), (4, 1), (5,))]
    for x in whole:
        dist.broadcast(x, 0)
    mesh, parameters = mesh_of("dp"), []
    for x, placement in zip(whole, (Shard(0), Shard(1), None), strict=True):
        p = x.clone() if placement is None else distribute_tensor(x, mesh, [placement])
        parameters.append(nn.Parameter(torch.zeros_like(p)))
        parameters[-1].grad = p
    expected = torch.linalg.vector_norm(torch.cat([x.flatten() for x in whole]), norm_type)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1e-3, norm_type), expected)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0, norm_type), torch.tensor(1e-3))


class Experts(nn.Module):
    """As torchtitan's: rows are sorted by expert."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x, num_tokens_per_expert):
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, self.w.mT, offs=offs)


register_experts(Experts)


class Mixture(nn.Module):
    """A layer, and experts that each read as many tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(32, 32), Experts()

    def forward(self, x):
        return self.experts(self.first(x), torch.full((4,), len(x) // 4))


@pytest.mark.ranks(2)
def test_the_gradients_of_converted_experts_are_clipped_with_the_rest(rank):
    alone, model = (convert_to_float8_training(Mixture(), config=ROWWISE) for _ in range(2))
    parallelize_module(model, mesh_of("ep"), {"experts": Float8ExpertParallel()})
    x = torch.randn(8, 32)  # the tokens of both ranks
    alone(x).sum().backward()
    model(x).sum().backward()
    model.experts.w.grad /= 2  # a sum over the tokens of both
    with pytest.raises(RuntimeError, match="DTensor"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e-3), expected)


def test_without_gradients_or_with_one():
    p = nn.Parameter(torch.ones(4))
    assert clip_grad_norm_([p], 1.0) == 0
    p.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_(p, 1.0) == 4
    torch.testing.assert_close(p.grad, torch.full((4,), 0.5))


@pytest.mark.ranks(2)
def test_a_replica_that_is_counted_twice_is_found(rank):
    """A planted fault: local norms, added up over all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    p.grad = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    total = clip_grad_norm_([p], 10.0)
    torch.testing.assert_close(total, torch.tensor(3.0).sqrt())
    twice = p.grad.to_local().square().sum()
    dist.all_reduce(twice)
    assert not torch.isclose(twice.sqrt(), total)
