"""Which product runs where, by which candidate, and why not.

A GPU is not needed: FakeTensors stand for CUDA tensors where shapes and choices matter, and
`PretendCuda` tensors, whose bytes are on the CPU, where numbers do.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import oracle
import pytest
import shapes
import torch
from assertions import assert_bitwise, assert_error_within_baseline
from meter import TORCH_PRODUCTS
from pretend import (
    B1,
    B128,
    BF16,
    E4M3,
    E5M2,
    EVERY_PRODUCT,
    MX,
    PRODUCTS,
    ROW,
    TENSOR,
    PretendCuda,
    assert_product_of,
    install_torch_scaled_mm,
    multiply,
    operands,
)
from shapes import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import kernels
from float8.kernels import definition

module = importlib.import_module("float8.kernels.scaled_mm")  # float8.kernels has its function
BLOCKWISE = [pair for pair, product in PRODUCTS.items() if product == "blockwise"]
BY_TORCH, BY_TRITON = "torch._scaled_mm", "the Triton GEMM"
# architecture -> product -> the candidate that runs it in bfloat16
RUNS = {
    "sm_89": {"tensorwise": BY_TORCH, "rowwise": BY_TORCH, "blockwise": BY_TRITON},
    "sm_90": {"tensorwise": BY_TORCH, "rowwise": BY_TORCH, "blockwise": BY_TORCH},
    **{
        arch: {"tensorwise": BY_TORCH, "rowwise": BY_TORCH, "blockwise": BY_TRITON, "mx": BY_TORCH}
        for arch in ("sm_100", "sm_103", "sm_120", "sm_121")
    },
    "gfx94": {"tensorwise": BY_TORCH, "rowwise": BY_TORCH},
    "gfx95": {"tensorwise": BY_TORCH, "rowwise": BY_TORCH},
    "sm_80": {},
    "gfx90": {},
}


# (architecture, CUDA) -> product -> candidates that write float32, float16; None: refused
WRITERS = {
    ("sm_90", "13.0"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (BY_TORCH, BY_TORCH),  # by cuBLASLt
        "blockwise": (BY_TORCH, BY_TRITON),
    },
    ("sm_90", "12.8"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (None, None),  # by CUTLASS
        "blockwise": (BY_TRITON, BY_TRITON),
    },
    ("sm_120", "13.0"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (None, None),
        "blockwise": (BY_TRITON, BY_TRITON),
        "mx": (BY_TORCH, BY_TORCH),
    },
    ("gfx94", None): {"tensorwise": (BY_TORCH, BY_TORCH), "rowwise": (None, None)},
}


@pytest.fixture
def torch_calls(monkeypatch):
    """``torch._scaled_mm`` as documented, on an sm_90 unless the test says otherwise; its calls."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return install_torch_scaled_mm(monkeypatch)


# --- choices and refusals


@pytest.mark.parametrize("arch", RUNS)
@EVERY_PRODUCT
def test_an_architecture_runs_a_product_or_says_why_not(arch, a_block, b_block, monkeypatch):
    """It is traced so on fake CUDA tensors, where torch checks layouts; odd sizes are padded."""
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    reason, product = (
        module.refuses_device(arch, a_block, b_block, BF16),
        PRODUCTS[a_block, b_block],
    )
    chosen = RUNS[arch].get(product)
    assert module.gemm_for(arch, a_block, b_block, BF16) == (chosen or "", reason)
    assert (reason is None) == (chosen is not None)
    for M, K, N in ((256, 384, 128), (5, 123, 7)):
        with FakeTensorMode(), torch.no_grad(), Products() as products:
            parts = fake_operands(M, K, N, a_block, b_block)
            parts[0] = torch.empty(K, M, dtype=E4M3, device="cuda").t()
            rest = (a_block, b_block, torch.empty(N, dtype=BF16, device="cuda"))
            if reason is not None:
                with pytest.raises(ValueError, match=f"{arch} .*emulate=True"):
                    kernels.scaled_mm(*parts, *rest, out_dtype=BF16, pad=True)
                continue
            out = kernels.scaled_mm(*parts, *rest, out_dtype=BF16, pad=True)
            assert (out.shape, out.dtype, out.device.type) == ((M, N), BF16, "cuda")
        assert products.names == [chosen]
    if reason is not None and RUNS[arch]:
        assert all(candidate.name in reason for candidate in module.CANDIDATES[product])
    elif reason is not None:
        assert all(known in reason for known in module.SUPPORT)


