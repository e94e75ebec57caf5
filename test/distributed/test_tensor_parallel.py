"""Tensor and sequence parallel layers equal one process.

Where bits are compared, the data are small integers and scales are powers of two. Then every
product and every sum is exact in any order, and a bit that differs is a bug. Random data, every
recipe and data parallelism around the layers: `test_compositions.py`.
"""

import contextlib
import copy
import functools
from dataclasses import replace

import faults
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from wire import Wire

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
WHOLE, CUT = Replicate(), Shard(1)
PAIRS = {"mesh_dim_names": ("dp", "tp")}


class GatedFeedForward(nn.Module):
    """Two layers that read one input, and one that reads their product."""

    def __init__(self, hidden=H):
        super().__init__()
        self.gate, self.up = nn.Linear(K, hidden), nn.Linear(K, hidden, bias=False)
        self.down = nn.Linear(hidden, K)

    def forward(self, x):
        return self.down(self.gate(x).relu() + self.up(x))


def integers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def make_model(exact=True, hidden=H):
    torch.manual_seed(0)
    model = GatedFeedForward(hidden)
    if exact:
        with torch.no_grad():
            for seed, p in enumerate(model.parameters()):
                p.copy_(integers(*p.shape, seed=seed))
    return model


def prepared(local):
    return PrepareFloat8ModuleInput(
        input_layouts=CUT, desired_input_layouts=WHOLE, use_local_output=local
    )


def plan_of(colwise, rowwise, colwise_options, rowwise_options, block=None):
    layers = {name: colwise(**colwise_options) for name in ("gate", "up")}
    return {**layers, "down": rowwise(**rowwise_options)}, block


OURS, TORCHS = (Float8ColwiseParallel, Float8RowwiseParallel), (ColwiseParallel, RowwiseParallel)
DTENSORS = {"use_local_output": False}
PLANS = {  # name -> (styles of the layers, style of the block), and the dimension that is cut
    "replicated": (lambda: plan_of(*OURS, {}, {}), None),
    "sequence": (
        lambda: plan_of(*OURS, {"input_layouts": CUT}, {"output_layouts": CUT}), 1,
    ),
    "prepared": (lambda: plan_of(*OURS, {}, {"output_layouts": CUT}, prepared(False)), 1),
    "prepared, local": (lambda: plan_of(*OURS, {}, {"output_layouts": CUT}, prepared(True)), 1),
    "by columns": (
        lambda: plan_of(*OURS, {"input_layouts": Shard(2)}, {"output_layouts": Shard(-1)}), 2,
    ),
    "whole between": (
        lambda: plan_of(
            *OURS, {"output_layouts": WHOLE, **DTENSORS}, {"input_layouts": WHOLE, **DTENSORS}
        ),
        None,
    ),
    "whole, local": (
        lambda: plan_of(*OURS, {"output_layouts": WHOLE}, {"input_layouts": WHOLE}), None,
    ),
    "torch's": (lambda: plan_of(*TORCHS, {}, {}), None),
    "torch's, DTensors": (lambda: plan_of(*TORCHS, DTENSORS, DTENSORS), None),
    "mixed": (lambda: plan_of(ColwiseParallel, Float8RowwiseParallel, {}, {}), None),
}  # fmt: skip


def all_ranks():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallelized(model, mesh, plan, config, convert_first=False):
    if convert_first:
        convert_to_float8_training(model, config=config)
    layers, block = PLANS[plan][0]()
    parallelize_module(model, mesh, layers)
    if block is not None:
        parallelize_module(model, mesh, block)
    return model if convert_first else convert_to_float8_training(model, config=config)


def part(x, mesh, dim):
    return x if dim is None else x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model, x, g, run=None):
    """The output and all gradients of one step; x and g are what the model takes."""
    x = x.detach().clone().requires_grad_()
    out = (run or model)(x)
    out = out.to_local() if isinstance(out, DTensor) else out
    out.backward(g)
    return out.detach(), x.grad, {name: whole(p.grad) for name, p in model.named_parameters()}


def assert_is_part_of(mine, one, mesh, dim, what=""):
    (out, grad_x, grads), (one_out, one_grad_x, one_grads) = mine, one
    assert torch.equal(out, part(one_out, mesh, dim)), (what, "output")
    assert torch.equal(grad_x, part(one_grad_x, mesh, dim)), (what, "gradient of the input")
    for name, grad in one_grads.items():
        assert torch.equal(grads[name], grad), (what, name)


