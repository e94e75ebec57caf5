"""`Float8Shard`: this rank's rows of a frozen `Float8Tensor` that FSDP2 has sharded.

``fully_shard`` splits a parameter along its first dimension, pads the parts to one size, and
gathers the whole before a layer runs. Shards of a frozen float8 weight hold float8 data, so that
one byte per element is stored and sent. Nothing is cast: the gathered weight has the bits of the
weight that was sharded.

- Scales of single rows (``block[0] == 1``: rows, 1x32 blocks, experts) are sharded and gathered
  with the rows, if these divide evenly.
- Other scales serve rows of several shards, so each rank keeps all of them: 4 bytes per 16,384
  elements in blocks of 128x128.

FSDP2 makes a shard by ``new_zeros`` of the Parameter, into which it copies a part of ``split``; of
any other caller both return Float8Tensors. It calls `Float8Shard.fsdp_pre_all_gather` and
`Float8Shard.fsdp_post_all_gather` at each gather. A shard is no operand: operations that compute
raise an error.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8.granularity import Block, ceil_div, scale_shape
from float8.tensor.tensor import Float8Tensor, is_e8m0

aten = torch.ops.aten


class Float8Shard(Tensor):
    """Rows of a frozen float8 weight, with their scales or with those of the whole weight.

    Args:
        data: float8; FSDP2 also views it in one dimension.
        scale: of these rows, or of the whole weight.
        block: of the whole weight.
        dtype: the high-precision dtype that the weight stands for.
        has_rows: whether ``scale`` has one row for each row of the shard.
    """

    float8_data: Tensor
    scale: Tensor
    block: Block
    has_rows: bool

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, has_rows: bool
    ) -> Float8Shard:
        """See the class."""
        size, strides, offset = data.size(), data.stride(), data.storage_offset()
        return torch.Tensor._make_wrapper_subclass(
            cls, size, strides, offset, dtype=dtype, device=data.device
        )

    def __init__(
        self, data: Tensor, scale: Tensor, block: Block, dtype: torch.dtype, has_rows: bool
    ) -> None:
        self.float8_data, self.scale, self.block, self.has_rows = data, scale, block, has_rows

    @staticmethod
    def zeros(weight: Float8Tensor, size: torch.Size) -> Float8Shard:
        """Memory for rows of a weight; zeros, with no scales of rows yet.

        Raises ValueError if the weight requires a gradient, which a shard cannot have.
        """
        if weight.requires_grad:
            raise ValueError("fully_shard takes frozen float8 weights: call requires_grad_(False)")
        data, scale, rows = weight.float8_data, weight.scale, size[0]
        has_rows = weight.block[0] == 1 and rows > 0 and len(weight) % rows == 0
        if has_rows:
            scale = torch.empty((rows, *scale.shape[1:]), dtype=scale.dtype, device=scale.device)
        data = torch.zeros(size, dtype=torch.uint8, device=data.device).view(data.dtype)
        return Float8Shard(data, scale, weight.block, weight.dtype, has_rows)

    # --- the functions that FSDP2 calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, Tensor, bool]]:
        """What this rank sends: float8 data as bytes, (padded rows, ...), and scales of rows.

        The weight is sharded over the 1-D ``mesh``; ``outer_size`` is that of the whole weight.
        Raises ValueError, on all ranks, if it is sharded along another dimension than the first, or
        if ranks without rows would have to send scales.
        """
        ranks, data = mesh.size(), self.float8_data.view(torch.uint8)
        if self.shape[1:] != outer_size[1:] or (self.has_rows and outer_size[0] % ranks):
            raise ValueError(
                f"{type(module).__name__}: shard its float8 weight {tuple(outer_size)} along the "
                f"first dimension, and by fewer than {ranks} ranks if some have none of it"
            )
        if self.has_rows and ranks > 1:  # of one rank FSDP2 copies the first tensor alone
            scale = self.scale.view(torch.uint8) if is_e8m0(self.scale) else self.scale
            return (data, scale), (outer_size, self.scale, True)
        missing = ceil_div(outer_size[0], ranks) - len(data)
        sent = F.pad(data, (0, 0) * (data.dim() - 1) + (0, missing)) if missing else data
        return (sent,), (outer_size, self.scale, False)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[torch.Size, Tensor, bool],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, a `Float8Tensor` in the memory that FSDP2 manages.

        ``out`` is that of an earlier gather, whose memory has been written to.
        """
        size, scale, is_sent = metadata
        if out is not None:
            assert isinstance(out, Float8Tensor)
            out.scale = out.scale if is_sent else scale
            return None
        if is_sent:
            scale = all_gather_outputs[1].view(scale.dtype).view(scale_shape(size, self.block))
        data = all_gather_outputs[0].view(-1)[: size.numel()].view(size)
        whole = Float8Tensor(data.view(self.float8_data.dtype), scale, self.block, param_dtype)
        return whole, ()

    # --- the functions of a tensor subclass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, block and dtype."""
        return f"Float8Shard({tuple(self.shape)}, block={self.block}, dtype={self.dtype})"

    # Operations are handled by __torch_dispatch__ only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the data, and on the scales where they change with the data."""
        (x, *others), kwargs = args, kwargs or {}
        if func is aten.copy_.default and isinstance(x, Float8Shard):
            if not isinstance(others[0], (Float8Shard, Float8Tensor)):
                raise TypeError(
                    "a shard of a float8 weight takes float8 weights, not codes or numbers alone. "
                    "broadcast_from_rank0=True sends no scales: let all ranks read the state dict"
                )
            x.float8_data.copy_(others[0].float8_data)
            if x.has_rows:
                x.scale.copy_(others[0].scale)
            return x
        dtype = kwargs.pop("dtype", None) or x.dtype
        if func in (aten.new_zeros.default, aten.new_empty.default):
            zeros = torch.zeros(others[0], dtype=torch.uint8, device=x.device)
            return Float8Shard(zeros.view(x.float8_data.dtype), x.scale, x.block, dtype, False)
        if func not in {*_BOTH, aten.slice.Tensor, aten.view.default}:
            raise NotImplementedError(f"{func} is not defined for a shard of a float8 weight")
        data, scale = func(x.float8_data, *others, **kwargs), x.scale
        if func in _BOTH or (func is aten.slice.Tensor and x.has_rows):
            scale = func(scale, *others, **kwargs)
        return Float8Shard(data, scale, x.block, dtype, x.has_rows)


def is_for_fsdp(x: Tensor) -> bool:
    """Whether FSDP2 shards the Parameter x: its code is on the stack, for it has no hook there."""
    frame: Any = sys._getframe() if isinstance(x, nn.Parameter) else None
    while frame and frame.f_globals.get("__name__") != _FSDP_PARAM:
        frame = frame.f_back
    return frame is not None


_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
# Operations on data and scales alike.
_BOTH = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten.empty_like.default),
    *(aten._to_copy.default, aten._pin_memory.default),
}
