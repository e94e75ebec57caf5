"""Float8 copies of the tensors that backward reads, one copy per tensor.

A copy is float8 data and one scale per group. A group is 128 consecutive elements of the last
dimension; the last group of a row may be shorter. A tensor whose last dimension is shorter than a
group is one row, in its logical order. Legend: R rows, C elements per row, G = ceil(C / 128)::

    data  = nearest(x / scale)         (R, C), E4M3
    value = data * scale               scale (R, G) = amax / max(format), rounded to a power of two

A scale is stored as one byte, its E8M0 code: the exponent field of the float32
(``2^(byte - 127)``; 255 is inf and NaN). That makes 1.008 bytes per element, and an SQNR of 31.5 dB
for a normal tensor. Float32 scales (1.031 bytes) would have 31.8 dB, and groups of 16 with those
(1.25 bytes) 33.0. E4M3 covers 18 binades, so smaller groups help only if the magnitudes inside a
group of 128 span more.

A NaN or inf makes its whole group NaN, never a plausible number. Zeros stay zeros.

On CUDA Triton kernels cast groups and restore them, in one launch each (``gpu/cast``,
``gpu/dequantize_groups``); torch.compile fuses the second with what reads the values. Elsewhere it
is plain PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from float8 import kernels
from float8.formats import E4M3, HIGH_PRECISION_DTYPES, ScaleFormat
from float8.kernels.matrix import BY_128
from float8.kernels.registration import load_kernels
from float8.linear.float8_weight import version_of

_GROUP = 128  # elements that share a scale


class Float8Copy(NamedTuple):
    """data (R, C) float8; scale (R, G), uint8 exponents."""

    data: Tensor
    scale: Tensor


def cast_copy(x: Tensor) -> Float8Copy:
    """The float8 copy of a float32, bfloat16 or float16 tensor of any shape and strides."""
    one_row = x.dim() == 0 or x.shape[-1] < _GROUP
    x_RC = x.reshape(1, -1) if one_row else x.reshape(-1, x.shape[-1])
    kernel = _kernel_for(kernels.family_of(x.device))
    how = kernels.CastSpec(BY_128, E4M3.dtype, ScaleFormat.POWER_OF_TWO.value, kernel)
    data, scale, _ = kernels.cast(x_RC, how).row_major  # type: ignore[misc]
    return Float8Copy(data, (scale.view(torch.int32) >> 23).to(torch.uint8))


def restored(copy: Float8Copy, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values of a copy, of ``shape``: bfloat16 if ``dtype`` is bfloat16, else float32.

    Data times a power of two is exact in bfloat16; in float16 it could overflow.
    """
    data, scale = copy
    dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    kernel = _kernel_for(kernels.family_of(data.device))
    if kernel is not None and not torch.compiler.is_compiling():
        x: Tensor = torch.ops.float8.dequantize_groups.default(data, scale, _GROUP, dtype)
        return x.reshape(shape)
    scale = (scale.to(torch.int32) << 23).view(torch.float32)
    if kernel is not None and data.shape[1] % _GROUP == 0:
        # The partitioner counts what it may fuse twice, and would save the source of two bytes per
        # element instead. Of all views `unfold` is none that it may fuse.
        blocks = data.unfold(1, _GROUP, _GROUP).to(dtype) * scale.to(dtype).unsqueeze(2)
        return blocks.reshape(shape)
    return kernels.dequantize(data, scale, BY_128, dtype).reshape(shape)


def _kernel_for(family: str) -> str | None:
    """The kernel that casts groups of a row; there is one to restore them, too."""
    kernel = kernels.kernel_for(family, BY_128)
    if kernel is not None:
        load_kernels("dequantize_groups")
    return kernel


# For torch.compile: it runs once, while tracing. See `architecture`.
_kernel_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Restorer(NamedTuple):
    """The parameters by which backward restores a tensor from its saved copy."""

    shape: torch.Size
    dtype: torch.dtype
    # A function and its options, to recompute the tensor from the copy of that function's input.
    recompute: tuple[Callable[..., Tensor], dict[str, Any]] | None = None

    def restore(self, saved: list[Tensor]) -> Tensor:
        """The values of the copy that is next in ``saved``, which loses it."""
        copy = Float8Copy(saved.pop(0), saved.pop(0))
        x = restored(copy, self.shape, self.dtype)
        return x if self.recompute is None else self.recompute[0](x, **self.recompute[1])


