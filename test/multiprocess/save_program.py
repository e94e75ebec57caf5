"""Sharded models saved by two processes: the files of one process, and errors on every rank.

`test_save_sharded.py` starts the processes.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from disk import full_after
from mixtures import Mixture
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import float8
from float8 import Float8LinearConfig
from float8.checkpoints import FineGrained, casts, save_pretrained
from float8.checkpoints.save import sharing
from float8.distributed import tensor_parallel
from float8.distributed.expert_parallel import Float8ExpertParallel

D = 48


class Block(nn.Module):
    """Parts of a fused projection, of odd sizes, which make uneven shards."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(D, 33), nn.Linear(D, 7, bias=False)
        self.norm = nn.LayerNorm(D)
        self.register_buffer("position", torch.arange(5))

    def forward(self, x):
        return self.q_proj(self.norm(x)).sum() + self.k_proj(x).sum()


class Model(nn.Module):
    """Two blocks and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mixture = Block(), Block(), Mixture()

    def forward(self, x):
        return self.a(x) + self.b(x)


def model_of(recipe: str, gathers: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        model.a.q_proj.weight[30, 2] = 5.0  # the largest, in the last shard
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gathers, pad_inner_dim=True)
    return float8.convert_to_float8_training(model, config=config)


def shard(model: nn.Module, checkpointed: bool = False) -> nn.Module:
    for name, part in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(part) if checkpointed else part)
        fully_shard(getattr(model, name))
    return fully_shard(model)


def folder_of(name: str) -> Path:
    """The same on all ranks, unique to this run."""
    found = [None]
    if dist.get_rank() == 0:
        found = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found)
    return Path(found[0]) / name


def entries(folder: Path) -> dict[str, bytes]:
    dist.barrier()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def raised(call, kind=RuntimeError) -> str:
    """The message of the error that a call raises; the same on all ranks."""
    try:
        call()
    except kind as error:
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, str(error))
        assert len(set(messages)) == 1, messages
        return str(error)
    raise AssertionError("no error")


# --- checks


def same_files(rank, recipe, gathers=False, checkpointed=False, layout=None):
    folder = folder_of("it")
    single = model_of(recipe)
    if rank == 0:
        save_pretrained(single, folder.with_name("single"), layout, max_shard_bytes=4000)
    sharded = shard(model_of(recipe, gathers), checkpointed)
    before = [p.to_local().clone() for p in sharded.parameters()]
    save_pretrained(sharded, folder, layout, max_shard_bytes=4000)
    expected = entries(folder.with_name("single"))
    assert entries(folder) == expected and len(expected) > 3
    for p, old in zip(sharded.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old)


def parallel_layers(rank):
    folder = folder_of("it")
    single = model_of("tensorwise")
    if rank == 0:
        save_pretrained(single, folder.with_name("single"))
    model, mesh = model_of("tensorwise"), init_device_mesh("cpu", (2,))
    styles = {
        "mixture.shared_expert": tensor_parallel.Float8ColwiseParallel(),
        "mixture.experts": Float8ExpertParallel(),
    }
    parallelize_module(model, mesh, styles)
    save_pretrained(model, folder)
    assert entries(folder) == entries(folder.with_name("single"))


def a_full_disk(rank):
    folder = folder_of("it")
    sharded = shard(model_of("tensorwise"))
    with full_after(6000):
        message = raised(lambda: save_pretrained(sharded, folder))
    assert message.startswith("rank 0 has saved:") and "nothing of it is left" in message
    assert entries(folder.parent) == {} and not folder.exists()
    save_pretrained(sharded, folder)  # all ranks are still in step


def an_error_of_the_cast(rank):
    folder, real, calls = folder_of("it"), casts.StoredLayer.tensors, []

    def failing(cast, weight, scale=None):
        calls.append(weight)
        if len(calls) == 3:
            raise MemoryError("no memory")
        return real(cast, weight, scale)

    with mock.patch.object(casts.StoredLayer, "tensors", failing):
        message = raised(lambda: save_pretrained(shard(model_of("tensorwise")), folder))
    assert message == "rank 0 has saved: no memory"
    assert len(calls) == (3 if rank == 0 else 0)
    assert not folder.exists()


def a_nan_in_one_shard(rank):
    folder, sharded = folder_of("it"), shard(model_of("rowwise"))
    if rank == 1:
        with torch.no_grad():
            sharded.b.k_proj.weight.to_local()[-1, -1] = torch.nan
    message = raised(lambda: save_pretrained(sharded, folder))
    assert message.startswith("rank 0 has saved: b.k_proj: its weight has NaN or inf")
    assert not folder.exists()


def an_existing_folder(rank):
    folder, sharded = folder_of("it"), shard(model_of("rowwise"))
    if rank == 0:
        folder.mkdir()
        (folder / "notes").write_text("mine")
    dist.barrier()
    message = raised(lambda: save_pretrained(sharded, folder))
    assert "rank 0 has saved:" in message and "exists and is not empty" in message
    assert entries(folder) == {"notes": b"mine"}
    save_pretrained(sharded, folder, overwrite=True)
    assert entries(folder).keys() >= {"notes", "model.safetensors", "config.json"}


def ranks_that_differ(rank):
    folder, sharded = folder_of("it"), shard(model_of("rowwise"))
    layout = FineGrained() if rank else None
    message = raised(lambda: save_pretrained(sharded, folder, layout))
    assert "their checkpoints differ" in message and "Give each rank the same model" in message
    assert not folder.exists()
    if rank == 0:
        sharded.register_buffer("more", torch.ones(2))
    message = raised(lambda: save_pretrained(sharded, folder))
    assert "more: dtype is torch.float32 on rank 0 and missing on rank 1" in message


def a_whole_model_is_saved_by_one(rank):
    folder = folder_of("it")
    assert sharing(model_of("rowwise")) == ([], [])
    if rank == 1:
        save_pretrained(model_of("rowwise"), folder)
    assert entries(folder).keys() == {"config.json", "model.safetensors"}
