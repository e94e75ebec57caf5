"""`find_nan`: planted faults are found where they are, and harmless infs are no finding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from shapes import pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unchanged import assert_model_unchanged

from float8.config import RECIPES, Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.numerics.nonfinite import find_nan

Fault = Callable[[Tensor], Tensor]


class Plant(torch.autograd.Function):
    """Puts a value into a tensor's forward or backward."""

    @staticmethod
    def forward(ctx, x, value, backward):
        ctx.args = value, backward
        return x.clone() if backward else put(x, value)

    @staticmethod
    def backward(ctx, g):
        value, backward = ctx.args
        return put(g, value) if backward else g, None, None


def put(x: Tensor, value: float) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[5] = value
    return x


class Block(nn.Module):
    """Layers, an activation, a residual; a fault can be planted between any two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = nn.ReLU(inplace=True)
        self.faults: dict[str, Fault] = {}

    def plant(self, where: str, x: Tensor) -> Tensor:
        return self.faults.get(where, lambda x: x)(x)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plant("after norm", self.norm(x))
        hidden = self.act(self.plant("after up", self.up(hidden)))
        return x + self.plant("after down", self.down(hidden))


class Net(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)
        self.register_buffer(
            "mask", torch.full((4,), -math.inf).masked_fill(torch.eye(4)[0] > 0, 0)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def faulty(where: str, value: float, backward: bool, how: str, float8: bool) -> Net:
    net = Net(how)
    net.blocks[1].faults[where] = lambda x: Plant.apply(x, value, backward)
    return converted(net, float8)


def converted(net: nn.Module, float8: bool) -> nn.Module:
    return convert_to_float8_training(net, config=PADS) if float8 else net


PADS = Float8LinearConfig(pad_inner_dim=True)  # converts layers of any sizes
HOW = ["plain", "reentrant", "not reentrant"]


@pairs(
    place=[
        ("norm", "input of blocks.1.up"),
        ("up", "input of blocks.1.act"),
        ("down", "output"),
    ],
    how=HOW,
    float8=[False, True],
)
def test_a_tensor_between_modules_belongs_to_the_module_around_them(place, how, float8):
    after, tensor = place
    found = find_nan(faulty(f"after {after}", math.nan, False, how, float8), batch())
    assert (found.module, found.tensor, found.phase) == ("blocks.1", tensor, "forward")
    assert found.after == f"blocks.1.{after}: output"
    assert (found.nan, found.inf) == (1, 0)
    assert find_nan(converted(Net(how), float8), batch()) is None


@pairs(after=["norm", "up", "down"], how=HOW, float8=[False, True])
def test_a_gradient_is_named_by_the_module_that_it_reaches_first(after, how, float8):
    found = find_nan(faulty(f"after {after}", math.nan, True, how, float8), batch())
    assert (found.module, found.phase) == (f"blocks.1.{after}", "backward")
    assert found.tensor == "gradient of its output"
    assert "made by what reads this output" in str(found)
    assert found.nan == 1


class Broken(nn.Module):
    """A module whose own backward is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return Plant.apply(x * self.weight, math.nan, True)


def test_a_modules_own_backward_is_told_from_what_came_into_it():
    model = nn.Sequential(nn.Linear(8, 16), Broken(), nn.Linear(16, 4))
    found = find_nan(model, batch())
    assert (found.module, found.module_type) == ("1", "Broken")
    assert found.tensor in ("gradient of its input", "gradient of weight")
    assert found.after == "1: gradient of its output"


def test_what_a_batch_a_parameter_or_a_buffer_brings_is_found_before_the_run():
    x = batch()
    x[2, 3] = math.nan
    found = find_nan(Net(), {"x": x})
    assert (found.module, found.tensor, found.first) == ("", "tensor 0 of the batch", (2, 3))
    for value in (math.nan, math.inf, -math.inf):
        net = convert_to_float8_training(Net(), config=PADS)
        with torch.no_grad():
            net.blocks[0].up.weight[1, 2] = value
        found = find_nan(net, batch())
        assert (found.module, found.tensor) == ("blocks.0.up", "parameter weight")
        assert (found.phase, found.first) == ("before", (1, 2))


def delayed() -> nn.Module:
    net = convert_to_float8_training(Net(), config=replace(RECIPES["delayed"], pad_inner_dim=True))
    net(batch()).sum().backward()
    sync_float8_amax_and_scale_history(net)
    return net


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_delayed_scale_is_the_origin(value):
    net = delayed()
    net.blocks[1].down.cast_grad_output.scale.fill_(value)
    found = find_nan(net, batch())
    assert (found.module, found.tensor) == ("blocks.1.down.cast_grad_output", "buffer scale")
    assert "blocks.1.down (Float8Linear)" in found.led_to


