"""`ShardedWeight`: a high-precision weight that FSDP2 gathers as float8.

Before a layer's forward, ``fully_shard`` all-gathers the shards of an ordinary weight in the
compute dtype, two bytes per element, and the layer casts the whole weight to float8. A
`ShardedWeight` is a high-precision weight that changes this. Its ``fsdp_pre_all_gather`` casts the
shard to float8, so that one byte per element is sent. Its ``fsdp_post_all_gather`` makes a
`GatheredWeight` of the result, which the layer does not cast again. FSDP2 calls both.

A dynamic scale depends on elements of several shards, and takes an all-reduce of amaxes. They are
kept until the weight is written to (see `float8.distributed.float8_gather`), so that backward's
gather does not repeat the all-reduce. `precompute_float8_dynamic_scale_for_fsdp` computes them for
all weights of a model at once. All ranks must write to their shards in the same steps, which FSDP2
requires too: a rank that wrote alone would wait alone in its all-reduce.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from float8.distributed.float8_gather import GatheredWeight, KnownAmax, cast_shard, weight_cast
from float8.granularity import Block
from float8.linear.resident import GatherableWeight

aten = torch.ops.aten
_Metadata = tuple[torch.Size, Tensor, torch.dtype, Block]  # size, scale, dtype of the data, block


class ShardedWeight(GatherableWeight):
    """A weight, or a shard of one, in high precision.

    ``plain`` is the ordinary tensor that it wraps; both share the data. ``known`` is what is known
    of the whole weight's amax, for all views of one weight.
    """

    plain: Tensor
    known: KnownAmax

    @staticmethod
    def __new__(cls, plain: Tensor, known: KnownAmax | None = None) -> ShardedWeight:
        """See the class."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
        )

    def __init__(self, plain: Tensor, known: KnownAmax | None = None) -> None:
        self.plain = plain
        self.known = known or KnownAmax()

    @property
    def data(self) -> Tensor:
        """A view of the same values, as torch's is; assigning to it raises an error."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "assigning to .data would not change a weight that is gathered in float8: write "
            "weight.copy_(...) under torch.no_grad(). FSDP1 assigns so: take fully_shard (FSDP2)"
        )

    def data_ptr(self) -> int:
        """The address of the stored tensor: frameworks identify parameters by their addresses."""
        return self.plain.data_ptr()

    # --- the functions that FSDP2 calls

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], _Metadata]:
        """The float8 data that this rank sends, (padded rows, K) bytes; and metadata.

        The weight is sharded over the 1-D ``mesh``; ``outer_size`` is that of the whole weight, (N,
        K) or (E, N, K). ``module`` is the float8 layer that owns it. The compute dtype is
        ``mp_policy.param_dtype``.
        """
        dtype, group = mp_policy.param_dtype or self.dtype, mesh.get_group()
        data, scale = cast_shard(self.plain, self.known, module, outer_size, dtype, group)
        sent = data.view(torch.uint8)  # gloo cannot send float8; NCCL sends either as bytes
        # If rows are sharded, the last shards may be short or empty. Columns are sharded evenly.
        missing = -(-outer_size[0] // mesh.size()) - sent.shape[0]
        if missing > 0:
            sent = F.pad(sent, (0, 0) * (sent.dim() - 1) + (0, missing))
        return (sent,), (outer_size, scale, data.dtype, weight_cast(module, self)[0].block)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: _Metadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered bytes as a `GatheredWeight`, which reads the memory that FSDP2 manages.

        ``metadata`` comes from `fsdp_pre_all_gather`; ``param_dtype`` is the compute dtype. ``out``
        is the `GatheredWeight` of an earlier gather, whose memory has been written to.
        """
        size, scale, dtype, block = metadata
        if scale.device.type == "cuda":
            # The scale was made on the gather's stream and is read on the layer's stream.
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is not None:
            assert isinstance(out, GatheredWeight)
            out.scale = scale
            return None
        data = all_gather_outputs[0].view(-1)[: size.numel()].view(size).view(dtype)
        return GatheredWeight(data, scale, block, param_dtype), ()

    # --- the functions of a tensor subclass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: None, size: Any, stride: Any
    ) -> ShardedWeight:
        return ShardedWeight(inner["plain"])

    def _stable_hash_for_caching(self) -> str:
        """A key for torch.compile's cache on disk, of everything that its graphs depend on."""
        t = self.plain
        return repr((t.dtype, t.device, tuple(t.shape), t.stride(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeight:
        tensor, *rest = self.__reduce_ex__(2)[1]
        memo[id(self)] = copied = _rebuild(tensor.clone(), *rest)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_parameter = isinstance(self, nn.Parameter)
        return _rebuild, (self.plain.detach(), self.requires_grad, is_parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The text of the tensor that it stores."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ShardedWeight({self.plain!r}{grad})"

    # Operations are handled by __torch_dispatch__ only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the stored tensors; views and copies are `ShardedWeight`s again."""
        kwargs = kwargs or {}
        plain = tree_map_only(ShardedWeight, lambda x: x.plain, (args, kwargs))
        out = func(*plain[0], **plain[1])
        if func._schema.is_mutable:
            _forget_written(func._schema.arguments, args, kwargs)
        elif func.is_view:
            out = tree_map_only(Tensor, lambda x: ShardedWeight(x, args[0].known), out)
        elif func in _NEW:
            out = ShardedWeight(out)
        return return_and_correct_aliasing(func, args, kwargs, out)


# Operations whose result may replace a ShardedWeight: padding, materialisation, moves.
_NEW = {
    *(aten.new_zeros.default, aten.new_empty.default, aten.empty_like.default),
    *(aten.clone.default, aten._to_copy.default, aten._pin_memory.default),
}


def _forget_written(arguments: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Discard the amaxes of the weights that an operation has written to, and of no others.

    One rank alone may read a weight, and would then wait alone in an all-reduce.
    """
    given = {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs
    written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
    for x in tree_leaves(written):
        if isinstance(x, ShardedWeight):
            x.known.forget()


def _rebuild(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> Any:
    """Unpickle a ShardedWeight."""
    new = ShardedWeight(tensor)
    return nn.Parameter(new, requires_grad) if is_parameter else new.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([ShardedWeight, _rebuild])
