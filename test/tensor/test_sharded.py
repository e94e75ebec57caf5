"""A `Float8Tensor` of DTensors, and a DTensor of Float8Tensors: what works and what is refused.

Torch's fake process group stands for the other ranks: this process is rank 0 of 2.
"""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from assertions import assert_bitwise
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from float8 import E4M3, Blockwise, CastConfig, Float8Tensor, Rowwise, ScalingType, Tensorwise
from float8.linear.casts import cast_matrix, cast_operand
from float8.linear.plan import Operand
from float8.tensor import Float8Shard


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_rowwise", [False, True])
def test_a_given_scale_may_be_a_dtensor(mesh, is_rowwise):
    x = torch.randn(5, 24)
    granularity = Rowwise() if is_rowwise else Tensorwise()
    scale = torch.rand(5, 1) + 0.01 if is_rowwise else torch.full((1, 1), 0.03)
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    placement = Shard(0) if is_rowwise else Replicate()
    given = DTensor.from_local(scale, mesh, [placement])
    q = Float8Tensor.from_high_precision(sharded, E4M3, granularity, given)
    codes = oracle.cast(x, scale, granularity.block_of(x.shape), torch.float8_e4m3fn)
    assert_bitwise(q.float8_data.to_local(), codes)
    assert_bitwise(q.scale.to_local(), scale)


@pytest.mark.parametrize(
    ("placement", "granularity", "static"),
    [
        (Shard(0), Tensorwise(), None),
        (Shard(0), Tensorwise(), 0.125),
        (Replicate(), Tensorwise(), None),
        (Replicate(), Rowwise(), None),
    ],
)
def test_stacks_of_matrices_are_cast_one_by_one(mesh, placement, granularity, static):
    kind = ScalingType.DYNAMIC if static is None else ScalingType.STATIC
    cast = CastConfig(kind, granularity, static_scale=static).resolve(E4M3)
    how = replace(cast, block=(1, *cast.block))
    x = torch.randn(3, 5, 24) * torch.tensor([1.0, 8.0, 64.0])[:, None, None]
    found = cast_operand(DTensor.from_local(x, mesh, [placement]), Operand(how, how))
    for (data, scale, _), source in zip(found[:2], (x, x.mT), strict=True):
        experts = 6 if isinstance(placement, Shard) else 3
        expected, its_scale, _ = cast_matrix(source, how).row_major
        assert data.shape == (experts, *source.shape[1:])
        assert_bitwise(data.to_local(), expected)
        assert_bitwise(scale.to_local(), its_scale)
        assert static is not None or len(scale) == experts
    first = cast_operand(DTensor.from_local(x, mesh, [placement]), Operand(how, how), second=False)
    assert_bitwise(first[0].data.to_local(), cast_matrix(x, how).row_major.data)


def test_a_collective_is_refused(mesh):
    q = Float8Tensor.from_high_precision(torch.randn(8, 32), E4M3)
    sharded = DTensor.from_local(q, mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="is not defined for Float8Tensor"):
        sharded.redistribute(mesh, [Replicate()])
    with pytest.raises(NotImplementedError, match="is not defined for Float8Tensor"):
        dist.all_reduce(q)


@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize(
    ("granularity", "has_rows"),
    [(Tensorwise(), False), (Rowwise(), True), (Blockwise(4, 8), False)],
)
def test_fsdp_stores_bytes_of_its_rows_and_their_scales_or_all(mesh, granularity, has_rows, rows):
    """Shards have one size: the scales of rows are sharded where that divides the weight."""
    layer = nn.Linear(24, rows, bias=False)
    q = Float8Tensor.from_high_precision(layer.weight.detach(), E4M3, granularity)
    layer.weight = nn.Parameter(q, requires_grad=False)
    shard = fully_shard(layer, mesh=mesh).weight._local_tensor
    assert type(shard) is Float8Shard and shard.block == q.block
    assert_bitwise(shard.float8_data, q.float8_data[:3])
    assert shard.float8_data.untyped_storage().nbytes() == 3 * 24
    assert_bitwise(shard.scale, q.scale[:3] if has_rows and rows == 6 else q.scale)
    with pytest.raises(TypeError, match="broadcast_from_rank0=True sends no scales"):
        shard.copy_(shard.float8_data)  # torch does so for that option
    with pytest.raises(ValueError, match=r"call requires_grad_\(False\)"):
        fully_shard(nn.ParameterList([nn.Parameter(q)]), mesh=mesh)