@pytest.mark.parametrize("a_block", [TENSOR, ROW, B1, B128, (3, 5)], ids=str)
@pytest.mark.parametrize("b_block", [TENSOR, ROW, B1, B128, (3, 5)], ids=str)
def test_a_pair_of_blocks_is_a_product_or_is_refused_everywhere(a_block, b_block):
    product = PRODUCTS.get((a_block, b_block))
    assert module.product_of(a_block, b_block) == product
    reason = module.refuses_granularity(a_block, b_block)
    assert (reason is None) == (product is not None)
    if reason is not None:
        assert all(words in reason for words in (str(a_block), str(b_block), "emulate=True"))
        assert module.refuses_device("sm_90", a_block, b_block, BF16) == reason


@EVERY_PRODUCT
@pytest.mark.parametrize("which", WRITERS, ids=str)
def test_candidates_that_write_other_dtypes_than_bfloat16(a_block, b_block, which, monkeypatch):
    arch, cuda = which
    monkeypatch.setattr(torch.version, "cuda", cuda)
    product = PRODUCTS[a_block, b_block]
    for out_dtype, chosen in zip(
        (torch.float32, torch.float16), WRITERS[which].get(product, (None, None)), strict=True
    ):
        name, reason = module.gemm_for(arch, a_block, b_block, out_dtype)
        assert (name, reason is None) == (chosen or "", chosen is not None)
        assert chosen or product != "rowwise" or f"bfloat16 only, not {out_dtype}" in reason


