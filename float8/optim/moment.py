"""`Moment`: a state of an optimizer in one or two bytes per element.

A moment reads as a float32 tensor. In memory it is ``codes`` of the parameter's shape and, per
group of ``group`` elements of a row, a float32 ``scale`` and, where the dynamic range is expanded,
a float32 ``exponent``. A row is one index of the first dimension, laid flat; a tensor of one
dimension is one row. So a moment of shape (R, ...) is a matrix (R, C) with ceil(C / group) groups
per row, the last perhaps shorter. A cut along the first dimension cuts codes and scales alike:
that is how checkpoints reshard bit for bit.

================== ============== ======== ====================================================
kind               codes          bytes    what it is for
================== ============== ======== ====================================================
``float8``         E4M3           1.03     the first moment: signed, its range that of a gradient
``float8_expanded`` E4M3          1.06     the second moment: squares, whose range is twice as wide;
                                           COAT's expansion, arXiv 2410.19313, section 4.1
``float16``        float16        2.03     the second moment or the master weights of MS-AMP,
                                           FP8-LM, arXiv 2310.18313, section 2.2
================== ============== ======== ====================================================

(Bytes per element with groups of 128.) ``float8/kernels/moments.py`` holds the formulas.

An operation without side effects sees the dequantised values, in a tensor of its own.
`Moment.copy_from`, ``copy_`` and ``zero_`` write. Every other operation that writes is refused,
because its result would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from float8.kernels.moments import (
    StateMatrix,
    encode_expanded,
    encode_groups,
    groups_shape,
    matrix_of,
    part,
    tiles,
)

aten = torch.ops.aten


class Moment(Tensor):
    """A float32 tensor kept as codes and scales.

    Args:
        codes: float8_e4m3fn or float16, contiguous, of the tensor's shape.
        scale: float32 of shape (R, ceil(C / group)); R is the
            first extent of the tensor and C the product of the others; a vector is one row.
        exponent: float32 of scale's shape, or None.
        group: how many consecutive elements of a row share a scale.

    Raises:
        ValueError: the shapes do not fit each other.
    """

    codes: Tensor
    scale: Tensor
    exponent: Tensor | None
    group: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> Moment:
        """See the class."""
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.size(), strides=codes.stride(), dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> None:
        self.codes, self.scale, self.exponent, self.group = codes, scale, exponent, group

    @staticmethod
    def zeros(
        shape: Sequence[int], kind: str, group: int, device: torch.device | str | None = None
    ) -> Moment:
        """A moment before the first step.

        Args:
            shape: of the parameter.
            kind: "float8", "float8_expanded" or "float16"; the second has the wider range that
                second moments need.
            group: how many consecutive elements of a row share a scale.
            device: where it lives.
        """
        dtype = torch.float16 if kind == "float16" else torch.float8_e4m3fn
        # Integers first: not every device fills float8.
        integers = torch.int16 if kind == "float16" else torch.uint8
        codes = torch.zeros(tuple(shape), dtype=integers, device=device).view(dtype)
        zero = torch.zeros(1, 1, device=device)
        coded = (
            encode_expanded(zero, 1) if kind == "float8_expanded" else encode_groups(zero, 1, dtype)
        )
        scale, *exponent = [x.repeat(groups_shape(shape, group)) for x in coded[1:]]
        return Moment(codes, scale, exponent[0] if exponent else None, group)

    @staticmethod
    def quantize(x: Tensor, kind: str, group: int) -> Moment:
        """The moment of a kind nearest to ``x``, a float tensor of any shape."""
        result = Moment.zeros(x.shape, kind, group, x.device)
        result.copy_from(x)
        return result

    @property
    def kind(self) -> str:
        """What it stores: "float8", "float8_expanded" or "float16"."""
        if self.exponent is not None:
            return "float8_expanded"
        return "float16" if self.codes.dtype == torch.float16 else "float8"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of codes, scales and exponents."""
        return sum([x.numel() * x.element_size() for x in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Codes, scale and, if there is one, exponent."""
        return [self.codes, self.scale] + ([] if self.exponent is None else [self.exponent])

    def matrix(self) -> StateMatrix:
        """Its memory as plain matrices."""
        return StateMatrix(matrix_of(self.codes), self.scale, self.exponent, self.group)

    def dequantize(self) -> Tensor:
        """The values in float32, in the tensor's shape."""
        return self.matrix().decode().view(self.codes.shape)

    def copy_from(self, x: Tensor) -> None:
        """Overwrite the values by those of ``x``, of the same shape, tile by tile."""
        if x.shape != self.codes.shape:
            raise ValueError(f"a moment of shape {tuple(self.shape)} got values of {x.shape}")
        matrix, x_RC = self.matrix(), matrix_of(x.detach())
        for rows, cols in tiles(x_RC.shape, self.group):
            matrix.tile(rows, cols).write(part(x_RC, rows, cols).float())

    def _with(self, function: Callable[[Tensor], Tensor]) -> Moment:
        """The moment of codes, scale and exponent after ``function``."""
        exponent = None if self.exponent is None else function(self.exponent)
        return Moment(function(self.codes), function(self.scale), exponent, self.group)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        names = ["codes", "scale"] + ([] if self.exponent is None else ["exponent"])
        return names, self.group

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], group: int, size: Any, stride: Any
    ) -> Moment:
        return Moment(inner["codes"], inner["scale"], inner.get("exponent"), group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Plain float8 tensors do not pickle outside torch.save; bytes always do.
        as_bytes = self.codes.view(torch.uint8) if self.codes.element_size() == 1 else self.codes
        return _rebuild, (as_bytes, self.scale, self.exponent, self.group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, kind and group; not the values."""
        return (
            f"Moment(shape={tuple(self.shape)}, kind={self.kind!r}, group={self.group}, "
            f"device='{self.device}')"
        )

    # Operations reach __torch_dispatch__ alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copies and moves keep the codes; reading dequantises; other writing is refused."""
        kwargs = kwargs or {}
        if func in _OPS:
            return _OPS[func](func, *args, **kwargs)
        if func._schema.is_mutable and isinstance(args[0], Moment):
            raise NotImplementedError(
                f"{func} would write into the dequantised copy of a Moment; compute the values in "
                "float32 (.dequantize()) and write them with .copy_from(values)"
            )
        args, kwargs = tree_map_only(Moment, lambda m: m.dequantize(), (tuple(args), kwargs))
        return func(*args, **kwargs)


def _rebuild(as_bytes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> Moment:
    """Unpickle a moment."""
    is_bytes = as_bytes.dtype == torch.uint8
    codes = as_bytes.view(torch.float8_e4m3fn) if is_bytes else as_bytes
    return Moment(codes, scale, exponent, group)


def _on_each_tensor(func: Any, x: Moment, *args: Any, **kwargs: Any) -> Moment:
    kwargs.pop("memory_format", None)  # codes are contiguous
    return x._with(lambda tensor: func(tensor, *args, **kwargs))


def _to_copy(func: Any, x: Moment, **kwargs: Any) -> Tensor:
    if kwargs.get("dtype") in (None, torch.float32):
        return _on_each_tensor(func, x, **{**kwargs, "dtype": None})
    return func(x.dequantize(), **kwargs)


def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, Moment):
        assert isinstance(source, Moment)
        return func(destination, source.dequantize(), non_blocking)
    form = (destination.kind, destination.group, destination.shape)
    if isinstance(source, Moment) and (source.kind, source.group, source.shape) == form:
        for mine, theirs in zip(destination.tensors(), source.tensors(), strict=True):
            mine.copy_(theirs, non_blocking)
        return destination
    values = source.dequantize() if isinstance(source, Moment) else source
    destination.copy_from(values.to(destination.device).expand(destination.shape))
    return destination


def _zero_(func: Any, x: Moment) -> Tensor:
    zeros = Moment.zeros(x.shape, x.kind, x.group, x.device)
    return _copy_(aten.copy_.default, x, zeros)


_OPS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _on_each_tensor,
    aten.alias.default: _on_each_tensor,
    aten.clone.default: _on_each_tensor,
    aten._pin_memory.default: _on_each_tensor,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
}


torch.serialization.add_safe_globals([Moment, _rebuild])
