"""The same small training under each framework, on one process or two: `TRAIN`, name -> function.

All take the arguments of a `Case` and return the trained model, which must have the bits of
`by_hand`. `test/integrations/test_frameworks.py` has the assertions.

Accelerate (1.15), and the Trainer of Transformers by it, shard with FSDP2 on accelerators only.
`start` makes Accelerate take the CPU for one, with gloo between the ranks, so that its own code
runs.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning.pytorch as pl
import one_process as one
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import Trainer, TrainingArguments

import float8.optim
from float8.checkpoints import load, save_pretrained
from float8.checkpoints.__main__ import main
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.accelerate import prepare_float8
from float8.integrations.lightning import Float8Precision
from float8.integrations.transformers import Float8Callback

STEPS, MICROBATCHES = 2, 2  # of an epoch


class Case(NamedTuple):
    """What is trained, and how."""

    recipe: str
    rank: int = 0
    world: int = 1
    fsdp: dict[str, Any] | None = None  # options of Accelerate's FSDP2
    bf16: bool = False
    tied: bool = False
    seed: int = 0
    epochs: int = 1
    save: str | None = None  # a folder for a checkpoint of the last epoch
    load: str | None = None  # one of the first epoch, to go on from

    @property
    def config(self) -> Any:
        return one.convert(nn.Linear(16, 16), self.recipe).config

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        if self.tied:
            model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32, bias=False))
            model[2].weight = model[0].weight
        return model

    def batches(self, rank: int | None = None) -> list[one.Batch]:
        """The microbatches of an epoch of a rank."""
        rank = self.rank if rank is None else rank
        return [one.batch(s, rank, m) for s in range(STEPS) for m in range(MICROBATCHES)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


def by_hand(case: Case) -> nn.Module:
    """The bare loop, in one process for all ranks, without checkpoints."""
    model = one.convert(case.model(), case.recipe.removeprefix(one.GATHERED))
    optimizer, ranks = adamw(model), [case.batches(rank) for rank in range(case.world)]
    for step in [*range(STEPS)] * case.epochs:
        part = slice(step * MICROBATCHES, (step + 1) * MICROBATCHES)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            one.global_step(model, [[(x, g / MICROBATCHES) for x, g in b[part]] for b in ranks])
        one.update(model, optimizer)
    return model


def start(case: Case) -> None:
    """Forget what an earlier case has left, and set what torchrun sets."""
    warnings.simplefilter("ignore")  # Lightning has advice for every short run
    for name in [name for name in os.environ if "FSDP" in name]:
        del os.environ[name]
    if case.world > 1:
        ranks = {"RANK": case.rank, "LOCAL_RANK": case.rank, "GROUP_RANK": 0}
        ranks |= {"WORLD_SIZE": case.world, "LOCAL_WORLD_SIZE": case.world, "MASTER_PORT": 1}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="a test")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerator_of(case: Case, **options: Any) -> Accelerator:
    start(case)
    if case.fsdp is not None:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **case.fsdp)
    precision = "bf16" if case.bf16 else "no"
    options = {"mixed_precision": precision, "gradient_accumulation_steps": MICROBATCHES, **options}
    return Accelerator(cpu=True, **options)


def by_accelerate(case: Case, build: Any = adamw, **options: Any) -> nn.Module:
    accelerator, model = accelerator_of(case, **options), case.model()
    model, optimizer = prepare_float8(accelerator, model, build(model), case.config)
    if case.load:
        accelerator.load_state(f"{case.load}/accelerate")
    for _ in range(case.load is not None, case.epochs):
        for batch in case.batches():
            with accelerator.accumulate(model):
                accelerator.backward(one.loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    if case.save:
        accelerator.save_state(f"{case.save}/accelerate")
    return accelerator.unwrap_model(model)


class WithLoss(nn.Module):
    """As the Trainer of Transformers calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": one.loss_of(self.model, (x, g))}


