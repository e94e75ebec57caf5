"""Experts equal one process, by expert parallelism and by FSDP2.

The reference is one process that has all tokens and all experts. Rows with scales of their own,
powers of two, are cast to the same values before and after they were sent. So the outputs and the
gradients of the inputs are those of one process to the bit, and the gradients of the weights those
of one process that rounds its rows first.
"""

import warnings
from dataclasses import replace
from unittest import mock

import one_process as one
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from assertions import assert_bitwise, error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from wire import Wire

from float8 import (
    Float8ExpertParallel,
    Float8Tensor,
    after_step,
    convert_to_float8_training,
    grouped_mm,
    high_precision,
    register_experts,
)
from float8.config import RECIPES
from float8.distributed import expert_parallel, float8_gather, token_exchange
from float8.granularity import Blockwise, Rowwise

E, D, H = 7, 128, 64  # seven experts do not divide
OWN_ROWS = {"rowwise": Rowwise(), "blockwise": Blockwise(1, 128), "mxfp8": Blockwise(1, 32)}
# Of each rank: tokens per expert. An expert has none on a rank, none at all; a rank has none.
COUNTS = [[3, 0, 5, 0, 7, 0, 2], [9, 2, 4, 0, 0, 1, 1], [0] * 7, [1, 1, 1, 0, 33, 1, 1]]


class Experts(nn.Module):
    """As torchtitan's: rows are sorted by expert."""

    def __init__(self, config, experts=E):
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.up = nn.Parameter(torch.randn(experts, H, D).div(8).bfloat16())
        self.down = nn.Parameter(torch.randn(experts, D, H).div(8).bfloat16())

    def forward(self, x, num_tokens_per_expert):
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        return self.product(self.product(x, self.up, offs).relu(), self.down, offs)

    def product(self, x, w, offs):
        if self.config is None:
            return F.grouped_mm(x, w.mT, offs=offs)
        return grouped_mm(x, w.mT, offs, self.config)


