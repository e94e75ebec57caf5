"""Parts of a tensor that the ranks of one mesh dimension hold, put together and summed.

A dimension of ``length`` is cut into chunks of ``ceil(length / size)``, as ``torch.chunk`` and
DTensor do: the last ranks may hold less than the others, or nothing. Collectives move equal parts,
so that a short one travels padded with zeros, which never reach a result.

Codes travel as bytes, because gloo knows no float8 type and NCCL's sums must never see one. The
collectives are torch's functional ones, which ``torch.compile`` traces; waiting for one orders
streams and does not stall the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Ranks(NamedTuple):
    """The ranks of one mesh dimension: the name of their group, how many, and which one this is."""

    group: str
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh of one dimension."""
        return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def length_here(self, length: int) -> int:
        """How much of a dimension this rank holds."""
        chunk = -(-length // self.size)
        return min(max(length - self.rank * chunk, 0), chunk)


def gather(x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
    """The whole of a tensor that is cut along ``dim``.

    Args:
        x: this rank's part; of any dtype, float8 too.
        dim: the dimension that is cut, >= 0.
        length: of that dimension, over all ranks.
        ranks: who holds parts.
    """
    bytes_ = x.view(torch.uint8) if x.element_size() == 1 else x
    chunk = -(-length // ranks.size)
    part = _padded(bytes_, dim, chunk).contiguous()
    ops = torch.ops._c10d_functional
    parts = ops.wait_tensor(ops.all_gather_into_tensor(part, ranks.size, ranks.group))
    whole = parts if dim == 0 else torch.cat(parts.chunk(ranks.size), dim)
    if whole.shape[dim] != length:
        whole = whole.narrow(dim, 0, length).contiguous()
    return whole.view(x.dtype)


def reduce_scatter(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part, along ``dim``, of the sum of all ranks' x; the transpose of `gather`."""
    length = x.shape[dim]
    whole = _padded(x, dim, -(-length // ranks.size) * ranks.size)
    whole = whole if dim == 0 else torch.cat(whole.chunk(ranks.size, dim))
    ops = torch.ops._c10d_functional
    part = ops.reduce_scatter_tensor(whole.contiguous(), "sum", ranks.size, ranks.group)
    part, here = ops.wait_tensor(part), ranks.length_here(length)
    return part if part.shape[dim] == here else part.narrow(dim, 0, here).contiguous()


def sum_over(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum of all ranks' x."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", ranks.group))


def part_of(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's part, along ``dim``, of a tensor that every rank has."""
    chunk = -(-x.shape[dim] // ranks.size)
    start = min(ranks.rank * chunk, x.shape[dim])
    return x.narrow(dim, start, ranks.length_here(x.shape[dim]))


def check_even(x: Tensor, dim: int, ranks: Ranks, name: str) -> None:
    """Refuse parts of unequal length, of plain tensors on a CPU.

    On a device the look would stall it; there, as with torch's own styles, the error is the
    collective's (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes it a clear one).

    Raises:
        ValueError: on every rank.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ops = torch.ops._c10d_functional
    lengths = torch.tensor([x.shape[dim], -x.shape[dim]])
    largest, smallest = ops.wait_tensor(ops.all_reduce(lengths, "max", ranks.group)).tolist()
    if largest != -smallest:
        raise ValueError(
            f"{name}: the input is cut along dimension {dim} into parts of unequal length (here "
            f"{x.shape[dim]}, the longest {largest}, the shortest {-smallest}), and a plain tensor "
            "does not say how long the whole is: pass a DTensor, or pad the sequence to a multiple "
            f"of {ranks.size}"
        )


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x
