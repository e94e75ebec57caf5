"""Where no filter is given, conversion leaves experts alone that lose on Hopper by the model."""

from dataclasses import replace

import pytest
import torch
from fresh import facts_of
from torch import nn

import float8
from float8 import convert_to_float8_training
from float8.config import RECIPES, Float8LinearConfig, GemmConfig
from float8.convert import filters
from float8.estimate import estimate
from float8.estimate.predict import experts_that_gain
from float8.integrations.conversion import Adapter


class Experts(nn.Module):
    """gate_up (E, 2H, D) and down (E, D, H) on the meta device."""

    def __init__(self, D: int, H: int, E: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(E, 2 * H, D, device="meta", dtype=dtype))
        self.down = nn.Parameter(torch.empty(E, D, H, device="meta", dtype=dtype))

    def forward(self, x, offs):
        raise NotImplementedError


float8.register_experts(Experts)
MIXTRAL, QWEN3 = (4096, 14336, 8), (2048, 768, 128)
SUMS = [f"gemm_config_{name}" for name in ("output", "grad_input", "grad_weight")]
FAST = dict.fromkeys(SUMS, GemmConfig(use_fast_accum=True))
PRECISE = dict.fromkeys(SUMS, GemmConfig(use_fast_accum=False))
WITHOUT_HISTORY = [name for name in RECIPES if name != "delayed" and "mxfp8" not in name]


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes this machine one with a GPU of this family and name."""
    monkeypatch.setattr(filters, "DEFAULT_FILTERS", [experts_that_gain])

    def become(family: str, name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr("float8.kernels.products.architecture", lambda index=None: family)

    return become


def converted(sizes, config, dtype=torch.bfloat16, **options):
    with torch.device("meta"):
        block = nn.ModuleDict({"experts": Experts(*sizes, dtype), "out": nn.Linear(64, 64)})
    done = convert_to_float8_training(block, config=config, **options).float8_conversion
    assert "out" in done.converted
    return done.experts == ["experts"], done.skipped.get("experts", "")


def predicted(sizes, config, device) -> float:
    """The speed-up of both products together, with 16,384 rows."""
    D, H, E = sizes
    shapes = [(16384, D, 2 * H, E), (16384, H, D, E)]
    return estimate(shapes, device=device, recipes={"own": config}).total("own").speedup


def test_float8_comes_with_the_filter():
    """Which conftest.py takes away."""
    program = "import float8\nfrom float8.convert.filters import DEFAULT_FILTERS as made\n"
    found = facts_of(program + 'facts["names"] = [make.__name__ for make in made]')
    assert found == {"names": ["experts_that_gain"]}


@pytest.mark.parametrize("sums", [FAST, PRECISE], ids=["fast", "precise"])
@pytest.mark.parametrize("recipe", WITHOUT_HISTORY)
@pytest.mark.parametrize("sizes", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3"])
@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_experts_are_converted_if_they_gain_with_the_rows_that_are_assumed(
    gpu, sizes, recipe, sums, name
):
    gpu("sm_90", name)
    config, device = replace(RECIPES[recipe], **sums), name.split()[1]
    speedup = predicted(sizes, config, device)
    takes, reason = converted(sizes, config)
    assert takes == (speedup > 1)
    if not takes:
        start = f"its predicted speed-up on an {device} is {speedup:.2f}x with 16,384 rows."
        assert reason.startswith(start) and "module_filter_fn" in reason and "tokens" in reason


def test_large_experts_gain_and_small_ones_do_not(gpu):
    """The two mixtures that were measured: 2,048 rows per expert, and 512."""
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    rowwise = replace(RECIPES["rowwise"], **FAST)
    assert converted(MIXTRAL, rowwise)[0] and not converted(QWEN3, rowwise)[0]
    assert not converted(MIXTRAL, RECIPES["blockwise"])[0]  # without DeepGEMM


def test_float32_weights_are_priced_as_fsdp_gathers_them(gpu):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    assert converted(MIXTRAL, replace(RECIPES["rowwise"], **FAST), torch.float32)[0]


@pytest.mark.parametrize("family", ["sm_89", "sm_100", "gfx94"])
def test_other_gpus_convert_all_experts(gpu, family):
    gpu(family, "another GPU")
    assert converted(QWEN3, RECIPES["rowwise"]) == (True, "")


def test_a_cpu_converts_all_experts(gpu, monkeypatch):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert converted(QWEN3, RECIPES["rowwise"]) == (True, "")


@pytest.mark.parametrize("sizes", [(64, 32, 0), (0, 32, 2), (64, 0, 2)], ids=["E", "D", "H"])
def test_empty_experts_are_converted(gpu, sizes):
    """As of a rank that has none."""
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    assert converted(sizes, RECIPES["rowwise"]) == (True, "")


@pytest.mark.parametrize(
    "config",
    [Float8LinearConfig(emulate=True), replace(RECIPES["mxfp8"], mxfp4_weights=True)],
    ids=["emulated", "mxfp4"],
)
def test_what_is_not_predicted_is_converted(gpu, config):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    assert converted(QWEN3, config) == (True, "")


def test_the_users_filter_decides(gpu):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    for chosen in (filters.skip_names("head"), lambda module, fqn: True):
        assert converted(QWEN3, RECIPES["rowwise"], module_filter_fn=chosen) == (True, "")
    config = replace(RECIPES["rowwise"], **FAST)
    assert not converted(QWEN3, config)[0]
    many = float8.faster_layers(config, 2**17, experts_per_token=8)
    by_tokens = convert_to_float8_training(Experts(*QWEN3), config=config, module_filter_fn=many)
    assert by_tokens.float8_conversion.experts == [""]


def test_a_filter_that_a_framework_takes_by_default_is_no_users_filter(gpu):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    every = filters.all_of()
    for own, expected in ((None, ["out"]), (every, ["experts", "out"])):
        with torch.device("meta"):
            block = nn.ModuleDict({"experts": Experts(*QWEN3), "out": nn.Linear(64, 64)})
        model = Adapter("rowwise", own).convert(block, None, every)
        assert model.float8_conversion.converted == expected


def test_frozen_weights_for_inference_are_converted_always(gpu):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    with torch.device("meta"):
        block = nn.ModuleDict({"experts": Experts(64, 64, 4), "out": nn.Linear(64, 64)})
    done = float8.convert_to_float8_inference(block).float8_conversion
    assert done.converted == ["experts", "out"]


def test_experts_of_one_size_are_one_line_of_the_report(gpu):
    gpu("sm_90", "NVIDIA H100 80GB HBM3")
    with torch.device("meta"):
        layers = nn.ModuleList(Experts(*QWEN3) for _ in range(3))
        model = nn.ModuleDict({"layers": layers, "out": nn.Linear(64, 64)})
    report = str(convert_to_float8_training(model, config="rowwise").float8_conversion)
    assert "left alone: layers.* (3 layers): its predicted speed-up on an H100" in report
