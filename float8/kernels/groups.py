"""Tokens that are sorted into groups, one group per expert: their layout and their casts.

A grouped GEMM multiplies each group of tokens with the weight of its expert. ``offs`` (E,) int32 is
the end of each group among the T rows of ``x_TK``. Rows at or beyond ``offs[-1]`` are in no group
and never read. ``offs`` lies on the device; on a GPU nothing here waits for its values.

The GEMM that contracts the tokens reads the transpose of a group, so the transposed operand
``data_KP`` has the groups side by side, with a layout of its own:

- Group g has its tokens in the columns from ``starts[g]`` on, ``starts[g]`` being the sum of
  ``ceil(size / align) * align`` over the groups before it. ``align`` is what the kernels need: 1 on
  a CPU, where ``P = T``. The columns between groups hold zeros.
- ``P`` must be known without the values of ``offs``: `padded_tokens` is an upper bound.
- Scales: one for the tensor (1, 1); one per row of a group (E, K); one per ``extent`` tokens of a
  group (K, P // extent + E), block j of group g being in column ``starts[g] // extent + g + j``.
  Two groups never share a block, and no column is used twice.

`cast_groups_definition` casts token operands, and is one opaque op to torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import WHOLE, Block, ceil_div, scale_shape
from float8.kernels import cpu
from float8.kernels.definition import scale_from_amax
from float8.kernels.registration import define_op

SHORT_SUM = 4096  # terms up to which sums of experts are fast, see `GemmConfig`


def padded_tokens(tokens: int, experts: int, align: int) -> int:
    """``P``: columns that hold T tokens in E groups, each group padded to a multiple of align.

    Without tokens it is 0, so that `float8.kernels.multiply_groups` asks no GEMM for the product.
    """
    if align == 1 or tokens == 0:
        return tokens
    return ceil_div(tokens + experts * (align - 1), align) * align


def scale_columns(tokens: int, experts: int, align: int, extent: int) -> int:
    """How many blocks of ``extent`` tokens the scale of a transposed operand holds, at most."""
    return padded_tokens(tokens, experts, align) // extent + experts


def ends_of(offs: Tensor, tokens: int) -> list[int]:
    """The values of ``offs``, on the host; a GPU must not be asked for them.

    Raises ValueError if they do not ascend from 0 to at most ``tokens``.
    """
    ends: list[int] = offs.tolist()
    if sorted([0, *ends, tokens]) != [0, *ends, tokens]:
        raise ValueError(
            f"grouped_mm: offs={ends} must ascend from 0 to at most {tokens}, the rows of x: they "
            "are the cumulative ends of the groups, such as counts.cumsum(0, dtype=torch.int32)"
        )
    return ends


def spans_of(ends: Sequence[int], align: int = 1) -> list[tuple[int, int, int]]:
    """For each group, its first row, its end, and its first column in a transposed operand."""
    spans, begin, start = [], 0, 0
    for end in ends:
        spans.append((begin, end, start))
        start += ceil_div(end - begin, align) * align
        begin = end
    return spans


def padded_sizes(offs: Tensor, align: int) -> Tensor:
    """The columns of each group in a transposed operand, padding included, on ``offs``' device."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return (sizes + (align - 1)) // align * align


def write_squares(out: Tensor, scales: Tensor, start: int, by_columns: bool) -> None:
    """Write the swizzled E8M0 scales of a group among those of all groups, which are bytes.

    ``start`` is the first column of the group where groups are padded to multiples of 128; for the
    order see ``gpu/cast_tokens.py``. ``by_columns``: the scales of transposed tokens.
    """
    first = start // 32 * len(out) if by_columns else start * out.shape[1]
    out.view(-1)[first : first + scales.numel()] = scales.view(torch.uint8)


