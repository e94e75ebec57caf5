"""DDP, FSDP and pipelines of torch train float8 layers to the bits of one process.

So they do where a value of one rank is not finite, where a rank has no tokens, and where FSDP2
gathers weights in float8. Compositions of these: `test_compositions.py`.
"""

import functools
import math
from unittest import mock

import faults
import one_process as one
import pytest
import torch
import torch.distributed as dist
from parallel_forms import FORMS, WORLD, ddp, fsdp1, fsdp2, mesh, trains
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import float8.distributed.rank_comparison  # noqa: F401  compares the layers of ranks
from float8.config import RECIPES
from float8.distributed import float8_gather, sharded_weight

BF16, NAN, INF = torch.bfloat16, math.nan, math.inf

# Sharding could change the scale of a whole weight, found from the gathered weight or a history:
# "delayed" has state, takes every form, and so do weights that are gathered in float8.
DELAYED = [(name, "delayed") for name in FORMS if name != "HSDP"]
GATHERED = [
    *((name, "gathered delayed") for name in FORMS if name.startswith("FSDP2")),
    *(("FSDP2" + name, "gathered tensorwise") for name in ("", ", foreach", ", mixed")),
    ("FSDP2, float8.optim", "gathered tensorwise"),
    ("FSDP2", "gathered unit"),
    # A block is cut in most of these: a weight is (48, 32) or (32, 48).
    *((name, "gathered blockwise") for name in ("FSDP2, foreach", "FSDP2, compiled")),
    *(("FSDP2, " + name, "gathered mxfp8_2d") for name in ("mixed", "kept", "columns", "on CPUs")),
    ("FSDP2, selective", "gathered mxfp8_2d"),
]
OTHERS = [
    *(("FSDP2, kept for a step", name) for name in RECIPES if name != "delayed"),
    ("DDP, static", "unit"),
    ("FSDP1", "rowwise"),
    ("FSDP1, mixed", "tensorwise"),
    ("FSDP2, selective", "tensorwise"),
    ("FSDP2, mixed", "unit"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        pytest.param(*case, marks=pytest.mark.slow if "compiled" in case[0] else ())
        for case in DELAYED + GATHERED + OTHERS
    ],
)
def test_every_form_trains(rank, form, recipe):
    trains(rank, recipe, **FORMS[form])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        ("FSDP1", "delayed"),
        *(("HSDP", name) for name in ("tensorwise", "gathered delayed", "gathered blockwise")),
    ],
)
def test_four_ranks_train(rank, form, recipe):
    trains(rank, recipe, **FORMS[form])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "recipe", "hidden"),
    [
        ("fsdp1", "delayed", 1),
        ("fsdp2", "tensorwise", 1),
        ("fsdp2", "gathered tensorwise", 1),
        ("fsdp2", "gathered delayed", 3),
        ("fsdp2", "gathered blockwise", 3),
        ("fsdp2", "gathered mxfp8_2d", 150),
    ],
)
def test_uneven_shards_train(rank, kind, recipe, hidden):
    """5 x hidden and hidden x 5 weights on four ranks, some of which hold fewer rows, or none.

    All ranks read the same batch: four equal numbers add up, and divide by four, exactly.
    """
    wrap = {
        "fsdp1": functools.partial(fsdp1, group=dist.group.WORLD),
        "fsdp2": lambda model: fsdp2(model, mesh()._flatten("all")),
    }[kind]
    names = (recipe.removeprefix(one.GATHERED), recipe)
    single, parallel = (one.make(name, width=5, hidden=hidden) for name in names)
    steps = [[[one.batch(step, 0, width=5)]] * 4 for step in range(3)]
    trains(rank, recipe, wrap, single=single, parallel=parallel, steps=steps)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "width", "hidden"), [("blockwise", 256, 512), ("mxfp8_2d", 64, 128)]
)
def test_shards_of_whole_blocks_train(rank, recipe, width, hidden):
    single, parallel = (
        one.make(name, width=width, hidden=hidden) for name in (recipe, one.GATHERED + recipe)
    )
    steps = [[[one.batch(step, r, width=width)] for r in range(WORLD)] for step in range(2)]
    trains(rank, recipe, fsdp2, single=single, parallel=parallel, steps=steps)


