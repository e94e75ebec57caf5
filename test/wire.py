"""Counts what one rank sends, at the process group: every collective, its bytes and its dtype.

All of torch.distributed ends in ops of the dispatcher: `dist.all_gather_into_tensor` and FSDP2's
own calls in ``c10d::_allgather_base_``, DDP's C++ reducer in ``c10d::allreduce_``, DTensor's
functional collectives in ``_c10d_functional::*``. `Wire` is a dispatch mode that sees those ops and
their tensors, in forward, in backward (autograd's threads inherit it) and between; it does not
estimate from what a model should need, and it changes nothing.

Of a collective over n ranks, a rank sends in the algorithms that no other beats in bytes (Patarasu
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009)::

    all_gather       (n - 1) / n * bytes of the output
    reduce_scatter   (n - 1) / n * bytes of the input
    all_reduce       2 * (n - 1) / n * bytes of the tensor
    all_to_all       bytes of the input's parts that are for other ranks
    broadcast        (n - 1) / n * bytes of the tensor        (a mean over ranks)
    send             bytes of the tensor

Padding that FSDP2 adds to uneven shards is sent, hence counted. Barriers send nothing; unknown ops
of a process group raise. The parts of the unsharded copy are seen too:
``fsdp::split_with_sizes_copy`` writes into the buffers that hold gathered parameters until FSDP2
empties them, so the largest sum of their sizes is the peak of what gathering costs in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _resolve_process_group,
)
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional")
SILENT = (
    *("barrier", "monitored_barrier_", "recv_", "recv_any_source_"),
    *("wait_tensor", "_wrap_tensor_autograd"),
)
SPLIT = "fsdp::split_with_sizes_copy"
# The beginning of an op's name without underscores -> the collective.
KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


@dataclass(frozen=True)
class Sent:
    """One collective: which, over how many ranks, of what dtype, and the bytes this rank sent."""

    kind: str
    ranks: int
    dtype: torch.dtype
    bytes: float


class Wire(TorchDispatchMode):
    """Records what this rank sends while it is active.

    Attributes:
        sent: the collectives in order.
        unsharded_bytes: the most that FSDP2's copies of gathered parameters held at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.unsharded_bytes = 0
        self._gathered: dict[int, UntypedStorage] = {}

    def bytes(self, kind: str) -> float:
        """What this rank sent in collectives of one kind."""
        return sum(each.bytes for each in self.sent if each.kind == kind)

    def count(self, kind: str) -> int:
        """How many collectives of one kind there were."""
        return sum(each.kind == kind for each in self.sent)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        namespace, _, op = name.partition("::")
        if namespace in NAMESPACES and op not in SILENT:
            self.sent.append(_sent(func, op, args, kwargs, result))
        elif name == SPLIT:
            self._note_unsharded(kwargs["out"])
        return result

    def _note_unsharded(self, written: Iterable[Tensor]) -> None:
        for tensor in written:
            storage = tensor.untyped_storage()
            self._gathered[storage._cdata] = storage
        held = sum(storage.nbytes() for storage in self._gathered.values())
        self.unsharded_bytes = max(self.unsharded_bytes, held)


def _sent(func: Any, op: str, args: Any, kwargs: dict[str, Any], result: Any) -> Sent:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    plain = op.replace("_", "")
    kind = next((kind for start, kind in KINDS.items() if plain.startswith(start)), None)
    if kind is None:
        raise NotImplementedError(f"Wire does not know what {func._schema.name} sends: tell KINDS")
    group = _group(given)
    tensors = _tensors(kind, given, result)
    size, n = sum(map(_bytes, tensors)), group.size()
    share = (n - 1) / n
    if kind == "all_to_all":
        sent = size - _kept(given, tensors, group)
    else:
        sent = size * {"send": 1.0, "all_reduce": 2 * share}.get(kind, share)
    return Sent(kind, n, tensors[0].dtype, sent)


def _group(given: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    return _resolve_process_group(given["group_name"])


def _tensors(kind: str, given: dict[str, Any], result: Any) -> list[Tensor]:
    """What the bytes are those of: an all-gather's output, else the input."""
    if kind == "all_gather":
        written = given.get("output_tensors", given.get("output_tensor", given.get("outputs")))
        return _flat(result if written is None else written)
    names = ("input_tensors", "input_tensor", "inputs", "input", "tensors", "self")
    return _flat(next(given[name] for name in names if name in given))


def _kept(given: dict[str, Any], tensors: list[Tensor], group: dist.ProcessGroup) -> float:
    """Bytes of an all-to-all's input that are for this rank itself."""
    if len(tensors) > 1:
        return _bytes(tensors[group.rank()])
    splits = given.get("input_split_sizes")
    rows = tensors[0].shape[0]
    own = splits[group.rank()] if splits else rows / group.size()
    return _bytes(tensors[0]) * own / rows if rows else 0.0


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for each in tensors for tensor in _flat(each)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