def by_transformers(case: Case) -> nn.Module:
    start(case)
    arguments = TrainingArguments(
        case.save or case.load or tempfile.mkdtemp(),
        num_train_epochs=case.epochs,
        save_strategy="epoch" if case.save else "no",
        train_sampling_strategy="sequential",
        per_device_train_batch_size=one.TOKENS,
        gradient_accumulation_steps=MICROBATCHES,
        optim="adamw_torch",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=case.bf16,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **({} if case.fsdp is None else {"fsdp": True, "fsdp_config": {"fsdp_version": 2}}),
    )
    assert arguments.world_size == case.world  # makes the PartialState
    if case.fsdp is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    ranks = zip(*(case.batches(rank) for rank in range(case.world)), strict=True)
    rows = [
        {"x": x, "g": g} for each in ranks for batch in each for x, g in zip(*batch, strict=True)
    ]
    callback = Float8Callback(case.config)
    trainer = Trainer(WithLoss(case.model()), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=case.load and f"{case.load}/checkpoint-{STEPS}")
    return trainer.model.model


class Module(pl.LightningModule):
    """The model of a case, which FSDP2 shards where the case says so."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.case = case.model(), case

    def configure_model(self) -> None:
        if self.case.fsdp is not None and not isinstance(self.model, FSDPModule):
            self.trainer.precision_plugin.convert_module(self)
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: one.Batch, batch_idx: int) -> torch.Tensor:
        return one.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def plugin_of(case: Case, **options: Any) -> Float8Precision:
    precision = "bf16-mixed" if case.bf16 else "32-true"
    return Float8Precision(case.config, **{"precision": precision, **options})


def by_lightning(case: Case, kind: type[Module] = Module) -> nn.Module:
    start(case)
    strategy: Any = "ddp" if case.world > 1 else "auto"
    if case.fsdp is not None:
        strategy = ModelParallelStrategy(data_parallel_size=case.world, tensor_parallel_size=1)
    trainer = pl.Trainer(
        plugins=plugin_of(case),
        strategy=strategy,
        devices=case.world,
        accelerator="cpu",
        max_epochs=case.epochs,
        accumulate_grad_batches=MICROBATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module, data = kind(case), torch.utils.data.DataLoader(case.batches(), batch_size=None)
    # The file holds the histories' tensors and Lightning's own classes.
    file = case.load and f"{case.load}/lightning.ckpt"
    trainer.fit(module, data, ckpt_path=file, weights_only=False)
    if case.save:
        trainer.save_checkpoint(f"{case.save}/lightning.ckpt", weights_only=False)
    return module.model


def by_fabric(case: Case) -> nn.Module:
    start(case)
    strategy = "ddp" if case.world > 1 else "auto"
    fabric = Fabric(
        accelerator="cpu", devices=case.world, strategy=strategy, plugins=plugin_of(case)
    )
    fabric.launch()
    model = case.model()
    wrapped, optimizer = fabric.setup(model, adamw(model))
    state = {"model": wrapped, "optimizer": optimizer}
    if case.load:
        fabric.load(f"{case.load}/fabric", state)
    for _ in range(case.load is not None, case.epochs):
        for i, batch in enumerate(case.batches()):
            is_last = i % MICROBATCHES == MICROBATCHES - 1
            ddp = case.world > 1 and not is_last
            with fabric.no_backward_sync(wrapped) if ddp else nullcontext():
                fabric.backward(one.loss_of(wrapped, batch) / MICROBATCHES)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    if case.save:
        fabric.save(f"{case.save}/fabric", state)
    return model


TRAIN = {
    "accelerate": by_accelerate,
    "transformers": by_transformers,
    "lightning": by_lightning,
    "fabric": by_fabric,
}


# --- on two processes


def trains_like_one_process(
    rank: int, framework: str, recipe: str, fsdp: dict[str, Any] | None = None, tied: bool = False
) -> None:
    """Parameters and histories, bit for bit."""
    case = Case(recipe, rank, 2, fsdp, tied=tied, epochs=2)
    model, expected = TRAIN[framework](case), by_hand(case)
    if framework == "lightning" and fsdp is not None:  # it adds gradients in another order
        for p, q in zip(one.whole(model.parameters()), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    else:
        one.assert_same_model(model, expected, case)
    weight = getattr(model[0].weight, "_local_tensor", None)
    assert isinstance(weight, ShardedWeight) == recipe.startswith(one.GATHERED)


def resumes(
    rank: int, framework: str, recipe: str, fsdp: dict[str, Any] | None = None, **options: Any
) -> None:
    """Another model goes on from a checkpoint to the bits of an uninterrupted run."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    case, train = Case(recipe, rank, 2, fsdp), TRAIN[framework]
    train(case._replace(save=folder[0]), **options)
    dist.barrier()  # rank 0 has written
    resumed = train(case._replace(load=folder[0], epochs=2, seed=1), **options)
    expected = train(case._replace(epochs=2), **options)
    if not options:
        one.assert_same_model(resumed, expected, case)
    for p, q in zip(one.whole(resumed.parameters()), one.whole(expected.parameters()), strict=True):
        torch.testing.assert_close(p, q)


