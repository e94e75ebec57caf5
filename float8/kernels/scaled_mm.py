"""The float8 GEMM ``(a * a_scale) @ (b * b_scale).T``: which candidate runs, and who refuses what.

Two candidates: cuBLASLt/CUTLASS (hipBLASLt on AMD) through ``torch._scaled_mm``, and the reference.
The reference serves every device that is not CUDA, and ``emulate=True``. On CUDA a product that
the hardware does not take is refused with the reason and what to do; it never runs slower or in
another precision unasked.

What float8 GEMMs need (cuBLASLt documentation, "FP8 data types", and torch's own checks):

- both operands with the contraction contiguous: ``a`` row-major, ``b.T`` column-major;
- contraction and output columns in multiples of 16;
- not E5M2 by E5M2;
- rowwise and blockwise products are written in bfloat16 only.

`SUPPORT` says which scale granularities each architecture takes, and why not the others.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.granularity import WHOLE, Block
from float8.kernels import reference

ALIGNMENT = 16
TENSORWISE, ROWWISE, BLOCKWISE = "tensorwise", "rowwise", "blockwise"
_BLOCK_NAMES: dict[Block, str] = {
    (WHOLE, WHOLE): TENSORWISE,
    (1, WHOLE): ROWWISE,
    (1, 128): "1x128",
    (128, 128): "128x128",
}
# A pair of operand granularities -> the product that the hardware is asked for. A tensorwise scale
# beside a rowwise one is repeated for every row, which is free.
_PRODUCTS: dict[tuple[str, str], str] = {
    (TENSORWISE, TENSORWISE): TENSORWISE,
    (TENSORWISE, ROWWISE): ROWWISE,
    (ROWWISE, TENSORWISE): ROWWISE,
    (ROWWISE, ROWWISE): ROWWISE,
    ("1x128", "128x128"): BLOCKWISE,
    ("128x128", "1x128"): BLOCKWISE,
    ("1x128", "1x128"): BLOCKWISE,
}

# architecture -> product -> None where it runs, else the reason why not.
_NO_128 = "its GEMM library has no product with 1x128 and 128x128 scales"
SUPPORT: dict[str, dict[str, str | None]] = {
    "sm_89": {TENSORWISE: None, ROWWISE: None, BLOCKWISE: _NO_128},
    "sm_90": {TENSORWISE: None, ROWWISE: None, BLOCKWISE: None},
    "sm_100": {TENSORWISE: None, ROWWISE: None, BLOCKWISE: _NO_128 + " (it has MX scales instead)"},
    "gfx94": {TENSORWISE: None, ROWWISE: None, BLOCKWISE: _NO_128},
    "gfx95": {TENSORWISE: None, ROWWISE: None, BLOCKWISE: _NO_128},
}
# cuBLASLt takes 1x128 and 128x128 scales from this CUDA version on (cuBLAS 12.9 release notes).
_BLOCKWISE_CUDA = (12, 9)
_EMULATE = "set emulate=True to run it in plain PyTorch"


def architecture(device_index: int | None = None) -> str:
    """``sm_90``, ``gfx94`` and so on: the name under which `SUPPORT` lists a CUDA device.

    Without a GPU, as when FakeTensors stand for CUDA ones, ``sm_90``.
    """
    return _architecture(device_index)


# What torch.compiler.assume_constant_result does, which would import all of dynamo (a second).
architecture._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _architecture(device_index: int | None) -> str:
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device_index or 0).gcnArchName)[:5]
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}" if major < 10 else f"sm_{major}0"


def product_of(a_block: Block, b_block: Block) -> str | None:
    """Which hardware product a pair of blocks needs, or None if there is none for them."""
    names = (_BLOCK_NAMES.get(a_block, ""), _BLOCK_NAMES.get(b_block, ""))
    return _PRODUCTS.get(names)


def refuses_granularity(a_block: Block, b_block: Block) -> str | None:
    """The reason why no hardware at all multiplies operands with these blocks, or None."""
    if product_of(a_block, b_block) is None:
        pairs = ", ".join(f"{a} by {b}" for a, b in _PRODUCTS)
        return (
            f"no hardware multiplies blocks {a_block} by {b_block} (-1: the whole dimension); "
            f"it multiplies {pairs}. Use one of those or {_EMULATE}"
        )
    return None


def refuses_device(arch: str, a_block: Block, b_block: Block, out_dtype: torch.dtype) -> str | None:
    """The reason why a CUDA architecture does not run a product, or None if it does."""
    if (reason := refuses_granularity(a_block, b_block)) is not None:
        return reason
    product = product_of(a_block, b_block)
    assert product is not None
    if arch not in SUPPORT:
        return (
            f"{arch} is not known to have float8 tensor cores (known: {', '.join(SUPPORT)}); "
            f"{_EMULATE}"
        )
    if (reason := SUPPORT[arch][product]) is not None:
        return f"{arch} does not run a {product} product: {reason}; {_EMULATE}"
    if product == BLOCKWISE and _cuda_version() < _BLOCKWISE_CUDA:
        return f"a blockwise product needs CUDA 12.9, this torch has {torch.version.cuda}"
    if product != TENSORWISE and out_dtype != torch.bfloat16:
        return (
            f"a {product} product is written in bfloat16 only, not {out_dtype}; use bfloat16 "
            "(model.bfloat16() or torch.autocast), a tensorwise recipe, or emulate=True"
        )
    return None


def refuses_formats(a_dtype: torch.dtype, b_dtype: torch.dtype) -> str | None:
    """The reason why no hardware multiplies operands of these dtypes, or None."""
    e5m2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
    if a_dtype in e5m2 and b_dtype in e5m2:
        return "no hardware multiplies E5M2 by E5M2; cast one of the operands to E4M3"
    return None


def refuses_sizes(contraction: int, columns: int) -> str | None:
    """The reason why the hardware does not take a product of these sizes, or None."""
    bad = [
        f"{name}={size}"
        for name, size in (("contraction", contraction), ("columns", columns))
        if size % ALIGNMENT
    ]
    return f"{' and '.join(bad)} not a multiple of {ALIGNMENT}" if bad else None


def _cuda_version() -> tuple[int, ...]:
    if torch.version.cuda is None:  # a CPU build tracing FakeTensors
        return _BLOCKWISE_CUDA
    return tuple(int(part) for part in torch.version.cuda.split(".")[:2])


def runs_reference(device: torch.device, emulate: bool) -> bool:
    """Whether products on this device run in plain PyTorch."""
    return emulate or device.type != "cuda"


def prepare(data: Tensor, emulate: bool = False) -> Tensor:
    """What several products with the same operand should be handed.

    The reference multiplies in bfloat16: codes that are read twice are decoded once. Hardware reads
    the codes themselves.
    """
    return reference.decode(data) if runs_reference(data.device, emulate) else data


def scaled_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    emulate: bool = False,
    pad: bool = False,
) -> Tensor:
    """``(a * a_scale) @ (b * b_scale).T + bias``, accumulated in float32.

    Args:
        a_MK, b_NK: float8 matrices, or what `prepare` made of them; the contraction K last; any
            strides (copied if need be).
        a_scale, b_scale: float32, ``ceil(shape / block)``.
        a_block, b_block: the extents that share a scale; -1 is the whole dimension.
        bias_N: added before rounding where the hardware can, or None.
        out_dtype: float32, bfloat16 or float16; rowwise and blockwise on CUDA: bfloat16.
        use_fast_accum: see `GemmConfig`.
        emulate: run the reference on a CUDA device too.
        pad: pad sizes that are no multiple of 16 with zeros instead of refusing.

    Returns:
        (M, N) in ``out_dtype``.

    Raises:
        ValueError: the device does not run this product; the message says what would.
    """
    if (reason := refuses_formats(a_MK.dtype, b_NK.dtype)) is not None:
        raise ValueError(f"scaled_mm: {reason}")
    if runs_reference(a_MK.device, emulate) or 0 in (*a_MK.shape, *b_NK.shape):
        return reference.scaled_mm(
            a_MK, a_scale, b_NK, b_scale, a_block, b_block, bias_N, out_dtype
        )
    arch = architecture(a_MK.device.index)
    if (reason := refuses_device(arch, a_block, b_block, out_dtype)) is not None:
        raise ValueError(f"scaled_mm: {reason}")
    rows_N, inner_K = b_NK.shape
    if (reason := refuses_sizes(inner_K, rows_N)) is not None:
        if not pad:
            raise ValueError(f"scaled_mm: {reason}; pad the operands or set pad_inner_dim=True")
        padded_b, padded_scale, padded_bias = _pad_b(b_NK, b_scale, b_block, bias_N)
        a_padded = _pad_codes(a_MK, 0, -inner_K % ALIGNMENT)
        out = _torch_scaled_mm(
            a_padded, a_scale, padded_b, padded_scale, a_block, b_block, padded_bias,
            out_dtype, use_fast_accum,
        )  # fmt: skip
        return out.narrow(1, 0, rows_N)
    return _torch_scaled_mm(
        a_MK, a_scale, b_NK, b_scale, a_block, b_block, bias_N, out_dtype, use_fast_accum
    )


def _pad_codes(data: Tensor, rows: int, cols: int) -> Tensor:
    # Code 0 is the value 0 in every format; padding is defined for bytes, not for float8.
    return F.pad(data.view(torch.uint8), (0, cols, 0, rows)).view(data.dtype)


def _pad_b(
    b_NK: Tensor, scale: Tensor, block: Block, bias_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = -b_NK.shape[0] % ALIGNMENT
    data = _pad_codes(b_NK, rows, -b_NK.shape[1] % ALIGNMENT)
    if block[0] == 1:
        scale = F.pad(scale, (0, 0, 0, rows), value=1.0)
    elif block[0] != WHOLE:
        missing = -(-data.shape[0] // block[0]) - scale.shape[0]
        scale = F.pad(scale, (0, 0, 0, missing), value=1.0)
    return data, scale, None if bias_N is None else F.pad(bias_N, (0, rows))


def _torch_scaled_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_NK: Tensor,
    b_scale: Tensor,
    a_block: Block,
    b_block: Block,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    product = product_of(a_block, b_block)
    if product == TENSORWISE:
        a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
    elif product == ROWWISE:
        a_scale = _contraction_last(a_scale.expand(a_MK.shape[0], 1))
        b_scale = _contraction_last(b_scale.t().expand(1, b_NK.shape[0]))
    else:
        if (128, 128) in (a_block, b_block):
            a_MK, a_scale = _whole_rows_of_scales(a_MK, a_scale)
            b_NK, b_scale = _whole_rows_of_scales(b_NK, b_scale)
        a_scale, b_scale = _blockwise_layout(a_scale, a_block), _blockwise_layout(b_scale, b_block)
        b_scale = b_scale.t()
    fused_bias = bias_N if _fuses_bias(product, bias_N, out_dtype) else None
    out = torch._scaled_mm(
        _contraction_last(a_MK),
        _contraction_last(b_NK).t(),
        scale_a=a_scale,
        scale_b=b_scale,
        bias=fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    if bias_N is not None and fused_bias is None:
        out = (out + bias_N).to(out_dtype)
    return out


def _contraction_last(data: Tensor) -> Tensor:
    # Spelt as a clone: Tensor.contiguous() needs a CUDA build even for FakeTensors.
    # By strides: one row of any strides counts as contiguous, and hardware reads the strides.
    if data.stride() == (data.shape[1], 1):
        return data
    return data.clone(memory_format=torch.contiguous_format)


def _whole_rows_of_scales(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    # cuBLASLt reads 128x128 scales in rows aligned to 16 bytes, whatever torch lets through, and
    # otherwise returns wrong numbers (pytorch/pytorch#166752): pad the contraction with zeros.
    missing = -scale.shape[1] % 4
    if not missing:
        return data, scale
    padded = _pad_codes(data, 0, (scale.shape[1] + missing) * 128 - data.shape[1])
    return padded, F.pad(scale, (0, missing), value=1.0)


def _blockwise_layout(scale: Tensor, block: Block) -> Tensor:
    """A scale as cuBLASLt reads it: 1x128 with its rows contiguous, 128x128 with its columns."""
    return _contraction_last(scale.t()).t() if block[0] == 1 else _contraction_last(scale)


def _fuses_bias(product: str | None, bias_N: Tensor | None, out_dtype: torch.dtype) -> bool:
    # torch fuses a bias of the output's own 16-bit type into tensorwise and rowwise products.
    return (
        bias_N is not None and product != BLOCKWISE and bias_N.dtype == out_dtype != torch.float32
    )
