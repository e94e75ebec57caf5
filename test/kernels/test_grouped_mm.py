"""Which candidate runs a grouped product on which GPU, and whether torch takes what it is handed.

FakeTensors of a CUDA device go through torch's own checks of strides, shapes and dtypes; the checks
that only its CUDA code makes (ATen/native/cuda/GroupedBlas.cpp: sizes that are multiples of 16) are
repeated here.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from float8.kernels import grouped_mm as module
from float8.kernels.scaled_mm import PLAIN

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
BY_TORCH, BY_TRITON = module.TORCH.name, module.TRITON.name
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))
E, T = 3, 70


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
        out = module.multiply_groups(
            name, *parts, pair[0], b_block, out_dtype, module.group_alignment(name), True, pad
        )
    assert products.names == [name]
    assert out.dtype == out_dtype and out.device.type == "cuda"
    assert out.shape == ((E, N, K) if by_tokens else (T, N))
    return name


CASES = [
    (name, by_tokens, out_dtype, formats)
    for name, by_tokens in itertools.product(PAIRS, (False, True))
    if not (by_tokens and name == "blockwise")
    for out_dtype, formats in ((BF16, (E4M3, E4M3)), (BF16, (E5M2, E4M3)), (FP32, (E4M3, E4M3)))
]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_the_candidate_of_every_product(arch):
    """torch's where it is known to be right and to write the dtype; Triton's for all others."""
    for name, by_tokens, out_dtype, formats in CASES:
        chosen = multiply(arch, PAIRS[name], 64, 48, by_tokens, out_dtype, formats)
        is_torch = (
            (arch, by_tokens, out_dtype) == ("sm_90", False, BF16)
            and "rowwise" in name
            and formats == (E4M3, E4M3)
        )
        assert chosen == (BY_TORCH if is_torch else BY_TRITON), (name, by_tokens, out_dtype)


@EVERY_PAIR
@pytest.mark.parametrize("arch", ["sm_89", "sm_90"])
@pytest.mark.parametrize("sizes", [(64, 7), (123, 48), (130, 130)], ids=str)
def test_odd_features_are_padded_on_request(pair, sizes, arch):
    with pytest.raises(
        ValueError, match=r"grouped_mm: experts of .* multiples of 16; pad them or set"
    ):
        multiply(arch, pair, *sizes, by_tokens=False)
    multiply(arch, pair, *sizes, by_tokens=False, pad=True)


def transposed(x: Tensor) -> Tensor:
    return x.view(torch.uint8).mT.clone(memory_format=torch.contiguous_format).mT.view(x.dtype)


@EVERY_PAIR
@pytest.mark.parametrize("by_tokens", [False, True])
def test_other_strides_are_copied(pair, by_tokens):
    if by_tokens and SQUARE in pair:
        pytest.skip("no such operand")

    def change(parts):
        wide = cuda(*parts[0].shape[:-1], parts[0].shape[-1] + 16, dtype=torch.uint8)
        a = wide.narrow(-1, 3, parts[0].shape[-1]).view(E4M3)
        return [a, parts[1], transposed(parts[2]), *parts[3:]]

    multiply("sm_90", pair, 64, 48, by_tokens, change=change)


def test_nothing_to_multiply_launches_nothing():
    for K, tokens in ((0, T), (64, 0)):
        with FakeTensorMode(), torch.no_grad(), Products() as products:
            a, a_scale, b, b_scale, offs = operands((ROW, ROW), K, 48, False)
            parts = (a.narrow(0, 0, tokens), a_scale.narrow(0, 0, tokens), b, b_scale, offs)
            out = module.multiply_groups(BY_TORCH, *parts, ROW, (1, *ROW), BF16, 16)
        assert out.shape == (tokens, 48) and products.names == []


@pytest.mark.parametrize(
    ("arch", "pair", "words"),
    [
        ("gfx94", (ROW, ROW), "gfx94 does not run a grouped rowwise product written in .*bfloat16:"
         " torch._scaled_grouped_mm multiplies on sm_90 only; the Triton grouped GEMM is for"),
        ("sm_80", (ONE, ONE), "sm_80 is not known to have float8 tensor cores"),
        ("sm_90", ((3, 5), ONE), r"no hardware multiplies blocks \(3, 5\)"),
    ],
)  # fmt: skip
def test_refusals_say_why_and_the_way_out(arch, pair, words):
    name, reason = module.grouped_gemm_for(arch, pair[0], (1, *pair[1]), BF16)
    assert name == ""
    assert re.search(words, reason), reason
    assert "emulate=True" in reason


def test_a_cpu_and_emulation_run_every_product():
    for family, emulate in (("cpu", False), ("sm_90", True), ("sm_80", True)):
        assert module.grouped_gemm_for(family, ROW, ROW, FP32, emulate) == (PLAIN, None)


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
