"""Tensor and sequence parallel layers on two and on four processes.

The reference is the same model in one process. Where bits are compared, the data are small integers
and scales are powers of two. Then every product and every sum is exact in any order, and a bit that
differs is a bug. `test_tensor_parallel.py` starts the processes.
"""

import contextlib
import copy
import functools
import itertools
from dataclasses import replace

import faults
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from float8 import (
    CastConfig,
    Float8LinearConfig,
    Float8Tensor,
    RMSNormCast,
    ScaleFormat,
    ScalingType,
    after_step,
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.distributed import exchange
from float8.distributed.exchange import Ranks
from float8.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

B, S, K, H = 2, 8, 32, 64
POW2 = CastConfig(scale_format=ScaleFormat.POWER_OF_TWO)
DELAYED = CastConfig(scaling_type=ScalingType.DELAYED, scale_format=ScaleFormat.POWER_OF_TWO)
STATIC = CastConfig(scaling_type=ScalingType.STATIC, static_scale=2.0)
EXACT = {
    "dynamic": Float8LinearConfig(POW2, POW2, POW2),
    "delayed": Float8LinearConfig(DELAYED, DELAYED, DELAYED),
    "static": Float8LinearConfig(STATIC, STATIC, STATIC),
    "smooth": Float8LinearConfig(POW2, POW2, POW2, smooth_input=True),
}


class GatedFeedForward(nn.Module):
    """Two layers that read one input, and one that reads their product."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(K, H), nn.Linear(K, H, bias=False)
        self.down = nn.Linear(H, K)

    def forward(self, x):
        return self.down(self.gate(x).relu() + self.up(x))


def integers(*shape, seed, largest=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def make_model(exact=True, dtype=torch.float32):
    torch.manual_seed(0)
    model = GatedFeedForward().to(dtype)
    if exact:
        with torch.no_grad():
            for seed, p in enumerate(model.parameters()):
                p.copy_(integers(*p.shape, seed=seed))
    return model


def sequence_parallel():
    return {
        "gate": Float8ColwiseParallel(input_layouts=Shard(1)),
        "up": Float8ColwiseParallel(input_layouts=Shard(1)),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def prepared(use_local_output=False):
    return {
        "": PrepareFloat8ModuleInput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_output=use_local_output,
        ),
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }


PLANS = {
    "replicated": lambda: {
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(),
    },
    "sequence": sequence_parallel,
    "prepared": prepared,
    "prepared, local": lambda: prepared(use_local_output=True),
    "scattered by columns": lambda: {
        "gate": Float8ColwiseParallel(input_layouts=Shard(-1)),
        "up": Float8ColwiseParallel(input_layouts=Shard(2), output_layouts=Shard(-1)),
        "down": Float8RowwiseParallel(output_layouts=Shard(-1)),
    },
    "whole between": lambda: {
        "gate": Float8ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "up": Float8ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        "down": Float8RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    },
}
CUT = {"replicated": None, "whole between": None, "scattered by columns": 2}


def parallelized(model, mesh, plan, config, convert_first):
    if convert_first:
        convert_to_float8_training(model, config=config)
    plan = dict(plan)
    whole = plan.pop("", None)
    parallelize_module(model, mesh, plan)
    if whole is not None:
        parallelize_module(model, mesh, whole)
    return model if convert_first else convert_to_float8_training(model, config=config)


def part(x, mesh, dim):
    return x if dim is None else x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model, x, g):
    """The output and all gradients of one step; x and g are what the model takes."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    out = out.to_local() if isinstance(out, DTensor) else out
    out.backward(g)
    return out.detach(), x.grad, {name: whole(p.grad) for name, p in model.named_parameters()}


def assert_is_part_of(mine, one, mesh, dim, what):
    (out, grad_x, grads), (one_out, one_grad_x, one_grads) = mine, one
    assert torch.equal(out, part(one_out, mesh, dim)), (what, "output")
    assert torch.equal(grad_x, part(one_grad_x, mesh, dim)), (what, "gradient of the input")
    for name, grad in one_grads.items():
        assert torch.equal(grads[name], grad), (what, name)


def equals_one_process(rank, recipes=tuple(EXACT), plans=tuple(PLANS), steps=2):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for i, plan in enumerate(plans):
        for j, recipe in enumerate(recipes):
            convert_first = (i + j) % 2 == 1
            config, what = EXACT[recipe], (plan, recipe, convert_first)
            one = convert_to_float8_training(make_model(), config=config)
            model = parallelized(make_model(), mesh, PLANS[plan](), config, convert_first)
            dim = CUT.get(plan, 1)
            for seed in range(steps):
                x, g = integers(B, S, K, seed=seed), integers(B, S, K, seed=9 + seed)
                expected = step(one, x, g)
                found = step(model, part(x, mesh, dim), part(g, mesh, dim))
                assert_is_part_of(found, expected, mesh, dim, (*what, seed))
                if recipe == "delayed":
                    sync_float8_amax_and_scale_history(model)
                    sync_float8_amax_and_scale_history(one)
                    if plan != "prepared":
                        for a, b in zip(one.buffers(), model.buffers(), strict=True):
                            assert torch.equal(a, b), what
                one.zero_grad()
                model.zero_grad()


class Wire(TorchDispatchMode):
    """Record the calls of collectives: (name, dtype, elements)."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.sent.append((func.__name__.split(".")[0], args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def inputs_travel_as_float8(rank):
    """Sequence parallel: inputs are gathered in float8, and sums are scattered in bfloat16."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = part(integers(B, S, K, seed=1), mesh, 1).bfloat16()
    g = part(integers(B, S, K, seed=2), mesh, 1).bfloat16()
    for plan, gathers in (("sequence", 2), ("prepared", 1)):
        model = make_model(dtype=torch.bfloat16)
        parallelized(model, mesh, PLANS[plan](), EXACT["static"], True)
        with Wire() as wire:
            model(x.clone().requires_grad_()).backward(g)
        sent = [entry for entry in wire.sent if entry[0] != "all_reduce"]
        part_of_input = B * S // mesh.size() * K
        data = ("all_gather_into_tensor", torch.uint8, part_of_input)
        sums = ("reduce_scatter_tensor", torch.bfloat16, B * S * K)
        assert sent.count(data) == gathers + 1, (plan, sent)  # and one in backward
        assert sent.count(sums) == gathers + 1, (plan, sent)
        assert len(sent) == 2 * gathers + 2, (plan, sent)


def random_data_differ_by_rounding_only(rank, recipe, dtype_name, replicas=1, autocast=False):
    """Random data: as close to one process as torch's own parallel layers are to theirs.

    Each replica has its own data, and its amaxes must not change another replica's scales. Under
    autocast parameters are float32, and everything else has the dtype.
    """
    ranks = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "tp"))
    dtype, replica = getattr(torch, dtype_name), mesh["dp"].get_local_rank()
    torch.manual_seed(replica)
    x, g = (torch.randn(B, S, n, dtype=dtype) * (1 + 2.7 * replica) for n in (K, H))
    errors_above_bound = []
    for ours, torchs in COUNTERPARTS.items():
        errors = []
        for style in (ours, torchs):
            torch.manual_seed(4)
            one = nn.Sequential(nn.Linear(K, H)).to(torch.float32 if autocast else dtype)
            cut = copy.deepcopy(one)
            parallelize_module(cut, mesh["tp"], {"0": _between_whole_tensors(style)})
            if style is ours:
                for model in (one, cut):
                    convert_to_float8_training(model, config=RECIPES[recipe])
            with torch.autocast("cpu", dtype, enabled=autocast):
                leaf = x.float() if autocast else x
                errors.append(_differences(step(one, leaf, g), step(cut, leaf, g)))
        names = ("output", "gradient of x", "of the weight", "of the bias")
        for what, found, allowed in zip(names, *errors, strict=True):
            # One rounding of what is compared, where torch's own happened to agree to the bit.
            bound = 2 * allowed + torch.finfo(dtype).eps
            if not found <= bound:
                errors_above_bound.append((recipe, ours.__name__, what, found, bound))
    assert errors_above_bound == []  # at the end: all ranks have taken part in all collectives


