"""`inspect` on two processes.

The reference is one process that has the whole model and all data.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.numerics import inspect, inspect_every, load_alarms, load_run

K, H = 32, 64
EXACT = ("elements", "zeros", "amax", "scale_max", "flushed", "saturated", "histogram")
CLOSE = ("sqnr", "kurtosis")


def model(recipe="tensorwise", gathers=False, smooth=False):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, K))
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, smooth_input=smooth)
    return convert_to_float8_training(layers, config=config)


def batch(rank, rows=8):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, K, generator=generator), torch.randn(rows, K, generator=generator)


def run(layers, x, g):
    out = layers(x)
    out.backward(g)


def same(found, expected, replay, operands=("input", "weight", "grad_output"), but=()):
    mine = {row.key: row for row in found._rows if row.operand in operands}
    theirs = {row.key: row for row in expected._rows if row.operand in operands}
    assert mine.keys() == theirs.keys(), replay
    for key, row in mine.items():
        for name in set(EXACT) - set(but):
            one, other = getattr(row, name), getattr(theirs[key], name)
            assert one == other or one == pytest.approx(other, rel=1e-6), (replay, key, name)
        for name in CLOSE:
            one, other = getattr(row, name), getattr(theirs[key], name)
            assert one == pytest.approx(other, rel=1e-6), (replay, key, name)


def data_parallel_reports_gather_to_that_of_one_process(rank, kind):
    world = dist.get_world_size()
    alone, layers = model("rowwise"), model("rowwise")
    if kind.startswith("ddp"):
        layers = DistributedDataParallel(layers, static_graph=kind == "ddp, static graph")
    else:
        fully_shard(layers, mesh=init_device_mesh("cpu", (world,)))
    with inspect(alone) as expected:
        for r in range(world):
            run(alone, *batch(r))
    with inspect(layers) as report:
        run(layers, *batch(rank))
    assert {row.calls for row in report._rows} == {1}
    same(report.gather(), expected, kind)
    one, other = (
        {row.key: row.gradient_sqnr for row in each._rows if row.gradient_sqnr is not None}
        for each in (report.gather(), expected)
    )
    assert len(one) == 2  # energies of ranks add up, products of calls too: not the same number
    assert one == pytest.approx(other, abs=3.0)


def gathered_weights_are_those_of_one_process(rank):
    """A weight gathered in float8 has no high-precision values: only its data are measured."""
    alone, layers = model(), model(gathers=True)
    fully_shard(layers, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with inspect(alone) as expected:
        run(alone, *batch(rank))
    with inspect(layers) as report:
        run(layers, *batch(rank))
    same(report, expected, "gathered", ("input", "grad_output"))
    weights = [row for row in report._rows if row.operand == "weight"]
    theirs = [row for row in expected._rows if row.operand == "weight"]
    assert [(row.scaling, row.sqnr) for row in weights] == [("float8", None)] * 2
    assert [row.scale_max for row in weights] == [row.scale_max for row in theirs]


def tensor_parallel_parts_gather_to_the_whole(rank, recipe, sequence, smooth=False):
    """Each rank measures its part under the scale, and the factors, of the whole tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, layers = (model(recipe, smooth=smooth) for _ in range(2))
    x, g = batch(0)
    cut = {"input_layouts": Shard(0)} if sequence else {}
    out = {"output_layouts": Shard(0)} if sequence else {}
    plan = {"0": Float8ColwiseParallel(**cut), "2": Float8RowwiseParallel(**out)}
    parallelize_module(layers, mesh, plan)
    part = slice(rank * 4, rank * 4 + 4) if sequence else slice(None)
    for step in range(2):
        with inspect(alone) as expected:
            run(alone, x * (step + 1), g)
        with inspect(layers) as report:
            run(layers, x[part] * (step + 1), g[part])
        found = report.gather()
        replay = (recipe, sequence, step)
        if sequence:  # every operand is cut: the ranks' elements are those of the whole
            same(found, expected, replay)
        else:  # the first input and the last gradient are on both ranks
            same(found, expected, replay, ("weight",))
            same(found, expected, replay, ("input", "grad_output"), ("elements", "histogram"))
        for each in (alone, layers):
            sync_float8_amax_and_scale_history(each)


def smooth_channels_of_other_ranks_have_factors_too(rank):
    """Each rank has some channels of the input, and rows of the weight with all channels."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, layers = model(smooth=True), model(smooth=True)
    plan = {"0": Float8ColwiseParallel(input_layouts=Shard(-1)), "2": Float8RowwiseParallel()}
    parallelize_module(layers, mesh, plan)
    x, g = batch(0)
    x = x * 2.0 ** torch.arange(K)
    with inspect(alone) as expected:
        run(alone, x, g)
    with inspect(layers) as report:
        run(layers, x.chunk(2, 1)[rank], g)
    same(report.gather(), expected, "columns", ("input", "weight"))


def a_layer_of_dtensors_is_measured_by_its_shards(rank, smooth=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, K))
    config = replace(RECIPES["tensorwise"], smooth_input=smooth)
    alone = convert_to_float8_training(copy.deepcopy(plain), config=config)
    styles = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    layers = convert_to_float8_training(parallelize_module(plain, mesh, styles), config=config)
    x, g = batch(0)
    with inspect(alone) as expected:
        run(alone, x, g)
    with inspect(layers) as report:
        run(layers, x, g)
    same(report.gather(), expected, "DTensor", ("weight",))


def a_monitor_writes_on_one_rank_what_all_have_seen(rank, path):
    monitor = inspect_every(layers := model(), 2, path=path if rank == 0 else None)
    for _ in range(3):
        with monitor:
            run(layers, *batch(rank))
    assert {row.elements for row in monitor.report._rows if row.operand == "input"} == {
        dist.get_world_size() * 8 * K,
        dist.get_world_size() * 8 * H,
    }
    if rank == 0:
        assert [report.step for report in load_run(path)] == [0, 2]


def an_alarm_of_one_rank_stops_all(rank, path):
    """Rank 1 alone meets inf; the file is on rank 0 alone."""
    seen = []
    monitor = inspect_every(
        layers := model(), 1, path=path if rank == 0 else None, on_alarm=seen.append
    )
    for step in range(2):
        x, g = batch(rank)
        x[0, 0] = float("inf") if rank == 1 and step == 1 else 0.0
        with monitor:
            run(layers, x, g)
    assert (seen[0].rule, seen[0].layer, seen[0].started) == ("inf or NaN", "0", 1)
    assert seen == monitor.alarms
    if rank == 0:
        assert load_alarms(path) == seen