@pytest.mark.parametrize(
    ("cuda", "chosen"),
    [("12.8", BY_TRITON), ("12.9", BY_TORCH), ("13.0", BY_TORCH), (None, BY_TORCH)],
)
def test_blockwise_products_by_torch_need_a_cuda_that_has_them(cuda, chosen, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert module.gemm_for("sm_90", B1, B128, BF16) == (chosen, None)
    assert module.gemm_for("sm_90", ROW, ROW, BF16) == (BY_TORCH, None)
    assert module._has_triton() == (importlib.util.find_spec("triton") is not None)
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    reason = module.refuses_device("sm_90", B1, B128, BF16)
    assert reason is None if chosen == BY_TORCH else "from CUDA 12.9 on" in reason
    assert reason is None or "pip install triton" in reason
    reason = module.refuses_device("sm_89", B1, B128, torch.float16)
    assert all(words in reason for words in ("on sm_90 only", "pip install triton", "float16"))


@pytest.mark.parametrize(
    ("contraction", "columns", "words"),
    [
        (16, 16, ()),
        (0, 0, ()),
        (24, 16, ("contraction=24",)),
        (16, 1, ("columns=1",)),
        (15, 17, ("contraction=15", "columns=17")),
    ],
)
@EVERY_PRODUCT
def test_torch_takes_multiples_of_16(a_block, b_block, contraction, columns, words, torch_calls):
    """No other candidate takes its place."""
    arch = "sm_100" if a_block == MX else "sm_90"
    reason = module.refuses_sizes(arch, a_block, b_block, BF16, contraction, columns)
    assert (reason is None) == (words == ())
    if words and a_block != MX:
        assert all(word in reason for word in words)
        assert ("columns" in reason) == any("columns" in word for word in words)
        with pytest.raises(ValueError, match=r"not a multiple of 16; .*pad_inner_dim=True"):
            multiply(operands(16, contraction, columns, a_block, b_block), a_block, b_block)
    assert torch_calls == []


@pytest.mark.parametrize(
    ("hip", "device", "arch"),
    [
        (None, (8, 9), "sm_89"),
        (None, (10, 3), "sm_103"),
        (None, None, "sm_90"),  # without a GPU, fake ones are Hoppers
        ("6.4", "gfx942:sramecc+:xnack-", "gfx94"),
    ],
)
def test_the_architecture_of_a_device(hip, device, arch, monkeypatch):
    module._architecture.cache_clear()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: device)
    properties = SimpleNamespace(gcnArchName=device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert module.architecture() == arch
    module._architecture.cache_clear()


def test_every_architecture_that_is_supported_is_tested():
    assert set(module.SUPPORT) == {arch for arch, runs in RUNS.items() if runs}
    assert set(module.CANDIDATES) == set(PRODUCTS.values())
    by_torch = {product for product, row in module.CANDIDATES.items() if module.TORCH in row}
    assert all(set(products) == by_torch for products in module.SUPPORT.values())


def test_a_row_of_the_table_chooses_for_its_architecture_alone(torch_calls, monkeypatch):
    after = module.SCALED_AFTER
    monkeypatch.setitem(module.FASTEST, ("sm_90", "rowwise"), after)
    assert module.gemm_for("sm_90", ROW, ROW, BF16) == (after.name, None)
    assert module.gemm_for("sm_90", ROW, TENSOR, BF16) == (after.name, None)
    assert module.gemm_for("sm_90", TENSOR, TENSOR, BF16) == (BY_TORCH, None)
    assert module.gemm_for("sm_100", ROW, ROW, BF16) == (BY_TORCH, None)
    for sizes in ((16, 32, 48), (3, 40, 7)):
        for blocks in ((ROW, ROW), (ROW, TENSOR)):
            parts = operands(*sizes, *blocks, E5M2)
            bias = Case((sizes[2],), BF16, seed=3).make()
            actual = multiply(parts, *blocks, bias, pad=True)
            assert_product_of(actual, parts, *blocks, bias, sizes)
    assert {tuple(call.scale_a.shape) for call in torch_calls} == {()}
    assert {call.out_dtype for call in torch_calls} == {torch.float32}


# --- what runs


@pytest.mark.parametrize(
    ("arch", "a_block", "b_block", "out_dtype"),
    [
        ("sm_90", (3, 5), B128, BF16),
        ("sm_80", TENSOR, TENSOR, BF16),
        ("gfx94", B1, B128, BF16),
        ("sm_120", ROW, ROW, torch.float32),
    ],
)
def test_emulated_or_on_a_cpu_any_product_is_the_definition(
    torch_calls, monkeypatch, arch, a_block, b_block, out_dtype
):
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    parts = operands(3, 640, 128, a_block, b_block)
    with pytest.raises(ValueError, match=r"scaled_mm: .*emulate=True"):
        multiply(parts, a_block, b_block, out_dtype=out_dtype)
    expected = definition.scaled_mm(*parts, a_block, b_block, None, out_dtype)
    for actual in (
        multiply(parts, a_block, b_block, out_dtype=out_dtype, emulate=True),
        kernels.scaled_mm(*parts, a_block, b_block, out_dtype=out_dtype),
    ):
        assert_bitwise(actual, expected, (a_block, b_block, arch))
    assert torch_calls == []


@pytest.mark.parametrize("dtype", [E5M2, torch.float8_e5m2fnuz], ids=str)
def test_e5m2_by_e5m2_is_refused_on_every_device(torch_calls, dtype):
    assert module.refuses_formats(dtype, E4M3) is module.refuses_formats(E4M3, dtype) is None
    parts = operands(16, 32, 16, TENSOR, TENSOR, dtype)
    parts[:2] = parts[2:]
    for run in (multiply, lambda *args: kernels.scaled_mm(*args[0], *args[1:], out_dtype=BF16)):
        with pytest.raises(ValueError, match="E5M2 by E5M2; cast one of the operands to E4M3"):
            run(parts, TENSOR, TENSOR)
    assert torch_calls == []


@pytest.mark.parametrize("place", range(1, 5))
def test_operands_of_several_devices_are_refused(place):
    parts = [*operands(16, 32, 16, TENSOR, TENSOR), torch.ones(16, dtype=BF16)]
    parts = [part if j == place else part.as_subclass(PretendCuda) for j, part in enumerate(parts)]
    with pytest.raises(ValueError, match=r"is on cpu and a on cuda:0; move it with .to\('cuda"):
        kernels.scaled_mm(*parts[:4], TENSOR, TENSOR, parts[4], out_dtype=BF16)


@pytest.mark.parametrize(("a_block", "b_block"), BLOCKWISE, ids=str)
@pytest.mark.parametrize("sizes", [(5, 123, 7), (48, 272, 160), (1, 384, 16)], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=str)
def test_triton_multiplies_blockwise_in_any_dtype_and_size(
    torch_calls, monkeypatch, a_block, b_block, sizes, bias_dtype
):
    """By its op, which on a CPU is the definition."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_89")
    parts = operands(*sizes, a_block, b_block)
    bias = None if bias_dtype is None else Case(sizes[2:], bias_dtype, seed=3).make()
    for out_dtype in shapes.HIGH_PRECISION:
        actual = multiply(parts, a_block, b_block, bias, out_dtype)
        expected = definition.scaled_mm(*parts, a_block, b_block, bias, out_dtype)
        assert actual.dtype == out_dtype
        exact = oracle.matmul(parts[0], parts[1], a_block, parts[2], parts[3], b_block)
        exact = exact if bias is None else exact + bias.double()
        replay = (sizes, a_block, b_block, out_dtype)
        assert_error_within_baseline(actual, exact, expected, replay=replay)
    assert torch_calls == []


@pytest.mark.parametrize("sizes", [(0, 128, 256), (16, 0, 128), (16, 128, 0)], ids=str)
@pytest.mark.parametrize(("a_block", "b_block"), [(TENSOR, TENSOR), (B1, B128)], ids=str)
def test_an_empty_product_asks_no_hardware(torch_calls, sizes, a_block, b_block):
    M, K, N = sizes
    bias = torch.ones(N, dtype=BF16)
    actual = multiply(operands(M, K, N, a_block, b_block), a_block, b_block, bias)
    assert_bitwise(actual, torch.ones(M, N, dtype=BF16), sizes)
    assert torch_calls == []


# --- traced on fake CUDA tensors, where torch checks layouts and shapes itself


class Products(TorchDispatchMode):
    """Which candidates multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in TORCH_PRODUCTS:
            self.names.append(BY_TORCH)
        elif func.name() == "float8::blockwise_mm":
            self.names.append(BY_TRITON)
        return func(*args, **(kwargs or {}))


def fake_operands(M: int, K: int, N: int, a_block, b_block) -> list[Tensor]:
    parts = []
    for rows, block in ((M, a_block), (N, b_block)):
        parts.append(torch.empty(rows, K, dtype=E4M3, device="cuda"))
        dtype = torch.float8_e8m0fnu if block == MX else torch.float32
        shape = oracle.scale_shape((rows, K), block)
        parts.append(torch.empty(shape, dtype=dtype, device="cuda"))
    return parts


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_the_choice(dynamic, monkeypatch):
    """On CPU tensors that take the way of CUDA ones; the op itself is the reference there."""
    monkeypatch.setattr(module, "family_of", lambda device: "sm_89")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def product(parts):
        return kernels.scaled_mm(*parts, B1, B128, out_dtype=torch.float16)

    for sizes in ((16, 256, 32), (48, 272, 160)):
        parts = operands(*sizes, B1, B128)
        expected = definition.scaled_mm(*parts, B1, B128, None, torch.float16)
        assert_bitwise(product(parts), expected, sizes)


# --- on a GPU


@pytest.mark.cuda
@EVERY_PRODUCT
@pytest.mark.parametrize(
    "sizes",
    # whole tiles; odd; few rows, of which cuBLASLt takes fours where scales are of 128
    [(48, 272, 160), (256, 384, 128), (5, 123, 7), *((M, 272, 160) for M in (1, 2, 3, 5))],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("pad", [False, True])
def test_a_gpu_multiplies_as_the_oracle_or_refuses(a_block, b_block, sizes, with_bias, pad):
    _, K, N = sizes
    product = (module.architecture(), a_block, b_block, BF16)
    parts = operands(*sizes, a_block, b_block)
    bias = Case((N,), BF16, seed=3).make() if with_bias else None
    on_gpu = [part.cuda() for part in parts]
    gpu_bias = None if bias is None else bias.cuda()
    refused = module.refuses_device(*product) or (
        None if pad else module.refuses_sizes(*product, K, N)
    )
    if refused is not None:
        with pytest.raises(ValueError, match="scaled_mm"):
            kernels.scaled_mm(*on_gpu, a_block, b_block, gpu_bias, out_dtype=BF16, pad=pad)
        return
    actual = kernels.scaled_mm(*on_gpu, a_block, b_block, gpu_bias, out_dtype=BF16, pad=pad)
    assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))