COUNTERPARTS = {Float8ColwiseParallel: ColwiseParallel, Float8RowwiseParallel: RowwiseParallel}


def _between_whole_tensors(style):
    if style in (ColwiseParallel, Float8ColwiseParallel):
        return style(output_layouts=Replicate())
    return style(input_layouts=Replicate())


def _differences(one, other):
    pairs = [(one[0], other[0]), (one[1], other[1])]
    pairs += [(one[2][name], other[2][name]) for name in one[2]]
    return [((a - b).abs().max() / a.abs().max()).item() for a, b in pairs]


def rows_and_blocks_are_cast_by_the_receiving_rank(rank, recipe):
    """Scales of parts are never coarser: as close to high precision as one process is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    x, g = torch.randn(B, S, K), torch.randn(B, S, K)
    exact = step(make_model(exact=False), x, g)
    one = step(convert_to_float8_training(make_model(exact=False), config=RECIPES[recipe]), x, g)
    for plan in ("sequence", "prepared"):
        config = RECIPES[recipe]
        model = parallelized(make_model(exact=False), mesh, PLANS[plan](), config, False)
        out, grad_x, grads = step(model, part(x, mesh, 1), part(g, mesh, 1))
        pairs = [(exact[2][n], one[2][n], grads[n]) for n in grads]
        pairs.append((part(exact[0], mesh, 1), part(one[0], mesh, 1), out))
        pairs.append((part(exact[1], mesh, 1), part(one[1], mesh, 1), grad_x))
        for expected, single, found in pairs:
            error = [(y - expected).norm() / expected.norm() for y in (single, found)]
            assert error[1] <= 1.25 * error[0] + 1e-6, (recipe, plan, error)


def trains_with_fully_shard(rank):
    """TP x FSDP2, 2 x 2: each replica has its own data; gradients are their mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    for recipe, config in EXACT.items():
        for plan in ("sequence", "prepared"):
            model = _in_two_dimensions(mesh, plan, config)
            data = [(integers(B, S, K, seed=s), integers(B, S, K, seed=5 + s)) for s in range(2)]
            data[1] = data[1][0] * 8, data[1][1]  # another replica's amax would be another scale
            ones = [convert_to_float8_training(make_model(), config=config) for _ in data]
            expected = [step(one, x, g) for one, (x, g) in zip(ones, data, strict=True)]
            x, g = (part(t, mesh["tp"], 1) for t in data[replica])
            out, grad_x, grads = step(model, x, g)
            assert torch.equal(out, part(expected[replica][0], mesh["tp"], 1)), (recipe, plan)
            assert torch.equal(grad_x, part(expected[replica][1], mesh["tp"], 1)), (recipe, plan)
            for name, grad in grads.items():
                mean = (expected[0][2][name] + expected[1][2][name]) / 2
                assert torch.equal(grad, mean), (recipe, plan, name)


