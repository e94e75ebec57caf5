"""Float8 under Hugging Face Accelerate: `prepare_float8` in the place of ``accelerator.prepare``.

::

    import torch
    from accelerate import Accelerator
    from torch import nn
    from float8.integrations.accelerate import prepare_float8

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=8)
    model, optimizer, loader = prepare_float8(accelerator, model, optimizer, "delayed", loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("checkpoint")

Layers are converted before Accelerate wraps them. A hook on the optimizer's own step calls
`float8.after_step`; Accelerate makes that step where gradients are synchronised, not per
microbatch. A step that a ``GradScaler`` skips is not counted: its amaxes join those of the next
step, which enter the history as 0 where they overflowed.

- **DDP, FSDP2**: as the Accelerator says. Accelerate's FSDP2 tells parameters apart by the address
  of their data; weights that are gathered in float8 answer with that of their stored tensor. Its
  ``cpu_ram_efficient_loading=True`` takes no buffers, and so no delayed scaling.
- **Checkpoints**: ``save_state`` holds the histories of delayed scaling, and ``load_state``
  resumes to the same bits; a checkpoint of the plain model loads too. ``save_model`` writes the
  histories beside the weights; under ``with float8.high_precision(model):`` it writes the plain
  model.
- **Evaluation** (eval mode, no gradients) runs in high precision, unless asked otherwise.
- ``accelerator.prepare`` takes a model that was converted by hand as well. Then call
  ``float8.after_step(model)`` under ``if accelerator.sync_gradients:``.

Not with ``mixed_precision="fp8"``, by which Accelerate converts the model with other packages.
Where a file of ``accelerate config`` says so, give its ``fp8_config`` to `prepare_float8` as a
mapping, and write ``mixed_precision: bf16``. Nor with DeepSpeed, Megatron-LM or FSDP1, which have
parameters or steps of their own. One optimizer per model: its step is the one that is counted.
Tested with Accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from float8.arguments import check_type
from float8.config import Float8LinearConfig
from float8.convert.after_step import after_step
from float8.convert.filters import ModuleFilter, all_of, divisible_by
from float8.integrations.conversion import Adapter, delayed_casts, refuse_fp8, warn_of_version

warn_of_version("accelerate", "1.15", "1.16")

__all__ = ["prepare_float8"]


def prepare_float8(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    config: Float8LinearConfig | str | Any | None = None,
    *others: Any,
    module_filter_fn: ModuleFilter | None = None,
    float8_in_evaluation: bool | None = None,
) -> tuple[Any, ...]:
    """Convert a model, prepare it with its optimizer, and keep its scales up to date.

    Args:
        accelerator: as configured; ``mixed_precision="bf16"`` is the usual one.
        model: not prepared yet. One that is converted already stays as it is.
        optimizer: built from the model's parameters; it is updated where conversion replaces some.
        config: a `Float8LinearConfig`, a recipe's name, Accelerate's ``TERecipeKwargs`` or
            ``AORecipeKwargs``, or the ``fp8_config`` of its file as a mapping; dynamic tensorwise
            by default.
        others: dataloaders, schedulers and whatever else ``accelerator.prepare`` takes.
        module_filter_fn: as in `float8.convert_to_float8_training`. By default all layers are
            converted. Under ``AORecipeKwargs`` the default is the filter of these settings; without
            a filter it leaves out the first layer, the last layer and layers with a dimension that
            is no multiple of 16.
        float8_in_evaluation: keep float8 in eval mode where gradients are disabled; by default
            what Accelerate's settings say as ``use_autocast_during_eval``, or False.

    Returns:
        What ``accelerator.prepare(model, optimizer, *others)`` returns.

    Raises:
        ValueError: the accelerator or the optimizer does not go with float8, the model was prepared
            before or has another config, or layers cannot be converted. No layer is converted then.
        TypeError: ``config`` or ``optimizer`` is of another type.
    """
    check_type(optimizer, Optimizer, "prepare_float8", "optimizer", "a torch.optim.Optimizer")
    adapter = Adapter(config, module_filter_fn, float8_in_evaluation)
    _check(accelerator, model, optimizer)
    if accelerator.is_fsdp2:
        _prepare_for_fsdp2(accelerator, model, optimizer)
    is_torchao = type(config).__name__ == "AORecipeKwargs"
    model = adapter.convert(model, optimizer, _inner_layers(model) if is_torchao else None)
    prepared: tuple[Any, ...] = accelerator.prepare(model, optimizer, *others)

    def end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _is_rehearsal(optimizer, model):
            after_step(model)

    optimizer.register_step_post_hook(end_step)
    return prepared


def _is_rehearsal(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether a step is not one of the training, and must not move the histories.

    To create an optimizer's states, `torch.distributed.checkpoint` steps it with zero gradients and
    a learning rate of 0; no forward has recorded an amax then.
    """
    casts = delayed_casts(model).values()
    is_still = not any(group["lr"] for group in optimizer.param_groups)
    return is_still and bool(casts) and not any(cast.current_amax > 0 for cast in casts)


def _check(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    refuse_fp8(accelerator.mixed_precision, str(accelerator.fp8_backend.value))
    kind = accelerator.distributed_type
    is_fsdp1 = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if is_fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{kind.value}{' of version 1' if is_fsdp1 else ''} has parameters or steps of its "
            "own: take DDP, or FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    prepared = any(getattr(x, "_is_accelerate_prepared", False) for x in (model, optimizer))
    if prepared or isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "this model or optimizer was prepared before: give prepare_float8 both as they were"
        )


def _inner_layers(model: nn.Module) -> ModuleFilter:
    """What ``AORecipeKwargs`` documents as its filter.

    It excludes the first and the last linear layer, and layers with a dimension that is not a
    multiple of 16.
    """
    names = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    return all_of(lambda module, fqn: fqn not in (names[0], names[-1]), divisible_by(16))


def _prepare_for_fsdp2(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what Accelerate would lose when it shards, and upcast as it does."""
    if optimizer.state:
        raise ValueError(
            "Accelerate loses this optimizer's states where FSDP2 shards: prepare it before its "
            "first step, and load states by accelerator.load_state"
        )
    if accelerator.mixed_precision != "no":
        for parameter in model.parameters():  # after conversion Accelerate could not write .data
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
