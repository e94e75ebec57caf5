"""Which product runs where, why not, and what the hardware is handed.

A GPU is not needed: FakeTensors stand for CUDA tensors where shapes and layouts matter, and
`PretendCuda` tensors, whose bytes are on the CPU, where numbers do; `hardware` multiplies as
cuBLASLt is documented to, rules included.
"""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import oracle
import pytest
import shapes
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from shapes import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from float8 import kernels
from float8.kernels import reference

module = importlib.import_module("float8.kernels.scaled_mm")  # float8.kernels has its function
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16
TENSOR, ROW, B1, B128 = (-1, -1), (1, -1), (1, 128), (128, 128)
BLOCKS = {"tensorwise": TENSOR, "rowwise": ROW, "1x128": B1, "128x128": B128, "3x5": (3, 5)}
PRODUCTS = {
    (TENSOR, TENSOR): "tensorwise",
    (TENSOR, ROW): "rowwise",
    (ROW, TENSOR): "rowwise",
    (ROW, ROW): "rowwise",
    (B1, B128): "blockwise",
    (B128, B1): "blockwise",
    (B1, B1): "blockwise",
}
EVERY_PRODUCT = pytest.mark.parametrize(("a_block", "b_block"), PRODUCTS, ids=str)
# architecture -> the products that it runs
RUNS = {
    "sm_89": {"tensorwise", "rowwise"},
    "sm_90": {"tensorwise", "rowwise", "blockwise"},
    "sm_100": {"tensorwise", "rowwise"},
    "gfx94": {"tensorwise", "rowwise"},
    "gfx95": {"tensorwise", "rowwise"},
    "sm_80": set(),
    "sm_120": set(),
    "gfx90": set(),
}


# --- refusals


def test_the_support_table_speaks_of_every_architecture_and_product():
    assert set(module.SUPPORT) == {arch for arch, runs in RUNS.items() if runs}
    for products in module.SUPPORT.values():
        assert set(products) == set(PRODUCTS.values())


@pytest.mark.parametrize("arch", RUNS)
@EVERY_PRODUCT
def test_an_architecture_runs_a_product_or_says_why_not(arch, a_block, b_block):
    reason = module.refuses_device(arch, a_block, b_block, BF16)
    product = PRODUCTS[a_block, b_block]
    if product in RUNS[arch]:
        assert reason is None
        return
    assert arch in reason
    assert "emulate=True" in reason
    if RUNS[arch]:
        assert f"does not run a {product} product" in reason
    else:
        assert "is not known to have float8 tensor cores" in reason
        assert all(known in reason for known in module.SUPPORT)


@pytest.mark.parametrize("pair", list(itertools.product(BLOCKS, BLOCKS)), ids="-".join)
def test_a_pair_of_blocks_is_a_product_or_is_refused_everywhere(pair):
    a_block, b_block = (BLOCKS[name] for name in pair)
    product = PRODUCTS.get((a_block, b_block))
    assert module.product_of(a_block, b_block) == product
    reason = module.refuses_granularity(a_block, b_block)
    if product is not None:
        assert reason is None
        return
    assert str(a_block) in reason
    assert str(b_block) in reason
    assert "emulate=True" in reason
    assert module.refuses_device("sm_90", a_block, b_block, BF16) == reason


@EVERY_PRODUCT
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
def test_only_tensorwise_products_are_written_in_another_dtype_than_bfloat16(
    a_block, b_block, out_dtype
):
    reason = module.refuses_device("sm_90", a_block, b_block, out_dtype)
    if PRODUCTS[a_block, b_block] == "tensorwise":
        assert reason is None
    else:
        assert str(out_dtype) in reason
        assert "bfloat16 only" in reason


@pytest.mark.parametrize(
    ("contraction", "columns", "words"),
    [
        (16, 16, None),
        (0, 0, None),
        (48, 4096, None),
        (24, 16, ["contraction=24"]),
        (16, 1, ["columns=1"]),
        (15, 17, ["contraction=15", "columns=17"]),
    ],
)
def test_sizes_are_multiples_of_16(contraction, columns, words):
    reason = module.refuses_sizes(contraction, columns)
    if words is None:
        assert reason is None
    else:
        assert all(word in reason for word in [*words, "not a multiple of 16"])
        assert ("columns" in reason) == any("columns" in word for word in words)