def _in_two_dimensions(mesh, plan, config):
    model = parallelized(make_model(), mesh["tp"], PLANS[plan](), config, False)
    for layer in (model.gate, model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])
    return model


def a_wrong_group_is_found(rank, fault, replicas):
    # The last replica's values are the largest: no other can raise its scales.
    is_last = replicas > 1 and rank >= dist.get_world_size() * (replicas - 1) // replicas
    fails = contextlib.nullcontext() if is_last else pytest.raises(AssertionError)
    with getattr(faults, fault)(), fails:
        random_data_differ_by_rounding_only(rank, "tensorwise", "float32", replicas)


def sequences_that_do_not_divide(rank):
    """A DTensor says how long the whole is; plain parts of unequal length are refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    length = S - 1
    x, g = integers(B, length, K, seed=1), integers(B, length, K, seed=2)
    one = convert_to_float8_training(make_model(), config=EXACT["dynamic"])
    expected = step(one, x, g)
    for plan in ("sequence", "prepared"):
        model = parallelized(make_model(), mesh, PLANS[plan](), EXACT["dynamic"], False)
        cut = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        out = model(cut)
        mine = distribute_tensor(g, mesh, [Shard(1)]).to_local()
        out.backward(mine)
        assert torch.equal(out, part(expected[0], mesh, 1)), plan
        assert torch.equal(cut.grad.full_tensor(), expected[1]), plan
        for name, p in model.named_parameters():
            assert torch.equal(p.grad.full_tensor(), expected[2][name]), (plan, name)
        with pytest.raises(ValueError, match="pass a DTensor"):
            model(part(x, mesh, 1))


def features_that_do_not_divide(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, g = integers(B, S, K, seed=1), integers(B, S, K, seed=2)
    make = lambda: nn.Sequential(nn.Linear(K, 33), nn.ReLU(), nn.Linear(33, K))  # noqa: E731
    torch.manual_seed(0)
    one = make()
    with torch.no_grad():
        for seed, p in enumerate(one.parameters()):
            p.copy_(integers(*p.shape, seed=seed))
    model = copy.deepcopy(one)
    plan = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    for m in (one, model):
        convert_to_float8_training(m, config=replace(EXACT["dynamic"], pad_inner_dim=True))
    assert_is_part_of(step(model, x, g), step(one, x, g), mesh, None, "features")


def recomputes(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    for recipe in ("dynamic", "delayed"):
        for plan in ("sequence", "prepared"):
            for use_reentrant in (False, True):
                model = parallelized(make_model(), mesh, PLANS[plan](), EXACT[recipe], False)
                again = copy.deepcopy(model)
                expected = step(model, x, g)
                run = lambda y, m=again, r=use_reentrant: checkpoint(m, y, use_reentrant=r)  # noqa: E731
                leaf = x.clone().requires_grad_()
                out = run(leaf)
                out.backward(g)
                grads = {name: whole(p.grad) for name, p in again.named_parameters()}
                found = (out.detach(), leaf.grad, grads)
                what = (recipe, plan, use_reentrant)
                assert_is_part_of(found, expected, mesh, None, what)
                for a, b in zip(model.buffers(), again.buffers(), strict=True):
                    assert torch.equal(a, b), what


class Around(nn.Module):
    """Call the block in the same graph, so that its hooks are traced."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


