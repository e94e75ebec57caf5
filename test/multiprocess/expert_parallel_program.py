"""Experts on two and on four processes; `test_expert_parallel.py` starts them.

The reference is one process that has all tokens and all experts. Rows with scales of their own,
powers of two, are cast to the same values before and after they were sent. So the outputs and the
gradients of the inputs are those of one process to the bit, and the gradients of the weights those
of one process that rounds its rows first.
"""

import copy
import importlib.util
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from assertions import assert_bitwise, error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
    """As those of Transformers: each token has the indices and the weights of its experts."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        order = top_k_index.flatten().argsort(stable=True)
        counts = F.one_hot(top_k_index.flatten(), self.num_experts).sum(0)
        rows = super().forward(hidden_states[order // top_k_index.shape[1]], counts)
        rows = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, top_k_index.shape)
        return (rows * top_k_weights.unsqueeze(-1)).sum(1)


def config_of(recipe):
    return None if recipe is None else RECIPES[recipe]


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def parallel(experts, mesh, config=None):
    model = nn.Sequential(experts)
    parallelize_module(model, mesh, {"0": Float8ExpertParallel(config=config or experts.config)})
    return model


def rows_of(rank, seed=0):
    """This rank's rows, and two that are in no group; and the gradient of the output."""
    torch.manual_seed(100 * seed + rank)
    rows = sum(COUNTS[rank])
    x, g = torch.randn(2, rows + 2, D).bfloat16().unbind()
    return x.clone().requires_grad_(), g


class Rounded(torch.autograd.Function):
    """Rounds rows forwards, and with ``backwards`` the gradient instead."""

    @staticmethod
    def forward(ctx, x, granularity, fmt, backwards):
        ctx.cast = granularity, fmt
        ctx.backwards = backwards
        return x.clone() if backwards else round_trip(x, *ctx.cast)

    @staticmethod
    def backward(ctx, g):
        return round_trip(g, *ctx.cast) if ctx.backwards else g, None, None, None


def round_trip(x, granularity, scale_format):
    cast = Float8Tensor.from_high_precision
    return cast(x, torch.float8_e4m3fn, granularity, scale_format=scale_format).dequantize()


def one_process(recipe, rounded, ranks, seed=0):
    """Outputs and input gradients of all ranks' rows, and the weights' gradients."""
    experts = Experts(config_of(recipe))
    inputs = [rows_of(rank, seed) for rank in range(ranks)]
    parts = [x[: sum(c)].split(c) for (x, _), c in zip(inputs, COUNTS, strict=False)]
    grads = [g[: sum(c)].split(c) for (_, g), c in zip(inputs, COUNTS, strict=False)]
    x = torch.cat([part[e] for e in range(E) for part in parts])
    g = torch.cat([part[e] for e in range(E) for part in grads])
    if rounded:
        cast = OWN_ROWS[recipe], experts.config.plan.output.a.scale_format
        x = Rounded.apply(x, *cast, False)
    y = experts(x, torch.tensor(COUNTS[:ranks]).sum(0))
    y = Rounded.apply(y, *cast, True) if rounded else y
    y.backward(g)
    sizes = [c[e] for e in range(E) for c in COUNTS[:ranks]]
    split = y.detach().split(sizes)
    outputs = [torch.cat([split[e * ranks + rank] for e in range(E)]) for rank in range(ranks)]
    return outputs, [x.grad for x, _ in inputs], [p.grad for p in experts.parameters()]


def step(model, rank, seed=0, run=None):
    x, g = rows_of(rank, seed)
    counts = torch.tensor(COUNTS[rank])
    y = model[0](x, counts) if run is None else run(model[0], x, counts)
    y.backward(g)
    return y.detach()[: sum(COUNTS[rank])], y.detach()[sum(COUNTS[rank]) :], x.grad


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def equals_one_process(rank):
    world = dist.get_world_size()
    for recipe in (None, *OWN_ROWS, "unit"):
        model = parallel(Experts(config_of(recipe)), ep_mesh())
        out, rest, grad = step(model, rank)
        outputs, grads, weight_grads = one_process(recipe, False, world)
        assert_bitwise(out, outputs[rank], recipe)
        assert not rest.any()
        assert_bitwise(grad, grads[rank], recipe)
        if recipe in OWN_ROWS:
            _, _, weight_grads = one_process(recipe, True, world)
        for p, expected in zip(model.parameters(), weight_grads, strict=True):
            assert_bitwise(whole(p.grad), expected, recipe)


