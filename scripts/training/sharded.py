"""One of several processes that train a model together: FSDP2 shards it, float8 is gathered.

parallel.py says what this means for the numbers. Imported only where needed: it loads most of
torch.distributed.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from scripts.training import gpt
from scripts.training.parallel import Alone

# recipes whose weights are gathered as float8
GATHERED = ("tensorwise", "delayed", "blockwise", "mxfp8_2d")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Sharded(Alone):
    """One of the processes that torchrun started; every method is called by all of them."""

    def __init__(self, device: str) -> None:
        kind = torch.device(device).type
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not dist.is_initialized():
            own = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else None
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=own)
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), kind

    def model(self, plain: gpt.GPT, recipe: str) -> nn.Module:
        """The model in its recipe, sharded.

        Raises:
            ValueError: a recipe of the unit-scaled model.
        """
        if recipe in gpt.UNIT:  # unit_scale plans on a copy of the model, and FSDP2 forbids copies
            raise ValueError(f"recipe {recipe} trains in one process: leave it out, or --nproc 1")
        model = gpt.in_recipe(plain, recipe, gathers=recipe in GATHERED)
        # The views are added to the residual stream, and not in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for block in model.get_submodule("blocks").children():
            multiplying = [block.get_submodule(name) for name in ("attention", "feed_forward")]
            fully_shard(multiplying, mp_policy=half)
        # The root too gives its weights back after forward: the count of what is kept then sees
        # activations alone.
        fully_shard(model, reshard_after_forward=True)
        return model

    def part(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This process's windows of a batch: equal parts, or the mean of means is not the mean."""
        tokens, targets = (whole.chunk(self.size)[self.rank] for whole in batch)
        return tokens, targets

    def mean(self, *values: float) -> list[float]:
        """Each value's mean over all processes, the same on each."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return (total / self.size).tolist()

    def state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Whole tensors, on rank 0; nothing on the others."""
        parts = get_state_dict(model, optimizer, options=WHOLE)
        return dict(zip(("model", "optimizer"), parts, strict=True))

    def load(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Back to what `state` returned on rank 0."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts, options=FROM_RANK_0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all must stop at the same step."""
        return self.mean(flag)[0] > 0

    def addresses(self, model: nn.Module) -> set[int]:
        """No addresses: FSDP2 frees gathered parameters after forward."""
        return set()

    def close(self) -> None:
        """At the end, together."""
        dist.barrier()
        dist.destroy_process_group()
