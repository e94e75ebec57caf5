"""Trainings drawn by a seed: parallelism x recipe x compile x recomputation, against one process.

A `Composition` is one training on two gloo processes, drawn by ``Composition.of(seed)`` from those
that are supported. Its reference is the same training in one process, eager and without
recomputation. Data parallelism promises the bits of `one_process`. Tensor parallelism sums in
another order: its gradients may be at most twice as far from a float64 training without float8 as
those of one process are. `test_expert_parallel.py` has experts. Replay seeds 17 and 18 by ::

    PYTHONPATH=.:test python test/multiprocess/composition_program.py 17 18
"""

from __future__ import annotations

import random
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import product

import faults
import one_process as one
import parallel_forms
import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bitwise, assert_error_within_baseline
from processes import failures
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import float8
from float8.config import RECIPES

D, BF16 = 32, torch.bfloat16
LENGTHS = 0, 1, 2, 7, 16, 34
BLOCKS = "blockwise", "mxfp8", "mxfp8_2d"


def drawn(*values):
    return field(metadata={"values": values})


@dataclass(frozen=True)
class Composition:
    """One training on two processes.

    Args:
        seed: of the weights and the data.
        data: the data parallelism.
        layers: the parallelism within layers.
        data_ranks: the ranks of ``data``; ``layers`` has the others.
        plan: of tensor parallelism: where its input is whole, cut, or cast before it is gathered.
        convert_first: before ``layers``.
        left_out: one layer stays in high precision.
        tokens: (batch, sequence) of each rank of ``data``.
        microbatches: of each step.
        frozen: "weight" of a layer, or "block".
        tied: two layers with one "weight", or one "block" that runs twice.
        after_step: ends a step by `float8.after_step`, which is optional for most recipes.
    """

    seed: int
    data: str = drawn("none", "DDP", "FSDP2", "FSDP2 in float8")
    layers: str = drawn("whole", "TP", "torch's TP")
    data_ranks: int = drawn(1, 2)
    plan: str = drawn("replicated", "sequence", "prepared")
    convert_first: bool = drawn(False, True)
    recipe: str = drawn(*RECIPES)
    dtype: str = drawn("float32", "bfloat16", "mixed")
    compile: str = drawn(*[""] * 12, "model", "blocks")
    recompute: bool = drawn(False, True)
    left_out: bool = drawn(False, False, True)
    frozen: str = drawn("", "", "weight", "block")
    tied: str = drawn("", "", "weight", "block")
    bias: bool = drawn(False, True)
    hidden: int = drawn(32, 96, 160)
    tokens: tuple[tuple[int, int], ...] = drawn(*product(product((1, 2, 3), LENGTHS), repeat=2))
    microbatches: int = drawn(1, 2)
    steps: int = drawn(2, 3)
    after_step: bool = drawn(False, True)
    reshard: bool = drawn(False, True)

    @classmethod
    def of(cls, seed: int) -> Composition:
        """The first supported composition of the seed's random numbers."""
        r = random.Random(seed)
        while True:
            values = [r.choice(field.metadata["values"]) for field in fields(cls)[1:]]
            if (composition := cls(seed, *values)).is_supported:
                return composition

    @property
    def is_supported(self) -> bool:
        rules = (
            self.data_ranks == 1 if self.data == "none" else self.layers != "whole" or self.is_fed,
            self.is_tp or self.plan == "replicated",
            # DDP takes no DTensor, and weights of tensor-parallel layers are gathered as they are.
            not self.is_tp or self.data not in ("DDP", "FSDP2 in float8"),
            # torch's styles leave DTensors, which scales of blocks do not take.
            not (self.layers == "torch's TP" and self.recipe in BLOCKS),
            # torch's product of DTensors, which layers in high precision take too, needs tokens.
            not (self.is_tp and any(S == 0 for _, S in self.tokens)) or self.is_all_ours,
            not (self.layers == "torch's TP" and self.convert_first),
            # Dynamo makes strides dynamic where they differ between blocks; DTensor's rules cannot
            # hash them, for plain layers too (torch 2.13).
            not (self.layers == "torch's TP" and self.compile and self.is_cut),
            # The styles replace each layer's weight, which unties two of them.
            not (self.is_tp and self.tied == "weight"),
            # Nothing is composed.
            self.data != "none" or self.layers != "whole" or self.compile or self.recompute,
        )
        return all(rules)

    is_tp = property(lambda self: self.layers.endswith("TP"))
    is_fsdp = property(lambda self: self.data.startswith("FSDP2"))
    is_fed = property(lambda self: self.data_ranks == 2)
    is_all_ours = property(lambda self: self.layers == "TP" and not self.left_out)
    is_cut = property(lambda self: self.plan != "replicated")

    @property
    def keeps_bits(self) -> bool:
        """Whether sums have the order of one process."""
        if self.layers != "whole":
            return False
        # FSDP2 adds the gradients of a tied weight in bfloat16, one process in float32; and FSDP2
        # reduces the gradients of each run of a block.
        unlike = self.tied == "block" or (self.tied == "weight" and self.dtype == "mixed")
        return not (self.is_fsdp and unlike)

    @cached_property
    def mesh(self):
        shape = (self.data_ranks, 2 // self.data_ranks)
        return init_device_mesh("cpu", shape, mesh_dim_names=("data", "layers"))

    def batch(self, step: int, rank: int, microbatch: int) -> one.Batch:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
        B, S = self.tokens[rank]
        x, g = torch.randn(2, B, 2 * S if self.is_cut else S, D, generator=generator)
        return (x * (1 + rank)).to(torch.float32 if self.dtype == "float32" else BF16), g

    def batches(self, step: int) -> list[list[one.Batch]]:
        """Of a step: the microbatches of each rank that has data of its own."""
        ranks = range(self.data_ranks)
        return [[self.batch(step, r, m) for m in range(self.microbatches)] for r in ranks]


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(D, c.hidden, c.bias), nn.Linear(c.hidden, D, c.bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.recompute = body, False

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False) if self.recompute else self._run(x)

    def _run(self, x):
        return x + self.body(x)


def plain_model(c):
    torch.manual_seed(c.seed)
    model = nn.Sequential(*(Block(FeedForward(c)) for _ in range(3)))
    if c.tied == "block":
        model[-1] = model[-2]
    if c.tied == "weight":
        model[-1].body.up.weight = model[-2].body.up.weight
    if c.frozen == "weight":
        model[-2].body.down.weight.requires_grad_(False)
    if c.frozen == "block":
        model[c.seed % 2].requires_grad_(False)
    return model.to(BF16 if c.dtype == "bfloat16" else torch.float32)


def converted(c, model, gathers=False):
    config = replace(RECIPES[c.recipe], enable_fsdp_float8_all_gather=gathers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'recipe "unit"')  # these layers are not unit-scaled
        return float8.convert_to_float8_training(
            model,
            config=config,
            module_filter_fn=lambda _, fqn: not (c.left_out and fqn == "1.body.down"),
        )


def tensor_parallel(c, model):
    """Cut each layer over the mesh, by the library's styles before conversion or by torch's."""
    styles = {"TP": (float8.Float8ColwiseParallel, float8.Float8RowwiseParallel)}
    colwise, rowwise = styles.get(c.layers, (ColwiseParallel, RowwiseParallel))
    prepare = float8.PrepareFloat8ModuleInput if c.layers == "TP" else PrepareModuleInput
    whole, cut = Replicate(), Shard(1)
    plan = {
        "*.body.up": colwise(input_layouts=cut if c.plan == "sequence" else whole),
        "*.body.down": rowwise(output_layouts=whole if c.plan == "replicated" else cut),
    }
    parallelize_module(model, c.mesh["layers"], plan)
    if c.plan == "prepared":
        style = prepare(input_layouts=cut, desired_input_layouts=whole)
        parallelize_module(model, c.mesh["layers"], {"*.body": style})


def parallel_model(c):
    """The model of a composition, and what its forward runs."""
    model = plain_model(c)
    for block in model:
        block.recompute = c.recompute
    if c.convert_first:
        converted(c, model, c.data == "FSDP2 in float8")
    if c.is_tp:
        tensor_parallel(c, model[:-1] if c.tied == "block" else model)
    if not c.convert_first:
        converted(c, model, c.data == "FSDP2 in float8")
    if c.compile == "blocks":
        for block in dict.fromkeys(model):
            block.compile(backend="aot_eager")
    if c.is_fsdp:
        options = {"reshard_after_forward": c.reshard}
        if c.dtype == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(BF16, torch.float32)
        mesh = c.mesh["data"]
        for block in dict.fromkeys(model) if c.tied != "weight" else ():
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    run = model
    if c.data == "DDP":
        run = DistributedDataParallel(model)
    return model, torch.compile(run, backend="aot_eager") if c.compile == "model" else run


def cut(c, batch):
    """This rank's part of a batch."""
    ranks = c.mesh["layers"]
    return [t.chunk(ranks.size(), 1)[ranks.get_local_rank()] if c.is_cut else t for t in batch]


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def trains(rank, seed):
    c = Composition.of(seed)
    torch._dynamo.reset()
    single, exact = converted(c, plain_model(c)), plain_model(c).double()
    parallel, run = parallel_model(c)
    mine, without_sync = c.mesh["data"].get_local_rank(), nullcontext
    if c.data != "none":
        without_sync = partial(parallel_forms.without_sync, getattr(run, "_orig_mod", run))
    in_single = parallel_forms.in_bf16 if c.dtype == "mixed" else nullcontext
    in_parallel = nullcontext if c.is_fsdp else in_single
    models = (single, parallel) if c.keeps_bits else (single, parallel, exact)
    make = partial(torch.optim.AdamW if c.keeps_bits else torch.optim.SGD, lr=0.01, foreach=False)
    optimizers = [make([p for p in m.parameters() if p.requires_grad]) for m in models]
    for step in range(c.steps):
        ranks = c.batches(step)
        with in_single():
            expected = one.global_step(single, ranks)[mine]
        with in_parallel():
            batches = [cut(c, each) for each in ranks[mine]]
            found = one.rank_step(run, batches, without_sync)
        if c.keeps_bits:
            assert found == expected, (c, step, found, expected)
        else:
            one.global_step(exact, [[(x.double(), g.double()) for x, g in r] for r in ranks])
            assert_gradients_are_as_close(c, step, parallel, exact, single)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if model is parallel and c.after_step:
                float8.after_step(model)
            elif model is not exact:
                one.sync_float8_amax_and_scale_history(model)
        if c.keeps_bits:
            one.assert_same_model(parallel, single, (c, step))
    if c.compile:  # again for evaluation, which takes as long
        return
    with torch.no_grad():
        batch = c.batch(c.steps, mine, 0)
        with in_single():
            expected = cut(c, [single.eval()(batch[0])])[0]
        with in_parallel():
            run.eval()
            found = run(cut(c, batch)[0])
        if c.keeps_bits:
            assert_bitwise(found, expected, c, "evaluation")
        else:
            exact = cut(c, [exact(batch[0].double())])[0]
            assert_error_within_baseline(found, exact, expected, 2.0, c, "evaluation")


def assert_gradients_are_as_close(c, step, parallel, exact, single):
    found, expected, baseline = map(gradients, (parallel, exact, single))
    assert found.keys() == expected.keys() == baseline.keys(), c
    for (name, exact_grad), grad in zip(expected.items(), one.whole(found.values()), strict=True):
        what = f"step {step}: gradient of {name}"
        assert_error_within_baseline(grad, exact_grad, baseline[name], 2.0, c, what)


def finds(rank, fault, seed):
    """A planted fault, on all ranks."""
    with getattr(faults, fault)(), pytest.raises(AssertionError):
        trains(rank, seed)


def failures_of(seeds) -> dict[str, Exception]:
    """The errors of seeds that fail, by their compositions."""
    checks = {repr(Composition.of(seed)): ("trains", seed) for seed in seeds}
    return failures("composition_program", checks)


if __name__ == "__main__":
    found = failures_of(map(int, sys.argv[1:]))
    for name, error in found.items():
        print(name, error, sep="\n", end="\n\n")
    sys.exit(bool(found))
