"""Tensor and sequence parallel layers equal one process.

Where bits are compared, the data are small integers and scales are powers of two. Then every
product and every sum is exact in any order, and a bit that differs is a bug. Random data, every
recipe and data parallelism around the layers: `test_compositions.py`.
"""

import contextlib
import copy
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


OURS, TORCHS = (Float8ColwiseParallel, Float8RowwiseParallel), (ColwiseParallel, RowwiseParallel)
DTENSORS = {"use_local_output": False}
WHOLE_OUT, WHOLE_IN = {"output_layouts": WHOLE}, {"input_layouts": WHOLE}
# name -> the styles of layers, their options, whether the block prepares; the dimension that is cut
PLANS = {
    "replicated": (OURS, {}, {}, None, None),
    "sequence": (OURS, {"input_layouts": CUT}, {"output_layouts": CUT}, None, 1),
    "prepared": (OURS, {}, {"output_layouts": CUT}, "DTensor", 1),
    "prepared, local": (OURS, {}, {"output_layouts": CUT}, "local", 1),
    "by columns": (OURS, {"input_layouts": Shard(2)}, {"output_layouts": Shard(-1)}, None, 2),
    "whole between": (OURS, {**WHOLE_OUT, **DTENSORS}, {**WHOLE_IN, **DTENSORS}, None, None),
    "whole, local": (OURS, WHOLE_OUT, WHOLE_IN, None, None),
    "torch's": (TORCHS, {}, {}, None, None),
    "torch's, cut": (TORCHS, {"input_layouts": CUT}, {"output_layouts": CUT}, None, 1),
    "torch's, DTensors": (TORCHS, DTENSORS, DTENSORS, None, None),
    "mixed": ((ColwiseParallel, Float8RowwiseParallel), {}, {}, None, None),
}


def styled(model, mesh, plan):
    """The model, parallelized."""
    (colwise, rowwise), before, after, prepares, _ = PLANS[plan]
    layers = {"gate": colwise(**before), "up": colwise(**before), "down": rowwise(**after)}
    parallelize_module(model, mesh, layers)
    if prepares is not None:
        style = PrepareFloat8ModuleInput(
            input_layouts=CUT, desired_input_layouts=WHOLE, use_local_output=prepares == "local"
        )
        parallelize_module(model, mesh, style)
    return model


def all_ranks():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallelized(model, mesh, plan, config, convert_first=False):
    if convert_first:
        return styled(convert_to_float8_training(model, config=config), mesh, plan)
    return convert_to_float8_training(styled(model, mesh, plan), config=config)


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
@pytest.mark.parametrize(
    ("plan", "recipe"),
    [(plan, recipe) for plan in PLANS for recipe in ("dynamic", "delayed")]
    + [(plan, recipe) for plan in ("sequence", "torch's, cut") for recipe in ("static", "smooth")]
    + [("prepared", "static"), ("prepared, local", "smooth"), ("mixed", "static")],
)
def test_bits_are_those_of_one_process(rank, plan, recipe):
    equals_one_process(plan, EXACT[recipe])


@pytest.mark.ranks(4)
def test_four_ranks_and_rows_equal_one_process(rank):
    equals_one_process("sequence", EXACT["dynamic"])
    equals_one_process("torch's, DTensors", RECIPES["rowwise"])


def equals_one_process(plan, config):
    """Converted before and after; torch's styles take the state of the casts for layers."""
    mesh, dim = all_ranks(), PLANS[plan][-1]
    takes_state = config.uses_delayed_scaling and ColwiseParallel in PLANS[plan][0]
    orders = (False,) if takes_state else (False, True)
    for convert_first in orders:
        one = convert_to_float8_training(make_model(), config=config)
        model = parallelized(make_model(), mesh, plan, config, convert_first)
        for seed in range(3 if config.uses_delayed_scaling else 2):
            x, g = integers(B, S, K, seed=seed), integers(B, S, K, seed=9 + seed)
            expected = step(one, x, g)
            found = step(model, part(x, mesh, dim), part(g, mesh, dim))
            assert_is_part_of(found, expected, mesh, dim, (convert_first, seed))
            for each in (one, model):
                after_step(each)
                each.zero_grad()
            if not plan.startswith("prepared"):  # where the block has a cast of its own
                assert_same_buffers(model, one)


