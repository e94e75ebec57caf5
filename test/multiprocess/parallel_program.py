"""Training by `scripts/train_gpt.py` in two processes, which `test_parallel.py` starts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from wire import Wire

from benchmarks.models import text as texts
from scripts import train_gpt
from scripts.train_gpt import Trainer
from scripts.training.options import Options
from scripts.training.sharded import Sharded

WORLD = 2
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 4, "steps": 6}
OPTIONS = Options(**SIZES, eval_interval=3, eval_batches=2)


def options_of(recipe: str, folder: str, nproc: int = WORLD, **others: Any) -> Options:
    checkpoint = Path(folder, f"{recipe}_{nproc}.pt")
    return replace(OPTIONS, recipe=recipe, nproc=nproc, checkpoint=checkpoint, **others)


def trained(options: Options, data: str) -> Trainer:
    trainer = Trainer(options, texts.load(Path(data)))
    assert trainer.fit()
    return trainer


def losses_equal_those_of_one_process(rank, recipe, data, folder, bound):
    """Within `bound`, and bit-equal on both ranks."""
    trainer = trained(options_of(recipe, folder), data)
    history = trainer.history
    mine = torch.tensor(history.train_loss + [loss for _, loss in history.val_loss]).double()
    everyone = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(everyone, mine)
    assert torch.equal(*everyone)
    alone = torch.tensor(json.loads(Path(folder, f"{recipe}.json").read_text())).double()
    off = (mine - alone).abs().max().item()
    assert off <= bound, (off, bound)
    half = torch.tensor(trainer.saved_for_backward())
    whole = json.loads(Path(folder, f"{recipe}_saved.json").read_text())
    assert half <= 0.6 * whole, (half, whole)  # half of the batch, none of the weights


def a_batch_that_is_not_divided_is_seen(rank, recipe, data, folder, bound):
    """A planted fault: both ranks train on the first part."""

    def first(self: Sharded, batch: Any) -> Any:
        return tuple(whole.chunk(self.size)[0] for whole in batch)

    divided, Sharded.part = Sharded.part, first
    try:
        losses_equal_those_of_one_process(rank, recipe, data, folder, bound)
    except AssertionError:
        return
    finally:
        Sharded.part = divided
    raise AssertionError("no check found that half of the data was used")


def stopped_by_one_rank_it_resumes_to_the_same_losses(rank, recipe, data, folder):
    options, text = options_of(recipe, folder), texts.load(Path(data))
    whole = trained(options, data).history
    options.checkpoint.unlink(missing_ok=True) if rank == 0 else None
    answers = iter([False] * 4 + [rank == 1])  # only one rank is told
    assert not Trainer(options, text).fit(lambda: next(answers))
    dist.barrier()
    state = torch.load(options.checkpoint, weights_only=True)
    assert not any(isinstance(value, DTensor) for value in state["model"].values())
    rest = Trainer(replace(options, resume=True), text)
    assert rest.step == 4
    assert rest.fit()
    assert rest.history.train_loss == whole.train_loss
    assert rest.history.val_loss == whole.val_loss


def weights_travel_as_float8(rank, recipe, data, folder):
    sent = {}
    for name in ("bf16", recipe):
        trainer = Trainer(options_of(name, folder), texts.load(Path(data)))
        trainer._train_step()
        with Wire() as wire:
            trainer._train_step()
        gathers = [each for each in wire.sent if each.kind == "all_gather"]
        blocks = [each for each in gathers if each.dtype != torch.float32]  # the root is float32
        sent[name] = sum(each.bytes for each in blocks)
    assert sent[recipe] == sent["bf16"] / 2, sent


def the_unit_scaled_model_is_refused(rank, data, folder):
    with pytest.raises(ValueError, match="--nproc 1"):
        Trainer(options_of("unit", folder), texts.load(Path(data)))


def a_checkpoint_of_one_process_is_refused(rank, data, folder):
    options = options_of("bf16", folder, resume=True)
    options = replace(options, checkpoint=Path(folder, "bf16_1.pt"))
    with pytest.raises(ValueError, match="trained with --nproc 1, not 2"):
        Trainer(options, texts.load(Path(data)))


def bad_input_is_told_once(rank, data, folder):
    """Rank 0 alone prints the message; the ranks are torchrun's."""
    os.environ.update(WORLD_SIZE=str(WORLD), RANK=str(rank))
    with pytest.raises(SystemExit) as ended:
        train_gpt.main(["--batch", "3", "--data", data])
    del os.environ["WORLD_SIZE"], os.environ["RANK"]
    told = "--batch 3 does not divide among --nproc 2" in str(ended.value.code)
    assert told == (rank == 0)