def compiled(rank, recipe, plan):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    model = Around(parallelized(make_model(), mesh, PLANS[plan](), EXACT[recipe], False))
    fast = copy.deepcopy(model)
    expected = step(model, x, g)
    fast = torch.compile(fast, backend="aot_eager", fullgraph=True)
    out, grad_x, grads = step(fast, x, g)
    grads = {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}
    assert_is_part_of((out, grad_x, grads), expected, mesh, None, (recipe, plan))


def compiled_sync_is_one_graph(rank):
    """After the first call, over the default group or a given one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    model = parallelized(make_model(), mesh, sequence_parallel(), EXACT["delayed"], False)
    fast = copy.deepcopy(model)
    for group in (None, mesh.get_group()):
        compiled = torch.compile(
            sync_float8_amax_and_scale_history, fullgraph=True, backend="aot_eager"
        )
        for factor in (1, 2):
            step(model, factor * x, g)
            step(fast, factor * x, g)
            sync_float8_amax_and_scale_history(model, group)
            is_first = group is None and factor == 1
            (sync_float8_amax_and_scale_history if is_first else compiled)(fast, group)
            for a, b in zip(model.buffers(), fast.buffers(), strict=True):
                assert torch.equal(a, b), (group, factor)


def in_high_precision_equals_torchs_styles(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(rank)
    x, g = torch.randn(B, S // 2, K), torch.randn(B, S // 2, K)
    torchs = parallelize_module(
        make_model(exact=False),
        mesh,
        {
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    expected = step(torchs, x, g)
    for plan in ("sequence", "prepared", "prepared, local"):
        config = RECIPES["tensorwise"]
        model = parallelized(make_model(exact=False), mesh, PLANS[plan](), config, False)
        with high_precision(model):
            found = step(model, x, g)
        assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-5), plan
        model.zero_grad()
        assert torch.equal(step(convert_from_float8_training(model), x, g)[0], found[0]), plan


def an_input_is_cast_once_for_all_layers(rank):
    """The layers get a Float8Tensor with the data and scale of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(6)
    x = torch.randn(B, S, K)
    expected = Float8Tensor.from_high_precision(x, torch.float8_e4m3fn)
    for plan in ("prepared", "prepared, local"):
        seen = []
        model = parallelized(make_model(), mesh, PLANS[plan](), RECIPES["tensorwise"], False)
        hook = lambda m, args, seen=seen: seen.append(args[0])  # noqa: E731
        model.gate.register_forward_pre_hook(hook)
        model(part(x, mesh, 1))
        (found,) = seen
        assert isinstance(found, DTensor) == (plan == "prepared")
        found = found.to_local() if isinstance(found, DTensor) else found
        assert torch.equal(
            found.float8_data.view(torch.uint8), expected.float8_data.view(torch.uint8)
        )
        assert torch.equal(found.scale, expected.scale.reshape(found.scale.shape))


