"""torch's FlopCounterMode counts a float8 product as it counts that of a plain layer."""

import pytest
import torch
import torch.nn.functional as F
from fake_cuda import empty, fake_cuda, step
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from float8 import Float8LinearConfig, convert_to_float8_training, grouped_mm
from float8.config import RECIPES
from float8.kernels import flops


def count(run, **options) -> int:
    with FlopCounterMode(display=False, **options) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:recipe .unit.")
def test_a_converted_model_counts_what_the_plain_one_does(recipe, bias, device):
    model = nn.Sequential(nn.Linear(96, 64, bias), nn.GELU(), nn.Linear(64, 32, bias)).to(device)
    x = torch.randn(3, 5, 96, device=device)
    model[0].weight.requires_grad_(bias)  # a frozen one has no grad_weight product

    def forward():
        return model(x)

    def whole():
        model(x).sum().backward()

    plain = count(forward), count(whole)
    model = convert_to_float8_training(model, config=recipe)
    assert (count(forward), count(whole)) == plain
    assert plain[0] == 2 * 15 * (96 * 64 + 64 * 32)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "blockwise"])
def test_grouped_products_count_the_tokens_of_all_groups(recipe):
    convert_to_float8_training(nn.Linear(16, 16))
    x = torch.randn(48, 96, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(4, 96, 64, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([16, 16, 33, 48], dtype=torch.int32)
    assert count(lambda: grouped_mm(x, w, offs, recipe).sum().backward()) == 6 * 48 * 96 * 64
    assert count(lambda: F.grouped_mm(x, w, offs=offs)) == 2 * 48 * 96 * 64


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100"])  # blockwise by Triton, torch, as MX
@pytest.mark.parametrize("experts", [0, 4])
def test_products_of_a_gpu_count_the_same(recipe, arch, experts):
    pytest.importorskip("triton")
    with fake_cuda(arch):
        x, w, g = empty(128, 256), empty(*[experts] * bool(experts), 64, 256), empty(128, 64)
        offs = empty(experts, dtype=torch.int32) if experts else None
        config = Float8LinearConfig.from_recipe_name(recipe)
        step(config, x, w, g, offs=offs)  # imports the kernels
        known = {"blockwise_mm": flops.of_products, "grouped_mm_gpu": flops.of_groups}
        known = {op: f for n, f in known.items() if (op := getattr(torch.ops.float8, n, None))}
        found = count(lambda: step(config, x, w, g, offs=offs), custom_mapping=known)
    # torch's own grouped product does not say which tokens of grad_weight are padding.
    padding = 4 * 128 if experts and arch == "sm_100" and recipe != "tensorwise" else 0
    assert found == 2 * (3 * 128 + padding) * 256 * 64
