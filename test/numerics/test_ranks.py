"""`inspect`, `inspect_every`, `find_nan` and `compare` on two processes.

The reference is one process that has the whole model and all data.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    compare,
    convert_to_float8_training,
    find_nan,
    sync_float8_amax_and_scale_history,
)
from float8.config import RECIPES
from float8.numerics import inspect, inspect_every, load_alarms, load_run

K, H = 32, 64
EXACT = ("elements", "zeros", "amax", "scale_max", "flushed", "saturated", "histogram")
CLOSE = ("sqnr", "kurtosis")
OPERANDS = ("input", "weight", "grad_output")
pytestmark = pytest.mark.ranks(2)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, H), nn.GELU(), nn.Linear(H, K))


def model(recipe="tensorwise", gathers=False, smooth=False):
    config = replace(RECIPES[recipe], enable_fsdp_float8_all_gather=gathers, smooth_input=smooth)
    return convert_to_float8_training(plain(), config=config)


def batch(rank, rows=8):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, K, generator=generator), torch.randn(rows, K, generator=generator)


def mesh():
    return init_device_mesh("cpu", (2,))


def report_of(layers, *batches):
    with inspect(layers) as report:
        for x, g in batches:
            layers(x).backward(g)
    return report


def same(found, expected, replay, operands=OPERANDS, but=()):
    mine = {row.key: row for row in found._rows if row.operand in operands}
    theirs = {row.key: row for row in expected._rows if row.operand in operands}
    assert mine.keys() == theirs.keys(), replay
    for key, row in mine.items():
        for name in {*EXACT, *CLOSE} - set(but):
            one, other = getattr(row, name), getattr(theirs[key], name)
            assert one == other or one == pytest.approx(other, rel=1e-6), (replay, key, name)


@pytest.mark.parametrize("kind", ["ddp", "static graph", "fsdp2"])
def test_data_parallel_reports_gather_to_that_of_one_process(rank, kind):
    layers = model("rowwise")
    if kind == "fsdp2":
        fully_shard(layers, mesh=mesh())
    else:
        layers = DistributedDataParallel(layers, static_graph=kind == "static graph")
    expected = report_of(model("rowwise"), batch(0), batch(1))
    report = report_of(layers, batch(rank))
    assert {row.calls for row in report._rows} == {1}
    same(report.gather(), expected, kind)
    one, other = (
        {row.key: row.gradient_sqnr for row in each._rows if row.gradient_sqnr is not None}
        for each in (report.gather(), expected)
    )
    assert len(one) == 2  # energies of ranks add up, products of calls too: not the same number
    assert one == pytest.approx(other, abs=3.0)


def test_of_a_weight_gathered_in_float8_only_the_data_are_measured(rank):
    layers = model(gathers=True)
    fully_shard(layers, mesh=mesh())
    expected, report = report_of(model(), batch(rank)), report_of(layers, batch(rank))
    same(report, expected, "gathered", ("input", "grad_output"))
    weights = [row for row in report._rows if row.operand == "weight"]
    theirs = [row for row in expected._rows if row.operand == "weight"]
    assert [(row.scaling, row.sqnr) for row in weights] == [("float8", None)] * 2
    assert [row.scale_max for row in weights] == [row.scale_max for row in theirs]


@pytest.mark.parametrize(
    ("recipe", "sequence", "smooth"),
    [
        ("tensorwise", False, False),
        ("delayed", True, False),
        ("tensorwise", False, True),
        ("tensorwise", True, True),
    ],
)
def test_tensor_parallel_parts_gather_to_the_whole(rank, recipe, sequence, smooth):
    """Each rank measures its part under the scale, and the factors, of the whole tensor."""
    alone, layers = (model(recipe, smooth=smooth) for _ in range(2))
    x, g = batch(0)
    cut = {"input_layouts": Shard(0)} if sequence else {}
    out = {"output_layouts": Shard(0)} if sequence else {}
    plan = {"0": Float8ColwiseParallel(**cut), "2": Float8RowwiseParallel(**out)}
    parallelize_module(layers, mesh(), plan)
    part = slice(rank * 4, rank * 4 + 4) if sequence else slice(None)
    for step in (1, 2):
        expected = report_of(alone, (x * step, g))
        found = report_of(layers, (x[part] * step, g[part])).gather()
        if sequence:  # every operand is cut: the ranks' elements are those of the whole
            same(found, expected, step)
        else:  # the first input and the last gradient are on both ranks
            same(found, expected, step, ("weight",))
            same(found, expected, step, ("input", "grad_output"), ("elements", "histogram"))
        for each in (alone, layers):
            sync_float8_amax_and_scale_history(each)


def test_smooth_channels_of_other_ranks_have_factors_too(rank):
    """Each rank has some channels of the input, and rows of the weight with all channels."""
    alone, layers = model(smooth=True), model(smooth=True)
    plan = {"0": Float8ColwiseParallel(input_layouts=Shard(-1)), "2": Float8RowwiseParallel()}
    parallelize_module(layers, mesh(), plan)
    x, g = batch(0)
    x = x * 2.0 ** torch.arange(K)
    found = report_of(layers, (x.chunk(2, 1)[rank], g)).gather()
    same(found, report_of(alone, (x, g)), "columns", ("input", "weight"))


def test_a_monitor_writes_on_one_rank_what_all_have_seen(rank, tmp_path):
    path = tmp_path / "run.json"
    monitor = inspect_every(layers := model(), 2, path=path if rank == 0 else None)
    for _ in range(3):
        with monitor:
            layers(batch(rank)[0]).sum().backward()
    inputs = {row.elements for row in monitor.report._rows if row.operand == "input"}
    assert inputs == {2 * 8 * K, 2 * 8 * H}
    if rank == 0:
        assert [report.step for report in load_run(path)] == [0, 2]


def test_the_folder_of_a_run_may_be_on_one_machine_alone(rank, tmp_path):
    folder = tmp_path / str(rank)
    (tmp_path / "0").mkdir(exist_ok=True)
    monitor = inspect_every(layers := model(), 1, path=folder / "run.json")
    with monitor:
        layers(batch(rank)[0]).square().sum().backward()
    assert (folder / "run.json").exists() == (rank == 0)


def test_an_alarm_of_one_rank_is_on_all(rank, tmp_path):
    """Rank 1 alone meets inf; the file is on rank 0 alone."""
    path, seen, layers = tmp_path / "run.json", [], model()
    monitor = inspect_every(layers, 1, path=path if rank == 0 else None, on_alarm=seen.append)
    for step in range(2):
        x, _ = batch(rank)
        x[0, 0] = math.inf if rank == 1 and step == 1 else 0.0
        with monitor:
            layers(x).sum().backward()
    assert (seen[0].rule, seen[0].layer, seen[0].started) == ("inf or NaN", "0", 1)
    assert seen == monitor.alarms
    if rank == 0:
        assert load_alarms(path) == seen


def test_a_rank_whose_numbers_are_not_finite_leaves_no_other_waiting(rank):
    """Its collectives, of layers and of casts, are those of the other rank."""
    layers = model("delayed")
    parallelize_module(layers, mesh(), {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    layers.append(nn.Linear(K, K))
    if rank == 1:
        with torch.no_grad():
            layers[3].bias[0] = math.nan
    found = find_nan(layers, batch(0)[0])
    assert (found is None) == (rank == 0)
    assert rank == 0 or (found.module, found.tensor) == ("3", "parameter bias")
    assert (compare(layers, batch(0)[0]).output is None) == (rank == 1)