SavedCopy = tuple[Restorer, tuple[Tensor, ...]]  # with the data and the scale of the copy


class _Entry(NamedTuple):
    """The copy of a tensor, and the version that the tensor had."""

    version: int
    parts: tuple[weakref.ref[Tensor], ...]
    restorer: Restorer


# Base -> place in the base -> entry; of all scopes, since dynamo cannot make one.
_ENTRIES = WeakTensorKeyDictionary()


class CopyCache:
    """The copies of tensors, so that ops which read one tensor share one copy.

    `save` makes a float8 copy at once: later writes to the tensor do not change it. For the result
    of a cheap op of a copied tensor (``silu(gate)`` in ``silu(gate) * up``) it returns the copy of
    the op's input, from which backward recomputes the result.

    Copies are found by the base of a tensor, its place in the base and its version, so that another
    view of the same elements finds them too. They are referenced weakly: the autograd graph owns
    them and frees them.

    Under ``torch.compile`` a list holds the tensors between `begin` and `end`, since a graph must
    not leave tensors behind. A scope for all ops that is entered outside the graph has no such end,
    and so finds no copies inside it. The compiler merges equal casts, but ``silu(gate) * up`` then
    saves three copies, not two.
    """

    def __init__(self, min_size: int) -> None:
        self.min_size = min_size
        self._traced: list[tuple[Tensor, SavedCopy]] | None = None

    def begin(self) -> None:
        """Start a forward: until `end`, a compiled graph may hold tensors."""
        if torch.compiler.is_compiling():
            self._traced = []

    def end(self) -> None:
        """Release the tensors of a compiled graph."""
        self._traced = None

    def _of_graph(self) -> list[tuple[Tensor, SavedCopy]] | None:
        """The tensors that the graph holds, while one is traced."""
        if not torch.compiler.is_compiling():
            return None
        return [] if self._traced is None else self._traced

    def is_worthwhile(self, x: Tensor) -> bool:
        """Whether a float8 copy of x takes less memory than x, which some op holds otherwise.

        It does not for parameters and their views, tensors without gradient (rotary tables, masks),
        broadcast views, tensors of fewer than ``min_size`` elements, and other dtypes than float32,
        bfloat16 and float16.
        """
        if x.numel() < self.min_size or x.dtype not in HIGH_PRECISION_DTYPES or not x.requires_grad:
            return False
        is_broadcast = any([s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)])
        return not is_broadcast and not isinstance(_base(x), nn.Parameter)

    def save(self, x: Tensor) -> SavedCopy:
        """The copy of an input of an op."""
        if (found := self._find(x)) is not None:
            return found[0]._replace(shape=x.shape), found[1]
        with torch.no_grad():
            copy = cast_copy(x.detach())
        saved = Restorer(x.shape, x.dtype), tuple(copy)
        self.remember(x, saved)
        return saved

    def remember(self, x: Tensor, saved: SavedCopy) -> None:
        """Record what restores x."""
        if (traced := self._of_graph()) is not None:
            traced.append((x, saved))
            return
        restorer, parts = saved
        entry = _Entry(version_of(x), tuple([weakref.ref(part) for part in parts]), restorer)
        _ENTRIES.setdefault(_base(x), {})[_place(x)] = entry

    def _find(self, x: Tensor) -> SavedCopy | None:
        if (traced := self._of_graph()) is not None:
            found = [saved for y, saved in traced if y is x]
            return found[0] if found else None
        entry = _ENTRIES.get(_base(x), {}).get(_place(x))
        if entry is None or entry.version != version_of(x):
            return None
        parts = tuple([part for ref in entry.parts if (part := ref()) is not None])
        return (entry.restorer, parts) if len(parts) == len(entry.parts) else None


def _base(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _place(x: Tensor) -> tuple[Any, ...]:
    """The elements of the base that x views, whether negated, and what decides its groups."""
    last = x.shape[-1] if x.dim() else 1
    if x.is_contiguous():
        return x.storage_offset(), x.is_neg(), x.numel(), last
    return x.storage_offset(), x.is_neg(), tuple(x.shape), x.stride()
