"""Which product runs where, by which candidate, and why not.

A GPU is not needed: FakeTensors stand for CUDA tensors where shapes and choices matter, and
`PretendCuda` tensors, whose bytes are on the CPU, where numbers do.
"""

from __future__ import annotations

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
    BLOCKWISE,
    E4M3,
    E5M2,
    EVERY_PRODUCT,
    PRODUCTS,
    ROW,
    TENSOR,
    PretendCuda,
    assert_product_of,
    install_torch_scaled_mm,
    matrices,
    multiply,
    operands,
)
from shapes import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from float8 import kernels
from float8.granularity import block_name
from float8.kernels import definition
from float8.kernels import products as module

BY_TORCH, BY_TRITON = "torch._scaled_mm", "the Triton GEMM"


# architecture, CUDA -> of each product, who writes bfloat16, float32 and float16: t is torch, T the
# Triton GEMM, and - nobody. Rowwise products are cuBLASLt's on sm_90 from CUDA 12.9 on.
ORDER = ("tensorwise", "rowwise", "blockwise", "mx")
RUNS = {
    ("sm_89", "13.0"): "ttt t-- TTT ---",
    ("sm_90", "13.0"): "ttt ttt ttT ---",
    ("sm_90", None): "ttt ttt ttT ---",
    ("sm_90", "12.9"): "ttt ttt ttT ---",
    ("sm_90", "12.8"): "ttt t-- TTT ---",
    **{(f"sm_{n}", "13.0"): "ttt t-- TTT ttt" for n in (100, 103, 120, 121)},
    ("gfx94", None): "ttt t-- --- ---",
    ("gfx95", None): "ttt t-- --- t-t",
    **{(arch, None): "--- --- --- ---" for arch in ("sm_80", "gfx90")},
}


@pytest.fixture
def torch_calls(monkeypatch):
    """``torch._scaled_mm`` as documented, on an sm_90 unless the test says otherwise; its calls."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return install_torch_scaled_mm(monkeypatch)


# --- choices and refusals


@pytest.mark.parametrize(("arch", "cuda"), RUNS)
@EVERY_PRODUCT
def test_a_device_runs_a_product_or_says_why_not(arch, cuda, a_block, b_block, monkeypatch):
    """It is traced so on fake CUDA tensors, where torch checks layouts; odd sizes are padded."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    letters = RUNS[arch, cuda].split()[ORDER.index(PRODUCTS[a_block, b_block])]
    for letter, out_dtype in zip(letters, (BF16, torch.float32, torch.float16), strict=True):
        chosen = {"t": BY_TORCH, "T": BY_TRITON, "-": ""}[letter]
        name, reason = module.gemm_for(arch, a_block, b_block, out_dtype)
        assert (name, reason is None) == (chosen, chosen != "")
        assert module.gemm_for(arch, a_block, b_block, out_dtype)[1] == reason
        for M, K, N in ((256, 384, 128), (5, 123, 7)):
            with FakeTensorMode(), torch.no_grad(), Products() as products:
                parts = fake_operands(M, K, N, a_block, b_block)
                parts[0] = torch.empty(K, M, dtype=E4M3, device="cuda").t()
                given = matrices(parts, a_block, b_block)
                bias = torch.empty(N, dtype=out_dtype, device="cuda")
                if reason is not None:
                    with pytest.raises(ValueError, match=f"{arch} .*emulate=True"):
                        kernels.scaled_mm(*given, bias, out_dtype=out_dtype, pad=True)
                    continue
                out = kernels.scaled_mm(*given, bias, out_dtype=out_dtype, pad=True)
                assert (out.shape, out.dtype, out.device.type) == ((M, N), out_dtype, "cuda")
            assert products.names == [chosen]


@pytest.mark.parametrize("a_block", [TENSOR, ROW, B1, B128, (3, 5)], ids=str)
@pytest.mark.parametrize("b_block", [TENSOR, ROW, B1, B128, (3, 5)], ids=str)
def test_a_pair_of_blocks_is_a_product_or_is_refused_everywhere(a_block, b_block):
    product = PRODUCTS.get((a_block, b_block))
    assert module.product_name(a_block, b_block) == product
    reason = module.reason_against_granularity(a_block, b_block)
    assert (reason is None) == (product is not None)
    if reason is not None:
        names = block_name(a_block), block_name(b_block)
        assert all(words in reason for words in (*names, "emulate=True"))
        assert module.gemm_for("sm_90", a_block, b_block, BF16)[1] == reason


@pytest.mark.parametrize(("K", "N"), [(24, 16), (16, 1), (15, 17)])
@EVERY_PRODUCT
def test_torch_takes_multiples_of_16(a_block, b_block, K, N, torch_calls):
    """No other candidate takes its place."""
    wrong = [f"{name}={n}" for name, n in (("contraction", K), ("columns", N)) if n % 16]
    match = rf"scaled_mm: {' and '.join(wrong)} not a multiple of 16; .*pad_inner_dim=True"
    with pytest.raises(ValueError, match=match):
        multiply(operands(16, K, N, a_block, b_block), a_block, b_block)
    assert torch_calls == []


@pytest.mark.parametrize(  # without a GPU, fake ones are Hoppers
    ("hip", "device", "arch"),
    [(None, (10, 3), "sm_103"), (None, None, "sm_90"), ("6.4", "gfx942:sramecc+", "gfx94")],
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
        kernels.scaled_mm(*matrices(parts, a_block, b_block), out_dtype=out_dtype),
    ):
        assert_bitwise(actual, expected, (a_block, b_block, arch))
    assert torch_calls == []


