"""The float8 GEMM ``(a * a_scale) @ (b * b_scale).T``: which candidate runs it, on which device.

On CUDA, the first of `CANDIDATES` that does not refuse the product runs it:

=============  ======================================  ===========================================
candidate      products                                refuses
=============  ======================================  ===========================================
torch, as MX   rowwise, blockwise on sm_100, sm_103    scales that are not powers of two by format
torch          tensorwise, rowwise; blockwise on       contraction or columns that are not
(`cublas`)     sm_90 with CUDA 12.9; MX from sm_100    multiples of 16 (unless padded); results in
               on, and on gfx95                        another dtype than `written_dtypes` says
Triton         blockwise                               AMD GPUs, on which it is untested
(`gpu/`)
=============  ======================================  ===========================================

**Powers of two as MX.** An E8M0 scale is a power of two. So where the formats of both casts round
scales to powers of two, the same data with each scale repeated for its blocks of 1x32 is an MX
operand with equal values, which Blackwell's tensor cores scale themselves (as TransformerEngine
runs its block scaling there: transformer_engine/pytorch/csrc/extensions/gemm.cpp). One launch per
operand repeats the scales (``gpu/expand_scales.py``): 1/32 byte per element. A scale that E8M0
does not hold makes NaN of its products. Operands that MX products do not take, blocks of odd sizes
and DTensors, are multiplied by the last candidate.

Plain PyTorch runs it on every other device, and with ``emulate=True``. A product that no candidate
runs raises an error with each candidate's reason and the remedy. It never runs in another
precision, or in plain PyTorch, without being asked to. No hardware multiplies E5M2 by E5M2.

`scaled_mm` chooses the candidate and multiplies. A layer chooses once (`gemm_for`) and then calls
`multiply` at each step, which checks only sizes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8.formats import Format, on_family
from float8.granularity import Block, block_name
from float8.kernels import cublas, definition
from float8.kernels.cublas import ALIGNMENT
from float8.kernels.matrix import Float8Matrix
from float8.kernels.registration import load_kernels, op_on

TENSORWISE_PRODUCT, ROWWISE_PRODUCT, BLOCKWISE_PRODUCT, MX_PRODUCT = (
    "tensorwise",
    "rowwise",
    "blockwise",
    "mx",
)
# The names of two blocks (`block_name`) -> the product that they make. A tensorwise scale beside a
# rowwise one is repeated for every row, which is free. What is not listed runs with emulate=True.
_PRODUCTS: dict[tuple[str, str], str] = {
    (TENSORWISE_PRODUCT, TENSORWISE_PRODUCT): TENSORWISE_PRODUCT,
    (TENSORWISE_PRODUCT, ROWWISE_PRODUCT): ROWWISE_PRODUCT,
    (ROWWISE_PRODUCT, TENSORWISE_PRODUCT): ROWWISE_PRODUCT,
    (ROWWISE_PRODUCT, ROWWISE_PRODUCT): ROWWISE_PRODUCT,
    ("1x128", "128x128"): BLOCKWISE_PRODUCT,
    ("128x128", "1x128"): BLOCKWISE_PRODUCT,
    ("1x128", "1x128"): BLOCKWISE_PRODUCT,
    ("1x32", "1x32"): MX_PRODUCT,
    ("1x32", "32x32"): MX_PRODUCT,  # whose scales are repeated for every row
}
# Every architecture with float8 tensor cores that the library knows -> product -> None where
# torch._scaled_mm runs it, else the reason why not. Sources, in torch 2.11 and 2.13:
# - ATen/native/cuda/ScaledBlasDeviceUtils.cpp: 8.9, and everything from 9.0 on;
# - tensorwise: cuBLASLt, on all of these (sm_120: pytorch#192707 runs it);
# - rowwise: ScaledBlas.cpp gives it to cuBLASLt on sm_90 with CUDA 12.9, elsewhere to the CUTLASS
#   kernels of RowwiseScaledMM.cu, which dispatches on 8.9, 9.x, 10.x, 11.x and 12.x (sm_120:
#   pytorch#155991); the Linux wheels contain them for 8.9, 9.0, 10.0, 10.3, 12.0 and 12.1;
# - blockwise: ScaledBlas.cpp, _check_deepseek_support;
# - MX: cuBLASLt. Torch runs its tests from sm_100 on, sm_120 too (PLATFORM_SUPPORTS_MX_GEMM of
#   torch/testing/_internal/common_cuda.py), where cuBLASLt takes the layouts of `cublas`
#   (pytorch#198126); and on gfx950 from ROCm 7.0 on (ScaledBlas.cpp).
_NO_128 = "takes 1x128 and 128x128 scales on sm_90 only"
_NO_MX = (
    "multiplies MX formats from sm_100 (B200) on and on gfx95 (MI350) only: use the recipe "
    "blockwise or rowwise"
)
_BASIC: dict[str, str | None] = {
    TENSORWISE_PRODUCT: None,
    ROWWISE_PRODUCT: None,
    BLOCKWISE_PRODUCT: _NO_128,
    MX_PRODUCT: _NO_MX,
}
SUPPORT: dict[str, dict[str, str | None]] = {
    "sm_89": {**_BASIC},
    "sm_90": {**_BASIC, BLOCKWISE_PRODUCT: None},
    "sm_100": {**_BASIC, MX_PRODUCT: None},
    "sm_103": {**_BASIC, MX_PRODUCT: None},
    "sm_120": {**_BASIC, MX_PRODUCT: None},
    "sm_121": {**_BASIC, MX_PRODUCT: None},
    "gfx94": {**_BASIC},
    "gfx95": {**_BASIC, MX_PRODUCT: None},
}
# Where powers of two run as MX products. TransformerEngine's check_mxfp8_support refuses sm_120.
_AS_MX = ("sm_100", "sm_103")
# cuBLASLt takes scales of rows and of 128-wide blocks from this CUDA version on, on sm_90 alone
# (cuBLAS 12.9 release notes).
_CUBLASLT_CUDA = (12, 9)
_EMULATE = "set emulate=True to run it in plain PyTorch"


def architecture(device_index: int | None = None) -> str:
    """``sm_90``, ``gfx94`` and so on: the name under which `SUPPORT` lists a CUDA device.

    Without a GPU, as with FakeTensors of a CUDA device, it is ``sm_90``.
    """
    return _architecture(device_index)


# The effect of torch.compiler.assume_constant_result, whose import of dynamo would take a second.
architecture._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _architecture(device_index: int | None) -> str:
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device_index or 0).gcnArchName)[:5]
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}"


CPU = "cpu"  # the device family of every device that has no kernels of its own


def family_of(device: torch.device) -> str:
    """The device family that decides which kernels run: `CPU`, or the `architecture`.

    A device of another type takes a line here, and rows in the tables of this file and of `casts`.
    """
    return CPU if device.type != "cuda" else architecture(device.index)


def on_device(fmt: Format, device: torch.device) -> Format:
    """The twin of ``fmt`` that ``device`` multiplies: ``fnuz`` on AMD gfx94x, else ``fmt``."""
    return on_family(fmt, family_of(device))


# --- the candidates


def written_dtypes(arch: str, product: str) -> tuple[torch.dtype, ...]:
    """The dtypes in which ``torch._scaled_mm`` writes a product that it runs, on any torch >= 2.11.

    cuBLASLt writes rowwise products (its OUTER_VEC_32F scales) in all three dtypes, as torch's
    test_scaled_mm_vs_emulated_row_wise shows. The CUTLASS kernels of torch 2.11 write bfloat16 for
    every requested dtype (pytorch#187569), and hipBLASLt accepts only bfloat16, of MX products
    float16 too. Torch does not check the dtype of a blockwise result; its
    test_scaled_mm_block_wise_numerics covers two.
    """
    if product == ROWWISE_PRODUCT and not _scales_rows_by_cublaslt(arch):
        return (torch.bfloat16,)
    if product == BLOCKWISE_PRODUCT:
        return (torch.bfloat16, torch.float32)
    if product == MX_PRODUCT and arch == "gfx95":
        return (torch.bfloat16, torch.float16)
    return (torch.bfloat16, torch.float16, torch.float32)


def _scales_rows_by_cublaslt(arch: str) -> bool:
    return arch == "sm_90" and _cuda_version() >= _CUBLASLT_CUDA


def _reason_against_torch(arch: str, product: str, out_dtype: torch.dtype) -> str | None:
    if (reason := SUPPORT[arch][product]) is not None:
        return reason
    if product == BLOCKWISE_PRODUCT and _cuda_version() < _CUBLASLT_CUDA:
        return (
            f"takes 1x128 and 128x128 scales from CUDA 12.9 on, and this torch was built with "
            f"{torch.version.cuda}"
        )
    if out_dtype not in (written := written_dtypes(arch, product)):
        names = " or ".join([str(dtype).removeprefix("torch.") for dtype in written])
        return (
            f"writes a {product} product in {names} only, not {out_dtype}: use bfloat16 "
            "(model.bfloat16() or torch.autocast) or a tensorwise recipe"
        )
    return None


def _cuda_version() -> tuple[int, ...]:
    if torch.version.cuda is None:  # a CPU build tracing FakeTensors
        return _CUBLASLT_CUDA
    return tuple([int(part) for part in torch.version.cuda.split(".")[:2]])


def reason_against_triton(arch: str, *_: Any) -> str | None:
    """The reason why no Triton GEMM runs on this architecture, or None."""
    if not arch.startswith("sm_"):
        return "is for NVIDIA GPUs and untested on others"
    return None if _has_triton() else "needs Triton, which is not installed: `pip install triton`"


def _has_triton() -> bool:
    return _find_triton()


_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _find_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_multiply(
    a: Float8Matrix,
    b: Float8Matrix,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply by the Triton kernel, which takes any sizes.

    A contraction that is not a multiple of 16 is padded: without that, loads would be single bytes.
    """
    load_kernels("blockwise_mm")
    a_MK, b_NK = a.data, b.data
    if missing := -a_MK.shape[1] % ALIGNMENT:
        a_MK, b_NK = [cublas.pad_codes(codes, 0, missing) for codes in (a_MK, b_NK)]
    a_MK, b_NK = cublas.aligned_row_major(a_MK), cublas.aligned_row_major(b_NK)
    return op_on("blockwise_mm", a_MK)(
        a_MK, a.scale, b_NK, b.scale, a.block[0], b.block[0], bias_N, out_dtype
    )


def _reason_against_mx(arch: str, product: str, out_dtype: torch.dtype) -> str | None:
    if arch not in _AS_MX:
        return f"is for {' and '.join(_AS_MX)}"
    return reason_against_triton(arch, product, out_dtype)  # which expands the scales


def _multiply_as_mx(a: Float8Matrix, b: Float8Matrix, *others: Any) -> Tensor:
    """Multiply by torch as an MX product; odd blocks and DTensors by the last candidate."""
    bias_N, out_dtype, _ = others
    product = _PRODUCTS[block_name(a.block), block_name(b.block)]
    other, (columns, contraction) = CANDIDATES[product][-1], b.data.shape
    is_odd = not other.is_aligned and (columns % ALIGNMENT or contraction % ALIGNMENT)
    if is_odd or cublas.is_sharded(a.data) or cublas.is_sharded(b.data):
        if reason := other.reason_against(family_of(a.data.device), product, out_dtype):
            raise ValueError(f"scaled_mm: {other.name} {reason}")
        return other.multiply(a, b, *others)
    load_kernels("expand_scales")
    expand = op_on("expand_scales", a.scale)
    a, b = [Float8Matrix(x.data, expand(x.scale, x.block, *x.data.shape), (1, 32)) for x in (a, b)]
    return cublas.multiply_by_torch(a, b, bias_N, out_dtype, False)


class Candidate(NamedTuple):
    """One way to run a product on a GPU, or a product of groups.

    ``reason_against(architecture, product, out_dtype)`` returns the reason why it does not run, or
    None; of groups, it is also told whether both operands are E4M3. A message puts the reason after
    ``name``. ``is_aligned``: the contraction and the columns must be multiples of 16. ``multiply``
    pads sizes that are not, so callers check before. ``align``: what it needs of groups in the
    transposed layout. ``needs_power_of_two_scales``: it makes NaN of others.
    """

    name: str
    reason_against: Callable[..., str | None]
    multiply: Callable[..., Tensor]
    is_aligned: bool = True
    align: int = ALIGNMENT
    needs_power_of_two_scales: bool = False


PLAIN_PYTORCH = "plain PyTorch"
TORCH_GEMM = Candidate("torch._scaled_mm", _reason_against_torch, cublas.multiply_by_torch)
TRITON_GEMM = Candidate("the Triton GEMM", reason_against_triton, _triton_multiply, False)
ROWS_AS_MX = Candidate(
    "torch as MX", _reason_against_mx, _multiply_as_mx, needs_power_of_two_scales=True
)
BLOCKS_AS_MX = ROWS_AS_MX._replace(name="torch as MX, odd sizes Triton", is_aligned=False)
# product -> its candidates; the presumably fastest comes first
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    TENSORWISE_PRODUCT: (TORCH_GEMM,),
    ROWWISE_PRODUCT: (ROWS_AS_MX, TORCH_GEMM),
    BLOCKWISE_PRODUCT: (BLOCKS_AS_MX, TORCH_GEMM, TRITON_GEMM),
    MX_PRODUCT: (TORCH_GEMM,),
}
# Numerics of rowwise products. Precise: partial sums are added in float32 outside of the tensor
# cores' accumulators, which hold about 14 bits on Hopper (arXiv 2412.19437, section 3.3.2);
# cuBLASLt's OUTER_VEC and the CUTLASS kernels multiply them by both scales before they are written.
# Fast (`GemmConfig.use_fast_accum`): the tensor cores add all of the contraction. The error grows
# with it, so a config chooses this, and no table. Precise products stay precise with CUDA before
# 12.9 too, where CUTLASS runs them. torchao gives them to cuBLASLt, without scales, and scales the
# rounded result; since pytorch#144809 CUTLASS is about as fast as that (ao#2185).
CANDIDATES_BY_NAME = {candidate.name: candidate for row in CANDIDATES.values() for candidate in row}


