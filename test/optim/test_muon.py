"""Muon: torch.optim.Muon with a float8 momentum, AdamW beside it, and matrices shared by ranks."""

import copy
import io
from unittest import mock

import pytest
import torch
from assertions import assert_bitwise
from checkpoint_program import load, save
from one_process import convert
from optim_training import assert_same_models, assert_same_states, sqnr_of_states, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from wire import Wire

import float8.optim.muon
from float8 import E4M3, Float8Tensor
from float8.kernels import optimizer_step
from float8.kernels.optimizer_step import cast_master
from float8.optim import AdamW, Muon, float32_state_dict, report
from float8.optim.moment import Moment
from scripts.training.gpt import GPT, Sizes

FLOAT32 = {"first_moment": "float32"}
SHAPES = [(64, 48), (5, 123), (96, 96), (1, 40), (130, 1)]


def matrices(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def step(params, *optimizers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(p.shape, generator=generator) for p in params[0]]
    for chosen in params:
        for p, g in zip(chosen, gradients, strict=True):
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if is_d(p) else g.to(p.dtype)
    for optimizer in optimizers:
        optimizer.step()


def is_d(p):
    return isinstance(p, DTensor)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8, "weight_decay": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 0.1},
        {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1.0},
    ],
)
def test_with_a_float32_momentum_it_is_torch(options):
    """To a part of bfloat16's precision: torch fuses a sum, and then a direction may round up."""
    ours, theirs = matrices(), matrices()
    a, b = Muon(ours, **options, **FLOAT32), torch.optim.Muon(theirs, **options)
    for seed in range(4):
        step((ours, theirs), a, b, seed=seed)
    b.load_state_dict(float32_state_dict(a))
    a.load_state_dict(b.state_dict())
    step((ours, theirs), a, b, seed=9)
    for p, q, start in zip(ours, theirs, matrices(), strict=True):
        assert (p - q).norm() < 2.0**-9 * (q - start).norm()
        torch.testing.assert_close(
            a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )


def test_an_update_is_nearly_orthogonal():
    p = nn.Parameter(torch.zeros(48, 80))
    p.grad = torch.randn(48, 80)
    u, _, v = torch.linalg.svd(p.grad.double(), full_matrices=False)
    Muon([p], lr=1.0, weight_decay=0.0, min_size=0).step()
    update = -(u.t() @ p.detach().double() @ v.t())
    diagonal = update.diagonal()
    assert bool((diagonal > 0.6).all() and (diagonal < 1.3).all())
    assert (update - diagonal.diag()).norm() < 0.05 * diagonal.norm()


