"""The Trainer of transformers with `Float8Callback` on two processes.

`test_transformers.py` starts them. `accelerate_program` says what Accelerate needs to shard on a
CPU.
"""

from __future__ import annotations

import gc
import os
import tempfile

import one_process as one
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from trainers import data_of, llama
from transformers import Trainer, TrainingArguments

from float8.checkpoints import load
from float8.checkpoints.inspection import inspect_checkpoint
from float8.config import RECIPES
from float8.distributed.sharded_weight import ShardedWeight
from float8.integrations.transformers import Float8Callback
from float8.kernels import is_sharded

WORLD = 2


def trainer_of(rank, folder, recipe, fsdp, seed=0, save_float8=None):
    """A Trainer in an existing process group."""
    gc.freeze()  # ``train()`` collects garbage, which is slow with all objects of torch
    for name in [n for n in os.environ if "FSDP" in n]:
        del os.environ[name]
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({k: str(v) for k, v in ranks.items()}, MASTER_ADDR="127.0.0.1")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    options = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}} if fsdp else {}
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **options,
    )
    assert arguments.world_size == WORLD  # makes the PartialState
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    config = one.convert(torch.nn.Linear(16, 16), recipe).config
    callbacks = [Float8Callback(config, save_float8=save_float8)]
    return Trainer(llama(seed), arguments, train_dataset=data_of(), callbacks=callbacks)


def resumes(rank, recipe, fsdp):
    """A run resumes to the losses, weights and histories of an uninterrupted one."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    whole = trainer_of(rank, folder[0], recipe, fsdp)
    whole.train()
    dist.barrier()
    resumed = trainer_of(rank, folder[0], recipe, fsdp, seed=1)
    resumed.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-2")
    assert [e.get("loss") for e in resumed.state.log_history][:4] == [
        e.get("loss") for e in whole.state.log_history
    ][:4]
    one.assert_same_model(resumed.model, whole.model, (recipe, fsdp))
    projection = whole.model.model.layers[0].mlp.up_proj
    assert projection.config == one.convert(torch.nn.Linear(16, 16), recipe).config
    if fsdp and recipe.startswith(one.GATHERED):
        assert isinstance(projection.weight._local_tensor, ShardedWeight)
    if projection.config.cast_config_input == RECIPES["delayed"].cast_config_input:
        history = projection.cast_input.amax_history.clone()
        dist.broadcast(history, 0)
        assert torch.equal(history, projection.cast_input.amax_history)
        assert int((history > 0).sum()) == 4


def saves_float8(rank, recipe):
    """Parameters that FSDP2 has sharded end in one folder, as the model has them."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    trainer = trainer_of(rank, folder[0], recipe, True, save_float8=f"{folder[0]}/float8")
    trainer.train()
    dist.barrier()
    assert not inspect_checkpoint(f"{folder[0]}/float8", data=True)["problems"]
    found = load(llama(1), f"{folder[0]}/float8")
    for name, parameter in trainer.model.named_parameters():
        assert is_sharded(parameter)
        trained = parameter.full_tensor().double()
        error = (found.get_parameter(name).double() - trained).norm() / trained.norm()
        assert error < (0.04 if "_proj" in name else 1e-9), (name, error)  # E4M3: 28 dB