@pytest.mark.cuda
@EVERY_PRODUCT
@pytest.mark.parametrize("out_dtype", shapes.HIGH_PRECISION, ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_writes_what_the_table_says_it_does(a_block, b_block, out_dtype, fast):
    """Every dtype, with a bias and without; with fast accumulation where there is one."""
    if fast and PRODUCTS[a_block, b_block] == "blockwise":
        pytest.skip("no fast accumulation: the plan never asks for it")
    product = (module.architecture(), a_block, b_block, out_dtype)
    parts = operands(48, 272, 160, a_block, b_block)
    for bias in (None, Case((160,), out_dtype, seed=3).make()):
        given = [part.cuda() for part in parts], None if bias is None else bias.cuda()
        options = {"out_dtype": out_dtype, "use_fast_accum": fast}
        if (reason := module.refuses_device(*product)) is not None:
            assert "does not run" in reason
            with pytest.raises(ValueError, match="does not run"):
                kernels.scaled_mm(*given[0], a_block, b_block, given[1], **options)
            continue
        actual = kernels.scaled_mm(*given[0], a_block, b_block, given[1], **options).cpu()
        assert actual.dtype == out_dtype
        exact = oracle.matmul(parts[0], parts[1], a_block, parts[2], parts[3], b_block)
        exact = exact if bias is None else exact + bias.double()
        # A tensor core's sum has 14 bits without promotion (arXiv 2412.19437, 3.3.2).
        error = (actual.double() - exact).norm() / exact.norm()
        assert error <= 2.0**-7, (a_block, b_block, out_dtype, fast, float(error))