def float8_moments_resume(rank: int) -> None:
    """The states of `float8.optim` under Accelerate's FSDP2."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return float8.optim.AdamW(model.parameters(), lr=0.01, min_size=1)

    resumes(rank, "accelerate", "gathered tensorwise", {}, build=build)


def a_bfloat16_model_is_upcast(rank: int) -> None:
    """As Accelerate does for FSDP2 in mixed precision; it could not after `prepare_float8`."""
    case, models = Case("gathered tensorwise", rank, 2, {}, bf16=True), []
    for dtype in (torch.bfloat16, torch.float32):
        model = case.model().bfloat16().to(dtype)
        prepared, optimizer = prepare_float8(accelerator_of(case), model, adamw(model), case.config)
        one.loss_of(prepared, case.batches()[0]).backward()
        optimizer.step()
        assert {p.dtype for p in prepared.parameters()} == {torch.float32}
        models.append(prepared)
    one.assert_same_model(*models, case)


def accelerate_clips_and_writes_plain_tensors(rank: int) -> None:
    """Norms over shards are those of the whole; save_model writes what a plain model loads."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    case = Case("gathered delayed", rank, 2, {})
    accelerator, model = accelerator_of(case), case.model()
    model, _ = prepare_float8(accelerator, model, adamw(model), case.config)
    accelerator.backward(one.loss_of(model, case.batches(rank=0)[0]))
    gradients = one.whole(p.grad for p in model.parameters())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    expected = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(one.whole([norm])[0], expected)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(one.whole([p.grad])[0], gradient * (0.5 / expected))
    with float8.high_precision(model):
        accelerator.save_model(model, folder[0])
    dist.barrier()
    plain = case._replace(seed=1).model()
    plain.load_state_dict(load_file(f"{folder[0]}/model.safetensors"))
    one.assert_same_model(nn.ParameterList(one.whole(model.parameters())), plain, case)


def accelerate_refuses_an_optimizer_with_states(rank: int) -> None:
    """Accelerate would lose them."""
    case = Case("tensorwise", rank, 2, {})
    model, accelerator = case.model(), accelerator_of(case)
    optimizer = adamw(model)
    one.loss_of(model, case.batches()[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"loses this optimizer's states.*load_state"):
        prepare_float8(accelerator, model, optimizer)


def what_the_trainer_trained_is_saved_in_float8(rank: int) -> None:
    """Parameters that FSDP2 has sharded end in one folder, as the model has them."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    case = Case("blockwise", rank, 2, {})
    model = by_transformers(case)
    save_pretrained(model, f"{folder[0]}/float8")
    dist.barrier()
    assert main(["inspect", f"{folder[0]}/float8", "--data"]) == 0
    found = load(case._replace(seed=1).model(), f"{folder[0]}/float8")
    for name, parameter in model.named_parameters():
        trained = parameter.full_tensor().double()
        error = (found.get_parameter(name).double() - trained).norm() / trained.norm()
        assert error < (0.04 if "weight" in name else 1e-9), (name, error)  # E4M3: 28 dB


def lightning_converts_before_it_shards(rank: int) -> None:
    case = Case("delayed", rank, 2, {})

    class TooLate(Module):
        def configure_model(self) -> None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    with pytest.raises(ValueError, match="convert the model first"):
        by_lightning(case, TooLate)