# --- refusals


def product_name(a_block: Block, b_block: Block) -> str | None:
    """The hardware product for a pair of blocks, or None if there is none."""
    return _PRODUCTS.get((block_name(a_block), block_name(b_block)))


def reason_against_granularity(a_block: Block, b_block: Block) -> str | None:
    """The reason why no hardware at all multiplies operands with these blocks, or None."""
    if product_name(a_block, b_block) is None:
        pairs = ", ".join([f"{a} by {b}" for a, b in _PRODUCTS])
        return (
            f"no hardware multiplies {block_name(a_block)} by {block_name(b_block)} scales; "
            f"it multiplies {pairs}. Use one of those or {_EMULATE}"
        )
    return None


def reason_against_formats(a_dtype: torch.dtype, b_dtype: torch.dtype) -> str | None:
    """The reason why no hardware multiplies operands of these dtypes, or None."""
    e5m2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
    if a_dtype in e5m2 and b_dtype in e5m2:
        return "no hardware multiplies E5M2 by E5M2; cast one of the operands to E4M3"
    return None


def gemm_for(
    family: str,
    a_block: Block,
    b_block: Block,
    out_dtype: torch.dtype,
    emulate: bool = False,
    has_power_of_two_scales: bool = False,
) -> tuple[str, str | None]:
    """The GEMM that multiplies operands of two granularities, as `multiply` takes it.

    ``has_power_of_two_scales`` says whether the scales of both are powers of two by their format.
    Returns its name in `CANDIDATES_BY_NAME` and None; or "" and the reason why there is none.
    """
    if family == CPU or emulate:
        return PLAIN_PYTORCH, None
    if (reason := reason_against_granularity(a_block, b_block)) is not None:
        return "", reason
    if family not in SUPPORT:
        return "", (
            f"{family} is not known to have float8 tensor cores (known: {', '.join(SUPPORT)}); "
            f"{_EMULATE}"
        )
    product = _PRODUCTS[block_name(a_block), block_name(b_block)]
    what = family, product, out_dtype
    name, reasons = first_candidate(CANDIDATES[product], has_power_of_two_scales, *what)
    return name, None if name else (
        f"{family} does not run a {product} product written in {out_dtype}: {reasons}. "
        f"Or {_EMULATE}"
    )


