"""Which candidate runs a grouped product on which GPU, and whether torch takes what it is handed.

FakeTensors of a CUDA device go through torch's own checks of strides, shapes and dtypes; the checks
that only its CUDA code makes (ATen/native/cuda/GroupedBlas.cpp: sizes that are multiples of 16) are
repeated here.
"""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import replace
from unittest import mock

import oracle
import pytest
import torch
from assertions import assert_all_bitwise, assert_error_within_baseline
from pretend import matrices, out_of_squares
from shapes import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from float8 import grouped_mm
from float8.config import RECIPES
from float8.kernels import grouped_products as module
from float8.kernels.gpu.cast_tokens import cast_tokens_op
from float8.kernels.products import PLAIN_PYTORCH, Product
from float8.linear.plan import USED

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
ONE, ROW, BY_128, SQUARE, MX = (-1, -1), (1, -1), (1, 128), (128, 128), (1, 32)
PAIRS = {
    "tensorwise": (ONE, ONE),
    "rowwise": (ROW, ROW),
    "rowwise by tensorwise": (ROW, ONE),
    "blockwise": (BY_128, SQUARE),
    "1x128": (BY_128, BY_128),
}
BY_TORCH, BY_TRITON = module.TORCH_MX.name, module.TRITON_GROUPED_GEMM.name
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
E, T = 3, 70
cast_matrices = torch.ops.float8.cast.default