def assert_same_buffers(model, other):
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", EXACT)
@pytest.mark.parametrize("plan", PLANS)
def test_bits_are_those_of_one_process(rank, plan, recipe):
    equals_one_process(plan, EXACT[recipe])


@pytest.mark.ranks(4)
def test_four_ranks_equal_one_process(rank):
    equals_one_process("sequence", EXACT["dynamic"])


@pytest.mark.ranks(2)
def test_torchs_styles_take_rows(rank):
    equals_one_process("torch's, DTensors", RECIPES["rowwise"])


def equals_one_process(plan, config, steps=3):
    """Converted before and after; torch's styles take the state of the casts for layers."""
    mesh, dim = all_ranks(), PLANS[plan][1]
    takes_state = (
        config.uses_delayed_scaling and PLANS[plan][0]()[0]["up"].__class__ is ColwiseParallel
    )
    orders = (False,) if takes_state else (False, True)
    for convert_first in orders:
        one = convert_to_float8_training(make_model(), config=config)
        model = parallelized(make_model(), mesh, plan, config, convert_first)
        for seed in range(steps):
            x, g = integers(B, S, K, seed=seed), integers(B, S, K, seed=9 + seed)
            expected = step(one, x, g)
            found = step(model, part(x, mesh, dim), part(g, mesh, dim))
            assert_is_part_of(found, expected, mesh, dim, (convert_first, seed))
            for each in (one, model):
                after_step(each)
                each.zero_grad()
            if not plan.startswith("prepared"):  # where the block has a cast of its own
                assert_same_buffers(model, one)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("plan", "gathers"), [("sequence", 2), ("prepared", 1)])
def test_inputs_travel_as_float8(rank, plan, gathers):
    """Sequence parallel: inputs are gathered in float8, and sums are scattered in bfloat16."""
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1).bfloat16() for s in (1, 2))
    model = parallelized(make_model().bfloat16(), mesh, plan, EXACT["static"], True)
    model(x)  # the first forward compares the ranks
    with Wire() as wire:
        model(x.requires_grad_()).backward(g)
    sent = [(e.kind, e.dtype, e.bytes) for e in wire.sent if e.kind != "all_reduce"]
    data = ("all_gather", torch.uint8, B * S * K / 2)
    sums = ("reduce_scatter", torch.bfloat16, B * S * K * 2 / 2)
    assert sorted(sent, key=str) == [data] * (gathers + 1) + [sums] * (gathers + 1)


OFF = CastConfig(scaling_type=ScalingType.DISABLED)
IN_HIGH_PRECISION = {
    "rows": RECIPES["rowwise"],
    "smooth": EXACT["smooth"],
    "a product in high precision": Float8LinearConfig(
        cast_config_input_for_grad_weight=OFF, cast_config_grad_output_for_grad_weight=OFF
    ),
    "a second cast": Float8LinearConfig(
        cast_config_input_for_grad_weight=POW2, cast_config_grad_output_for_grad_weight=STATIC
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared"])
def test_what_no_single_scale_serves_travels_in_high_precision(rank, plan):
    """Gradients of a smooth input are not smooth: they have one scale."""
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1).bfloat16() for s in (1, 2))
    for name, config in IN_HIGH_PRECISION.items():
        model = parallelized(make_model().bfloat16(), mesh, plan, config)
        model(x)
        with Wire() as wire:
            model(x.requires_grad_()).backward(g)
        in_float8 = [e for e in wire.sent if e.kind == "all_gather" and e.dtype == torch.uint8]
        assert len(in_float8) == (name == "smooth"), name


def differences(one, other):
    pairs = [*zip(one[:2], other[:2], strict=True), *((one[2][n], other[2][n]) for n in one[2])]
    return [((a - b).abs().max() / a.abs().max()).item() for a, b in pairs]