def first_candidate(
    candidates: Sequence[Candidate], has_power_of_two_scales: bool, *what: Any
) -> tuple[str, str]:
    """The name of the first candidate that runs a product, and ""; or "" and all reasons."""
    reasons = []
    for candidate in candidates:
        reason = candidate.reason_against(*what)
        if reason is None and (has_power_of_two_scales or not candidate.needs_power_of_two_scales):
            return candidate.name, ""
        if not candidate.needs_power_of_two_scales:
            reasons.append(f"{candidate.name} {reason}")
    return "", "; ".join(reasons)


# --- the product


def is_aligned(gemm: str) -> bool:
    """Whether a GEMM takes only contractions and columns that are multiples of 16."""
    return gemm in CANDIDATES_BY_NAME and CANDIDATES_BY_NAME[gemm].is_aligned


def needs_power_of_two_scales(gemm: str) -> bool:
    """Whether a GEMM, grouped or not, reads scales as powers of two: no factor fits into them."""
    return gemm in CANDIDATES_BY_NAME and CANDIDATES_BY_NAME[gemm].needs_power_of_two_scales


def unaligned(contraction: int, columns: int, multiple: int = ALIGNMENT) -> str | None:
    """The reason why a GEMM does not take these sizes without padding, or None."""
    sizes = {"contraction": contraction, "columns": columns}
    bad = " and ".join([f"{name}={size}" for name, size in sizes.items() if size % multiple])
    return f"{bad} not a multiple of {multiple}" if bad else None


