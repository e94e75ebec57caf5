"""Float8 copies of the tensors that backward reads, one copy per tensor.

A copy is float8 data and one scale per group. A group is ``group`` consecutive elements of the last
dimension; the last group of a row may be shorter. A tensor whose last dimension is shorter than a
group is one row, in its logical order. Legend: R rows, C elements per row, G = ceil(C / group)::

    data  = nearest(x / scale)         (R, C), E4M3 or E5M2
    value = data * scale               scale (R, G) = amax / max(format), `kernels.scale_from_amax`

A power-of-two scale is stored as one byte, its E8M0 code: the exponent field of the float32
(``2^(byte - 127)``; 255 is inf and NaN). Other scales are float32:

====== ================ ============== ============================
group  scale            bytes/element  SQNR of a normal tensor, dB
====== ================ ============== ============================
128    power of two     1.008          31.5
128    float32          1.031          31.8
16     power of two     1.063          31.5
16     float32          1.250          33.0
====== ================ ============== ============================

The default is the smallest, groups of 128 with powers of two: E4M3 covers 18 binades, so smaller
groups help only if the magnitudes inside a group of 128 span more.

A NaN or inf makes its whole group NaN, never a plausible number. Zeros stay zeros.

On CUDA Triton kernels cast groups of 128 and restore them, in one launch each (``gpu/cast``,
``gpu/dequantize_groups``); torch.compile fuses the second with what reads the values. All else is
plain PyTorch: several passes in eager mode, fused by torch.compile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from float8 import kernels
from float8.formats import E4M3, HIGH_PRECISION_DTYPES
from float8.kernels.casts import import_kernels
from float8.kernels.definition import scale_format_of
from float8.linear.float8_weight import version_of

OUTPUT = -1  # as the index of a tensor: the op's result


class CopyFormat(NamedTuple):
    """The elements per group, the dtype of the data, and whether scales take one byte."""

    group: int = 128
    dtype: torch.dtype = E4M3.dtype
    power_of_two_scale: bool = True


class Float8Copy(NamedTuple):
    """data (R, C) float8; scale (R, G), uint8 exponents or float32."""

    data: Tensor
    scale: Tensor


def cast_copy(x: Tensor, fmt: CopyFormat) -> Float8Copy:
    """The float8 copy of a float32, bfloat16 or float16 tensor of any shape and strides."""
    one_row = x.dim() == 0 or x.shape[-1] < fmt.group
    x_RC = x.reshape(1, -1) if one_row else x.reshape(-1, x.shape[-1])
    scale_format = scale_format_of(fmt.power_of_two_scale)
    kernel = _kernel_for(kernels.family_of(x.device), fmt.group)
    how = kernels.CastSpec((1, fmt.group), fmt.dtype, scale_format, kernel)
    data, scale, _ = kernels.cast(x_RC, how).row_major  # type: ignore[misc]
    if fmt.power_of_two_scale:
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return Float8Copy(data, scale)


def restored(copy: Float8Copy, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values of a copy, of ``shape``: bfloat16 if ``dtype`` is bfloat16, else float32.

    Data times a power of two is exact in bfloat16; in float16 it could overflow.
    """
    data, scale = copy
    dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    kernel = _kernel_for(kernels.family_of(data.device), group)
    if kernel is not None and not torch.compiler.is_compiling():
        x: Tensor = torch.ops.float8.dequantize_groups.default(data, scale, group, dtype)
        return x.reshape(shape)
    is_power_of_two = scale.dtype == torch.uint8
    if is_power_of_two:
        scale = (scale.to(torch.int32) << 23).view(torch.float32)
    if kernel is not None and is_power_of_two and data.shape[1] % group == 0:
        # The partitioner counts what it may fuse twice, and would save the source of two bytes per
        # element instead. Of all views `unfold` is none that it may fuse.
        blocks = data.unfold(1, group, group).to(dtype) * scale.to(dtype).unsqueeze(2)
        return blocks.reshape(shape)
    return kernels.dequantize(data, scale, (1, group), dtype).reshape(shape)


def _kernel_for(family: str, group: int) -> str | None:
    """The kernel that casts these groups of a row; there is one to restore them, too."""
    kernel = kernels.kernel_for(family, (1, group)) if group == 128 else None
    if kernel is not None:
        import_kernels(("dequantize_groups",))
    return kernel


# For torch.compile: it runs once, while tracing. See `architecture`.
_kernel_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Restorer(NamedTuple):
    """The parameters by which backward restores a tensor from its saved copy."""

    position: int  # which of the op's inputs the tensor is, or `OUTPUT`
    fmt: CopyFormat | None  # None: the tensor itself, an input, is saved
    shape: torch.Size
    dtype: torch.dtype
    # A function and its options, to recompute the tensor from the copy of that function's input.
    recompute: tuple[Callable[..., Tensor], dict[str, Any]] | None = None

    def restore(self, saved: list[Tensor]) -> Tensor:
        """The tensor, or the values of its copy; removes what it uses from ``saved``."""
        if self.fmt is None:
            return saved.pop(0)
        copy = Float8Copy(saved.pop(0), saved.pop(0))
        x = restored(copy, self.fmt.group, self.shape, self.dtype)
        return x if self.recompute is None else self.recompute[0](x, **self.recompute[1])


SavedCopy = tuple[Restorer, tuple[Tensor, ...]]  # with the data and the scale of the copy


class _Entry(NamedTuple):
    """The copy of a tensor, and the version that the tensor had."""

    version: int
    parts: tuple[weakref.ref[Tensor], ...]
    restorer: Restorer


# Base -> (format, place in the base) -> entry; of all scopes, since dynamo cannot make one.
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

    def __init__(self, fmt: CopyFormat, min_size: int) -> None:
        self.fmt, self.min_size = fmt, min_size
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

    def save(self, x: Tensor, index: int) -> SavedCopy:
        """The copy of input ``index`` of an op. The `OUTPUT` has none before the op has run."""
        if index == OUTPUT:
            return Restorer(OUTPUT, self.fmt, x.shape, torch.float32), ()
        if (found := self._find(x)) is not None:
            return found[0]._replace(position=index, shape=x.shape), found[1]
        with torch.no_grad():
            copy = cast_copy(x.detach(), self.fmt)
        saved = Restorer(index, self.fmt, x.shape, x.dtype), tuple(copy)
        self.remember(x, saved)
        return saved

    def remember(self, x: Tensor, saved: SavedCopy) -> None:
        """Record what restores x."""
        if (traced := self._of_graph()) is not None:
            traced.append((x, saved))
            return
        restorer, parts = saved
        entry = _Entry(version_of(x), tuple([weakref.ref(part) for part in parts]), restorer)
        _ENTRIES.setdefault(_base(x), {})[self.fmt, _place(x)] = entry

    def _find(self, x: Tensor) -> SavedCopy | None:
        if (traced := self._of_graph()) is not None:
            found = [saved for y, saved in traced if y is x]
            return found[0] if found else None
        entry = _ENTRIES.get(_base(x), {}).get((self.fmt, _place(x)))
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
