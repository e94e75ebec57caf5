"""`Moment`: what an optimizer remembers of a parameter, in one or two bytes per element.

A moment is a float32 tensor to whoever reads it and something smaller in memory: ``codes`` of the
parameter's shape, and per group of ``group`` elements of a row a float32 ``scale`` and, where the
dynamic range is expanded, a float32 ``exponent``. A row is what one index of the first dimension
selects, laid flat; a tensor of one dimension is one row. So a moment of shape (R, ...) is a matrix
(R, C) with ceil(C / group) groups per row, the last perhaps shorter, and cutting it along the
first dimension cuts codes and scales alike: that is how checkpoints reshard bit for bit.

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

Reading a moment gives float32: any operation without side effects sees the dequantised values, in
a tensor of its own. Writing goes through `Moment.copy_from`, ``copy_`` and ``zero_``; every other
operation that writes is refused, because its result would be lost.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from float8.kernels import moments
from float8.optim.tiles import part, tiles

aten = torch.ops.aten
KINDS = ("float8", "float8_expanded", "float16")


class Parts(NamedTuple):
    """A moment, or some rows of one, as plain matrices.

    Attributes:
        codes: (R, C), float8_e4m3fn or float16.
        scale: (R, ceil(C / group)), float32.
        exponent: as scale, or None where the range is not expanded.
        group: how many neighbours in a row share a scale.
    """

    codes: Tensor
    scale: Tensor
    exponent: Tensor | None
    group: int

    def decode(self) -> Tensor:
        """The values, (R, C) float32."""
        if self.exponent is None:
            return moments.decode(self.codes, self.scale, self.group)
        return moments.decode_expanded(self.codes, self.scale, self.exponent, self.group)

    def encode(self, x_RC: Tensor, chance: Tensor | None = None) -> None:
        """Overwrite the parts with the codes of ``x_RC``, (R, C) float32.

        Args:
            x_RC: the values.
            chance: uniform in [0, 1), (R, C): round up or down at random, so that the expectation
                is x. None rounds to nearest.
        """
        if self.exponent is None:
            codes, scale = moments.encode(x_RC, self.group, self.codes.dtype, chance)
        else:
            codes, scale, exponent = moments.encode_expanded(x_RC, self.group, chance)
            self.exponent.copy_(exponent)
        self.codes.copy_(codes)
        self.scale.copy_(scale)

    def tile(self, rows: slice, cols: slice) -> Parts:
        """Views of some rows, and of some columns that begin with a group."""
        groups = slice(cols.start // self.group, -(-cols.stop // self.group))
        exponent = None if self.exponent is None else part(self.exponent, rows, groups)
        codes, scale = part(self.codes, rows, cols), part(self.scale, rows, groups)
        return Parts(codes, scale, exponent, self.group)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(R, C) of a tensor: its first dimension and the product of the others; (1, n) of a vector."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def matrix_of(x: Tensor) -> Tensor:
    """x as a matrix (R, C): a view, or a copy if its rows are not contiguous."""
    return x.reshape(matrix_shape(x.shape))


class Moment(Tensor):
    """A float32 tensor kept as codes and scales.

    Args:
        codes: float8_e4m3fn or float16, contiguous, of the tensor's shape.
        scale: float32 of shape (R, ceil(C / group)); see the head of this file.
        exponent: float32 of scale's shape, or None.
        group: how many neighbours in a row share a scale.

    Raises:
        ValueError: the parts do not fit each other.
    """

    codes: Tensor
    scale: Tensor
    exponent: Tensor | None
    group: int

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> Moment:
        """See the class."""
        self: Moment = torch.Tensor._make_wrapper_subclass(
            cls, codes.size(), strides=codes.stride(), dtype=torch.float32, device=codes.device
        )
        return self

    def __init__(self, codes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> None:
        rows, cols = matrix_shape(codes.shape)
        expected = (rows, -(-cols // group))
        for name, x in (("scale", scale), ("exponent", exponent)):
            if x is not None and tuple(x.shape) != expected:
                raise ValueError(
                    f"{name} must have shape {expected} for codes of shape {tuple(codes.shape)} "
                    f"and groups of {group}, got {tuple(x.shape)}"
                )
        self.codes, self.scale, self.exponent, self.group = codes, scale, exponent, group

    @staticmethod
    def zeros(
        shape: Sequence[int], kind: str, group: int, device: torch.device | str | None = None
    ) -> Moment:
        """A moment before the first step.

        Args:
            shape: of the parameter.
            kind: one of `KINDS`.
            group: how many neighbours in a row share a scale.
            device: where it lives.
        """
        check_kind(kind)
        rows, cols = matrix_shape(shape)
        dtype = torch.float16 if kind == "float16" else torch.float8_e4m3fn
        # uint8 on the way: not every device fills float8.
        width = torch.int16 if kind == "float16" else torch.uint8
        codes = torch.zeros(tuple(shape), dtype=width, device=device).view(dtype)
        groups = (rows, -(-cols // group))
        one = torch.zeros(1, 1, device=device)  # what a group of zeros has for scale and exponent
        if kind == "float8_expanded":
            _, scale, exponent = moments.encode_expanded(one, 1)
            return Moment(codes, _filled(scale, groups), _filled(exponent, groups), group)
        _, scale = moments.encode(one, 1, dtype)
        return Moment(codes, _filled(scale, groups), None, group)

    @staticmethod
    def quantize(x: Tensor, kind: str, group: int) -> Moment:
        """The moment nearest to ``x``, a float tensor of any shape.

        Args:
            x: float32, bfloat16 or float16.
            kind: one of `KINDS`.
            group: how many neighbours in a row share a scale.
        """
        result = Moment.zeros(x.shape, kind, group, x.device)
        result.copy_from(x)
        return result

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.exponent is not None:
            return "float8_expanded"
        return "float16" if self.codes.dtype == torch.float16 else "float8"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of codes, scales and exponents."""
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Codes, scale and, if there is one, exponent."""
        return [self.codes, self.scale] + ([] if self.exponent is None else [self.exponent])

    def parts(self) -> Parts:
        """The same memory as plain matrices."""
        return Parts(matrix_of(self.codes), self.scale, self.exponent, self.group)

    def dequantize(self) -> Tensor:
        """The values in float32, in the tensor's shape."""
        return self.parts().decode().view(self.codes.shape)

    def copy_from(self, x: Tensor) -> None:
        """Overwrite the values by those of ``x``, of the same shape; a few MB at a time."""
        if x.shape != self.codes.shape:
            raise ValueError(
                f"cannot write values of shape {tuple(x.shape)} into a moment of shape "
                f"{tuple(self.codes.shape)}"
            )
        parts = self.parts()
        x_RC = x.detach().reshape(parts.codes.shape)
        for rows, cols in tiles(parts.codes.shape, self.group):
            parts.tile(rows, cols).encode(part(x_RC, rows, cols).float())

    def _with(self, function: Callable[[Tensor], Tensor]) -> Moment:
        """The moment whose parts are what ``function`` makes of these."""
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Moment:
        memo[id(self)] = result = self._with(lambda part: copy.deepcopy(part, memo))
        return result

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


