"""`save_pretrained`, `plan_save` and `weight_updates`: a model in float8 for serving engines.

::

    from float8.checkpoints import plan_save, save_pretrained, weight_updates

    print(plan_save(model))                       # layers, bytes, what is skipped and why
    save_pretrained(model, "model-fp8")           # then: vllm serve ./model-fp8
    for name, tensor in weight_updates(model):    # the same tensors, after each step
        engine.load_weights([(name, tensor)])

**Sharded models.** Where parameters are DTensors, as of FSDP2, all ranks of their mesh make the
call. They gather one parameter after the other, and the first rank writes. If that fails, it goes
on gathering, so that no rank waits for it, and then every rank raises its error. Whether ranks
agree is compared before the first gather and after the last. A model that no DTensor is in is
whole in each process: let one process save it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8 import kernels
from float8.arguments import check_bool, check_module
from float8.checkpoints.files import MAX_SHARD_BYTES, write_shards
from float8.checkpoints.layouts import WEIGHT, Layout
from float8.checkpoints.plan import SavePlan, Writing
from float8.checkpoints.weights import planned, transformers_config
from float8.convert.folding import pattern_of, unwrapped
from float8.distributed.rank_comparison import compare_ranks
from float8.granularity import block_name

__all__ = ["plan_save", "save_pretrained", "weight_updates"]


def plan_save(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> SavePlan:
    """What `save_pretrained` would write for a model; no data is read, and nothing is written.

    Args:
        model: converted to float8; also on the meta device.
        layout, input_scales, max_shard_bytes: as `save_pretrained`.

    Raises:
        TypeError: an argument of another type.
        ValueError: the model has no layer in float8, or some that the layout cannot store; the
            message names all of them, and the fix.
    """
    plan = planned(model, layout, input_scales, max_shard_bytes).plan
    _warn_of_sizes(plan, model)
    return plan


def _warn_of_sizes(plan: SavePlan, model: nn.Module) -> None:
    """Warn of blocks that Transformers misreads.

    Where it dequantises, as without a GPU, it takes the shape of a weight divided by that of its
    scales for the block.
    """
    if plan.layout is None or plan.layout.name != "fine_grained" or not transformers_config(model):
        return
    odd = {
        pattern_of(name)
        for name in plan.layers
        for n, extent in zip(plan.tensors[name + WEIGHT].shape, plan.layout.block, strict=True)
        if n > extent and n % extent
    }
    if odd:
        warnings.warn(
            "Transformers 5.23 without a GPU misreads sizes that are no multiples of "
            f"{block_name(plan.layout.block)}: {', '.join(sorted(odd))}. It reads "
            "CompressedTensors(Rowwise()) in all sizes",
            stacklevel=3,
        )


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> SavePlan:
    """Write a model as a float8 checkpoint that other libraries load.

    Layers that are in float8 in the model are in float8 in the file. All other tensors keep their
    dtype. If the layout has scales of the layer's granularity, the file has the bits that the layer
    stores or would cast for its next forward. Otherwise the weight is cast once from high
    precision. Weights are cast in their own dtype. (Under autocast a forward rounds them to the
    compute dtype first.)

    The folder has the tensors in files named as HuggingFace names them, and ``config.json`` with
    ``quantization_config``. For a model of Transformers it also has the model's own config and
    ``generation_config.json``. Tokenizers are not part of a model: save them beside it.

    Args:
        model: converted; it may be compiled, in wrappers, or sharded by FSDP2 (then all ranks
            call this).
        folder: absent or empty. It appears when all of it is on the disk.
        layout: how layers are stored: a `FineGrained`, `CompressedTensors`, `ModelOpt`, `MXFP4` or
            `GptOss`; or a layout's name, for the variant that fits the model's recipe. None takes
            the layout that stores the scales of the recipe, or its MXFP4 weights.
        input_scales: layer -> the static scale of its input, for layouts that store it:
            ``float8.calibrate(model, batches).static_scales()``. Layers whose inputs are cast with
            a constant or a delayed scale need no entry.
        max_shard_bytes: the largest size of a file, except of a file with a single tensor. Saving
            needs this much memory beside the model.
        overwrite: replace the checkpoint in an existing folder when the new checkpoint is complete.
            Files of other names stay.

    Returns:
        what was written.

    Raises:
        TypeError: an argument of another type.
        ValueError: the layout cannot store some layers, which the message names; or a weight that
            is cast has NaN or inf. Nothing was written.
        FileExistsError: the folder has files and ``overwrite`` is False; or the folder cannot be
            replaced, because it is a mount point or has the current folder in it.
        OSError: the disk is full or cannot be written to. The folder is as it was before.
        RuntimeError: the model is sharded and a rank has an error. All ranks raise it.
    """
    check_bool(overwrite, "save_pretrained: overwrite")
    ranks, groups = sharing(model)
    how = (layout, input_scales, max_shard_bytes)
    writing = _agreed(groups, "calls save_pretrained", model, *how)
    plan, left, error = writing.plan, iter(writing.keys), None
    try:
        if not ranks or dist.get_rank() == ranks[0]:
            files, tensors = _files_beside(model, plan), writing.tensors(left)
            write_shards(folder, plan.tensors, tensors, files=files, overwrite=overwrite)
    except Exception as caught:
        error = caught
    for key in left:  # all of them, or those after an error
        writing.gather(key)
    agree(groups, "has saved", error, None)
    _warn_of_sizes(plan, model)
    return plan


def _files_beside(model: nn.Module, plan: SavePlan) -> dict[str, bytes | dict[str, Any]]:
    """File name -> content of the files beside the tensors; the model is not changed.

    The config of a model of Transformers is written as its own ``save_pretrained`` writes it, with
    ``quantization_config`` added. Of any other model the file has that entry alone.
    """
    assert plan.layout is not None
    files: dict[str, Any] = plan.layout.other_files(plan.quantization_config)
    files["config.json"] = {"quantization_config": plan.quantization_config}
    if (config := transformers_config(model)) is not None:
        plain: Any = unwrapped(model)
        own = copy.deepcopy(config)
        own.architectures = [type(plain).__name__.removeprefix("FSDP")]  # which fully_shard adds
        own.dtype = str(plain.dtype).removeprefix("torch.")
        own.quantization_config = plan.quantization_config
        files["config.json"] = own.to_json_string().encode()
        if plain.can_generate() and getattr(plain, "generation_config", None) is not None:
            files["generation_config.json"] = plain.generation_config.to_json_string().encode()
    return files


# --- ranks


def sharing(model: nn.Module) -> tuple[list[int], list[dist.ProcessGroup]]:
    """The ranks over which a model is sharded, and their process groups; none if it is whole."""
    check_module(model, "float8.checkpoints")
    tensors = (*model.parameters(), *model.buffers())
    meshes: Any = dict.fromkeys(x.device_mesh for x in tensors if kernels.is_sharded(x))  # type: ignore[attr-defined]
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    groups = {group.group_name: group for mesh in meshes for group in mesh.get_all_groups()}
    return sorted(ranks), list(groups.values())


def _agreed(groups: list[dist.ProcessGroup], entry: str, model: nn.Module, *how: Any) -> Writing:
    """What a model becomes, which ``how`` says, after a comparison with the other ranks."""
    writing, error = None, None
    try:
        writing = planned(model, *how)
    except Exception as caught:
        error = caught
    agree(groups, entry, error, None if writing is None else writing.plan)
    assert writing is not None
    return writing


def agree(
    groups: list[dist.ProcessGroup], entry: str, error: Exception | None, plan: SavePlan | None
) -> None:
    """Raise the error of one rank on all ranks, or an error if their checkpoints differ."""
    if groups:
        specs = {} if plan is None else plan.tensors
        facts = {key: {"dtype": str(s.dtype), "shape": str(s.shape)} for key, s in specs.items()}
        own = None if error is None else f"rank {dist.get_rank()} {entry}: {error}"
        remedy = "Give each rank the same model, layout and arguments"
        try:
            compare_ranks(groups, facts, remedy, own, "checkpoints")
        except RuntimeError as verdict:
            raise verdict from error
    if error is not None:
        raise error


# --- without files


def weight_updates(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as a float8 checkpoint has them, one tensor at a time.

    `save_pretrained` writes the same names, tensors and bits. Each scale follows its weight.
    Weights that are resident in float8 are not cast again.
    One parameter is gathered at a time, and its matrices are cast one after the other.

    Args:
        model: a converted model, compiled or not. If FSDP2 has sharded it, all ranks call this and
            iterate to the end, in step with each other. Every rank gets whole tensors.
        layout: how layers are stored, as in `save_pretrained`.
        input_scales: layer -> the static scale of its input, as in `save_pretrained`.

    Returns:
        An iterator of (name, tensor), for one use. Tensors may share memory with the model: an
        engine copies them before the next optimizer step.

    Raises:
        TypeError: an argument has another type.
        ValueError: the layout cannot store a layer.
        RuntimeError: the model is sharded and a rank has an error. All ranks raise it. While
            iterating: a parameter was written to since the call, so that an engine would have
            weights of two steps.
    """
    _, groups = sharing(model)
    writing = _agreed(groups, "calls weight_updates", model, layout, input_scales)
    # Inference tensors have no version, and are written to under inference_mode alone.
    own = {n: (p, p._version) for n, p in model.named_parameters() if not p.is_inference()}
    return _watched(writing.tensors(iter(writing.keys)), own)


def _watched(
    tensors: Iterator[tuple[str, Tensor]], own: Mapping[str, tuple[Tensor, int]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors; raises before one that comes after a write to a parameter.

    Version counters show all writes but those of multi-tensor optimizers to sharded parameters
    (torch 2.13), which a hook on optimizers shows.
    """
    stepped: set[int] = set()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.update(id(p) for group in optimizer.param_groups for p in group["params"])

    handle = register_optimizer_step_post_hook(note)
    try:
        while True:
            for name, (p, version) in own.items():
                if p._version != version or id(p) in stepped:
                    raise RuntimeError(
                        f"weight_updates: {name} was written to since the call, and earlier tensors"
                        " are of the weights before. Iterate to the end before the optimizer steps"
                    )
            if (entry := next(tensors, None)) is None:
                return
            yield entry
            del entry
    finally:
        handle.remove()
