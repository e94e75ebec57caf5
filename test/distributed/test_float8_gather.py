"""Shards are cast as one process casts the whole; several ranks: test_gathered_weights.py."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.config import RECIPES
from float8.distributed.float8_gather import KnownAmax, cast_shard


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cast_of(layer, dtype=torch.float32):
    weight = layer.weight.detach()
    return cast_shard(weight, KnownAmax(), layer, weight.shape, dtype, dist.group.WORLD)


def test_training_records_the_amax_and_evaluation_does_not():
    layer = Float8Linear(32, 48, config=RECIPES["delayed"])
    peak = layer.weight.detach().abs().max()
    for _ in range(2):  # before and after the first sync
        for training in (False, True):
            layer.train(training)
            _, scale = cast_of(layer)
            assert layer.cast_weight.current_amax == (peak if training else 0)
        sync_float8_amax_and_scale_history(layer)
    before = scale.clone()
    layer.cast_weight.scale.zero_()  # as sync writes to it
    assert torch.equal(scale, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_visible_in_the_values(bad):
    layer = Float8Linear(32, 48)
    with torch.no_grad():
        layer.weight[0, 0] = bad
    data, scale = cast_of(layer)
    assert not (data.float() * scale).isfinite().all()