def cast_groups_definition(
    x_TK: Tensor,
    offs: Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    scale_format: str,
    scale: Tensor | None,
    align: int,
    row_major: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast tokens in groups to float8: row-major, and transposed as the file's docstring says.

    ``x_TK`` is float32, bfloat16 or float16, with any strides; ``offs``, (E,) int32, has the ends
    of the groups. ``block`` is that of both orientations, the contraction last: (-1, -1), (1, -1)
    or (1, extent). ``scale`` (1, 1) float32 is for (-1, -1) only; None computes scales in
    ``scale_format``. Groups are padded to multiples of ``align`` in the transposed orientation.

    Returns ``data`` (T, K) and its scale; ``data_t`` (K, P) and its scale. What belongs to no group
    is zero, and its scale 1. An orientation that is not to be written has no elements.
    """
    block = tuple(block)
    ends = ends_of(offs, x_TK.shape[0])
    used = x_TK[: ends[-1]] if ends else x_TK[:0]
    out = _empty(x_TK, offs, block, dtype, scale_format, align, row_major, transposed)
    data, scales, data_t, scales_t = out
    fits = scale is None and not ScaleFormat(scale_format).is_e8m0
    if block == (WHOLE, WHOLE):
        scale = _scale(used, block, dtype, scale_format) if scale is None else scale
    if row_major:
        found = _scale(used, block, dtype, scale_format) if scale is None else scale
        cpu.cast_by_scale(used, found, block, dtype, fits, data[: len(used)])
        _write(scales, found)
    if transposed and scale is not None:
        _write(scales_t, scale)
    for group, (begin, end, start) in enumerate(spans_of(ends, align) if transposed else []):
        if begin == end:
            continue
        x_KT = x_TK[begin:end].t()
        found = _scale(x_KT, block, dtype, scale_format) if scale is None else scale
        cpu.cast_by_scale(x_KT, found, block, dtype, fits, data_t[:, start : start + end - begin])
        if scale is None:
            is_whole = block[1] == WHOLE
            where = (
                scales_t[group, :, None] if is_whole else scales_t[:, start // block[1] + group :]
            )
            _write(where, found)
    return out


def _scale(x: Tensor, block: Block, dtype: torch.dtype, scale_format: str) -> Tensor:
    return scale_from_amax(cpu.amax(x, block), torch.finfo(dtype).max, scale_format)


def _write(where: Tensor, values: Tensor) -> None:
    """Copy into the beginning of each dimension; one-byte types as bytes."""
    for dim, size in enumerate(values.shape):
        where = where.narrow(dim, 0, size)
    if values.element_size() == 1:
        where, values = where.view(torch.uint8), values.view(torch.uint8)
    where.copy_(values)


def _empty(
    x_TK: Tensor,
    offs: Tensor,
    block: Block,
    dtype: torch.dtype,
    scale_format: str,
    align: int,
    row_major: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `cast_groups_definition`, zeros with scales of 1, in the strides of the op."""
    (T, K), E = x_TK.shape, offs.shape[0]
    P = padded_tokens(T, E, align)
    data = x_TK.new_zeros((T, K) if row_major else (0, 0), dtype=torch.uint8).view(dtype)
    data_t = x_TK.new_zeros((P, K) if transposed else (0, 0), dtype=torch.uint8).view(dtype).t()
    shape: tuple[int, ...] = scale_shape((T, K), block) if row_major else (0, 0)
    shape_t: tuple[int, ...] = (0, 0)
    if transposed and block[1] == WHOLE:
        shape_t = (1, 1) if block[0] == WHOLE else (E, K)
    elif transposed:
        shape_t = (K, scale_columns(T, E, align, block[1]))
    kind = ScaleFormat(scale_format).dtype
    scale, scale_t = [
        x_TK.new_ones(size, dtype=torch.float32).to(kind) for size in (shape, shape_t)
    ]
    return data, scale, data_t, scale_t


# Of `cast_groups_definition`, and of each kernel in its place.
SCHEMA = (
    "(Tensor x, Tensor offs, int[] block, ScalarType dtype, str scale_format, Tensor? scale, "
    "int align, bool row_major, bool transposed) -> "
    "(Tensor data, Tensor scale, Tensor data_t, Tensor scale_t)"
)
define_op(
    "cast_groups" + SCHEMA,
    cast_groups_definition,
    lambda x, offs, block, dtype, scale_format, _, *how: _empty(
        x, offs, tuple(block), dtype, scale_format, *how
    ),
)