@pytest.mark.ranks(4)
def test_replicas_have_scales_of_their_own(rank):
    """Random data, of another size on each replica, differ from one process by rounding only.

    Nearly all values are rounded otherwise under another replica's scale, a planted fault.
    """
    mesh = init_device_mesh("cpu", (2, 2), **PAIRS)
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(replica)
    x, g = (torch.randn(B, S, n) * (1 + 2.7 * replica) for n in (K, H))
    found = []
    for context in (contextlib.nullcontext, faults.default_group):
        one = nn.Sequential(nn.Linear(K, H))
        cut = copy.deepcopy(one)
        style = Float8ColwiseParallel(output_layouts=WHOLE)
        parallelize_module(cut, mesh["tp"], {"0": style})
        for model in (one, cut):
            convert_to_float8_training(model)
        expected = step(one, x, g)
        with context():
            found.append(max(differences(expected, step(cut, x, g))))
    # The last replica's values are the largest: no other can raise its scales.
    assert found[0] <= 1e-5 and (replica == 1 or found[1] > 1e-3), found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("plan", ["sequence", "prepared"])
@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
def test_layers_train_with_fully_shard(rank, recipe, plan):
    """TP x FSDP2, 2 x 2: each replica has its own data; gradients are their mean."""
    mesh = init_device_mesh("cpu", (2, 2), **PAIRS)
    replica, config = mesh["dp"].get_local_rank(), EXACT[recipe]
    model = parallelized(make_model(), mesh["tp"], plan, config)
    for layer in (model.gate, model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])
    data = [(integers(B, S, K, seed=s), integers(B, S, K, seed=5 + s)) for s in range(2)]
    data[1] = data[1][0] * 8, data[1][1]  # another replica's amax would be another scale
    ones = [step(convert_to_float8_training(make_model(), config=config), *d) for d in data]
    mean = {name: (ones[0][2][name] + ones[1][2][name]) / 2 for name in ones[0][2]}
    found = step(model, *(part(t, mesh["tp"], 1) for t in data[replica]))
    assert_is_part_of(found, (*ones[replica][:2], mean), mesh["tp"], 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared"])
def test_sequences_that_do_not_divide(rank, plan):
    """A DTensor says how long the whole is."""
    mesh = all_ranks()
    x, g = integers(B, S - 1, K, seed=1), integers(B, S - 1, K, seed=2)
    expected = step(convert_to_float8_training(make_model(), config=EXACT["dynamic"]), x, g)
    model = parallelized(make_model(), mesh, plan, EXACT["dynamic"])
    cut = distribute_tensor(x, mesh, [CUT]).requires_grad_()
    out = model(cut)
    out.backward(distribute_tensor(g, mesh, [CUT]).to_local())
    assert torch.equal(out, part(expected[0], mesh, 1))
    assert torch.equal(cut.grad.full_tensor(), expected[1])
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.full_tensor(), expected[2][name]), name


@pytest.mark.ranks(2)
def test_features_that_do_not_divide(rank):
    mesh, config = all_ranks(), replace(EXACT["dynamic"], pad_inner_dim=True)
    x, g = integers(B, S, K, seed=1), integers(B, S, K, seed=2)
    one = convert_to_float8_training(make_model(hidden=33), config=config)
    model = parallelized(make_model(hidden=33), mesh, "replicated", config)
    assert_is_part_of(step(model, x, g), step(one, x, g), mesh, None)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared"])