def check_kind(kind: str) -> None:
    """Raise ValueError for what is not one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"a moment is one of {', '.join(KINDS)}, not {kind!r}")


def _filled(value: Tensor, shape: tuple[int, int]) -> Tensor:
    return value.expand(shape).clone(memory_format=torch.contiguous_format)


def _rebuild(as_bytes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> Moment:
    """Unpickle a moment."""
    is_bytes = as_bytes.dtype == torch.uint8
    codes = as_bytes.view(torch.float8_e4m3fn) if is_bytes else as_bytes
    return Moment(codes, scale, exponent, group)


def _each_part(func: Any, x: Moment, *args: Any, **kwargs: Any) -> Moment:
    kwargs.pop("memory_format", None)  # codes are contiguous
    return x._with(lambda part: func(part, *args, **kwargs))


def _to_copy(func: Any, x: Moment, **kwargs: Any) -> Tensor:
    if kwargs.get("dtype") in (None, torch.float32):
        return _each_part(func, x, **{**kwargs, "dtype": None})
    return func(x.dequantize(), **kwargs)


def _copy_(func: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, Moment):
        assert isinstance(source, Moment)
        return func(destination, source.dequantize(), non_blocking)
    if isinstance(source, Moment) and _kept_alike(source, destination):
        for mine, theirs in zip(destination.tensors(), source.tensors(), strict=True):
            mine.copy_(theirs, non_blocking)
        return destination
    values = source.dequantize() if isinstance(source, Moment) else source
    destination.copy_from(values.to(destination.device).expand(destination.shape))
    return destination


def _kept_alike(a: Moment, b: Moment) -> bool:
    return (a.kind, a.group, a.shape) == (b.kind, b.group, b.shape)


def _zero_(func: Any, x: Moment) -> Tensor:
    zeros = Moment.zeros(x.shape, x.kind, x.group, x.device)
    return _copy_(aten.copy_.default, x, zeros)


_OPS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _each_part,
    aten.alias.default: _each_part,
    aten.clone.default: _each_part,
    aten._pin_memory.default: _each_part,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
}


torch.serialization.add_safe_globals([Moment, _rebuild])
