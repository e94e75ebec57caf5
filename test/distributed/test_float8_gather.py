"""Shards are cast as one process casts the whole; several ranks: test_gathered_weights.py."""

import functools
from contextlib import contextmanager
from unittest import mock

import oracle
import pytest
import torch
import torch.distributed as dist
from assertions import assert_bitwise
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.config import RECIPES
from float8.distributed.float8_gather import KnownAmax, amax_of_shard, cast_shard
from float8.kernels.casts import KERNELS
from float8.kernels.products import CPU
from float8.kernels.registration import load_kernels


@contextmanager
def a_rank(rank=0, ranks=1):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def one_rank():
    with a_rank():
        yield


def cast_of(layer, dtype=torch.float32):
    weight = layer.weight.detach()
    return cast_shard(weight, KnownAmax(), layer, weight.shape, dtype, dist.group.WORLD)


SHAPES = {  # of a weight, with the ranks and the dimension that is sharded
    "blocks are whole": ((256, 160), 2, 0),
    "the last block is short": ((300, 33), 3, 0),
    "blocks are cut": ((300, 33), 2, 0),
    "a block on four ranks": ((97, 128), 8, 0),
    "short and empty shards": ((130, 5), 7, 0),
    "columns": ((70, 258), 3, 1),
}


CASTS = {  # of a weight: its blocks, and how their scales are rounded
    "tensorwise": ((-1, -1), "float32"),
    "blockwise": ((128, 128), "power_of_two"),
    "mxfp8_2d": ((32, 32), "e8m0"),
}


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("recipe", CASTS)
@pytest.mark.parametrize("case", SHAPES)
def test_shards_are_cast_as_the_whole(case, recipe, with_kernels):
    """One rank after the other, without an all-reduce; kernels by their definition."""
    size, ranks, dim = SHAPES[case]
    torch.manual_seed(ranks)
    config, weight = RECIPES[recipe], torch.randn(size) * torch.rand(size).exp2()
    layer = Float8Linear(*size[::-1], config=config)
    cast = config.gemms.output.b
    shards = [*weight.chunk(ranks, dim)]
    shards += [weight.narrow(dim, 0, 0)] * (ranks - len(shards))

    def by_rank(call):
        for rank, shard in enumerate(shards):
            with a_rank(rank, ranks) as group:
                yield call(shard, group=group)

    amaxes = by_rank(lambda shard, group: amax_of_shard(shard, cast, weight.shape, group))
    known = KnownAmax()
    known.remember(functools.reduce(torch.maximum, amaxes), weight, [layer.weight])
    rows = KERNELS["sm_90"] if with_kernels else {}
    load_kernels(*rows.values())
    arguments = known, layer, weight.shape, torch.bfloat16
    with mock.patch.dict(KERNELS, {CPU: rows}):
        found = [*by_rank(lambda shard, group: cast_shard(shard, *arguments, group))]
    block, scale_format = CASTS[recipe]
    codes, scales = oracle.quantize(weight.bfloat16(), block, torch.float8_e4m3fn, scale_format)
    data = torch.cat([data.view(torch.uint8) for data, _ in found], dim)
    assert_bitwise(data, codes, replay=(case, recipe))
    for _, scale in found:
        assert_bitwise(scale.float(), scales.float(), replay=(case, recipe))


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_visible_in_the_values(bad):
    layer = Float8Linear(32, 48)
    with torch.no_grad():
        layer.weight[0, 0] = bad
    data, scale = cast_of(layer)
    assert not (data.float() * scale).isfinite().all()