OFF = CastConfig(scaling_type=ScalingType.DISABLED)
SENT = {  # config -> float8 tensors that travel: of the input of two layers, and of one output
    "static": (EXACT["static"], 2, 1),
    "rows": (RECIPES["rowwise"], 0, 0),
    "smooth": (EXACT["smooth"], 0, 1),  # gradients of a smooth input are not smooth
    "high precision": (
        Float8LinearConfig(
            cast_config_input_for_grad_weight=OFF, cast_config_grad_output_for_grad_weight=OFF
        ), 0, 0,
    ),
    "a second cast": (
        Float8LinearConfig(
            cast_config_input_for_grad_weight=POW2, cast_config_grad_output_for_grad_weight=STATIC
        ), 0, 0,
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared"])
def test_inputs_travel_as_float8_if_they_have_one_scale(rank, plan):
    """Sums are scattered in bfloat16."""
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1).bfloat16() for s in (1, 2))
    for name, (config, inputs, outputs) in SENT.items():
        model = parallelized(make_model().bfloat16(), mesh, plan, config)
        model(x)  # the first forward compares the ranks
        with Wire() as wire:
            model(x.requires_grad_()).backward(g)
        gathers = [e.bytes for e in wire.sent if (e.kind, e.dtype) == ("all_gather", torch.uint8)]
        expected = min(inputs, 2 if plan == "sequence" else 1) + outputs
        assert gathers == [B * S * K / 2] * expected, name
        sums = [e for e in wire.sent if e.kind == "reduce_scatter"]
        assert {(e.dtype, e.bytes) for e in sums} == {(torch.bfloat16, B * S * K)}, name


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
def test_sequences_and_features_that_do_not_divide(rank, plan):
    """A DTensor says how long the whole is."""
    mesh, config = all_ranks(), replace(EXACT["dynamic"], pad_inner_dim=True)
    x, g = integers(B, S - 1, K, seed=1), integers(B, S - 1, K, seed=2)
    expected = step(convert_to_float8_training(make_model(hidden=33), config=config), x, g)
    model = parallelized(make_model(hidden=33), mesh, plan, config)
    cut = distribute_tensor(x, mesh, [CUT]).requires_grad_()
    out = model(cut)
    out.backward(distribute_tensor(g, mesh, [CUT]).to_local())
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    grad = distribute_tensor(expected[1], mesh, [CUT]).to_local()
    assert torch.equal(cut.grad.to_local(), grad)
    assert_is_part_of((out, part(expected[1], mesh, 1), grads), expected, mesh, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["sequence", "prepared", "prepared, local"])
def test_in_high_precision_layers_equal_torchs_styles(rank, plan):
    mesh = all_ranks()
    torch.manual_seed(rank)
    x, g = torch.randn(B, S // 2, K), torch.randn(B, S // 2, K)
    expected = step(styled(make_model(exact=False), mesh, "torch's, cut"), x, g)
    model = parallelized(make_model(exact=False), mesh, plan, RECIPES["tensorwise"])
    with high_precision(model):
        found = step(model, x, g)
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    model.zero_grad()
    assert torch.equal(step(convert_from_float8_training(model), x, g)[0], found[0])


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["prepared", "prepared, local"])
def test_a_prepared_module_is_compiled_with_its_caller(rank, plan):
    """On its own its hook would be another graph, which a gradient cannot enter in float8."""
    mesh = all_ranks()
    x, g = (part(integers(B, S, K, seed=s), mesh, 1) for s in (1, 2))
    model = parallelized(make_model(), mesh, plan, EXACT["dynamic"])
    expected = step(model, x, g)
    model.zero_grad()
    caller = torch.compile(nn.Sequential(model), backend="aot_eager", fullgraph=True)
    assert_is_part_of(step(model, x, g, caller), expected, mesh, None)
    model.compile(backend="aot_eager")
    with pytest.raises(Exception, match=r"a float8 tensor .* Compile the caller"):
        step(model, x, g)


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


class TakesKeywords(GatedFeedForward):
    def forward(self, mask, *, x):
        return super().forward(x), mask


@pytest.mark.ranks(2)
def test_keyword_inputs_are_prepared_and_others_are_not(rank):
    mesh = all_ranks()
    model = TakesKeywords()
    model.load_state_dict(make_model().state_dict())
    styled(model, mesh, "replicated")
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
    assert same is mask and torch.equal(out, one(x))
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