class IndexedExperts(Experts):
    """As those of Transformers; conversion runs their grouped products in float8."""

    def __init__(self, experts=E):
        super().__init__(None, experts)
        self.num_experts = experts

    def forward(self, hidden_states, top_k_index, top_k_weights):
        order = top_k_index.flatten().argsort(stable=True)
        counts = F.one_hot(top_k_index.flatten(), self.num_experts).sum(0)
        rows = super().forward(hidden_states[order // top_k_index.shape[1]], counts)
        rows = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, top_k_index.shape)
        return (rows * top_k_weights.unsqueeze(-1)).sum(1)


register_experts(IndexedExperts)


class Mixture(nn.Module):
    """A router and experts, top 2."""

    def __init__(self, experts=E):
        super().__init__()
        self.experts = IndexedExperts(experts)
        self.router = nn.Linear(D, experts, bias=False)
        self.float()

    def forward(self, x):
        scores, index = self.router(x).softmax(-1).topk(min(2, self.router.out_features))
        return self.experts(x, index, scores)


def converted(recipe, gathers=False, experts=E):
    torch.manual_seed(1)
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recipe "unit"')  # these layers are not unit-scaled
        return convert_to_float8_training(Mixture(experts), config=config)


def config_of(recipe):
    return None if recipe is None else RECIPES[recipe]


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def parallel(recipe, experts=E):
    config, model = config_of(recipe), nn.Sequential(Experts(config_of(recipe), experts))
    return parallelize_module(model, ep_mesh(), {"0": Float8ExpertParallel(config=config)})


def rows_of(rank):
    """This rank's rows, and two that are in no group; and the gradient of the output."""
    torch.manual_seed(rank)
    x, g = torch.randn(2, sum(COUNTS[rank]) + 2, D).bfloat16().unbind()
    return x.clone().requires_grad_(), g


class Rounded(torch.autograd.Function):
    """Rounds rows forwards, and with ``backwards`` the gradient instead."""

    @staticmethod
    def forward(ctx, x, granularity, fmt, backwards):
        ctx.cast, ctx.backwards = (granularity, fmt), backwards
        return x.clone() if backwards else round_trip(x, *ctx.cast)

    @staticmethod
    def backward(ctx, g):
        return round_trip(g, *ctx.cast) if ctx.backwards else g, None, None, None


def round_trip(x, granularity, scale_format):
    cast = Float8Tensor.from_high_precision
    return cast(x, torch.float8_e4m3fn, granularity, scale_format=scale_format).dequantize()


def one_process(recipe, rounded=False):
    """Outputs and input gradients of all ranks' rows, and the weights' gradients."""
    experts, counts = Experts(config_of(recipe)), COUNTS[: dist.get_world_size()]
    inputs = [rows_of(rank) for rank in range(len(counts))]

    def by_expert(i):
        parts = [each[i].split([*c, 2]) for each, c in zip(inputs, counts, strict=True)]
        return torch.cat([part[e] for e in range(E) for part in parts])

    x, g = by_expert(0), by_expert(1)
    if rounded:
        cast = OWN_ROWS[recipe], experts.config.gemms.output.a.scale_format
        x = Rounded.apply(x, *cast, False)
    y = experts(x, torch.tensor(counts).sum(0))
    y = Rounded.apply(y, *cast, True) if rounded else y
    y.backward(g)
    parts = iter(y.detach().split([c[e] for e in range(E) for c in counts]))
    of_expert = [[next(parts) for _ in counts] for _ in range(E)]
    outputs = [torch.cat(of_rank) for of_rank in zip(*of_expert, strict=True)]
    return outputs, [x.grad for x, _ in inputs], [p.grad for p in experts.parameters()]


def step(model, rank, run=None):
    x, g = rows_of(rank)
    counts = torch.tensor(COUNTS[rank])
    y = (run or model[0])(x, counts)
    y.backward(g)
    rows = sum(COUNTS[rank])
    assert not y[rows:].any()
    return y.detach()[:rows], x.grad, [whole(p.grad) for p in model.parameters()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recipe", [None, *OWN_ROWS, "unit"])
def test_bits_are_those_of_one_process(rank, recipe):
    equals_one_process(rank, recipe)


def equals_one_process(rank, recipe):
    out, grad, found = step(parallel(recipe), rank)
    outputs, grads, expected = one_process(recipe)
    assert_bitwise(out, outputs[rank])
    assert_bitwise(grad, grads[rank])
    if recipe in OWN_ROWS:
        expected = one_process(recipe, rounded=True)[2]
    for a, b in zip(found, expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.ranks(2)
def test_planted_faults_are_found(rank):
    """Rows that are not sorted by expert after they arrived; scales of other ranks' experts."""

    def unsorted(*args):
        route, counts = token_exchange.find_route(*args)
        return route._replace(order=torch.arange(len(route.order))), counts

    fails = pytest.raises(AssertionError)
    with mock.patch.object(expert_parallel, "find_route", unsorted), fails:
        equals_one_process(rank, None)
    every = lambda shard, *_: float8_gather.Part(0, 0, len(shard))  # noqa: E731
    with mock.patch.object(float8_gather, "part_of", every), pytest.raises(AssertionError):
        fsdp2_equals_one_process(rank, "tensorwise")


@pytest.mark.ranks(2)
def test_a_scale_per_tensor_differs_by_rounding_only(rank):
    """The error against bfloat16, with rows rounded twice, is at most 1.5x that of one process."""
    out, grad, found = step(parallel("tensorwise"), rank)
    exact, usual = (
        [outputs[rank], grads[rank], *weights]
        for outputs, grads, weights in map(one_process, (None, "tensorwise"))
    )
    for ours, single, plain in zip((out, grad, *found), usual, exact, strict=True):
        assert error(ours, plain) <= 1.5 * error(single, plain)


@pytest.mark.ranks(2)
def test_tokens_travel_as_float8(rank):
    """Bytes of the dispatch against bfloat16's, in forward and in backward."""
    sent = {}
    bound = {"unit": 0.5, "rowwise": 0.52, "blockwise": 0.516, "mxfp8": 0.516, "tensorwise": 0.516}
    for recipe in (None, *bound, "rowwise_with_gw_hp"):
        model = parallel(recipe)
        with Wire() as wire:
            step(model, rank)
        sent[recipe] = [e for e in wire.sent if e.kind == "all_to_all"]
    counts, x, y, g, grad = (each.bytes for each in sent[None])
    for recipe, most in bound.items():
        found = sent[recipe][1:]
        assert [e.dtype for e in found] == [torch.uint8, torch.bfloat16] * 2
        assert (found[1].bytes, found[3].bytes) == (y, grad)
        assert 0.5 * x <= found[0].bytes <= most * x and found[2].bytes <= most * g
    # Two GEMMs of this recipe read the rows in high precision.
    assert [e.bytes for e in sent["rowwise_with_gw_hp"]] == [counts, x, y, g, grad]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("style_first", [False, True])
def test_experts_take_the_config_of_the_conversion(rank, style_first):
    style = {"experts": Float8ExpertParallel()}
    single, model, x = converted("rowwise"), Mixture(), torch.arange(48.0 * D).sin().view(2, 24, D)
    model.load_state_dict(single.state_dict())
    if style_first:
        parallelize_module(model, ep_mesh(), style)
    convert_to_float8_training(model, config=RECIPES["rowwise"])
    if not style_first:
        parallelize_module(model, ep_mesh(), style)
    inputs, plain = x[rank].clone().requires_grad_(), x.flatten(0, 1).requires_grad_()
    y, z = model(inputs), single(plain)
    mine = slice(24 * rank, 24 * rank + 24)
    assert_bitwise(y, z[mine])
    y.square().sum().backward()
    z.square().sum().backward()
    assert_bitwise(inputs.grad, plain.grad[mine])
    assert error(whole(model.experts.up.grad), single.experts.up.grad) < 1e-6
    assert isinstance(model.experts.up, DTensor) and model.experts.num_experts == E
    with high_precision(model), high_precision(single), Wire() as wire:
        assert_bitwise(model(x[rank]), single(plain)[mine])
    assert {e.dtype for e in wire.sent[1:]} == {torch.float32}
    rows = 24 * (rank == 0)  # a rank without tokens; an index of no expert
    index, scores = torch.full((rows, 2), E), torch.ones(rows, 2)
    assert not model.experts(x[rank, :rows], index, scores).any()


class InTurn(nn.ModuleList):
    def forward(self, x, counts, order):
        for index in order:
            x = self[index](x, counts)
        return x


@pytest.mark.ranks(2)
def test_ranks_that_differ_get_an_error(rank):
    with pytest.raises(RuntimeError, match="experts differ"):
        parallel(None, experts=E + (rank == 1))
    with pytest.raises(RuntimeError, match="leave one of"):
        parallel(None, experts=1)
    counts, (x, _) = torch.tensor(COUNTS[rank]), rows_of(rank)
    with pytest.raises(RuntimeError, match="cast_config_input"):
        parallel("blockwise" if rank else "rowwise")[0](x, counts)
    order = InTurn(parallel(None)[0] for _ in range(2))
    with pytest.raises(RuntimeError, match=r"module is . \(Experts\) on rank 0 and . \("):
        order(x, counts, [0, 1] if rank else [1, 0])
    model = parallel(None)[0]
    model(x, counts)
    with pytest.raises(ValueError, match=r"rows of \[256, -1\] bytes"):
        model(x, counts + 9 * (rank == 1))
    with pytest.raises(ValueError, match=r"rows of \[512, 256\] bytes"):
        model(x if rank else x.float(), counts)
    model(x, counts)  # and goes on


# --- FSDP2

# Both GEMMs of these read one cast of a weight.
GATHERED = ("tensorwise", "blockwise", "mxfp8_2d", "unit")


def sharded(model, by_columns=False, **options):
    """Each rank has some of the experts, or a part of each of them."""
    if by_columns:
        options["shard_placement_fn"] = lambda p: Shard(1 if p.dim() == 3 else 0)
    fully_shard(model.experts, **options)
    return fully_shard(model, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "experts", "by_columns"),
    [
        ("tensorwise", E, False),
        ("blockwise", E, False),
        ("mxfp8_2d", E, False),
        ("tensorwise", 1, False),
        ("tensorwise", E, True),
        ("unit", E, True),
        ("blockwise", E, True),
        ("mxfp8_2d", 1, True),
    ],
)
def test_experts_of_fsdp2_have_the_bits_of_one_process(rank, recipe, experts, by_columns):
    fsdp2_equals_one_process(rank, recipe, experts, by_columns)


def fsdp2_equals_one_process(rank, recipe, experts=E, by_columns=False):
    """Shards are uneven, or empty; all ranks read the same batch. Others: test_compositions.py."""
    single = converted(recipe, False, experts)
    model = sharded(converted(recipe, True, experts), by_columns)
    x = torch.randn(24, D, generator=torch.Generator().manual_seed(0))
    steps = [[[(x * (1 + step), x.flip(0))] * 2] * 1 for step in range(2)]
    one.assert_same_training(0, single, model, steps, recipe, end_step=after_step)
    assert {type(whole(value)) for value in model.state_dict().values()} == {torch.Tensor}


@pytest.mark.ranks(2)
def test_weights_are_gathered_in_float8(rank):
    """Bytes of the gathers, and one all-reduce for the scales of all experts."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for recipe in (*GATHERED, "rowwise"):
        sent = []
        for gathers in (True, False):
            model = sharded(converted(recipe, gathers), mp_policy=policy)
            x = torch.randn(8, D).bfloat16()
            model(x).sum().backward()  # the first gather compares the ranks
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            with Wire() as wire:
                after_step(model)
            assert wire.count("all_reduce") == (gathers and recipe in GATHERED[:-1])
            with Wire() as wire:
                model(x).sum().backward()
            sent.append(wire.bytes("all_gather"))
            assert wire.count("all_reduce") == 0
        # Of each rank, in forward and in backward.
        saved = -(-E // 2) * 2 * D * H * 2 if recipe in GATHERED else 0
        assert sent[1] - sent[0] == saved, recipe
