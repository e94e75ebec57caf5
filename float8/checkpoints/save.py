"""`save_pretrained`: a model as a folder in float8 that serving engines load.

::

    from float8.checkpoints import plan_save, save_pretrained

    print(plan_save(model))                       # layers, bytes, what is skipped and why
    save_pretrained(model, "model-fp8")           # then: vllm serve ./model-fp8

The parameters go from the model to the file one at a time (``weights.py`` < ``shard_writer.py``).

**Sharded models.** Where parameters are DTensors, as of FSDP2, all ranks of their mesh make the
call. They gather one parameter after the other, and the first rank writes. If that fails, it goes
on gathering, so that no rank waits for it, and then every rank raises its error. Whether ranks
agree is compared before the first gather and after the last. A model that no DTensor is in is
whole in each process: let one process save it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from float8.arguments import check_bool, check_module, check_type
from float8.checkpoints.finite import refuses_values
from float8.checkpoints.layout import Layout
from float8.checkpoints.model_config import files_beside
from float8.checkpoints.new_folder import refuses_folder
from float8.checkpoints.ranks import Sharing, agree
from float8.checkpoints.save_plan import SavePlan, plan_of
from float8.checkpoints.shard_writer import FORMAT, MAX_SHARD_BYTES, write_shards
from float8.checkpoints.weights import Checkpoint, Item, items

__all__ = ["save_pretrained"]


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    recast: bool = False,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = False,
) -> SavePlan:
    """Write a model as a float8 checkpoint that other libraries load.

    Layers that are in float8 in the model are in float8 in the file; all else keeps its dtype. A
    weight is written as the bits that the layer has or would cast for its next forward, if the
    layout has scales of that granularity, and is cast once from high precision otherwise. Weights
    are cast in their own dtype: under autocast a forward rounds them to the compute dtype first.

    The folder has the tensors, in the shards and with the index of HuggingFace, and
    ``config.json`` with ``quantization_config``; of a model of Transformers its own config, and
    ``generation_config.json``. Tokenizers are not part of a model: save them beside it.

    Args:
        model: converted; it may be compiled, in wrappers, or sharded by FSDP2 (then all ranks
            call this).
        folder: absent or empty. It appears when all of it is on the disk.
        layout: how layers are stored: `FineGrained`, `CompressedTensors`, `ModelOpt`, or the name
            of one, in the variant of the model's recipe. None takes the one of the recipe.
        input_scales: layer -> the static scale of its input, for layouts that store it, as from
            ``float8.calibrate(model, batches).static_scales()``. Layers whose inputs are cast with
            a constant or a delayed scale have their own.
        recast: dequantise and cast again float8 weights of another granularity than the layout's.
        max_shard_bytes: a file has no more bytes of tensors, unless it has one tensor alone.
        overwrite: replace the checkpoint in an existing folder once the new one is complete. Files
            of other names stay.
        progress: show a bar, by tqdm.

    Returns:
        what was written.

    Raises:
        TypeError: an argument of another type.
        ValueError: the layout cannot store a layer, or a weight has NaN or inf; the message names
            all of them. Nothing was written.
        FileExistsError: the folder is neither absent nor empty, and ``overwrite`` is False; or it
            cannot be replaced, as the current folder and mount points.
        OSError: the disk is full, or cannot be written to; the folder is as it was before.
        ImportError: ``progress`` is True and tqdm is missing.
        RuntimeError: of a sharded model, on every rank: the error of any rank.
    """
    check_module(model, "save_pretrained")
    check_type(folder, (str, Path), "save_pretrained", "folder", "a path")
    check_bool(overwrite, "save_pretrained: overwrite")
    check_bool(progress, "save_pretrained: progress")
    sharing = Sharing.of(model)
    found, error = None, None
    try:
        found = items(model, layout, input_scales=input_scales, recast=recast)
        plan = plan_of(found, max_shard_bytes)
        if sharing.writes and (reason := refuses_folder(Path(folder), overwrite)) is not None:
            raise FileExistsError(reason)
        if (reason := refuses_values(found.items)) is not None:
            raise ValueError(reason)
        beside = files_beside(model, found)
        bar = _Bar(found, progress and sharing.writes)
    except Exception as caught:
        error = caught
    agree(sharing, "calls save_pretrained", error, found)
    assert found is not None
    if sharing.writes:
        error = _write(found, Path(folder), max_shard_bytes, beside, overwrite, bar, sharing)
    else:
        for item in found.items:
            item.gather()
    agree(sharing, "has saved", error)
    return plan


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    max_shard_bytes: float,
    files: Mapping[str, str],
    overwrite: bool,
    bar: _Bar,
    sharing: Sharing,
) -> Exception | None:
    """Write a checkpoint from the rank that does; the error, once no rank waits for this one."""
    left, is_gathering = iter(checkpoint.items), False

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal is_gathering
        for item in left:
            is_gathering = True
            gathered = item.gather()
            is_gathering = False
            tensors = item.cast(gathered)
            del gathered  # freed with the last of its tensors
            yield from tensors
            bar.advance(item)

    try:
        with bar:
            write_shards(
                folder,
                checkpoint.specs,
                stream(),
                max_shard_bytes,
                FORMAT,
                files=files,
                overwrite=overwrite,
            )
    except Exception as error:
        if sharing.ranks and not is_gathering:
            for item in left:
                item.gather()
        return error
    return None


class _Bar:
    """The progress of a checkpoint, shown by tqdm if asked for."""

    def __init__(self, checkpoint: Checkpoint, is_shown: bool) -> None:
        self._bar: Any = None
        if not is_shown:
            return
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True shows a bar of tqdm, which is missing: pip install tqdm, or leave "
                "it out"
            ) from error
        total = sum(spec.nbytes for spec in checkpoint.specs.values())
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="float8 checkpoint")

    def advance(self, item: Item) -> None:
        """Count the tensors of an item as written."""
        if self._bar is not None:
            self._bar.update(sum(spec.nbytes for spec in item.specs.values()))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