class Products(TorchDispatchMode):
    """Which candidates multiplied; with the checks of torch's CUDA code that FakeTensors lack."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_grouped_mm.default:
            self.names.append(BY_TORCH)
            a, b = args[:2]
            assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
            assert a.storage_offset() % 16 == b.storage_offset() % 16 == 0
        elif func.name() == "float8::grouped_mm_gpu":
            self.names.append(BY_TRITON)
            a, _, b = args[:3]
            assert a.stride(-1) == b.stride(-1) == 1
            assert all(stride % 16 == 0 for stride in (*a.stride()[:-1], *b.stride()[:-1]))
        assert "local_scalar" not in func.name(), "waits for the device"
        return func(*args, **(kwargs or {}))


def cuda(*shape, dtype=torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def operands(pair, K, N, by_tokens, formats=(E4M3, E4M3)) -> list[Tensor]:
    """a, a_scale, b, b_scale, offs; by tokens, of N by K features."""
    P = -(-(T + 15 * E) // 16) * 16
    parts = []
    shapes = ((N, P), (K, P)) if by_tokens else ((T, K), (E, N, K))
    for shape, block, dtype in zip(shapes, pair, formats, strict=True):
        rows = shape[-2]
        if by_tokens and block[0] == 1:
            scale = (E, rows) if block == ROW else (rows, P // 128 + E)
        else:
            scale = tuple(
                1 if e == -1 else -(-s // e) for s, e in zip(shape[-2:], block, strict=True)
            )
        parts += [cuda(*shape, dtype=dtype), cuda(*shape[:-2], *scale)]
    return [*parts, cuda(E, dtype=torch.int32)]


def multiply(
    arch, pair, K, N, by_tokens, out_dtype=BF16, formats=(E4M3, E4M3), pad=False, change=None
):
    """The result and the names of the candidates that ran."""
    b_block = pair[1] if by_tokens else (1, *pair[1])
    is_e4m3 = formats == (E4M3, E4M3)
    name, reason = module.grouped_gemm_for(arch, pair[0], b_block, out_dtype, is_e4m3=is_e4m3)
    assert reason is None, reason
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        parts = operands(pair, K, N, by_tokens, formats)
        parts = parts if change is None else change(parts)
        gemm = Product(name, None, out_dtype, True, pad, module.group_alignment(name))
        out = module.multiply_groups(*matrices(parts[:4], pair[0], b_block), gemm, parts[4])
    assert products.names == [name]
    assert out.dtype == out_dtype and out.device.type == "cuda"
    assert out.shape == ((E, N, K) if by_tokens else (T, N))
    return name


@EVERY_PAIR
@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_every_product_runs(arch, pair, by_tokens):
    if by_tokens and SQUARE in pair:
        pytest.skip("no such operand")
    for out_dtype, formats in ((BF16, (E4M3, E4M3)), (BF16, (E5M2, E4M3)), (FP32, (E4M3, E4M3))):
        assert multiply(arch, pair, 64, 48, by_tokens, out_dtype, formats) == BY_TRITON

    def with_other_strides(parts):
        wide = cuda(*parts[0].shape[:-1], parts[0].shape[-1] + 16, dtype=torch.uint8)
        a = wide.narrow(-1, 3, parts[0].shape[-1]).view(E4M3)
        b = parts[2].view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).mT
        return [a, parts[1], b.view(E4M3), *parts[3:]]

    multiply(arch, pair, 64, 48, by_tokens, change=with_other_strides)
    if not by_tokens:  # whose features are rows
        for sizes in ((64, 7), (123, 48), (130, 130)):
            with pytest.raises(ValueError, match=r"multiples of 16; pad them or set"):
                multiply(arch, pair, *sizes, by_tokens=False)
            multiply(arch, pair, *sizes, by_tokens=False, pad=True)


@pytest.mark.parametrize(
    ("arch", "pair", "is_e4m3", "out_dtype", "words"),
    [
        ("gfx94", (ROW, ROW), True, BF16, "the Triton grouped GEMM is for NVIDIA GPUs"),
        ("sm_80", (ONE, ONE), True, BF16, "sm_80 is not known to have float8 tensor cores"),
        ("sm_90", ((1, 5), ONE), True, BF16, "no hardware multiplies 1x5 by"),
        ("sm_90", (MX, MX), True, BF16, "on sm_100 .B200. only: use the recipe blockwise"),
        ("sm_103", (MX, MX), True, BF16, "on sm_100 .B200. only: use the recipe blockwise"),
        ("sm_100", (MX, MX), False, BF16, "E4M3 by E4M3 only"),
        ("sm_100", (MX, MX), True, FP32, "writes bfloat16 only, not torch.float32"),
    ],
)
def test_refusals_say_why_and_the_way_out(arch, pair, is_e4m3, out_dtype, words):
    blocks = pair[0], (1, *pair[1])
    name, reason = module.grouped_gemm_for(arch, *blocks, out_dtype, False, is_e4m3)
    assert name == "" and re.search(words, reason) and "emulate=True" in reason, reason
    for family in (arch, "cpu"):  # emulated, or on a CPU, every product runs
        found = module.grouped_gemm_for(family, *blocks, out_dtype, family != "cpu", is_e4m3)
        assert found == (PLAIN_PYTORCH, None)


@pytest.mark.parametrize(("family", "emulate"), [("sm_90", False), ("sm_90", True), ("cpu", False)])
@pytest.mark.parametrize("blocks", [(SQUARE, (1, 1, 128)), (BY_128, SQUARE), (SQUARE, BY_128)])
def test_tokens_of_two_experts_share_no_scale(blocks, family, emulate):
    name, reason = module.grouped_gemm_for(family, *blocks, BF16, emulate)
    assert name == "" and "tokens in blocks 128x128: two experts would share" in reason, reason


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
def test_blackwell_gradients_of_experts_without_tokens_are_zeroed(arch, monkeypatch):
    """In high precision, which torch multiplies: pytorch#172439."""
    monkeypatch.setattr(module, "family_of", lambda device: arch)
    ops: list[str] = []

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func.name())
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.no_grad(), Ops():
        g, x, offs = cuda(T, 48, dtype=BF16), cuda(T, 64, dtype=BF16), cuda(E, dtype=torch.int32)
        out = module.multiply_groups_plainly(g.t(), x.t(), offs)
    assert out.shape == (E, 48, 64)
    assert any("masked_fill" in name for name in ops) == (arch != "sm_90")


# --- MX products