@pytest.mark.parametrize("float8", [False, True])
def test_an_overflow_is_named_where_it_happens_and_not_where_it_becomes_nan(float8):
    net = Net().half()
    with torch.no_grad():
        net.blocks[0].up.weight.zero_()[3, 0] = 600.0
        net.blocks[0].norm.weight[:] = 1e4
    found = find_nan(converted(net, float8), batch().half())
    assert (found.module, found.tensor, found.nan) == ("blocks.0.up", "output", 0)
    assert found.inf > 0
    assert "65504" in str(found)
    assert found.went_in["weight"] == 600.0
    assert ("SQNR" in str(found)) == float8


class Attention(nn.Module):
    """Attention whose masks are -inf: an input, a buffer, and a module that returns one."""

    class Causal(nn.Module):
        def forward(self, scores):
            return scores + torch.full(scores.shape, -math.inf).triu(1)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.causal = nn.Linear(8, 24), self.Causal()

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.causal(q @ k.t() + mask).softmax(-1) @ v


def test_masks_are_no_fault_until_a_row_is_all_masked():
    model = convert_to_float8_training(Attention(), config=PADS)
    mask = torch.zeros(6, 6)
    mask[:, 3] = -math.inf
    assert find_nan(model, {"x": batch(), "mask": mask}) is None
    mask[4] = -math.inf  # softmax of nothing
    found = find_nan(model, {"x": batch(), "mask": mask})
    assert (found.module, found.tensor, found.phase) == ("", "output", "forward")
    assert found.after == "causal: output"


def test_an_inf_of_the_batch_is_not_the_origin_of_what_a_module_makes_of_it():
    """Neither where it enters a module nor what follows from it: the NaN is the first fault."""
    torch.manual_seed(0)
    x = batch()
    x[2, 3] = math.inf
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # infs of both signs, then their sum
    found = find_nan(model, (x,))
    assert (found.module, found.tensor, found.phase) == ("1", "output", "forward")
    assert found.led_to is None
    assert found.nan > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value):
    found = find_nan(Net(), batch(), loss_fn=lambda out: out.sum() * value)
    assert (found.module, found.tensor, found.phase) == ("", "loss", "forward")
    assert list(found.went_in) == ["output 0"]


class Root(nn.Module):
    """The derivative of sqrt at 0 is inf; the function itself is finite there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.before(x)
        return self.after((hidden * (hidden > 0)).square().sqrt())


@pytest.mark.parametrize("float8", [False, True])
def test_a_derivative_that_is_not_finite(float8):
    model = converted(Root(), float8)
    found = find_nan(model, batch())
    assert (found.module, found.tensor) == ("before", "gradient of its output")
    assert found.after == "after: gradient of its input"


def test_an_inf_in_a_parameters_gradient_is_a_fault_by_itself():
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.fill_(1e-30)  # the output is small, and the weight's gradient is not
    found = find_nan(layer, torch.full((2, 8), 1e30), loss_fn=lambda out: out.sum() * 1e20)
    assert (found.module, found.tensor, found.phase) == ("", "gradient of weight", "backward")
    assert (found.nan, found.inf) == (0, 64)


@pytest.mark.parametrize("fault", [None, "forward", "backward", "raises"])
def test_it_leaves_no_trace(fault):
    net = delayed()
    net(batch()).sum().backward()
    if fault in ("forward", "backward"):
        planted = lambda x: Plant.apply(x, math.nan, fault == "backward")  # noqa: E731
        net.blocks[1].faults["after up"] = planted

    def loss_fn(out):
        if fault == "raises":
            raise KeyError("inside")
        return out.sum()

    with assert_model_unchanged(net):
        if fault == "raises":
            with pytest.raises(KeyError):
                find_nan(net, batch(), loss_fn=loss_fn)
        else:
            assert (find_nan(net, batch(), loss_fn=loss_fn) is None) == (fault is None)


def test_a_float8_layer_shows_its_casts():
    """The weight saturates under its delayed scale; the fault is another one."""
    net = delayed()
    net.blocks[1].down.cast_weight.scale.mul_(2.0**-3)
    net.blocks[1].faults["after down"] = lambda x: Plant.apply(x, math.nan, True)
    said = " ".join(str(find_nan(net, batch())).split())
    assert said.startswith("blocks.1.down (Float8Linear): gradient of its output, in the backward")
    assert "saturation: blocks.1.down, weight." in said
    for operand in ("input", "weight", "grad_output"):
        assert f"down {operand} e" in said
