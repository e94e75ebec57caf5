"""The report of a conversion: sizes that GPUs refuse, patterns that match nothing, folded names."""

import copy
import dataclasses
import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import float8
from float8 import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_inference,
    convert_to_float8_training,
    filters,
)
from float8.config import RECIPES


def model(features: int = 50) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(32, features), "down": nn.Linear(features, 32)})


def adamw(module):
    return torch.optim.AdamW(module.parameters())


CONVERSIONS = {
    "training": convert_to_float8_training,
    "inference": convert_to_float8_inference,
    "ms_amp": lambda m, **options: float8.ms_amp(m, adamw(m), **options)[0],
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_layers_of_sizes_that_no_gpu_multiplies_are_left_alone(convert):
    plain = model(64)
    plain["head"], plain["odd"] = nn.Linear(64, 10), nn.Linear(50, 32)
    weight = plain["head"].weight
    done = convert(copy.deepcopy(plain)).float8_conversion
    assert done.converted == ["up", "down"]
    why = "not multiples of 16, which GPUs need; pad_inner_dim=True converts it"
    assert done.skipped == {
        "head": f"in_features=64, out_features=10: {why}",
        "odd": f"in_features=50, out_features=32: {why}",
    }
    for config in (Float8LinearConfig(pad_inner_dim=True), Float8LinearConfig(emulate=True)):
        done = convert(copy.deepcopy(plain), config=config).float8_conversion
        assert done.converted == ["up", "down", "head", "odd"]
    assert Float8Linear.from_float(plain["head"]).weight is weight  # the user names it


def test_a_pattern_matches_layers_that_were_converted_before():
    skip = filters.skip_names("down")
    converted = convert_to_float8_training(model(64), module_filter_fn=skip)
    convert_to_float8_training(converted, module_filter_fn=filters.skip_names("up"))
    assert converted.float8_conversion.unmatched_patterns == []


def test_a_layer_whose_forward_was_replaced_says_so():
    """As by Accelerate's hooks and by ``from_pretrained(tp_plan=...)``."""
    plain = model(64)
    plain["down"].forward = functools.partial(nn.Linear.forward, plain["down"])
    skipped = convert_to_float8_training(plain).float8_conversion.skipped
    assert list(skipped) == ["down"] and "convert it before that" in skipped["down"]


# --- what reports say, and where


def blocks(count: int = 48) -> nn.Module:
    layers = nn.ModuleList(model(64) for _ in range(count))
    for layer in layers:
        layer["gate"], layer["experts"] = nn.Linear(32, 16), nn.ModuleList([nn.Linear(32, 32)])
    return nn.ModuleDict({"layers": layers, "head": nn.Linear(32, 10)})


def test_the_report_folds_layers_by_pattern_and_reason(caplog):
    with caplog.at_level(logging.INFO, logger="float8"):
        converted = convert_to_float8_training(blocks(), config="rowwise")
    report = str(converted.float8_conversion)
    assert [record.getMessage() for record in caplog.records] == [report]
    first, gates, head = report.splitlines()
    elements = 48 * 5 * 32 * 32, 48 * 32 * 16 + 320
    share = 100 * elements[0] / sum(elements)
    assert (
        first == f"converted to float8 (rowwise): 144 layers, {share:.1f} % of the matrix elements"
    )
    assert gates.startswith("  left alone: layers.*.gate (48 layers): it routes tokens")
    assert head.startswith("  left alone: head: in_features=32, out_features=10: ")
    assert len(converted.float8_conversion.skipped) == 49


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (
            dataclasses.replace(RECIPES["delayed"], pad_inner_dim=True),
            "delayed, pad_inner_dim=True",
        ),
        (Float8LinearConfig(cast_config_input=RECIPES["rowwise"].cast_config_input), "own config"),
    ],
)
def test_the_report_names_the_recipe(config, name):
    done = convert_to_float8_training(model(64), config=config).float8_conversion
    assert done.recipe == name and f"converted to float8 ({name}): 2 layers" in str(done)


