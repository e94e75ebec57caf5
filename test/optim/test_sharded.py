"""FSDP2, HSDP and tensor parallel: states are sharded, saved and resharded, bit for bit.

All ranks read the same batch, so that losses, states and weights equal those of one process.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from checkpoint_program import load, save
from processes import pool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from float8.optim import SGD, AdamW
from float8.optim.moment import Moment

pytestmark = pytest.mark.slow
NO_GROUP = "ignore:torch.distributed is disabled:UserWarning"
BEFORE, AFTER = 3, 2
# A weight of 4160 elements has 8-bit moments, however small the shards of it are.
OPTIONS = {"lr": 1e-2, "min_size": 4000, "group_size": 16}


def make(mesh=None):
    """A model and its optimizer, of one process or sharded. 130 rows are cut unevenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 130), nn.GELU(), nn.Linear(130, 32))
    if mesh is not None:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model, AdamW(model.parameters(), **OPTIONS)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def assert_same_as_one_process(model, optimizer, expected):
    """Compare weights and states with this rank's rows of those of one process."""
    other, twin = expected
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p.detach()), q), "weights"
        for name, theirs in twin.state[q].items():
            mine = optimizer.state[p][name]
            if not isinstance(theirs, Moment):
                assert torch.equal(full(mine), theirs), name
                continue
            rows = rows_of(p)
            for part, whole in zip(mine.matrix().tensors(), theirs.matrix().tensors(), strict=True):
                assert torch.equal(bits(part), bits(whole)[rows]), name


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def bits(x):
    return x.view(torch.uint8) if x.element_size() == 1 else x


def rows_of(p):
    """The rows of a parameter that this rank has, found by DTensor itself."""
    if not isinstance(p, DTensor):
        return slice(None)
    index = torch.arange(p.shape[0])[:, None].expand(p.shape).contiguous()
    mine = distribute_tensor(index, p.device_mesh, p.placements).to_local()
    return mine[:, 0]


def after(steps):
    """The model and the optimizer of one process after some steps."""
    model, optimizer = make()
    train(model, optimizer, range(steps))
    return model, optimizer


def saves_and_resumes(rank, path):
    model, optimizer = make(mesh_of_all())
    train(model, optimizer, range(BEFORE))
    assert_same_as_one_process(model, optimizer, after(BEFORE))
    save(model, optimizer, path)
    resumes(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that four processes have written, and resumed from."""
    path = tmp_path_factory.mktemp("checkpoint")
    pool().run(4, __file__, "saves_and_resumes", path)
    return path


def resumes(path):
    """Load the checkpoint and continue, on several processes or in one."""
    model, optimizer = make(mesh_of_all() if dist.is_initialized() else None)
    load(model, optimizer, path)
    expected = after(BEFORE)
    assert_same_as_one_process(model, optimizer, expected)
    losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    assert losses == train(*expected, range(BEFORE, BEFORE + AFTER))
    assert_same_as_one_process(model, optimizer, expected)


@pytest.mark.ranks(2)
def test_two_processes_resume(rank, saved):
    resumes(saved)


@pytest.mark.filterwarnings(NO_GROUP)
def test_one_process_resumes(saved):
    resumes(saved)


@pytest.mark.ranks(2)
def test_wrong_rows_are_seen(rank, saved):
    """A planted fault."""
    model, optimizer = make(mesh_of_all())
    load(model, optimizer, saved)
    for state in optimizer.state.values():
        if isinstance(state["exp_avg"], Moment):
            codes = state["exp_avg"].codes.view(torch.uint8)
            codes.copy_(codes.roll(1, 0))
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_same_as_one_process(model, optimizer, after(BEFORE))


@pytest.mark.ranks(4)
def test_replicas_stay_alike(rank):
    """HSDP: stochastic rounding is equal on replicas and in one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = make(mesh)
    train(model, optimizer, range(BEFORE))
    assert_same_as_one_process(model, optimizer, after(BEFORE))
    entry = get_state_dict(model, optimizer)[1]["state"]["0.weight"]["exp_avg_sq"]
    assert entry["exponent"].placements == (Replicate(), Shard(0))
    assert entry["exponent"].shape == (130, 2)


@pytest.mark.ranks(2)
def test_tensor_parallel_parameters(rank):
    """Rows, aligned and unaligned columns, vectors: steps and states equal the unsharded ones."""
    mesh = init_device_mesh("cpu", (2,))
    cases = {
        "rows": ((48, 40), Shard(0), True),
        "columns that end with a group": ((48, 64), Shard(1), True),
        "columns that cut a group": ((48, 40), Shard(1), False),
        "a vector": ((600,), Shard(0), False),
    }
    options = {"min_size": 100, "group_size": 16, "state_rounding": "nearest"}
    for name, (shape, placement, is_coded) in cases.items():
        torch.manual_seed(1)
        whole, grads = torch.randn(shape), torch.randn(2, *shape)
        for cls in (AdamW, SGD):
            p = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
            q = nn.Parameter(whole.clone())
            optimizer, single = cls([p], **options), cls([q], **options)
            step(optimizer, p, grads[0], q, single)
            first = next(iter(optimizer.moment_options))
            entry = optimizer.state_dict()["state"][0][first]
            assert isinstance(entry, dict) == is_coded, name
            again = nn.Parameter(copy.deepcopy(p.detach()))
            twin = cls([again], **options)
            twin.load_state_dict(optimizer.state_dict())
            step(optimizer, p, grads[1], q, single)
            step(twin, again, grads[1])
            if is_coded:
                torch.testing.assert_close(p.full_tensor(), q, rtol=1e-6, atol=1e-7)
                assert torch.equal(again.full_tensor(), p.full_tensor()), name
            else:  # its groups differ, and the state is rounded once more
                torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=2e-3)
                torch.testing.assert_close(again.full_tensor(), q, rtol=0, atol=2e-3)


def step(optimizer, p, grad, q=None, single=None):
    p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
    optimizer.step()
    if single is not None:
        q.grad = grad
        single.step()


@pytest.mark.ranks(2)
def test_plain_states_are_refused(rank):
    """Loading a plain state into a sharded optimizer would mix up rows."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.randn(48, 40), mesh, [Shard(0)]))
    q = nn.Parameter(torch.randn(48, 40))
    q.grad = torch.randn(48, 40)
    single = AdamW([q], min_size=0)
    single.step()
    with pytest.raises(ValueError, match="set_state_dict"):
        AdamW([p], min_size=0).load_state_dict(single.state_dict())