class Product(NamedTuple):
    """How `multiply` multiplies; a plan's `Gemm` has these fields too.

    Args:
        name: of the GEMM, which `gemm_for` chose for these granularities.
        refusal: the reason why none multiplies, or None.
        out_dtype: of the result: float32, bfloat16 or float16; on CUDA see `written_dtypes`.
        use_fast_accum: see `GemmConfig`; for tensorwise and rowwise products.
        pad: pad sizes that are no multiple of 16 with zeros instead of refusing.
        align: of groups, the multiple to which their transposed layout is padded.
    """

    name: str
    refusal: str | None
    out_dtype: torch.dtype
    use_fast_accum: bool = False
    pad: bool = False
    align: int = 1


def multiply(a: Float8Matrix, b: Float8Matrix, gemm: Any, bias_N: Tensor | None = None) -> Tensor:
    """``(a.data * a.scale) @ (b.data * b.scale).T + bias``, accumulated in float32.

    Args:
        a, b: (M, K) and (N, K), the contraction K last; any strides (copied if need be).
        gemm: a `Product`, or what has its fields.
        bias_N: added before rounding where the hardware can, or None.

    Returns:
        (M, N) in ``gemm.out_dtype``.

    Raises:
        ValueError: no GEMM multiplies; sizes are no multiples of 16, without ``pad``; or operands
            are on several devices. The message names the remedy.
    """
    (a_MK, a_scale, a_block), (b_NK, b_scale, b_block), out_dtype = a, b, gemm.out_dtype
    if a_MK.numel() == 0 or b_NK.numel() == 0:
        out = a_MK.new_zeros((a_MK.shape[0], b_NK.shape[0]), dtype=out_dtype)
        return out if bias_N is None else out + bias_N.to(out_dtype)
    device, bias = a_MK.device, a_MK if bias_N is None else bias_N
    if not (a_scale.device == b_NK.device == b_scale.device == bias.device == device):
        places = ", ".join([str(x.device) for x in (a_MK, a_scale, b_NK, b_scale, bias)])
        raise ValueError(f"scaled_mm: a, its scale, b, its scale and bias are on {places}")
    if gemm.name == PLAIN_PYTORCH:
        is_sharded = hasattr(a_MK, "device_mesh")  # the op has no rules for DTensors: aten has
        run = definition.scaled_mm if is_sharded else torch.ops.float8.scaled_mm.default
        return run(a_MK, a_scale, b_NK, b_scale, a_block, b_block, bias_N, out_dtype)
    if gemm.refusal is not None:
        raise ValueError(f"scaled_mm: {gemm.refusal}")
    candidate, (columns, contraction) = CANDIDATES_BY_NAME[gemm.name], b_NK.shape
    is_odd = columns % ALIGNMENT or contraction % ALIGNMENT
    if candidate.is_aligned and not gemm.pad and is_odd:
        reason = unaligned(contraction, columns)
        raise ValueError(f"scaled_mm: {reason}; pad the operands or set pad_inner_dim=True")
    return candidate.multiply(a, b, bias_N, out_dtype, gemm.use_fast_accum)


def scaled_mm(
    a: Float8Matrix,
    b: Float8Matrix,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    emulate: bool = False,
    pad: bool = False,
) -> Tensor:
    """`multiply` by the GEMM that its device has for these granularities.

    ``emulate`` runs plain PyTorch on a CUDA device too. For the other arguments see `Product`.
    """
    if not emulate and (reason := reason_against_formats(a.data.dtype, b.data.dtype)) is not None:
        raise ValueError(f"scaled_mm: {reason}")
    name, refusal = gemm_for(family_of(a.data.device), a.block, b.block, out_dtype, emulate)
    return multiply(a, b, Product(name, refusal, out_dtype, use_fast_accum, pad), bias_N)
