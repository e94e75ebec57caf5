"""What `bench_grouped_mm` compares: shapes of mixtures of experts, and grouped GEMMs in turn.

The routed experts of four models, from their papers and configurations:

                   hidden  expert  experts  per token
    DeepSeek-V3      7168    2048      256          8   arXiv:2412.19437, section 4.2
    Qwen3-30B-A3B    2048     768      128          8   config.json of Qwen/Qwen3-30B-A3B
    Llama-4-Scout    5120    8192       16          1   config.json of Llama-4-Scout-17B-16E
    Mixtral-8x7B     4096   14336        8          2   arXiv:2401.04088, table 1

    gate_up   K = hidden   N = 2 * expert      (gate and up in one product)
    down      K = expert   N = hidden

for 8192 tokens on a GPU, T = 8192 * experts per token. DeepSeek-V3's experts are shared among eight
GPUs, so that a GPU holds 32 of them and sees as many tokens as it sends. `small` has an eighth of
each width and 512 tokens, for a CPU.

The router is simulated: the size of a group is uniform between 0 and twice the mean, and a multiple
of 32, because torchao's grouped GEMMs need that.

torchao's (torchao.prototype.moe_training) are measured where it is importable. On a CPU its MXFP8
is emulated, and its rowwise casts are refused: they are Triton kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.contenders import PEER, SCALED
from benchmarks.measuring.step import Step
from float8 import Float8LinearConfig, grouped_mm
from float8.estimate import roofline
from float8.estimate.roofline import Shape as LayerShape
from float8.estimate.roofline import Use

BASELINE = "F.grouped_mm"
MULTIPLE = 32  # of the size of a group
# Histories of amaxes belong to a layer's cast, which a function does not have.
RECIPES = tuple(recipe for recipe in SCALED if recipe != "delayed")
PEERS = {"rowwise": "_to_fp8_rowwise_then_scaled_grouped_mm",
         "mxfp8": "_to_mxfp8_then_scaled_grouped_mm"}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A grouped GEMM ``x_TK @ w_ENK.T`` per group: T rows of tokens among E experts."""

    T: int
    K: int
    N: int
    E: int
    name: str = ""

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of T * K * N terms."""
        return 2 * self.T * self.K * self.N

    @property
    def row(self) -> dict[str, Any]:
        """What a row says about its shape."""
        return {"shape": str(self), "T": self.T, "K": self.K, "N": self.N, "E": self.E}

    def __str__(self) -> str:
        return f"{self.name} ({self.T},{self.K},{self.N},{self.E})".strip()


def of_model(
    model: str, hidden: int, expert: int, experts: int, top_k: int, tokens: int = 8192
) -> tuple[Shape, Shape]:
    """The two grouped GEMMs of a model's experts."""
    T = tokens * top_k
    return (
        Shape(T, hidden, 2 * expert, experts, f"{model}.gate_up"),
        Shape(T, expert, hidden, experts, f"{model}.down"),
    )


MODELS = {
    "deepseek-v3": of_model("deepseek-v3", 7168, 2048, 32, 8),
    "qwen3-30b": of_model("qwen3-30b", 2048, 768, 128, 8),
    "llama4-scout": of_model("llama4-scout", 5120, 8192, 16, 1),
    "mixtral": of_model("mixtral", 4096, 14336, 8, 2),
}
SMALL = tuple(
    Shape(shape.T // 16, shape.K // 8, shape.N // 8, shape.E, f"small.{shape.name}")
    for shape in (shapes[0] for shapes in MODELS.values())
)
TARGET = Shape(4096, 512, 1024, 8)
GROUPS = {**MODELS, "small": SMALL}
NAMED = {shape.name: shape for group in GROUPS.values() for shape in group}


def ends(shape: Shape, seed: int) -> Tensor:
    """(E,) int32: where a simulated router's groups end; the last one ends at T, or just before."""
    share = torch.rand(shape.E, generator=torch.Generator().manual_seed(seed)).cumsum(0)
    steps = shape.T // MULTIPLE
    return ((share / share[-1] * steps).round().int() * MULTIPLE).clamp(max=shape.T)


class Grouped(nn.Module):
    """``multiply(x, weight.mT, offs)``, an (E, N, K) weight being the module's parameter."""

    offs: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        offs: Tensor,
        multiply: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.weight, self.multiply = weight, multiply
        self.register_buffer("offs", offs)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self.multiply(x_TK, self.weight.mT, self.offs)


@dataclass(frozen=True)
class Operands:
    """What all contenders of a shape share."""

    x: Tensor
    weight: nn.Parameter
    offs: Tensor
    grad_output: Tensor

    @classmethod
    def random(cls, shape: Shape, device: str, seed: int) -> Operands:
        torch.manual_seed(seed)
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        weight = nn.Parameter(random(shape.E, shape.N, shape.K) * shape.K**-0.5)
        x = random(shape.T, shape.K, requires_grad=True)
        return cls(x, weight, ends(shape, seed).to(device), random(shape.T, shape.N))


def names(recipes: list[str], peer: bool) -> list[str]:
    """The contenders in order; the baseline of ratios comes first."""
    listed = [BASELINE]
    for recipe in recipes:
        listed.append(recipe)
        if peer and recipe in PEERS:
            listed.append(PEER + recipe)
    return listed


def function(name: str, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The grouped GEMM of a contender."""
    if name == BASELINE:
        return lambda x, w, offs: F.grouped_mm(x, w, offs=offs)
    if name.startswith(PEER):
        return _of_torchao(name.removeprefix(PEER), torch.device(device).type == "cpu")
    return partial(grouped_mm, config=Float8LinearConfig.from_recipe_name(name))


def _of_torchao(recipe: str, emulate: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    peer: Any = getattr(importlib.import_module("torchao.prototype.moe_training"), PEERS[recipe])
    options = {"pad_token_groups_for_grouped_mm": False}  # groups are multiples of 32
    if emulate and recipe == "mxfp8":
        common: Any = importlib.import_module("torchao.quantization.quantize_.common")
        options["kernel_preference"] = common.KernelPreference.EMULATED
    return partial(peer, **options)


def step(name: str, mode: str, operands: Operands) -> Step:
    """A training step of a contender, eager or compiled."""
    multiply = function(name, operands.x.device.type)
    layer = Grouped(operands.weight, operands.offs, multiply)
    run = torch.compile(layer, fullgraph=True, dynamic=False) if mode == "compiled" else layer
    return Step(layer, run, operands.x, operands.grad_output)


def moved_bytes(shape: Shape, recipe: str | None) -> float:
    """The bytes that one step reads and writes on CUDA, counted; None is bfloat16.

    Three grouped GEMMs and the casts of their operands, each operand read once, without padding.
    """
    sizes = LayerShape(shape.T, shape.K, shape.N, shape.E)
    x, w, g = shape.T * shape.K, shape.E * shape.K * shape.N, shape.T * shape.N
    plan = None if recipe is None else Float8LinearConfig.from_recipe_name(recipe).plan
    kinds = roofline.kinds_of_plan(plan, Use())
    moved = sum(roofline.grouped_gemm_bytes(kind, name, sizes) for name, kind in kinds.items())
    if plan is None:
        return moved
    *passes, _ = roofline.passes_of_layer(plan, Use(), emulates=False)
    return moved + sum(
        elements * each.bytes_per_element
        for elements, operand in zip((x, w, g), passes, strict=True)
        for each in operand
    )