class Recurrent(nn.Module):
    """Weights in modules that are no nn.Linear, in a parameter of its own, and in an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(1000, 16), nn.Linear(16, 32)
        self.tied = nn.Linear(16, 1000, bias=False)
        self.tied.weight = self.table.weight
        self.cells, self.mix, self.again = nn.LSTM(16, 16), *(nn.Conv2d(32, 16, 1) for _ in "12")
        self.again.weight = self.mix.weight
        self.own = nn.Parameter(torch.zeros(4, 32, 8))
        self.twice = self.up


def test_the_report_says_which_modules_hold_the_weights_that_stay():
    skip = filters.skip_names("tied")
    done = convert_to_float8_training(Recurrent(), module_filter_fn=skip).float8_conversion
    own, others = 512, {"LSTM": 2 * 64 * 16, "Recurrent": 4 * 32 * 8, "Conv2d": 512}
    everything = own + sum(others.values()) + 16_000
    assert done.elements == own and done.unnamed == others  # of tied there is a line
    lines = [
        f"{kind}: {100 * n / everything:.1f} % of the matrix elements" for kind, n in others.items()
    ]
    assert (
        str(done)
        .splitlines()[0]
        .endswith(f"1 layers, {100 * own / everything:.1f} % of the matrix elements")
    )
    assert str(done).splitlines()[-3:] == [f"  left alone: {line}" for line in lines]
    whole = convert_to_float8_training(nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16)))
    assert str(whole.float8_conversion) == "converted to float8 (tensorwise): 1 layers"


# --- layers whose weight the model reads itself


class Attention(nn.Module):
    """As in timm's BEiT: ``qkv`` is never called. Neither is ``same``, which is like ``proj``."""

    def __init__(self, D: int = 32) -> None:
        super().__init__()
        self.qkv, self.proj, self.same = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return x + F.linear(self.proj(F.scaled_dot_product_attention(q, k, v)), self.same.weight)


class Blocks(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Attention() for _ in range(3)), nn.Linear(32, 32)
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def messages(caplog) -> list[str]:
    """The warnings in the library's log."""
    found = [r for r in caplog.records if r.name == "float8" and r.levelno >= logging.WARNING]
    return [record.getMessage() for record in found]


def test_the_first_step_names_the_layers_that_were_not_called(caplog):
    model, x = convert_to_float8_training(Blocks()), torch.randn(2, 5, 32)
    float8.after_step(model)  # before a forward nothing is known
    assert messages(caplog) == []
    for _ in range(2):
        with float8.high_precision(model):
            model(x)
        model(x).sum().backward()
        float8.after_step(nn.ModuleList([model]))
    (line,) = messages(caplog)  # once
    assert line.splitlines()[0] == "layers of Blocks do not run in float8:"
    for name in ("qkv", "same"):
        assert f"  blocks.*.{name} (3 layers): it is converted, but was not called" in line
    assert "skip_names in module_filter_fn" in line
    skip = filters.skip_names("blocks.*.qkv", "blocks.*.same")
    caplog.clear()
    model = convert_to_float8_training(Blocks(), module_filter_fn=skip)
    assert model.float8_conversion.converted == [*(f"blocks.{i}.proj" for i in range(3)), "head"]
    model(x).sum().backward()
    float8.after_step(model)
    assert messages(caplog) == []


def test_what_ran_is_known_of_layers_that_others_wrap_or_share(caplog):
    caplog.set_level(logging.INFO, "float8")
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    model[1].weight = model[0].weight
    convert_to_float8_training(model)
    # Names change, as by PEFT's base_layer, and only one of two tied layers is called.
    nn.Sequential(model[1], model.append(nn.Sequential(model.pop(2)))[3])(torch.randn(4, 16))
    float8.after_step(model)
    line = caplog.records[-1].getMessage()
    assert line.startswith("layers of Sequential do not run in float8:")
    assert [text.split(":")[0] for text in line.splitlines()[1:]] == ["  0", "  2"]
    assert "If the model reads its weight itself" in line  # it may also be a layer of a later step


@pytest.mark.parametrize(
    "compiled",
    [
        "whole",
        "layers",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("recomputed", "blocks")),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's, of layers
def test_what_was_called_is_known_of_compiled_models_too(compiled, caplog):
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    model = convert_to_float8_training(Blocks(compiled == "recomputed"))
    parts = {"blocks": model.blocks, "layers": [m for m in model.modules() if hasattr(m, "config")]}
    for part in parts.get(compiled, [model]):
        part.compile(backend=backend, fullgraph=True)
    for _ in range(3):
        model(torch.randn(2, 5, 32, requires_grad=True)).sum().backward()
        float8.after_step(model)
    (line,) = messages(caplog)
    # Blocks and layers share a graph, so that `same` may have run by that of `proj`.
    assert "blocks.*.qkv (3 layers): it is converted, but was not called" in line
    assert "blocks.*.same" not in line
    assert backend.frame_count == 1  # a call is noted without a guard, and no graph breaks


def test_an_error_of_a_weight_in_float8_names_the_filter():
    model, x = convert_to_float8_inference(Blocks()), torch.randn(5, 32)
    remedy = r"weight of a layer.*float8.filters.skip_names"
    with pytest.raises(ValueError, match=f"float8 multiplies two Float8Tensors.*{remedy}"):
        model(x)
    with pytest.raises(NotImplementedError, match=f"not defined for Float8Tensor.*{remedy}"):
        model(x.expand(2, 5, 32))