@pytest.mark.parametrize("dtype", [E5M2, torch.float8_e5m2fnuz], ids=str)
def test_e5m2_by_e5m2_is_refused_on_every_device(torch_calls, dtype):
    assert (
        module.reason_against_formats(dtype, E4M3)
        is module.reason_against_formats(E4M3, dtype)
        is None
    )
    parts = operands(16, 32, 16, TENSOR, TENSOR, dtype)
    parts[:2] = parts[2:]
    for run in (multiply, lambda *args: kernels.scaled_mm(*matrices(*args), out_dtype=BF16)):
        with pytest.raises(ValueError, match="E5M2 by E5M2; cast one of the operands to E4M3"):
            run(parts, TENSOR, TENSOR)
    assert torch_calls == []


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
        exact = oracle.matmul(parts[0], parts[1], a_block, parts[2], parts[3], b_block)
        exact = exact if bias is None else exact + bias.double()
        replay = (sizes, a_block, b_block, out_dtype)
        assert_error_within_baseline(actual, exact, expected, replay=replay)
    assert torch_calls == []


def test_powers_of_two_in_a_dtensor_are_multiplied_as_without_mx(torch_calls, monkeypatch):
    """Which has sharding rules; in the dtypes that it writes."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_100")
    monkeypatch.setattr(PretendCuda, "device_mesh", object(), raising=False)
    parts = operands(48, 160, 96, ROW, ROW)
    for out_dtype in (BF16, torch.float32):
        name, reason = module.gemm_for("sm_100", ROW, ROW, out_dtype, has_power_of_two_scales=True)
        assert "MX" in name and reason is None
        pretended = matrices([part.as_subclass(PretendCuda) for part in parts], ROW, ROW)
        arguments = *pretended, module.Product(name, reason, out_dtype)
        if out_dtype != BF16:
            with pytest.raises(ValueError, match="rowwise product in bfloat16 only"):
                kernels.multiply(*arguments)
        else:
            assert_product_of(kernels.multiply(*arguments), parts, ROW, ROW, None, "a DTensor")
    assert [call.scale_a.dtype for call in torch_calls] == [torch.float32]


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
        dtype = torch.float8_e8m0fnu if block[1] == 32 else torch.float32
        shape = oracle.scale_shape((rows, K), block)
        parts.append(torch.empty(shape, dtype=dtype, device="cuda"))
    return parts


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_the_choice(dynamic, monkeypatch):
    """On CPU tensors that take the way of CUDA ones; the op itself is the reference there."""
    monkeypatch.setattr(module, "family_of", lambda device: "sm_89")

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def product(parts):
        return kernels.scaled_mm(*matrices(parts, B1, B128), out_dtype=torch.float16)

    for sizes in ((16, 256, 32), (48, 272, 160)):
        parts = operands(*sizes, B1, B128)
        expected = definition.scaled_mm(*parts, B1, B128, None, torch.float16)
        assert_bitwise(product(parts), expected, sizes)


# --- on a GPU


@pytest.mark.cuda
@EVERY_PRODUCT
@shapes.pairs(
    # whole tiles; odd; few rows, of which cuBLASLt takes fours where scales are of 128
    sizes=[(48, 272, 160), (256, 384, 128), (5, 123, 7), *((M, 272, 160) for M in (1, 2, 3, 5))],
    out_dtype=shapes.HIGH_PRECISION,
    with_bias=[False, True],
    pad=[False, True],
    fast=[False, True],
    index=[0, 1],
)
def test_a_gpu_multiplies_as_the_oracle_or_refuses(
    a_block, b_block, sizes, out_dtype, with_bias, pad, fast, index
):
    """In every dtype; with fast accumulation where there is one; on a second device too."""
    if index >= torch.cuda.device_count():
        pytest.skip("needs a second CUDA device")
    fast = fast and PRODUCTS[a_block, b_block] != "blockwise"
    product = (module.architecture(), a_block, b_block, out_dtype)
    parts = operands(*sizes, a_block, b_block)
    bias = Case((sizes[2],), out_dtype, seed=3).make() if with_bias else None
    given = [None if part is None else part.cuda(index) for part in (*parts, bias)]
    arguments = *matrices(given[:4], a_block, b_block), given[4]
    options = {"out_dtype": out_dtype, "use_fast_accum": fast, "pad": pad}
    name, refusal = module.gemm_for(*product)
    is_odd = any(size % 16 for size in sizes[1:])
    if refusal is not None or (is_odd and not pad and module.is_aligned(name)):
        with pytest.raises(ValueError, match="scaled_mm"):
            kernels.scaled_mm(*arguments, **options)
        return
    actual = kernels.scaled_mm(*arguments, **options).cpu()
    assert actual.dtype == out_dtype
    if out_dtype == BF16 and not fast:
        assert_product_of(actual, parts, a_block, b_block, bias, (sizes, a_block, b_block))
    exact = oracle.matmul(parts[0], parts[1], a_block, parts[2], parts[3], b_block)
    exact = exact if bias is None else exact + bias.double()
    # A tensor core's sum has 14 bits without promotion (arXiv 2412.19437, 3.3.2).
    error = (actual.double() - exact).norm() / exact.norm()
    assert error <= 2.0**-7, (a_block, b_block, out_dtype, fast, float(error))