class TakesKeywords(GatedFeedForward):
    def forward(self, mask, *, x):
        return super().forward(x), mask


def layers_in_high_precision_take_a_prepared_input(rank):
    """They read the dequantised input; its gradient is summed once."""
    mesh, config = init_device_mesh("cpu", (dist.get_world_size(),)), EXACT["dynamic"]
    convert = functools.partial(
        convert_to_float8_training, config=config, module_filter_fn=lambda m, name: name != "up"
    )
    x, g = integers(B, S, K, seed=1), integers(B, S, K, seed=2)
    one = step(convert(make_model()), x, g)
    for local in (False, True):
        model = make_model()
        plan = prepared(use_local_output=local)
        parallelize_module(model, mesh, {k: v for k, v in plan.items() if k})
        parallelize_module(model, mesh, plan[""])
        mine = step(convert(model), part(x, mesh, 1), part(g, mesh, 1))
        assert_is_part_of(mine, one, mesh, 1, f"{local=}")


def an_input_on_another_mesh_is_refused(rank):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    model = parallelized(make_model(), mesh["tp"], prepared(), EXACT["dynamic"], False)
    with pytest.raises(ValueError, match="PrepareFloat8ModuleInput: the input lies on"):
        model(distribute_tensor(integers(B, S, K, seed=1), mesh, [Shard(0), Shard(1)]))