def gpt(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(Sizes(layers=2, width=64, heads=4, context=32)).to(dtype)


def split(model):
    """The matrices of the blocks, and the rest."""
    chosen = [p for p in model.blocks.parameters() if p.dim() == 2]
    names = {id(p) for p in chosen}
    return chosen, [p for p in model.parameters() if id(p) not in names]


def groups(model, **options):
    chosen, rest = split(model)
    return [
        {"params": chosen, "lr": 0.02, **options},
        {"params": rest, "kind": "adamw", "lr": 3e-3, **options},
    ]


def train(model, *optimizers, steps=range(20)):
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        first, by = (torch.randint(n, (8, 1), generator=generator) for n in (64, 4))
        text = (first + torch.arange(33) * by) % 64
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def test_a_gpt_trains_as_torch_trains_it_in_float32():
    """With the momentum in float8 its loss is nearer than that of torch's own in bfloat16."""
    losses, models = {}, {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        models[name] = model = gpt(dtype)
        chosen, rest = split(model)
        twin = torch.optim.Muon(chosen, lr=0.02)
        losses[name] = train(model, twin, torch.optim.AdamW(rest, lr=3e-3))
    for name, options in (("exact", FLOAT32 | {"second_moment": "float32"}), ("float8", {})):
        models[name] = model = gpt()
        losses[name] = train(model, Muon(groups(model, **options), min_size=0))
    exact = distance(models["exact"], models["float32"])
    assert exact < distance(models["bfloat16"], models["float32"])
    assert abs(losses["float8"] - losses["float32"]) < abs(losses["bfloat16"] - losses["float32"])


def distance(model, other):
    pairs = zip(*(split(m)[0] for m in (model, other)), strict=True)
    return sum(float((p.detach().float() - q.detach()).square().sum()) for p, q in pairs)


def test_states_take_one_byte_per_element():
    ours, theirs = matrices(), matrices()
    a, b = Muon(ours, min_size=1000), torch.optim.Muon(theirs)
    for seed in range(5):
        step((ours, theirs), a, b, seed=seed)
    assert a.state[ours[0]].keys() == {"step", "momentum_buffer"}
    moments = [a.state[p]["momentum_buffer"] for p in ours]
    assert [type(m) is Moment for m in moments] == [True, False, True, False, False]
    assert moments[0].nbytes == 64 * 48 + 64 * 4
    assert moments[2].nbytes == 96 * 96 + 96 * 4
    assert report(a).keys() == {"momentum_buffer"}
    assert sqnr_of_states(a, b, "momentum_buffer") > 20


def test_groups_of_the_other_kind_are_adamws():
    model, twin = gpt(), gpt()
    optimizer = Muon(groups(model), min_size=0)
    mine, theirs = split(model)[1], split(twin)[1]
    assert optimizer.state_dict()["param_groups"][1]["weight_decay"] == 0.01
    twin_optimizer = AdamW([{"params": []}, {"params": theirs}], lr=3e-3, min_size=0)
    for seed in range(3):
        step((mine, theirs), optimizer, twin_optimizer, seed=seed)
    for p, q in zip(mine, theirs, strict=True):
        assert_bitwise(p.detach(), q.detach())
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_round_trip_keeps_every_bit():
    model = gpt()
    optimizer = Muon(groups(model))
    train(model, optimizer, steps=range(3))
    torch.save(optimizer.state_dict(), memory := io.BytesIO())
    memory.seek(0)
    other = copy.deepcopy(model)
    twin = Muon(groups(other))
    twin.load_state_dict(torch.load(memory, weights_only=True))
    assert_same_states(optimizer, twin)
    for m, o in ((model, optimizer), (other, twin)):
        train(m, o, steps=range(3, 5))
    assert_same_models(model, other)
    swapped = Muon(groups(other)[::-1])
    with pytest.raises(ValueError, match="parameter group"):
        swapped.load_state_dict(optimizer.state_dict())


def test_masters_and_layouts():
    """A float8 parameter follows its master, and a transposed parameter is written."""
    value = torch.randn(64, 48)
    kept = nn.Parameter(Float8Tensor.from_high_precision(value, E4M3))
    turned = nn.Parameter(value.t().contiguous().t())
    plain = nn.Parameter(value.clone())
    a, b = Muon([kept], lr=0.1, **FLOAT32), Muon([turned, plain], lr=0.1, **FLOAT32)
    a.start_master(kept, value)
    for seed in range(3):
        step(([plain], [turned], [kept]), a, b, seed=seed)
    assert_bitwise(turned.detach().contiguous(), plain.detach())
    torch.testing.assert_close(
        values_of(a.state[kept]["master"]), plain.detach(), rtol=2e-3, atol=2e-3
    )
    torch.testing.assert_close(kept.dequantize(), plain.detach(), rtol=0.07, atol=0.02)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_the_op_of_a_gpu_gives_the_same_bits(lr, monkeypatch):
    """It runs `plain_step` here; in place of both parts, also of a master."""
    pytest.importorskip("triton")
    assert optimizer_step._no_kernel(None) is None  # registers the op
    found = []
    for by_op in (False, True):
        params = matrices()
        params[0] = nn.Parameter(Float8Tensor.from_high_precision(params[0].detach(), E4M3))
        optimizer = Muon(params, lr=lr, min_size=0, capturable=isinstance(lr, torch.Tensor))
        with monkeypatch.context() as patch:
            if by_op:
                patch.setattr(optimizer_step, "takes_kernel", lambda *_: True)
                patch.setattr(optimizer_step, "cast_master", lambda p, w, *_: cast_master(p, w))
            for seed in range(2):
                step((params,), optimizer, seed=seed)
        found.append([params[0].dequantize().detach(), *params[1:]])
    for p, q in zip(*found, strict=True):
        assert_bitwise(p.detach(), q.detach())


def test_small_updates_of_bfloat16_parameters_add_up():
    moved = []
    for rounds in (False, True):
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = Muon([p], lr=1e-3, weight_decay=0.0, stochastic_rounding=rounds)
        p.grad = torch.eye(64, dtype=torch.bfloat16)
        for _ in range(50):
            optimizer.step()
        moved.append(1 - float(p.detach().diagonal().float().mean()))
    assert moved[0] == 0
    assert moved[1] == pytest.approx(0.05, rel=0.4)


def test_the_compiled_step_is_the_eager_one():
    found = []
    for compiled in (False, True):
        params = [*matrices(), nn.Parameter(torch.ones(200))]
        optimizer = Muon([{"params": params[:-1]}, {"params": params[-1], "kind": "adamw"}])
        if compiled:
            torch._dynamo.reset()
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        for seed in range(2):
            step((params,), optimizer, seed=seed)
        found.append(params)
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


# --- stacks of matrices, and slices of one

STACKS = [(3, 20, 48), (4, 40, 24), (2, 16, 16)]


def assert_moved_alike(p, q, start):
    """Products of batches sum in an order that depends on the size of the batch."""
    assert (p - q).norm() < 2.0**-8 * (q - start).norm()


def stacks(shapes=STACKS):
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_each_matrix_of_a_stack_moves_as_a_parameter_of_its_own(adjust):
    ours, theirs = stacks(), [[nn.Parameter(m.detach().clone()) for m in p] for p in stacks()]
    alone = [p for stack in theirs for p in stack]
    options = {"lr": 0.1, "adjust_lr_fn": adjust}
    a, b = Muon(ours, **options, **FLOAT32), torch.optim.Muon(alone, **options)
    for seed in range(3):
        step((ours,), a, seed=seed)
        gradients = [g for p in ours for g in p.grad]
        for p, g in zip(alone, gradients, strict=True):
            p.grad = g.clone()
        b.step()
    for p, stack, start in zip(ours, theirs, stacks(), strict=True):
        assert_moved_alike(p, torch.stack(list(stack)), start)


def test_slices_move_as_parameters_of_their_own():
    """The heads of a weight that makes q, k and v; and of a stack."""
    shapes = [(6 * 8, 40), (2, 2 * 8, 40)]
    ours = stacks(shapes)
    slices = nn.ParameterList(p.detach().reshape(-1, 8, 40).clone() for p in ours)
    a, b = (
        Muon([{"params": ours, "slice_rows": 8}], lr=0.1, **FLOAT32),
        Muon(slices, lr=0.1, **FLOAT32),
    )
    whole = Muon(others := stacks(shapes), lr=0.1, **FLOAT32)
    a.load_state_dict(copy.deepcopy(a.state_dict()))
    for seed in range(3):
        step((ours, others), a, whole, seed=seed)
        for p, q in zip(ours, slices, strict=True):
            q.grad = p.grad.reshape(q.shape).clone()
        b.step()
    for p, q, other, start in zip(ours, slices, others, stacks(shapes), strict=True):
        assert_moved_alike(p, q.view_as(p), start)
        with pytest.raises(AssertionError):
            assert_moved_alike(p, other, start)
    a.load_state_dict(whole.state_dict())  # slices are this optimizer's choice
    assert a.param_groups[0]["slice_rows"] == 8


def test_a_sharded_checkpoint_of_1_0_0_has_all_that_a_group_asks_for():
    """`torch.distributed.checkpoint` raises an error for a key that the files do not have."""
    of_1_0_0 = (
        "adjust_lr_fn capturable eps first_moment fused group_size kind lr maximize min_size "
        "momentum nesterov ns_coefficients ns_steps params second_moment state_rounding "
        "stochastic_rounding weight_decay"
    )
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    plain, sliced = Muon([weights[0]]), Muon([weights[1]], slice_rows=2)
    assert plain.state_dict()["param_groups"][0].keys() == set(of_1_0_0.split())
    assert sliced.state_dict()["param_groups"][0]["slice_rows"] == 2


@pytest.mark.parametrize("rows", [0, -8, 7, 96, 8.0])
def test_slices_that_do_not_divide_the_rows_are_refused(rows):
    with pytest.raises(ValueError, match=f"no whole slices of {rows} rows"):
        Muon([{"params": [nn.Parameter(torch.ones(48, 40))], "slice_rows": rows}])
    with pytest.raises(ValueError, match=r"is no matrix"):
        Muon([nn.Parameter(torch.ones(2, 2, 2, 2))])


@pytest.mark.ranks(4)
def test_stacks_on_several_ranks_move_as_in_one_process(rank):
    """Whole matrices stay on their ranks: nothing crosses the network. Others are gathered."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("a", "b"))
    options = {"state_rounding": "nearest", "min_size": 0, "group_size": 1, "slice_rows": 4}
    for placements, stays in (
        ((Replicate(), Shard(0)), True),  # experts over a part of the ranks, uneven
        ((Shard(0), Shard(0)), True),  # and their shards over the rest
        ((Replicate(), Shard(1)), False),
        ((Shard(0), Shard(2)), False),
    ):
        single = stacks()
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in single]
        one, several = Muon(single, **options), Muon(params, **options)
        for seed in range(2):
            step((single, params), one, seed=seed)
            with Wire() as wire:
                several.step()
            assert (not wire.sent) == stays
        for p, q, start in zip(params, single, stacks(), strict=True):
            assert_moved_alike(p.full_tensor(), q, start)


# --- several ranks


def sharded(mesh):
    return [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)] * mesh.ndim))
        for p in matrices()
    ]


def bits_of_one_process(steps):
    params = matrices()
    optimizer = Muon(params, min_size=0)
    for seed in range(steps):
        step((params,), optimizer, seed=seed)
    return params


@pytest.mark.ranks(2, 3)
def test_each_matrix_is_computed_by_one_rank(rank):
    """Bits are those of one process; a matrix's rows cross the network once, and its update's."""
    ranks = torch.distributed.get_world_size()
    params = sharded(init_device_mesh("cpu", (ranks,)))
    optimizer, computed = Muon(params, min_size=0), []
    plain = float8.optim.muon.newton_schulz

    def seen(u, *numbers):
        computed.append(tuple(u.shape))
        return plain(u, *numbers)

    with mock.patch.object(float8.optim.muon, "newton_schulz", seen):
        for seed in range(3):
            step((params,), seed=seed)
            with Wire() as wire:
                optimizer.step()
    assert computed == SHAPES[rank::ranks] * 3
    total = torch.tensor(wire.bytes("all_to_all"))
    torch.distributed.all_reduce(total)
    of_all = 2 * 2 * sum(rows * columns for rows, columns in SHAPES)  # bfloat16, there and back
    assert 0 < total < of_all
    for p, q in zip(params, bits_of_one_process(3), strict=True):
        assert_bitwise(p.detach().full_tensor(), q.detach())


@pytest.mark.ranks(4)
def test_every_placement_gives_the_bits_of_one_process(rank):
    """Replicas each compute all; columns, and rows over two dimensions, are gathered whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    options = {"state_rounding": "nearest", "min_size": 0, "group_size": 1}
    for placements in (
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Replicate()),
    ):
        single = matrices()
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, placements)) for p in single]
        pair = Muon(params, **options), Muon(single, **options)
        for seed in range(2):
            step((single, params), *pair, seed=seed)
        for p, q in zip(params, single, strict=True):
            assert_bitwise(p.detach().full_tensor(), q.detach(), placements)


def fsdp():
    model = convert(gpt(), "gathered tensorwise")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


@pytest.mark.ranks(2)
def test_fsdp_trains_saves_and_resumes(rank, tmp_path):
    """The losses are those of one process; a checkpoint of two ranks resumes to the bit.

    Weights are gathered in float8, from parameters of another type.
    """
    model, single = fsdp(), convert(gpt(), "gathered tensorwise")
    optimizer, one = Muon(groups(model)), Muon(groups(single))
    assert train(model, optimizer, steps=range(3)) == train(single, one, steps=range(3))
    save(model, optimizer, tmp_path)
    other = fsdp()
    resumed = Muon(groups(other))
    load(other, resumed, tmp_path)
    losses = {
        train(m, o, steps=range(3, 6))
        for m, o in ((model, optimizer), (other, resumed), (single, one))
    }
    assert len(losses) == 1
