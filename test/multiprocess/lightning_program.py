"""Lightning's strategies on two processes; `test_lightning.py` starts them."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from one_process import assert_same_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)

WORLD, STEPS, MICROBATCHES = 2, 3, 2
RUN = {
    "accelerator": "cpu",
    "devices": WORLD,
    "max_epochs": 1,
    "accumulate_grad_batches": MICROBATCHES,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def batches(rank):
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 32, generator=random) for _ in range(STEPS * MICROBATCHES)]


def loss_of(model, x):
    return (model(x) - x.roll(1, 0)).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_hand(parallel, model, rank):
    """The training loop without Lightning."""
    optimizer = adamw(parallel)
    for index, x in enumerate(batches(rank)):
        last = index % MICROBATCHES == MICROBATCHES - 1
        if isinstance(parallel, DistributedDataParallel):
            parallel.require_backward_grad_sync = last
        else:
            parallel.set_requires_gradient_sync(last)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(parallel, x) / MICROBATCHES
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            sync_float8_amax_and_scale_history(model)


def _environment(rank):
    """Set the environment variables that torchrun sets."""
    ours = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD}
    ours |= {"LOCAL_WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in ours.items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "a test"


def _lightning(rank):
    _environment(rank)
    warnings.simplefilter("ignore")  # Lightning's, about workers and others
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, shard):
            super().__init__()
            self.model, self.shard = network(), shard

        def configure_model(self):
            self.shard(self)

        def training_step(self, batch, batch_idx):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return adamw(self)

    return pl, Module


def _data(rank):
    return torch.utils.data.DataLoader(batches(rank), batch_size=None)


def ddp_under_the_trainer(rank, recipe):
    from float8.integrations.lightning import Float8Precision

    pl, module_type = _lightning(rank)
    module = module_type(shard=lambda module: None)
    trainer = pl.Trainer(strategy="ddp", plugins=Float8Precision(recipe), **RUN)
    trainer.fit(module, _data(rank))

    config = Float8LinearConfig.from_recipe_name(recipe)
    expected = convert_to_float8_training(network(), config=config)
    by_hand(DistributedDataParallel(expected), expected, rank)
    assert_same_model(module.model, expected, "lightning")


def ddp_under_fabric(rank, recipe):
    from float8.integrations.lightning import Float8Precision

    _lightning(rank)
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu", devices=WORLD, strategy="ddp", plugins=Float8Precision(recipe)
    )
    model = network()
    fabric.launch()
    parallel, optimizer = fabric.setup(model, adamw(model))
    for index, x in enumerate(batches(rank)):
        last = index % MICROBATCHES == MICROBATCHES - 1
        with fabric.no_backward_sync(parallel, enabled=not last):
            fabric.backward(loss_of(parallel, x) / MICROBATCHES)
        if last:
            optimizer.step()
            optimizer.zero_grad()

    config = Float8LinearConfig.from_recipe_name(recipe)
    expected = convert_to_float8_training(network(), config=config)
    by_hand(DistributedDataParallel(expected), expected, rank)
    assert_same_model(model, expected, "lightning")


def _shard(model, mesh):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)


def fsdp2_under_the_trainer(rank, recipe):
    """``configure_model`` must convert before it shards; else the plugin raises."""
    from float8.integrations.lightning import Float8Precision

    pl, module_type = _lightning(rank)
    from lightning.pytorch.strategies import ModelParallelStrategy

    def too_late(module):
        _shard(module.model, module.device_mesh["data_parallel"])

    def in_time(module):
        if not isinstance(module.model, FSDPModule):
            module.trainer.precision_plugin.convert_module(module)
            too_late(module)

    def fit(shard):
        strategy = ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
        module = module_type(shard)
        plugin = Float8Precision(recipe)
        pl.Trainer(strategy=strategy, plugins=plugin, **RUN).fit(module, _data(rank))
        return module

    with pytest.raises(ValueError, match="model was given to fully_shard before it was converted"):
        fit(too_late)
    module = fit(in_time)

    config = Float8LinearConfig.from_recipe_name(recipe)
    expected = convert_to_float8_training(network(), config=config)
    _shard(expected, torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,)))
    by_hand(expected, expected, rank)
    assert_same_model(module.model, expected, "lightning")
    dist.barrier()