def keyword_inputs_are_prepared_and_others_are_not(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = TakesKeywords()
    plan = PLANS["prepared"]() | {
        "": PrepareFloat8ModuleInput(
            input_layouts=(None,),
            desired_input_layouts=(None,),
            input_kwarg_layouts={"x": Shard(1)},
            desired_input_kwarg_layouts={"x": Replicate()},
        )
    }
    model.load_state_dict(make_model().state_dict())
    model = parallelized(model, mesh, plan, EXACT["dynamic"], False)
    one = convert_to_float8_training(make_model(), config=EXACT["dynamic"])
    x, mask = integers(B, S, K, seed=1), torch.ones(3)
    with Wire() as wire:
        out, same = model(mask, x=part(x, mesh, 1))
    assert same is mask and torch.equal(out, part(one(x), mesh, 1))
    gathers = [dtype for name, dtype, _ in wire.sent if name.startswith("all_gather")]
    assert gathers == [torch.uint8]


def takes_the_output_of_a_norm_in_float8(rank):
    """The output of `RMSNormCast` is multiplied as it is; its gradient is summed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = RECIPES["tensorwise"]
    torch.manual_seed(7)
    x, g = torch.randn(B, S, K), torch.randn(B, S, H)
    one = nn.Sequential(RMSNormCast(K, config=config), nn.Linear(K, H))
    cut = copy.deepcopy(one)
    parallelize_module(cut, mesh, {"1": Float8ColwiseParallel(output_layouts=Replicate())})
    for model in (one, cut):
        convert_to_float8_training(model, config=config)
    for difference in _differences(step(one, x, g), step(cut, x, g)):
        assert difference <= 1e-6, difference  # float32 sums in another order


def a_nan_on_one_rank_reaches_all(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelized(make_model(), mesh, sequence_parallel(), EXACT["dynamic"], False)
    for bad in (float("nan"), float("inf")):
        x = part(integers(B, S, K, seed=1), mesh, 1).clone()
        if rank == 1:
            x[0, 0, 0] = bad
        assert model(x).isnan().all(), bad


def mixes_with_torchs_styles(rank):
    """torch's own styles work on converted layers beside ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, g = integers(B, S, K, seed=1), integers(B, S, K, seed=2)
    one = convert_to_float8_training(make_model(), config=EXACT["dynamic"])
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "gate": Float8ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": Float8RowwiseParallel(),
    }
    model = parallelized(make_model(), mesh, plan, EXACT["dynamic"], False)
    assert_is_part_of(step(model, x, g), step(one, x, g), mesh, None, "mixed")


def torchs_styles_equal_one_process(rank):
    """Before and after conversion; layers that return local tensors, and DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe, config in (EXACT | {"rowwise": RECIPES["rowwise"]}).items():
        for convert_first, local in itertools.product((False, True), repeat=2):
            if convert_first and config.uses_delayed_scaling:
                continue  # the styles take the state of the casts for layers
            one = convert_to_float8_training(make_model(), config=config)
            plan = {
                "gate": ColwiseParallel(use_local_output=local),
                "up": ColwiseParallel(use_local_output=local),
                "down": RowwiseParallel(use_local_output=local),
            }
            model = parallelized(make_model(), mesh, plan, config, convert_first)
            for seed in range(3):
                x, g = integers(B, S, K, seed=seed), integers(B, S, K, seed=9 + seed)
                what = (recipe, convert_first, local, seed)
                expected, found = step(one, x, g), step(model, x, g)
                assert_is_part_of(found, expected, mesh, None, what)
                for each in (one, model):
                    after_step(each)
                    each.zero_grad()
                for a, b in zip(one.buffers(), model.buffers(), strict=True):
                    assert torch.equal(a, b), what


def parts_gather_to_the_whole(rank):
    """For any length, dimension and dtype; sums are over all ranks."""
    ranks = Ranks.of(init_device_mesh("cpu", (dist.get_world_size(),)))
    for dim in (0, 1, 2):
        for length in (1, 5, 8):
            shape = [3, 2, 4]
            shape[dim] = length
            x = integers(*shape, seed=length)
            mine = exchange.part_of(x, dim, ranks)
            assert mine.shape[dim] == ranks.length_here(length)
            for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
                found = exchange.gather(mine.to(dtype), dim, length, ranks)
                assert found.dtype == dtype and torch.equal(found.float(), x), (dim, length, dtype)
            total = x * sum(range(1, ranks.size + 1))
            assert torch.equal(exchange.sum_over(x * (rank + 1), ranks), total)
            found = exchange.reduce_scatter(x * (rank + 1), dim, ranks)
            assert torch.equal(found, exchange.part_of(total, dim, ranks)), (dim, length)
