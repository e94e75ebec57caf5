"""`Moment`: a state of an optimizer in one or two bytes per element.

A moment is a record of plain tensors: ``codes`` of the parameter's shape and, per group of
``group`` elements of a row, a float32 ``scale`` and, where the dynamic range is expanded, a float32
``exponent``. `Moment.dequantize` gives its values. A row is one index of the first dimension, laid
flat; a tensor of one dimension is one row. So a moment of shape (R, ...) is a matrix (R, C) with
ceil(C / group) groups per row, the last perhaps shorter. A cut along the first dimension cuts codes
and scales alike: that is how checkpoints reshard bit for bit.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.kernels.moments import (
    StateMatrix,
    encode_expanded,
    encode_groups,
    groups_shape,
    matrix_of,
    part,
    tiles,
)


class Moment(NamedTuple):
    """A state of a parameter, kept as codes and scales.

    Args:
        codes: float8_e4m3fn or float16, contiguous, of the parameter's shape.
        scale: float32 of shape (R, ceil(C / group)); R is the
            first extent of the parameter and C the product of the others; a vector is one row.
        exponent: float32 of scale's shape, or None.
        group: how many consecutive elements of a row share a scale.
    """

    codes: Tensor
    scale: Tensor
    exponent: Tensor | None
    group: int

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
        matrix, x_RC = result.matrix(), matrix_of(x.detach())
        for rows, cols in tiles(x_RC.shape, group):
            matrix.tile(rows, cols).write(part(x_RC, rows, cols).float())
        return result

    @property
    def kind(self) -> str:
        """What it stores: "float8", "float8_expanded" or "float16"."""
        if self.exponent is not None:
            return "float8_expanded"
        return "float16" if self.codes.dtype == torch.float16 else "float8"

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and exponents."""
        return sum([x.nbytes for x in self.matrix().tensors()])

    def matrix(self) -> StateMatrix:
        """Its memory as plain matrices."""
        return StateMatrix(matrix_of(self.codes), self.scale, self.exponent, self.group)

    def dequantize(self) -> Tensor:
        """The values in float32, in the parameter's shape."""
        return self.matrix().decode().view(self.codes.shape)

    def __reduce__(self) -> Any:
        # Plain float8 tensors do not pickle outside torch.save; bytes always do.
        as_bytes = self.codes.view(torch.uint8) if self.codes.element_size() == 1 else self.codes
        return _rebuild, (as_bytes, self.scale, self.exponent, self.group)


def _rebuild(as_bytes: Tensor, scale: Tensor, exponent: Tensor | None, group: int) -> Moment:
    """Unpickle a moment."""
    is_bytes = as_bytes.dtype == torch.uint8
    codes = as_bytes.view(torch.float8_e4m3fn) if is_bytes else as_bytes
    return Moment(codes, scale, exponent, group)


torch.serialization.add_safe_globals([_rebuild])