def faults_are_found(rank):
    """Rows that are not sorted by expert after they arrived; scales of other ranks' experts."""

    def unsorted(*args):
        route, counts = token_exchange.find_route(*args)
        return route._replace(order=torch.arange(len(route.order))), counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "find_route", unsorted)
        with pytest.raises(AssertionError):
            equals_one_process(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_gather, "experts_here", lambda shard, *_: slice(shard.shape[0]))
        with pytest.raises(AssertionError):
            fsdp2_equals_one_process(rank, recipes=("tensorwise",))


def a_scale_per_tensor_differs_by_rounding_only(rank):
    """The error against bfloat16, with rows rounded twice, is at most 1.5x that of one process."""
    world = dist.get_world_size()
    model = parallel(Experts(RECIPES["tensorwise"]), ep_mesh())
    found = step(model, rank)
    mine = [found[0], found[2], *(whole(p.grad) for p in model.parameters())]
    exact, usual = (
        [outputs[rank], grads[rank], *weights]
        for outputs, grads, weights in (one_process(r, False, world) for r in (None, "tensorwise"))
    )
    for ours, single, plain in zip(mine, usual, exact, strict=True):
        if plain.any():
            assert error(ours, plain) <= 1.5 * error(single, plain), (
                error(ours, plain),
                error(single, plain),
            )


def tokens_travel_as_float8(rank):
    """Bytes of the dispatch against bfloat16's, in forward and in backward."""
    mesh = ep_mesh()
    plain = parallel(Experts(None), mesh)
    with Wire() as wire:
        step(plain, rank)
    counts, *bf16 = [each.bytes for each in wire.sent]
    bound = {"unit": 0.5, "rowwise": 0.52, "blockwise": 0.516, "mxfp8": 0.516, "tensorwise": 0.516}
    for recipe, most in bound.items():
        model = parallel(Experts(RECIPES[recipe]), mesh)
        with Wire() as wire:
            step(model, rank)
        assert {each.kind for each in wire.sent} == {"all_to_all"}
        x, y, g, grad = [each.bytes for each in wire.sent[1:]]
        assert [each.dtype for each in wire.sent[1:]] == [
            torch.uint8,
            torch.bfloat16,
            torch.uint8,
            torch.bfloat16,
        ]
        assert (y, grad) == (bf16[1], bf16[3])
        assert x <= most * bf16[0]
        assert g <= most * bf16[2]
        assert x >= 0.5 * bf16[0]
    # Two GEMMs of this recipe read the rows in high precision.
    model = parallel(Experts(RECIPES["rowwise_with_gw_hp"]), mesh)
    with Wire() as wire:
        step(model, rank)
    assert [each.bytes for each in wire.sent] == [counts, *bf16]


def recomputes(rank):
    """Checkpointing around the experts dispatches again, to the same bits."""
    model = parallel(Experts(RECIPES["rowwise"]), ep_mesh())
    expected = step(model, rank)
    gradients = [whole(p.grad) for p in model.parameters()]
    model.zero_grad()

    def run(experts, x, counts):
        return checkpoint(experts, x, counts, use_reentrant=False)

    for ours, single in zip(step(model, rank, run=run), expected, strict=True):
        assert_bitwise(ours, single)
    for p, expected in zip(model.parameters(), gradients, strict=True):
        assert_bitwise(whole(p.grad), expected)


