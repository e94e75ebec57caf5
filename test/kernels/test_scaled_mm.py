"""Which product runs where, by which candidate, and why not.

A GPU is not needed: FakeTensors stand for CUDA tensors where shapes and choices matter, and
`PretendCuda` tensors, whose bytes are on the CPU, where numbers do.
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
BLOCKS = {"tensorwise": TENSOR, "rowwise": ROW, "1x128": B1, "128x128": B128, "3x5": (3, 5)}
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


def an_arch(a_block, b_block):
    """An architecture on which torch runs the product of these blocks."""
    return "sm_100" if PRODUCTS[a_block, b_block] == "mx" else "sm_90"


@pytest.fixture
def torch_calls(monkeypatch):
    """``torch._scaled_mm`` as documented, on an sm_90 unless the test says otherwise; its calls."""
    monkeypatch.setattr(module, "architecture", lambda index=None: "sm_90")
    return install_torch_scaled_mm(monkeypatch)


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setattr(module, "_has_triton", lambda: False)


# --- choices and refusals


def test_every_architecture_that_is_supported_is_tested():
    assert set(module.SUPPORT) == {arch for arch, runs in RUNS.items() if runs}
    assert set(module.CANDIDATES) == set(PRODUCTS.values())
    by_torch = {product for product, row in module.CANDIDATES.items() if module.TORCH in row}
    assert all(set(products) == by_torch for products in module.SUPPORT.values())


def test_no_gpu_has_been_measured():
    """With a row in it, docs and `CANDIDATES` no longer say which GEMM runs."""
    assert module.FASTEST == {}


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


@pytest.mark.parametrize("arch", RUNS)
@EVERY_PRODUCT
def test_an_architecture_runs_a_product_or_says_why_not(arch, a_block, b_block):
    reason = module.refuses_device(arch, a_block, b_block, BF16)
    product = PRODUCTS[a_block, b_block]
    if product in RUNS[arch]:
        assert reason is None
        assert module.gemm_for(arch, a_block, b_block, BF16) == (RUNS[arch][product], None)
        return
    assert arch in reason
    assert "emulate=True" in reason
    if RUNS[arch]:
        assert f"does not run a {product} product" in reason
        assert all(candidate.name in reason for candidate in module.CANDIDATES[product])
    else:
        assert "is not known to have float8 tensor cores" in reason
        assert all(known in reason for known in module.SUPPORT)
    assert module.gemm_for(arch, a_block, b_block, BF16) == ("", reason)


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


# (architecture, CUDA) -> product -> candidates that write float32, float16; None: refused
WRITERS = {
    ("sm_90", "13.0"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (BY_TORCH, BY_TORCH),  # by cuBLASLt
        "blockwise": (BY_TORCH, BY_TRITON),
        "mx": (None, None),
    },
    ("sm_90", "12.8"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (None, None),  # by CUTLASS
        "blockwise": (BY_TRITON, BY_TRITON),
        "mx": (None, None),
    },
    ("sm_120", "13.0"): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (None, None),
        "blockwise": (BY_TRITON, BY_TRITON),
        "mx": (BY_TORCH, BY_TORCH),
    },
    ("gfx94", None): {
        "tensorwise": (BY_TORCH, BY_TORCH),
        "rowwise": (None, None),
        "blockwise": (None, None),
        "mx": (None, None),
    },
}


@EVERY_PRODUCT
@pytest.mark.parametrize("which", WRITERS, ids=str)
def test_candidates_that_write_other_dtypes_than_bfloat16(a_block, b_block, which, monkeypatch):
    arch, cuda = which
    monkeypatch.setattr(torch.version, "cuda", cuda)
    product = PRODUCTS[a_block, b_block]
    for out_dtype, chosen in zip(
        (torch.float32, torch.float16), WRITERS[which][product], strict=True
    ):
        reason = module.refuses_device(arch, a_block, b_block, out_dtype)
        if chosen is not None:
            assert reason is None
            assert module.gemm_for(arch, a_block, b_block, out_dtype) == (chosen, None)
        elif product == "rowwise":
            assert f"in bfloat16 only, not {out_dtype}" in reason
            assert "torch.autocast" in reason


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
@EVERY_PRODUCT
def test_torch_takes_multiples_of_16_and_no_other_takes_its_place(
    a_block, b_block, contraction, columns, words, monkeypatch
):
    arch = an_arch(a_block, b_block)
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    reason = module.refuses_sizes(arch, a_block, b_block, BF16, contraction, columns)
    if words is None:
        assert reason is None
        return
    assert all(word in reason for word in [*words, "not a multiple of 16"])
    assert ("columns" in reason) == any("columns" in word for word in words)
    with pytest.raises(ValueError, match=r"not a multiple of 16; .*pad_inner_dim=True"):
        multiply(operands(16, contraction, columns, a_block, b_block), a_block, b_block)


@pytest.mark.parametrize(
    ("cuda", "chosen"),
    [("12.8", BY_TRITON), ("12.9", BY_TORCH), ("13.0", BY_TORCH), (None, BY_TORCH)],
)
def test_blockwise_products_by_torch_need_a_cuda_that_has_them(cuda, chosen, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert module.gemm_for("sm_90", B1, B128, BF16) == (chosen, None)
    assert module.gemm_for("sm_90", ROW, ROW, BF16) == (BY_TORCH, None)


@pytest.mark.parametrize(
    ("arch", "cuda", "out_dtype", "words"),
    [
        ("sm_89", "13.0", BF16, ["on sm_90 only"]),
        ("sm_90", "12.8", BF16, ["from CUDA 12.9 on", "12.8"]),
        ("sm_90", "13.0", torch.float16, ["bfloat16 or float32 only"]),
    ],
)
@pytest.mark.usefixtures("no_triton")
def test_a_refusal_names_every_candidate_and_what_would_make_it_run(
    arch, cuda, out_dtype, words, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    reason = module.refuses_device(arch, B1, B128, out_dtype)
    for word in [*words, BY_TORCH, BY_TRITON, "pip install triton", "emulate=True", str(out_dtype)]:
        assert word in reason, reason


@pytest.mark.usefixtures("no_triton")
def test_without_triton_blockwise_sizes_must_suit_torch():
    reason = module.refuses_sizes("sm_90", B1, B128, BF16, 24, 16)
    assert "contraction=24 not a multiple of 16" in reason


def test_triton_is_found_where_it_is_installed():
    assert module._has_triton() == (importlib.util.find_spec("triton") is not None)


@pytest.fixture
def fresh_architecture():
    module._architecture.cache_clear()
    yield
    module._architecture.cache_clear()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"),
     ((10, 3), "sm_103"), ((12, 0), "sm_120"), ((12, 1), "sm_121")],
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


# --- what runs


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((16, 24, 16), "contraction=24"), ((16, 16, 17), "columns=17")],
)
def test_sizes_that_the_hardware_does_not_take_are_refused_with_the_fix(torch_calls, sizes, words):
    with pytest.raises(ValueError, match=f"{words} not a multiple of 16") as error:
        multiply(operands(*sizes, TENSOR, TENSOR), TENSOR, TENSOR)
    assert "pad_inner_dim=True" in str(error.value)
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
        assert actual.dtype == out_dtype
        exact = oracle.matmul(parts[0], parts[1], a_block, parts[2], parts[3], b_block)
        exact = exact if bias is None else exact + bias.double()
        replay = (sizes, a_block, b_block, out_dtype)
        assert_error_within_baseline(actual, exact, expected, replay=replay)
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


@pytest.mark.parametrize("name", ["a_scale", "b", "b_scale", "bias"])
def test_operands_of_several_devices_are_refused(name):
    parts = [*operands(16, 32, 16, TENSOR, TENSOR), torch.ones(16, dtype=BF16)]
    i = ["a", "a_scale", "b", "b_scale", "bias"].index(name)
    parts = [part if j == i else part.as_subclass(PretendCuda) for j, part in enumerate(parts)]
    message = rf"scaled_mm: {name} is on cpu and a on cuda:0; move it with .to\('cuda:0'\)"
    with pytest.raises(ValueError, match=message):
        kernels.scaled_mm(*parts[:4], TENSOR, TENSOR, parts[4], out_dtype=BF16)


@pytest.mark.parametrize(
    ("a_block", "b_block", "out_dtype", "arch", "words"),
    [
        ((3, 5), B128, BF16, "sm_90", "no hardware multiplies"),
        (TENSOR, TENSOR, BF16, "sm_80", "not known to have float8 tensor cores"),
        (B1, B128, BF16, "gfx94", "does not run a blockwise product"),
        (ROW, ROW, torch.float32, "sm_120", "bfloat16 only"),
    ],
)
def test_a_refused_product_is_an_error_unless_emulated(
    torch_calls, monkeypatch, a_block, b_block, out_dtype, arch, words
):
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    parts = operands(3, 640, 128, a_block, b_block)
    with pytest.raises(ValueError, match=f"scaled_mm: .*{words}"):
        multiply(parts, a_block, b_block, out_dtype=out_dtype)
    emulated = multiply(parts, a_block, b_block, out_dtype=out_dtype, emulate=True)
    expected = definition.scaled_mm(*parts, a_block, b_block, None, out_dtype)
    assert_bitwise(emulated, expected, (a_block, b_block, arch))
    assert torch_calls == []


@pytest.mark.parametrize("sizes", [(0, 128, 256), (16, 0, 128), (16, 128, 0)], ids=str)
@pytest.mark.parametrize(("a_block", "b_block"), [(TENSOR, TENSOR), (B1, B128)], ids=str)
def test_an_empty_product_asks_no_hardware(torch_calls, sizes, a_block, b_block):
    M, K, N = sizes
    bias = torch.ones(N, dtype=BF16)
    actual = multiply(operands(M, K, N, a_block, b_block), a_block, b_block, bias)
    assert_bitwise(actual, torch.ones(M, N, dtype=BF16), sizes)
    assert torch_calls == []


def test_a_cpu_never_asks_the_hardware(torch_calls):
    parts = operands(16, 24, 17, ROW, ROW)
    actual = kernels.scaled_mm(*parts, ROW, ROW, out_dtype=torch.float32)
    expected = definition.scaled_mm(*parts, ROW, ROW, None, torch.float32)
    assert_bitwise(actual, expected)
    assert torch_calls == []


def test_what_is_prepared_for_two_products_multiplies_alike():
    a, a_scale, b, b_scale = operands(16, 24, 17, ROW, TENSOR)
    prepared = kernels.decode(a)
    for out_dtype in shapes.HIGH_PRECISION:
        expected = kernels.scaled_mm(a, a_scale, b, b_scale, ROW, TENSOR, out_dtype=out_dtype)
        actual = kernels.scaled_mm(prepared, a_scale, b, b_scale, ROW, TENSOR, out_dtype=out_dtype)
        assert_bitwise(actual, expected, out_dtype)


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


@pytest.mark.parametrize("arch", [arch for arch, runs in RUNS.items() if runs])
@EVERY_PRODUCT
@pytest.mark.parametrize("sizes", [(256, 384, 128), (48, 272, 160)], ids=str)
def test_the_chosen_candidate_is_traced_on_fake_cuda_tensors(
    a_block, b_block, sizes, arch, monkeypatch
):
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    chosen = RUNS[arch].get(PRODUCTS[a_block, b_block])
    M, K, N = sizes
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        bias = torch.empty(N, dtype=BF16, device="cuda")
        parts = fake_operands(M, K, N, a_block, b_block)
        if chosen is None:
            with pytest.raises(ValueError, match=f"{arch} does not run"):
                kernels.scaled_mm(*parts, a_block, b_block, bias, out_dtype=BF16)
            return
        out = kernels.scaled_mm(*parts, a_block, b_block, bias, out_dtype=BF16)
        assert (out.shape, out.dtype, out.device.type) == ((M, N), BF16, "cuda")
    assert products.names == [chosen]


@pytest.mark.parametrize("pad", [False, True])
@EVERY_PRODUCT
@pytest.mark.parametrize("sizes", [(5, 123, 7), (48, 272, 150), (48, 130, 160)], ids=str)
def test_odd_sizes_can_be_traced_on_fake_cuda_tensors(a_block, b_block, sizes, pad, monkeypatch):
    M, K, N = sizes
    arch = an_arch(a_block, b_block) if pad else "sm_89"
    if not pad and PRODUCTS[a_block, b_block] != "blockwise":
        pytest.skip("refused")
    # Without padding on an architecture whose blockwise products are Triton's, of any size.
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        bias = torch.empty(N, dtype=BF16, device="cuda")
        parts = fake_operands(M, K, N, a_block, b_block)
        out = kernels.scaled_mm(*parts, a_block, b_block, bias, out_dtype=BF16, pad=pad)
        assert (out.shape, out.dtype, out.device.type) == ((M, N), BF16, "cuda")
    assert products.names == [BY_TORCH if pad else BY_TRITON]


@EVERY_PRODUCT
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
def test_transposed_fake_cuda_operands_are_brought_into_layout(a_block, b_block, arch, monkeypatch):
    arch = "sm_100" if a_block == MX else arch
    monkeypatch.setattr(module, "architecture", lambda index=None: arch)
    with FakeTensorMode(), torch.no_grad():
        parts = fake_operands(48, 272, 160, a_block, b_block)
        for i in (0, 2):
            parts[i] = torch.empty(parts[i].shape[::-1], dtype=E4M3, device="cuda").t()
        out = kernels.scaled_mm(*parts, a_block, b_block, out_dtype=BF16)
        assert out.shape == (48, 160)


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