@pytest.mark.parametrize(
    ("cuda", "refused"), [("12.8", True), ("12.9", False), ("13.0", False), (None, False)]
)
def test_blockwise_products_need_a_cuda_that_has_them(cuda, refused, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    reason = module.refuses_device("sm_90", B1, B128, BF16)
    assert (reason is not None) == refused
    if refused:
        assert "CUDA 12.9" in reason
        assert cuda in reason
    assert module.refuses_device("sm_90", ROW, ROW, BF16) is None


@pytest.fixture
def fresh_architecture():
    module._architecture.cache_clear()
    yield
    module._architecture.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"),
     ((10, 3), "sm_100"), ((12, 0), "sm_120")],
)  # fmt: skip
@pytest.mark.usefixtures("fresh_architecture")
def test_the_architecture_of_an_nvidia_device(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert module.architecture(1) == arch


@pytest.mark.usefixtures("fresh_architecture")
def test_the_architecture_of_an_amd_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert module.architecture() == "gfx94"


@pytest.mark.usefixtures("fresh_architecture")
def test_without_a_gpu_fake_ones_are_hoppers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.architecture() == "sm_90"


# --- what the hardware is handed


class PretendCuda(torch.Tensor):
    """A tensor that says it is on a GPU; its bytes are on the CPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


@pytest.fixture
def hardware(monkeypatch):
    """``torch._scaled_mm`` as cuBLASLt is documented, in float64; its calls are kept in a list."""
    calls = []

    def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
        calls.append(SimpleNamespace(a=a, b=b, bias=bias, out_dtype=out_dtype, fast=use_fast_accum))
        a, b, scale_a, scale_b = (plain(x) for x in (a, b, scale_a, scale_b))
        (M, K), N = a.shape, b.shape[1]
        assert a.stride() == (K, 1), "a must be row-major"
        assert b.stride() == (1, K), "b must be column-major"
        assert b.shape[0] == K
        assert (K % 16, N % 16) == (0, 0)
        assert not a.dtype == b.dtype == E5M2
        assert scale_a.dtype == scale_b.dtype == torch.float32
        a_block, b_block = blocks_of(scale_a, scale_b, M, K, N)
        if (a_block, b_block) != (TENSOR, TENSOR):
            assert out_dtype == BF16
        out = oracle.matmul(
            a, scale_a.reshape(oracle.scale_shape((M, K), a_block)), a_block,
            b.t(), scale_b.t().reshape(oracle.scale_shape((N, K), b_block)), b_block,
        )  # fmt: skip
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
            assert bias.shape == (N,)
            out = out + plain(bias).double()
        return out.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return calls


def blocks_of(scale_a: Tensor, scale_b: Tensor, M: int, K: int, N: int):
    """The blocks that torch._scaled_mm reads from the shapes and strides of the scales."""
    if scale_a.numel() == scale_b.numel() == 1 and scale_a.dim() == 0:
        return TENSOR, TENSOR
    if scale_a.shape == (M, 1) and scale_b.shape == (1, N) and K > 128:
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return ROW, ROW
    # ATen/native/cuda/ScaledBlas.cpp: 1x128 scales have the rows contiguous, 128x128 ones the
    # columns, and then cuBLASLt wants rows of a multiple of four (pytorch/pytorch#166752).
    blocks = []
    columns = -(-K // 128)
    for scale, rows in ((scale_a, M), (scale_b.t(), N)):
        if scale.shape == (rows, columns):
            assert scale.stride(0) == 1 or rows == 1
            assert scale.stride(1) == rows or columns == 1
            blocks.append(B1)
        else:
            assert scale.shape == (-(-rows // 128), columns)
            assert scale.is_contiguous()
            assert columns % 4 == 0
            blocks.append(B128)
    return blocks


def operands(M: int, K: int, N: int, a_block, b_block, b_dtype=E4M3):
    """a and b as (data, scale), cast by the oracle."""
    pairs = []
    for rows, block, dtype, seed in ((M, a_block, E4M3, 1), (N, b_block, b_dtype, 2)):
        codes, scale = oracle.quantize(Case((rows, K), seed=seed).make(), block, dtype)
        pairs += [codes.view(dtype), scale]
    return pairs


def multiply(parts, a_block, b_block, bias=None, out_dtype=BF16, **options):
    """`kernels.scaled_mm` of operands that say they are on a GPU."""
    pretended = [part.as_subclass(PretendCuda) for part in parts]
    bias = None if bias is None else bias.as_subclass(PretendCuda)
    return plain(
        kernels.scaled_mm(*pretended, a_block, b_block, bias, out_dtype=out_dtype, **options)
    )


def assert_product_of(actual, parts, a_block, b_block, bias, replay) -> None:
    a, a_scale, b, b_scale = parts
    exact = oracle.matmul(a, a_scale, a_block, b, b_scale, b_block)
    baseline = exact.to(actual.dtype)
    if bias is not None:  # plain arithmetic rounds the product, and then the sum
        exact, baseline = exact + bias.double(), (baseline + bias).to(actual.dtype)
    assert_error_within_baseline(actual, exact, baseline, replay=replay)


@EVERY_PRODUCT
@pytest.mark.parametrize("bias_dtype", [None, BF16, torch.float32], ids=str)
def test_the_hardware_product_is_the_product(hardware, a_block, b_block, bias_dtype):
    M, K, N = 48, 272, 160
    parts = operands(M, K, N, a_block, b_block, E5M2)
    bias = None if bias_dtype is None else Case((N,), bias_dtype, seed=3).make()
    actual = multiply(parts, a_block, b_block, bias)
    assert_product_of(actual, parts, a_block, b_block, bias, (M, K, N, a_block, b_block))
    assert len(hardware) == 1
    fuses = bias_dtype == BF16 and PRODUCTS[a_block, b_block] != "blockwise"
    assert (hardware[0].bias is not None) == fuses


@EVERY_PRODUCT
@pytest.mark.parametrize(
    "sizes", [(5, 272, 123), (48, 135, 160), (1, 201, 7), (130, 257, 129)], ids=str
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_padding_changes_no_number(hardware, a_block, b_block, sizes, with_bias):
    parts = operands(*sizes, a_block, b_block)
    bias = Case((sizes[2],), BF16, seed=3).make() if with_bias else None
    actual = multiply(parts, a_block, b_block, bias, pad=True)
    assert actual.shape == (sizes[0], sizes[2])
    assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@EVERY_PRODUCT
def test_operands_of_any_strides_reach_the_hardware_in_its_layout(
    hardware, a_block, b_block, layout
):
    parts = operands(32, 512, 48, a_block, b_block)
    strided = list(parts)
    for i in (0, 2):
        codes = parts[i].view(torch.uint8)
        codes = {
            "contiguous": codes,
            "transposed": codes.t().contiguous().t(),
            "sliced": torch.stack([codes, codes + 1], dim=-1).flatten(1)[:, ::2],
        }[layout]
        strided[i] = codes.view(parts[i].dtype)
        assert strided[i].is_contiguous() == (layout == "contiguous")
    actual = multiply(strided, a_block, b_block)
    assert_bitwise(actual, multiply(parts, a_block, b_block), (a_block, b_block, layout))
    if layout == "contiguous":  # and what is in its layout already is not copied
        assert hardware[0].a.data_ptr() == parts[0].data_ptr()
        assert hardware[0].b.data_ptr() == parts[2].data_ptr()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_out_dtype_and_accumulation_reach_the_hardware(hardware, out_dtype, fast):
    parts = operands(16, 32, 16, TENSOR, TENSOR)
    bias = Case((16,), out_dtype, seed=3).make()
    actual = multiply(parts, TENSOR, TENSOR, bias, out_dtype, use_fast_accum=fast)
    assert actual.dtype == out_dtype
    assert hardware[0].out_dtype == out_dtype
    assert hardware[0].fast == fast
    assert_product_of(actual, parts, TENSOR, TENSOR, bias, (out_dtype, fast))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((16, 24, 16), "contraction=24"), ((16, 16, 17), "columns=17")],
)
def test_sizes_that_the_hardware_does_not_take_are_refused_with_the_fix(hardware, sizes, words):
    with pytest.raises(ValueError, match=f"{words} not a multiple of 16") as error:
        multiply(operands(*sizes, TENSOR, TENSOR), TENSOR, TENSOR)
    assert "pad_inner_dim=True" in str(error.value)
    assert hardware == []


@pytest.mark.parametrize("dtype", [E5M2, torch.float8_e5m2fnuz], ids=str)
def test_e5m2_by_e5m2_is_refused_on_every_device(hardware, dtype):
    assert module.refuses_formats(dtype, E4M3) is module.refuses_formats(E4M3, dtype) is None
    parts = operands(16, 32, 16, TENSOR, TENSOR, dtype)
    parts[:2] = parts[2:]
    for run in (multiply, lambda *args: kernels.scaled_mm(*args[0], *args[1:], out_dtype=BF16)):
        with pytest.raises(ValueError, match="E5M2 by E5M2; cast one of the operands to E4M3"):
            run(parts, TENSOR, TENSOR)
    assert hardware == []


def test_one_row_of_any_strides_reaches_the_hardware_in_its_layout(hardware):
    parts = operands(1, 32, 16, ROW, ROW)
    wide = torch.zeros(2, 96, dtype=torch.uint8)
    wide[:1, :32] = parts[0].view(torch.uint8)
    strided = [wide.view(E4M3)[:1, :32], *parts[1:]]
    assert strided[0].stride() == (96, 1)
    assert_bitwise(multiply(strided, ROW, ROW), multiply(parts, ROW, ROW))


def test_any_number_of_rows_is_taken(hardware):
    parts = operands(3, 16, 16, ROW, ROW)
    assert_product_of(multiply(parts, ROW, ROW), parts, ROW, ROW, None, "3 rows")


@pytest.mark.parametrize(
    ("a_block", "b_block", "out_dtype", "arch", "words"),
    [
        ((3, 5), B128, BF16, "sm_90", "no hardware multiplies"),
        (TENSOR, TENSOR, BF16, "sm_80", "not known to have float8 tensor cores"),
        (B1, B128, BF16, "sm_89", "does not run a blockwise product"),
        (ROW, ROW, torch.float32, "sm_90", "bfloat16 only"),
    ],
)
def test_a_refused_product_is_an_error_unless_emulated(
    hardware, monkeypatch, a_block, b_block, out_dtype, arch, words
):
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    parts = operands(3, 640, 128, a_block, b_block)
    with pytest.raises(ValueError, match=f"scaled_mm: .*{words}"):
        multiply(parts, a_block, b_block, out_dtype=out_dtype)
    emulated = multiply(parts, a_block, b_block, out_dtype=out_dtype, emulate=True)
    expected = reference.scaled_mm(*parts, a_block, b_block, None, out_dtype)
    assert_bitwise(emulated, expected, (a_block, b_block, arch))
    assert hardware == []


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_an_empty_product_asks_no_hardware(hardware, sizes):
    M, K, N = sizes
    bias = torch.ones(N, dtype=BF16)
    actual = multiply(operands(M, K, N, TENSOR, TENSOR), TENSOR, TENSOR, bias)
    assert_bitwise(actual, torch.ones(M, N, dtype=BF16), sizes)
    assert hardware == []


def test_a_cpu_never_asks_the_hardware(hardware):
    parts = operands(16, 24, 17, ROW, ROW)
    actual = kernels.scaled_mm(*parts, ROW, ROW, out_dtype=torch.float32)
    expected = reference.scaled_mm(*parts, ROW, ROW, None, torch.float32)
    assert_bitwise(actual, expected)
    assert hardware == []


def test_what_is_prepared_for_two_products_multiplies_alike():
    a, a_scale, b, b_scale = operands(16, 24, 17, ROW, TENSOR)
    prepared = kernels.prepare(a)
    for out_dtype in shapes.HIGH_PRECISION:
        expected = kernels.scaled_mm(a, a_scale, b, b_scale, ROW, TENSOR, out_dtype=out_dtype)
        actual = kernels.scaled_mm(prepared, a_scale, b, b_scale, ROW, TENSOR, out_dtype=out_dtype)
        assert_bitwise(actual, expected, out_dtype)


def test_hardware_is_handed_the_codes_themselves():
    a = operands(16, 32, 16, TENSOR, TENSOR)[0].as_subclass(PretendCuda)
    assert kernels.prepare(a) is a
    assert kernels.prepare(a, emulate=True).dtype == BF16


# --- traced on fake CUDA tensors, where torch checks layouts and shapes itself


def fake_operands(M: int, K: int, N: int, a_block, b_block) -> list[Tensor]:
    parts = []
    for rows, block in ((M, a_block), (N, b_block)):
        parts.append(torch.empty(rows, K, dtype=E4M3, device="cuda"))
        parts.append(torch.empty(oracle.scale_shape((rows, K), block), device="cuda"))
    return parts


@EVERY_PRODUCT
@pytest.mark.parametrize("sizes", [(256, 384, 128), (48, 272, 160)], ids=str)
def test_a_product_can_be_traced_on_fake_cuda_tensors(a_block, b_block, sizes):
    M, K, N = sizes
    with FakeTensorMode(), torch.no_grad():
        bias = torch.empty(N, dtype=BF16, device="cuda")
        parts = fake_operands(M, K, N, a_block, b_block)
        out = kernels.scaled_mm(*parts, a_block, b_block, bias, out_dtype=BF16)
        assert (out.shape, out.dtype, out.device.type) == ((M, N), BF16, "cuda")


@EVERY_PRODUCT
@pytest.mark.parametrize("sizes", [(5, 123, 7), (48, 272, 150), (48, 130, 160)], ids=str)
def test_padding_can_be_traced_on_fake_cuda_tensors(a_block, b_block, sizes):
    M, K, N = sizes
    with FakeTensorMode(), torch.no_grad():
        bias = torch.empty(N, dtype=BF16, device="cuda")
        parts = fake_operands(M, K, N, a_block, b_block)
        out = kernels.scaled_mm(*parts, a_block, b_block, bias, out_dtype=BF16, pad=True)
        assert (out.shape, out.dtype, out.device.type) == ((M, N), BF16, "cuda")


@EVERY_PRODUCT
def test_transposed_fake_cuda_operands_are_brought_into_layout(a_block, b_block):
    with FakeTensorMode(), torch.no_grad():
        parts = fake_operands(48, 272, 160, a_block, b_block)
        for i in (0, 2):
            parts[i] = torch.empty(parts[i].shape[::-1], dtype=E4M3, device="cuda").t()
        out = kernels.scaled_mm(*parts, a_block, b_block, out_dtype=BF16)
        assert out.shape == (48, 160)


# --- on a GPU


@pytest.mark.cuda
@EVERY_PRODUCT
@pytest.mark.parametrize("sizes", [(48, 272, 160), (256, 384, 128), (5, 123, 7)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gpu_multiplies_as_the_oracle_or_refuses(a_block, b_block, sizes, with_bias):
    reason = module.refuses_device(module.architecture(), a_block, b_block, BF16)
    parts = operands(*sizes, a_block, b_block)
    bias = Case((sizes[2],), BF16, seed=3).make() if with_bias else None
    on_gpu = [part.cuda() for part in parts]
    gpu_bias = None if bias is None else bias.cuda()
    if reason is not None:
        with pytest.raises(ValueError, match="scaled_mm"):
            kernels.scaled_mm(*on_gpu, a_block, b_block, gpu_bias, out_dtype=BF16)
        return
    actual = kernels.scaled_mm(*on_gpu, a_block, b_block, gpu_bias, out_dtype=BF16, pad=True)
    assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))
