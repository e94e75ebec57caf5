"""Compiled with a dynamic number of tokens, every product is one that torch.compile can lower.

The lowering of ``_scaled_mm`` has to prove from symbolic sizes which kind of scales it is given
(`get_scaling_options` of torch/_inductor/kernel/mm.py), and raises where it cannot. It runs on CUDA
alone, so the test calls that function for the products of fake CUDA tensors.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import empty, fake_cuda, step
from layer_check import run
from sympy import sympify
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.kernel.mm import get_scaling_options
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")  # the casts of CUDA tensors are its kernels

from float8 import Float8Linear
from float8.config import RECIPES

RECIPE_NAMES = ("tensorwise", "rowwise", "blockwise")


class Lowerings(TorchDispatchMode):
    """Asks inductor about each product, as it would when it lowers the graph."""

    def __init__(self, env: ShapeEnv) -> None:
        super().__init__()
        self.sizes, self.kinds = SizeVarAllocator(env), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_mm.default:
            a, b, scale_a, scale_b = ([sympify(d) for d in x.shape] for x in args[:4])
            sides = [SimpleNamespace(get_size=lambda sizes=sizes: sizes) for sizes in (a, b)]
            with V.set_graph_handler(SimpleNamespace(sizevars=self.sizes)):
                self.kinds.append(get_scaling_options(*sides, scale_a, scale_b))
        elif func is torch.ops.float8.cublas_blockwise_mm.default:
            self.kinds.append("opaque to inductor")
        return func(*args, **(kwargs or {}))


def lower(recipe: str, tokens: int) -> list:
    """The kinds of scales of the three products of a layer, for so many tokens, dynamic."""
    env, example = ShapeEnv(), torch.empty(tokens, 0)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=env)
    with fake_cuda("sm_90", mode), enable_python_dispatcher(), Lowerings(env) as lowerings:
        size = mode.from_tensor(example, symbolic_context=dynamic).shape[0]
        assert isinstance(size, torch.SymInt)
        config = replace(RECIPES[recipe], pad_inner_dim=True)
        step(config, empty(size, 640), empty(256, 640), empty(size, 256))
    return lowerings.kinds


# Whole tiles of everything; odd; no multiple of 4; fewer than a block, where scales of blocks and
# of rows are the same.
@pytest.mark.parametrize("tokens", [512, 453, 48, 3])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_lowering_knows_the_scales_of_every_product(recipe, tokens):
    kinds = lower(recipe, tokens)
    assert len(kinds) == 3
    # Inductor may give 1x128 scales to a template that ignores their strides (pytorch#193802).
    assert recipe != "blockwise" or set(kinds) == {"opaque to inductor"}


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_compiled_layer_takes_any_number_of_tokens(recipe):
    config = replace(RECIPES[recipe], pad_inner_dim=True)
    layer = Float8Linear(256, 128, dtype=torch.bfloat16, device="cuda", config=config)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (512, 1024, 453, 454, 48):
        x = torch.randn(tokens, 256, dtype=torch.bfloat16, device="cuda")
        g = torch.randn(tokens, 128, dtype=torch.bfloat16, device="cuda")
        found, expected = (run(call, x, g) for call in (compiled, layer))
        for name, exact in expected.items():
            error = (found[name].float() - exact.float()).norm()
            assert error <= 0.01 * exact.float().norm(), (recipe, tokens, name)
