"""Shards are cast as one process casts the whole; several ranks: test_gathered_weights.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8 import Float8Linear, Float8Tensor, sync_float8_amax_and_scale_history
from float8.config import RECIPES
from float8.distributed.float8_gather import GatheredWeight, cast_shard, needs_amax
from float8.distributed.known_amax import KnownAmax
from float8.linear.scaling import max_over_ranks


@pytest.fixture(autouse=True)
def one_rank():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(params=["tensorwise", "delayed", "unit"])
def layer(request):
    torch.manual_seed(0)
    return Float8Linear(32, 48, config=RECIPES[request.param])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_shard_has_the_codes_of_the_whole(layer, dtype):
    for _ in range(2):  # the second time a delayed scale follows from the history
        data, scale = cast_shard(
            layer.weight.detach(), KnownAmax(), layer, layer.weight.shape, dtype, dist.group.WORLD
        )
        expected = layer.cast_weight(layer.weight.detach().to(dtype))
        assert torch.equal(data.view(torch.uint8), expected.float8_data.view(torch.uint8))
        assert torch.equal(scale, expected.scale)
        sync_float8_amax_and_scale_history(layer)


def test_training_records_the_amax_and_evaluation_does_not():
    layer = Float8Linear(32, 48, config=RECIPES["delayed"])
    peak = layer.weight.detach().abs().max()
    for ready in (False, True):
        for training in (False, True):
            layer.train(training)
            assert needs_amax(layer.config.plan.output.b, layer.cast_weight.state) != ready
            cast_shard(
                layer.weight.detach(),
                KnownAmax(),
                layer,
                layer.weight.shape,
                torch.float32,
                dist.group.WORLD,
            )
            assert layer.cast_weight.current_amax == (peak if training else 0)
        sync_float8_amax_and_scale_history(layer)


def test_a_delayed_scale_is_not_the_buffer_that_sync_writes_to():
    layer = Float8Linear(32, 48, config=RECIPES["delayed"])
    layer(torch.randn(16, 32)).backward(torch.randn(16, 48))
    sync_float8_amax_and_scale_history(layer)
    _, scale = cast_shard(
        layer.weight.detach(),
        KnownAmax(),
        layer,
        layer.weight.shape,
        torch.float32,
        dist.group.WORLD,
    )
    before = scale.clone()
    layer.cast_weight.scale.zero_()
    assert torch.equal(scale, before)


def test_an_empty_shard_has_the_scale_of_the_whole(layer):
    known = KnownAmax()
    known.remember(torch.full((1, 1), 448.0), torch.zeros(1))
    data, scale = cast_shard(
        torch.empty(0, 32), known, layer, layer.weight.shape, torch.float32, dist.group.WORLD
    )
    assert data.shape == (0, 32)
    assert data.dtype == torch.float8_e4m3fn
    assert scale == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_visible_in_the_values(bad):
    layer = Float8Linear(32, 48)
    with torch.no_grad():
        layer.weight[0, 0] = bad
    data, scale = cast_shard(
        layer.weight.detach(),
        KnownAmax(),
        layer,
        layer.weight.shape,
        torch.float32,
        dist.group.WORLD,
    )
    assert not (data.float() * scale).isfinite().all()


def test_amaxes_that_are_not_finite_become_infinite():
    found = max_over_ranks(torch.tensor([1.0, float("nan"), float("inf")]), dist.group.WORLD)
    assert found.tolist() == [1.0, float("inf"), float("inf")]


def test_a_parameter_of_a_gathered_weight_is_one():
    whole = Float8Tensor.from_high_precision(torch.randn(48, 32), torch.float8_e4m3fn)
    gathered = GatheredWeight(whole.float8_data, whole.scale, (-1, -1), torch.bfloat16)
    parameter = nn.Parameter(torch.as_strided(gathered, (48, 32), (32, 1), 0))
    assert isinstance(parameter, GatheredWeight)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.dtype == torch.bfloat16
    assert parameter.float8_data.data_ptr() == whole.float8_data.data_ptr()
    assert type(torch.zeros_like(parameter)) is torch.Tensor
    assert type(parameter.t()) is Float8Tensor
    with pytest.raises(NotImplementedError, match="dequantize"):
        torch.as_strided(gathered, (24, 32), (32, 1), 0)
