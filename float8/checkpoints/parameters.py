"""Parameters that a file is read into: their memory, and the part of them that this rank has.

A tensor of a file goes to a `Slot` of a parameter: all of it, or one expert's part of a stack. A
parameter that FSDP2 has sharded has a box of the whole on this rank; `write` copies what the two
have in common. No rank reads more than that, but for float8 blocks that the border of a shard
splits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.checkpoints.names import Slot
from float8.granularity import WHOLE, ceil_div
from float8.linear.float8_weight import as_parameter
from float8.tensor import Float8Tensor

Box = tuple[slice, ...]  # start and stop along each dimension


@torch.inference_mode(False)  # a backward cannot save tensors that were made in inference mode
def materialise(model: nn.Module, device: torch.device) -> None:
    """Give parameters and persistent buffers on the meta device memory; shared ones stay shared."""
    new: dict[int, tuple[Tensor, Any]] = {}  # id -> the old one, whose id stays its, and the new
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, own in entries.items():
                if own is None or not own.is_meta or name in module._non_persistent_buffers_set:
                    continue
                if id(own) not in new:
                    data = torch.empty_like(own, device=device, requires_grad=False)
                    if isinstance(own, nn.Parameter):
                        data = as_parameter(own, data, own.requires_grad)
                    new[id(own)] = own, data
                entries[name] = new[id(own)][1]


@torch.no_grad()
def write(slot: Slot, parameter: Tensor, source: Tensor) -> None:
    """Copy a tensor of a file into its slot, dequantised if it is a `Float8Tensor`.

    ``source`` has the slot's shape. If ``parameter``, that of the slot, is a DTensor, it gets the
    part that this rank has.
    """
    local, offset = _local(parameter)
    target, box = _overlap(slot, parameter.shape, local.shape, offset)
    if target is not None:
        view = local[target]
        (view.mT if slot.transposed else view).copy_(_plain(source, box))


def _local(parameter: Any) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, and where it starts in the whole."""
    if not kernels.is_sharded(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter._local_tensor.detach(), offset


def _overlap(
    slot: Slot, shape: torch.Size, local: torch.Size, offset: tuple[int, ...]
) -> tuple[tuple[int | slice, ...] | None, Box]:
    """What this rank has of a slot: its index in the local part, and the box of the source.

    The index is None where they have nothing in common.
    """
    index = (*slot.index, *(slice(None) for _ in range(len(shape) - len(slot.index))))
    target: list[int | slice] = []
    box: list[slice] = []
    for entry, size, own, start in zip(index, shape, local, offset, strict=True):
        if isinstance(entry, int):
            if not start <= entry < start + own:
                return None, ()
            target.append(entry - start)
            continue
        covered = range(*entry.indices(size))
        first, step = covered.start, covered.step
        begin = max(0, ceil_div(start - first, step))
        end = min(len(covered), ceil_div(start + own - first, step))
        if begin >= end:
            return None, ()
        target.append(slice(first + begin * step - start, first + end * step - start, step))
        box.append(slice(begin, end))
    if slot.transposed:
        box[-2:] = reversed(box[-2:])
    return tuple(target), tuple(box)


def _plain(source: Tensor, box: Box) -> Tensor:
    """A part of a tensor in high precision; blocks that the box splits are dequantised whole.

    Data and scale are indexed apart. Indexing the `Float8Tensor` would make torch (2.13) import
    torch.distributed.tensor once, which takes longer than loading a small model.
    """
    if not isinstance(source, Float8Tensor):
        return source[box]
    wide, scales, inside = [], [], []
    for part, size, block in zip(box, source.shape, source.block, strict=True):
        extent = 1 if block == WHOLE else block
        first, last = part.start // extent, ceil_div(part.stop, extent)
        wide.append(slice(first * extent, min(last * extent, size)))
        scales.append(slice(None) if block == WHOLE else slice(first, last))
        inside.append(slice(part.start - first * extent, part.stop - first * extent))
    data, scale = source.float8_data[tuple(wide)], source.scale[tuple(scales)]
    return kernels.dequantize(data, scale, source.block, source.dtype)[tuple(inside)]