def converts_before_and_after(rank):
    """Experts as those of Transformers, which take the config of the conversion."""
    world, mesh = dist.get_world_size(), ep_mesh()
    style = {"experts": Float8ExpertParallel()}
    torch.manual_seed(0)
    x = torch.randn(world, 24, D)
    for first in ("conversion", "style"):
        single, model = converted("rowwise", False), Mixture(None)
        model.experts, model.router = PlainExperts(), nn.Linear(D, E, bias=False)
        model.float().load_state_dict(single.state_dict())
        if first == "style":
            parallelize_module(model, mesh, style)
        convert_to_float8_training(model, config=RECIPES["rowwise"])
        if first == "conversion":
            parallelize_module(model, mesh, style)
        inputs, plain = x[rank].clone().requires_grad_(), x.flatten(0, 1).requires_grad_()
        mine = slice(24 * rank, 24 * rank + 24)
        y, z = model(inputs), single(plain)
        assert_bitwise(y, z[mine], first)
        y.square().sum().backward()
        z.square().sum().backward()
        assert_bitwise(inputs.grad, plain.grad[mine], first)
        assert error(whole(model.experts.up.grad), single.experts.up.grad) < 1e-6
        assert isinstance(model.experts.up, DTensor)
        assert model.experts.num_experts == E
        with high_precision(model), high_precision(single), Wire() as wire:
            assert_bitwise(model(x[rank]), single(plain)[mine], first)
        assert {each.dtype for each in wire.sent[1:]} == {torch.float32}
        index = torch.full((24, 2), E)  # of no expert
        rows = 24 * (rank == 0)  # a rank without tokens
        assert not model.experts(x[rank, :rows], index[:rows], torch.ones(rows, 2)).any()


def takes_experts_of_other_libraries(rank):
    """Mixtral of Transformers, with the bits of one process."""
    world, mesh = dist.get_world_size(), ep_mesh()
    if importlib.util.find_spec("transformers") is not None:
        from transformers import MixtralConfig, MixtralForCausalLM

        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
        sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64}
        single = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, **sizes, **heads))
        for p in single.parameters():
            dist.broadcast(p.detach(), 0)
        model = copy.deepcopy(single)
        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": Float8ExpertParallel()})
        tokens = torch.arange(16 * world).view(world, 16) % 32
        for each in (single, model):
            convert_to_float8_training(each, config=RECIPES["rowwise"])
        mine = model(input_ids=tokens[rank : rank + 1]).logits[0]
        expected = single(input_ids=tokens).logits
        assert_bitwise(mine, expected[rank])
        mine.square().sum().backward()
        expected.square().sum().backward()
        stacks = [m.model.layers[0].mlp.experts.gate_up_proj.grad for m in (model, single)]
        assert error(whole(stacks[0]), stacks[1]) < 1e-6


class InTurn(nn.ModuleList):
    def forward(self, x, counts, order):
        for index in order:
            x = self[index](x, counts)
        return x


def ranks_that_differ_get_an_error(rank):
    mesh = ep_mesh()
    with pytest.raises(RuntimeError, match="experts differ"):
        parallel(Experts(None, experts=E + (rank == 1)), mesh)
    with pytest.raises(RuntimeError, match="leave one of"):
        parallel(Experts(None, experts=1), mesh)
    counts, (x, _) = torch.tensor(COUNTS[rank]), rows_of(rank)
    recipe = "blockwise" if rank else "rowwise"
    with pytest.raises(RuntimeError, match="cast_config_input"):
        parallel(Experts(RECIPES[recipe]), mesh)[0](x, counts)
    order = InTurn(parallel(Experts(None), mesh)[0] for _ in range(2))
    with pytest.raises(RuntimeError, match=r"runs 1 \(Experts\) where rank . runs 0"):
        order(x, counts, [0, 1] if rank else [1, 0])
    model = parallel(Experts(None), mesh)[0]
    model(x, counts)
    with pytest.raises(ValueError, match=r"rows of \[256, -1\] bytes"):
        model(x, counts + 9 * (rank == 1))
    with pytest.raises(ValueError, match=r"rows of \[512, 256\] bytes"):
        model(x if rank else x.float(), counts)
    model(x, counts)  # and goes on