def mslk(a, b, scale_a, scale_b, *, offs, out_dtype) -> Tensor:
    """``torch._scaled_grouped_mm`` of MX operands in float64, as MSLK's kernel reads the scales.

    (csrc/gemm/cutlass/mx8mx8bf16_grouped, include/mslk/gemm/cutlass/grouped_common.cuh.) It writes
    no group without tokens.
    """
    assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_a.dim() == 2
    assert a.is_contiguous() and b.mT.is_contiguous() and out_dtype == BF16
    assert (a.shape[-1] % 16, b.shape[-2] % 16, b.shape[-1] % 16) == (0, 0, 0)
    M, N, K = a.shape[0], b.shape[-1], a.shape[1]
    ends, flat_a, flat_b = [0, *offs.tolist()], scale_a.flatten(), scale_b.flatten()
    squares = lambda rows, columns: -(-rows // 128) * 128 * (-(-(columns // 32) // 4) * 4)  # noqa: E731
    at_a = at_b = 0
    if b.dim() == 3:
        assert K % 32 == 0 and scale_b.shape == (b.shape[0], squares(N, K))
        out = torch.full((M, N), torch.nan, dtype=out_dtype)
    else:
        out = torch.full((len(offs), M, N), torch.nan, dtype=out_dtype)
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        size = end - begin
        rows, depth = (size, K) if b.dim() == 3 else (M, size)
        a_part = a[begin:end] if b.dim() == 3 else a[:, begin:end]
        b_part = b[group].t() if b.dim() == 3 else b[begin:end].t()
        assert depth % 32 == 0
        number_a, number_b = squares(rows, depth), squares(N, depth)
        at_b = group * squares(N, K) if b.dim() == 3 else at_b
        if size:
            scales = [
                out_of_squares(flat[at : at + number], each, depth // 32)
                for flat, at, number, each in (
                    (flat_a, at_a, number_a, rows), (flat_b, at_b, number_b, N)
                )
            ]  # fmt: skip
            product = oracle.matmul(a_part, scales[0], MX, b_part, scales[1], MX)
            out[slice(begin, end) if b.dim() == 3 else group] = product.to(out_dtype)
        at_a, at_b = at_a + number_a, at_b + number_b
    return out


@pytest.mark.parametrize("sizes", [(5, 0, 130, 33), (128, 64, 32), (0, 0)], ids=str)
@pytest.mark.parametrize("features", [(160, 48), (144, 130)], ids=str)
@pytest.mark.parametrize("w_block", [MX, (32, 32)], ids=str)
def test_mx_products_by_torch_are_those_of_each_group(sizes, features, w_block, monkeypatch):
    """Casts and layouts together, with rows in no group; odd features are padded."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", mslk)
    (K, N), experts, tokens = features, len(sizes), sum(sizes)
    x, w = Case((tokens + 7, K), BF16, seed=1).make(), Case((experts, N, K), BF16, seed=2).make()
    g = Case((tokens + 7, N), BF16, seed=3).make()
    x[tokens:] = g[tokens:] = torch.nan
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)

    def cast(tokens_TK):
        return cast_tokens_op(tokens_TK, offs, MX, E4M3, "e8m0", None, 128, True, True)

    x8, x_scale, x8_t, x_scale_t = cast(x)
    _, _, g8_t, g_scale_t = cast(g)
    w8, w_scale, *_ = cast_matrices(w, None, w_block, E4M3, "e8m0", True, True, False, False)
    how = Product(module.TORCH_MX.name, None, BF16, pad=True, align=128)
    pairs = (
        matrices((x8, x_scale, w8, w_scale), MX, (1, *w_block)),
        matrices((g8_t, g_scale_t, x8_t, x_scale_t), MX, MX),
    )
    out, grad = [module.multiply_groups(*pair, how, offs) for pair in pairs]
    assert (out.shape, grad.shape) == ((tokens + 7, N), (experts, N, K))
    for group, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        rows = slice(begin, end)
        if begin == end:
            assert grad[group].count_nonzero() == 0
            continue
        for found, a, b, block in (
            (out[rows], x[rows], w[group], w_block), (grad[group], g[rows].t(), x[rows].t(), MX)
        ):  # fmt: skip
            a8, a_scale = oracle.quantize(a, MX, E4M3, "e8m0")
            b8, b_scale = oracle.quantize(b, block, E4M3, "e8m0")
            exact = oracle.matmul(a8.view(E4M3), a_scale, MX, b8.view(E4M3), b_scale, block)
            assert_error_within_baseline(found, exact, exact.to(BF16), replay=(sizes, features))


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        *(((5, 0, 130, 33), how) for how in ("eager", "compiled")),
        *((sizes, "eager") for sizes in ((128, 64, 32), (0, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
def test_powers_of_two_as_mx_have_the_bits_of_the_emulation(sizes, recipe, how, monkeypatch):
    """All three products of a call, by the casts' ops, with rows in no group."""
    K, N, tokens, results = 160, 96, sum(sizes), []
    importlib.import_module("torch._inductor.pattern_matcher")  # keeps torch's own products
    monkeypatch.setattr(torch, "_scaled_grouped_mm", op_of_mslk)
    MSLK_CALLS.clear()
    for name in ("float8.kernels", "float8.kernels.casts", "float8.kernels.products"):
        monkeypatch.setattr(importlib.import_module(name), "family_of", lambda device: "sm_100")
    torch.manual_seed(0)
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, g, w = (integers(*s) for s in ((tokens + 7, K), (tokens + 7, N), (len(sizes) * N, K)))
    for emulate in (True, False):
        config = replace(RECIPES[recipe], emulate=emulate)

        def product(x, w, offs, config=config):
            return grouped_mm(x, w.mT, offs, config)

        if how == "compiled" and not emulate:
            product = torch.compile(product, backend="aot_eager", fullgraph=True)
        leaves = x.clone().requires_grad_(), w.view(len(sizes), N, K).clone().requires_grad_()
        with mock.patch.dict(USED, clear=True):
            out = product(*leaves, offs)
            grads = torch.autograd.grad(out, leaves, g)
        results.append([out[:tokens].detach(), grads[0][:tokens], grads[1]])
    assert_all_bitwise(results[1], results[0], (sizes, recipe))
    products = 2 if recipe == "rowwise_with_gw_hp" else 3
    assert len(MSLK_CALLS) == products


def integers(*shape: int) -> Tensor:
    """Of rows of other magnitudes: float8 holds them, and float32 every sum."""
    rows = 2.0 ** -(torch.arange(shape[0]) % 3)
    return (torch.randint(-8, 9, shape) * rows[:, None]).bfloat16()


MSLK_CALLS: list[int] = []


@torch.library.custom_op("float8_test::scaled_grouped_mm", mutates_args=())
def op_of_mslk(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    MSLK_CALLS.append(b.dim())
    return mslk(a, b, scale_a, scale_b, offs=offs, out_dtype=out_dtype)


@op_of_mslk.register_fake
def _(a, b, scale_a, scale_b, offs, out_dtype):
    shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=out_dtype)


@pytest.mark.parametrize("by_tokens", [False, True])
def test_torch_takes_the_layouts_of_mx_operands(by_tokens):
    K, N = 160, 48
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        x, g, w = (cuda(*shape, dtype=BF16) for shape in ((T, K), (T, N), (E, N, K)))
        offs = cuda(E, dtype=torch.int32)
        x8, g8 = (cast_tokens_op(t, offs, MX, E4M3, "e8m0", None, 128, True, True) for t in (x, g))
        w8 = cast_matrices(w, None, MX, E4M3, "e8m0", True, True, False, False)
        pairs = (*g8[2:], *x8[2:]) if by_tokens else (*x8[:2], *w8[:2])
        b_block = MX if by_tokens else (1, *MX)
        how = Product(module.TORCH_MX.name, None, BF16, align=128)
        out = module.multiply_groups(*matrices(pairs, MX, b_block), how, offs)
    assert out.shape == ((E, N, K) if by_tokens else (T, N))
    assert products.names == [BY_TORCH]