def test_a_compiled_block_is_one_graph(rank, plan):
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    model = nn.Sequential(parallelized(make_model(), mesh, plan, EXACT["dynamic"]))
    run = torch.compile(again := copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert_is_part_of(step(again, x, g, run), step(model, x, g), mesh, None)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_compiled_sync_is_one_graph(rank):
    """After the first call, over the default group or a given one."""
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    sync = sync_float8_amax_and_scale_history
    model = parallelized(make_model(), mesh, "sequence", EXACT["delayed"])
    fast = copy.deepcopy(model)
    for group in (None, mesh.get_group()):
        compiled = torch.compile(sync, fullgraph=True, backend="aot_eager")
        for factor in (1, 2):
            for each in (model, fast):
                step(each, factor * x, g)
            sync(model, group)
            (sync if group is None and factor == 1 else compiled)(fast, group)
            assert_same_buffers(model, fast)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared", "prepared, local"])
def test_in_high_precision_layers_equal_torchs_styles(rank, plan):
    mesh = all_ranks()
    torch.manual_seed(rank)
    x, g = torch.randn(B, S // 2, K), torch.randn(B, S // 2, K)
    layers, _ = plan_of(*TORCHS, {"input_layouts": CUT}, {"output_layouts": CUT})
    expected = step(parallelize_module(make_model(exact=False), mesh, layers), x, g)
    model = parallelized(make_model(exact=False), mesh, plan, RECIPES["tensorwise"])
    with high_precision(model):
        found = step(model, x, g)
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    model.zero_grad()
    assert torch.equal(step(convert_from_float8_training(model), x, g)[0], found[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["prepared", "prepared, local"])
def test_an_input_is_cast_once_for_all_layers(rank, plan):
    """The layers get a Float8Tensor with the data and scale of one process."""
    mesh, seen = all_ranks(), []
    torch.manual_seed(6)
    x = torch.randn(B, S, K)
    expected = Float8Tensor.from_high_precision(x, torch.float8_e4m3fn)
    model = parallelized(make_model(), mesh, plan, RECIPES["tensorwise"])
    model.gate.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model(part(x, mesh, 1))
    (found,) = seen
    assert isinstance(found, DTensor) == (plan == "prepared")
    found = found.to_local() if isinstance(found, DTensor) else found
    assert torch.equal(found.float8_data.view(torch.uint8), expected.float8_data.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale.reshape(found.scale.shape))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["prepared", "prepared, local"])
def test_layers_in_high_precision_take_a_prepared_input(rank, plan):
    """They read the dequantised input; its gradient is summed once."""
    mesh = all_ranks()
    convert = functools.partial(
        convert_to_float8_training,
        config=EXACT["dynamic"],
        module_filter_fn=lambda m, name: name != "up",
    )
    x, g = integers(B, S, K, seed=1), integers(B, S, K, seed=2)
    model = make_model()
    for style in PLANS[plan][0]():
        parallelize_module(model, mesh, style)
    mine = step(convert(model), part(x, mesh, 1), part(g, mesh, 1))
    assert_is_part_of(mine, step(convert(make_model()), x, g), mesh, 1)


class TakesKeywords(GatedFeedForward):
    def forward(self, mask, *, x):
        return super().forward(x), mask


@pytest.mark.ranks(2)
def test_keyword_inputs_are_prepared_and_others_are_not(rank):
    mesh = all_ranks()
    model = TakesKeywords()
    model.load_state_dict(make_model().state_dict())
    parallelize_module(model, mesh, PLANS["prepared"][0]()[0])
    style = PrepareFloat8ModuleInput(
        input_layouts=(None,),
        desired_input_layouts=(None,),
        input_kwarg_layouts={"x": CUT},
        desired_input_kwarg_layouts={"x": WHOLE},
    )
    parallelize_module(model, mesh, style)
    one = make_model()
    for each in (model, one):
        convert_to_float8_training(each, config=EXACT["dynamic"])
    x, mask = integers(B, S, K, seed=1), torch.ones(3)
    model(mask, x=part(x, mesh, 1))  # the first forward compares the ranks
    with Wire() as wire:
        out, same = model(mask, x=part(x, mesh, 1))
    assert same is mask and torch.equal(out, part(one(x), mesh, 1))
    assert [e.dtype for e in wire.sent if e.kind == "all_gather"] == [torch.uint8]


@pytest.mark.ranks(2)
def test_a_layer_takes_the_output_of_a_norm_in_float8(rank):
    """The output of `RMSNormCast` is multiplied as it is; its gradient is summed."""
    config = RECIPES["tensorwise"]
    torch.manual_seed(7)
    x, g = torch.randn(B, S, K), torch.randn(B, S, H)
    one = nn.Sequential(RMSNormCast(K, config=config), nn.Linear(K, H))
    cut = copy.deepcopy(one)
    parallelize_module(cut, all_ranks(), {"1": Float8ColwiseParallel(output_layouts=WHOLE)})
    for model in (one, cut):
        convert_to_float8_training(model, config=config)
    # float32 sums in another order
    assert max(differences(step(one, x, g), step(cut, x, g))) <= 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_on_one_rank_reaches_all(rank, bad):
    mesh = all_ranks()
    model = parallelized(make_model(), mesh, "sequence", EXACT["dynamic"])
    x = part(integers(B, S, K, seed=1), mesh, 1).clone()
    x[0, 0, 0] = bad if rank == 1 else 0.0
    assert model(x).isnan().all()