class Mixture(nn.Module):
    """A router and experts, top 2."""

    def __init__(self, config):
        super().__init__()
        self.experts = IndexedExperts(config)
        self.experts.num_experts = E
        self.router = nn.Linear(D, E, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        scores, index = scores.topk(min(2, scores.shape[-1]))
        return self.experts(x, index, scores)


def losses(model, x, reduce_router, steps=8):
    """The losses of a few steps, each the sum over these tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for _ in range(steps):
        loss = (model(x) - x.flip(-1)).float().square().sum() / 1000
        loss.backward()
        reduce_router(model.router.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def trains(rank):
    """The losses of eight steps are those of one process, up to float32's rounding of sums.

    On four processes, replicas of the experts are sharded by FSDP2 over a second mesh dimension.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    x = torch.randn(world, 24, D)
    for recipe in (None, *OWN_ROWS, "tensorwise"):
        single = Mixture(config_of(recipe)).float()
        model = copy.deepcopy(single)
        config = config_of(recipe)
        parallelize_module(model, mesh["ep"], {"experts": Float8ExpertParallel(config=config)})
        if world > 2:
            fully_shard(model.experts, mesh=mesh["dp"])
            model.experts.set_gradient_divide_factor(1.0)  # a sum, as over tokens
            model.experts.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        found = torch.stack(list(losses(model, x[rank], dist.all_reduce)))
        dist.all_reduce(found)
        expected = torch.stack(list(losses(single, x.flatten(0, 1), lambda g: None)))
        gap = (found / expected - 1).abs().max().item()
        assert expected[-1] < 0.9 * expected[0]
        # A tensorwise scale of the tokens is one per rank, not one for all of them.
        assert gap < (0.02 if recipe == "tensorwise" else 1e-6), (recipe, gap)


# --- FSDP2


class PlainExperts(IndexedExperts):
    """Conversion runs its grouped products in float8."""

    def __init__(self, experts=E):
        super().__init__(None, experts)
        self.num_experts = experts


register_experts(PlainExperts)


def converted(recipe, gathers, experts=E):
    model = Mixture(None)
    model.experts, model.router = PlainExperts(experts), nn.Linear(D, experts, bias=False)
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recipe "unit"')  # these layers are not unit-scaled
        return convert_to_float8_training(model.float(), config=config)


def sharded(model, **options):
    fully_shard(model.experts, **options)
    return fully_shard(model, **options)


GATHERED = ("tensorwise", "blockwise", "unit")  # both GEMMs of these read one cast of a weight


def fsdp2_equals_one_process(rank, experts=E, recipes=tuple(r for r in RECIPES if r != "delayed")):
    """Outputs, gradients and weights of two steps, to the bit; shards are uneven, or empty."""
    world = dist.get_world_size()
    for recipe in recipes:
        for gathers in (True, False):
            single, model = converted(recipe, False, experts), converted(recipe, gathers, experts)
            told = "experts" in model.float8_conversion.gathered_in_high_precision
            assert told == (gathers and recipe not in GATHERED), recipe
            sharded(model)
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (single, model)]
            for number in range(2):
                torch.manual_seed(number)
                x, g = torch.randn(2, world, 24, D)
                expected = [single(x[r]) for r in range(world)]
                for y, g_of_rank in zip(expected, g, strict=True):
                    y.backward(g_of_rank)
                y = model(x[rank])
                assert_bitwise(y, expected[rank], (recipe, gathers))
                y.backward(g[rank])
                for p, q in zip(single.parameters(), model.parameters(), strict=True):
                    p.grad /= world
                    assert_bitwise(whole(q.grad), p.grad, (recipe, gathers))
                for m, optimizer in zip((single, model), optimizers, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    after_step(m)
            plain = {k: whole(v) for k, v in model.state_dict().items()}
            assert {type(v) for v in plain.values()} == {torch.Tensor}
            for name, value in single.state_dict().items():
                assert_bitwise(plain[name], value, name)
            with high_precision(model), high_precision(single):
                y, z = model(x[rank]), single(x[rank])
            assert torch.equal(y, z) or (gathers and error(y, z) < 0.1 * z.norm()), recipe


def weights_are_gathered_in_float8(rank):
    """Bytes of the gathers, and one all-reduce for the scales of all experts."""
    world = dist.get_world_size()
    per_rank = -(-E // world) * 2 * D * H
    for recipe in RECIPES:
        if recipe == "delayed":
            continue
        sent = {}
        for gathers in (True, False):
            model = converted(recipe, gathers)
            sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
            after_step(model)
            with Wire() as wire:
                model(torch.randn(8, D).bfloat16()).sum().backward()
            sent[gathers] = wire.bytes("all_gather")
            assert wire.count("all_reduce") == 0, recipe
        saved = per_rank * (world - 1) * 2 if recipe in GATHERED else 0  # forward and backward
        assert sent[False] - sent[True] == saved, (recipe, sent)
    model = sharded(converted("tensorwise", True))
    with Wire() as wire:
        after_step(model)
    assert [each.kind for each in wire.sent] == ["all_reduce"]