alone = lambda amax, group: amax  # noqa: E731
zeros_after = lambda part, x: nn.functional.pad(x, (0, 0, 0, part.before))  # noqa: E731
FAULTS = {
    "scales of single ranks": ("delayed", faults.missing_all_reduce),
    "scales of single shards": (
        "gathered tensorwise",
        functools.partial(mock.patch.object, float8_gather, "max_over_ranks", alone),
    ),
    "blocks that begin with a shard": (
        "gathered mxfp8_2d",
        functools.partial(mock.patch.object, float8_gather.Part, "aligned", zeros_after),
    ),
    "a stale scale": (
        "gathered tensorwise",
        functools.partial(mock.patch.object, sharded_weight, "_forget_written", lambda *_: None),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(rank, fault):
    recipe, planted = FAULTS[fault]
    with planted(), pytest.raises(AssertionError):
        trains(rank, recipe, **FORMS["FSDP2, foreach"])


@pytest.mark.ranks(2)
def test_ddp_keeps_the_amaxes_of_each_rank(rank):
    """DDP broadcasts buffers at every forward, which must not reach the amaxes."""
    model = one.make("delayed")
    parallel = ddp(model)
    peaks = []
    for microbatch, factor in enumerate((1000.0 if rank == 1 else 1.0, 1.0)):
        x, g = one.batch(0, rank, microbatch)
        peaks.append((factor * x).abs().max())
        one.loss_of(parallel, (factor * x, g)).backward()
    assert model[0].cast_input.current_amax == max(peaks)


# --- values of one rank


def with_bad_value(batch, bad):
    x = batch[0].clone()
    x[0, 0] = bad
    return x, batch[1]


RECIPES_AND_FORMS = [("tensorwise", "DDP"), ("delayed", "FSDP2"), ("rowwise", "FSDP2")]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "form"), [*RECIPES_AND_FORMS, ("unit", "FSDP2")])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_step_with_a_bad_value_can_be_skipped_by_all_ranks(rank, recipe, form, bad):
    """Rank 1 reads one bad value in step 1: no rank's gradients are finite, all scales are.

    Every rank then decides by its own gradients to skip that update, and ends with the bits of one
    process that does the same.
    """
    single, mine = one.make(recipe), FORMS[form]["wrap"](one.make(recipe))
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(3):
        data = [[one.batch(step, r)] for r in range(WORLD)]
        if step == 1:
            data[1] = [with_bad_value(data[1][0], bad)]
        expected = one.global_step(single, data)
        found = one.rank_step(mine, data[rank])
        assert math.isfinite(found[0]) == (step != 1 or rank == 0)
        assert str(found) == str(expected[rank])  # NaN equals no NaN
        for model, optimizer in zip((single, mine), optimizers, strict=True):
            norm = one.whole([nn.utils.get_total_norm([p.grad for p in model.parameters()])])
            assert norm[0].isfinite() == (step != 1)
            if not norm[0].isfinite():
                optimizer.zero_grad()
            one.update(model, optimizer)
        one.assert_same_model(mine, single, step)
        assert all(b.isfinite().all() for b in mine.buffers())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "form"), RECIPES_AND_FORMS)
def test_an_empty_batch_on_one_rank_trains(rank, recipe, form):
    """As when no token reaches a rank: its amaxes are 0, its gradients too."""
    steps = []
    for step in range(3):
        x, g = one.batch(step, 1)
        rows = 0 if step != 1 else one.TOKENS
        steps.append([[one.batch(step, 0)], [(x[:rows], g[:rows])]])
    trains(rank, recipe, FORMS[form]["wrap"], steps=steps)


# --- pipelines

PIPELINE_MICROBATCHES = 4


def halves(model):
    """The two stages: a linear layer and its activation; another linear layer."""
    return nn.Sequential(*model[:2]), nn.Sequential(model[2])


def examples(rank):
    """Example inputs and outputs of a stage in a microbatch.

    Without them torch (2.13; not 2.11) runs forward and backward of each stage on uninitialised
    memory in training mode, and a delayed cast would record its amaxes.
    """
    ends = [
        torch.zeros(one.TOKENS, width, requires_grad=width == one.HIDDEN or rank == 1)
        for width in (one.WIDTH, one.HIDDEN, one.WIDTH)
    ]
    return ends[rank], ends[rank + 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("recipe", ["delayed", "unit"])
def test_a_pipeline_trains(rank, recipe, schedule):
    """Losses, gradients and parameters: the same microbatches in the same order."""
    single, mine = one.make(recipe), halves(one.make(recipe))[rank]
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), *examples(rank))
    stages = [stage] if schedule is ScheduleInterleavedZeroBubble else stage
    parallel = schedule(stages, PIPELINE_MICROBATCHES, loss_fn=lambda y, g: (y * g).sum())
    optimizers = one.adamw(single), one.adamw(mine)
    for step in range(2):
        data = [one.batch(step, 0, m) for m in range(PIPELINE_MICROBATCHES)]
        expected = one.rank_step(single, data)
        for p in single.parameters():
            p.grad /= PIPELINE_MICROBATCHES  # as schedules do
        x, g = (torch.cat(parts) for parts in zip(*data, strict=True))
        found = []
        parallel.step(*([x] if rank == 0 else []), target=g, losses=found)
        if rank == 1:
            assert [loss.item() for loss in found] == expected, step
        one.update(single, optimizers[0])
        one.update(mine, optimizers[1], own)
        one.assert_same_model(mine, halves(single)[rank], step)


@pytest.mark.ranks(2)
def test_fsdp1_that_rounds_buffers_is_refused(rank):
    """Kernels read histories and scales as float32, and bfloat16 would change them."""
    model = fsdp1(one.make("delayed"), mixed_precision=MixedPrecision(BF16, BF16, BF16))
    with pytest.raises(TypeError, match="buffer_dtype"):
        one.rank_step(model, [one.batch(0, rank)])
