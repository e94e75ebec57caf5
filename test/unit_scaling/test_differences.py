"""Every different number from the package ``unit-scaling`` in docs/migrating/unit_scaling.md.

The first column of the page's first table names a row here. That the other package computes
something else is checked where it can be imported.
"""

from __future__ import annotations

import importlib
import math
import re
import warnings
from typing import Any

import pytest
import torch
from fresh import ROOT
from scale_assertions import gradients, normal
from torch import nn

PAGE = (ROOT / "docs" / "migrating" / "unit_scaling.md").read_text(encoding="utf-8")


class Library:
    """One of the two packages: ``lib.functional.linear``, ``lib.MHSA``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, part: str) -> Any:
        root = importlib.import_module(self.name)
        if (ROOT / "float8" / "unit_scaling" / f"{part}.py").is_file() or part in (
            *("functional", "transforms", "analysis"),
        ):
            return importlib.import_module(f"{self.name}.{part}")
        return getattr(root, part)


OURS = Library("float8.unit_scaling")


@pytest.fixture(scope="module")
def theirs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("unit_scaling.parameter")  # this directory is a unit_scaling too
    return Library("unit_scaling")


def grad_of(function, *inputs):
    return gradients(function, *inputs)[1:]


def seeded(make):
    """A module with weights that are the same for both packages."""
    module = make()
    for i, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=100 + i))
    return module


def evaluated_attention(lib):
    torch.manual_seed(0)
    return seeded(lambda: lib.MHSA(8, 2, True, dropout_p=0.5)).eval()(normal(2, 9, 8))


def gradient_in(dtype):
    def show(lib):
        x, w = normal(300, 8, dtype=dtype), normal(8, 8, dtype=dtype, seed=1)
        return grad_of(lambda x, w: lib.functional.linear(x, w, None), x, w)[1]

    return show


def convolved(lib, **options):
    layer = seeded(lambda: lib.Conv1d(3, 12, 3, **options))
    return torch.cat([g.flatten() for g in gradients(layer, normal(2, 3, 9))])


class Multiplies(nn.Module):
    def forward(self, x):
        return x @ x.mT


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(x + self.first(x))


def unit_scaled(lib, module):
    torch.manual_seed(1)
    return lib.transforms.unit_scale(seeded(lambda: module))


def simulated(lib, module):
    formats = [lib.formats.FPFormat(4, 3, "nearest"), lib.formats.FPFormat(5, 2, "nearest")]
    return lib.transforms.simulate_format(seeded(lambda: module), *formats)


def bias_gradient(lib):
    model = simulated(lib, Residual())
    model(normal(16, 8)).backward(normal(16, 8, seed=3))
    return model.second.bias.grad


def rounded(lib, *values, fmt=(4, 3)):
    return lib.formats.FPFormat(*fmt, "nearest").quantise(torch.tensor(values))


QKV = [normal(2, 3, 17, 8, seed=i) for i in range(3)]
TARGET = torch.tensor([0, 3, 6, 2, 2])
IGNORED = TARGET.clone().index_fill_(0, torch.tensor([1]), -100)
IDS = torch.tensor([[1, 2, 3]])


def attention(lib, q, k, v, **options):
    return lib.functional.scaled_dot_product_attention(q, k, v, **options)


def cross_entropy(*shape, target=TARGET, **options):
    logits = normal(*(shape or (5, 7)))
    return lambda lib: lib.functional.cross_entropy(logits, target, **options)


# Finite numbers that the other package computes differently.
RESULTS = {
    "`dropout` in evaluation": lambda lib: lib.functional.dropout(normal(9), 0.5, False),
    "`MHSA(dropout_p=...)` in evaluation": evaluated_attention,
    "`cross_entropy`, mean with ignored targets": cross_entropy(target=IGNORED),
    "`matmul` that broadcasts an input": lambda lib: grad_of(
        lambda a, b: lib.functional.matmul(a, b, constraint=None),
        normal(5, 6),
        normal(7, 6, 4, seed=1),
    )[0],
    "`conv1d`, input gradient": lambda lib: grad_of(
        lambda x, w: lib.functional.conv1d(x, w, constraint=None),
        normal(2, 3, 9),
        normal(4, 3, 5, seed=1),
    )[0],
    "`Conv1d(constraint=...)`": lambda lib: convolved(lib, constraint="to_grad_input_scale"),
    "`Conv1d(padding_mode=...)` other than zeros": lambda lib: torch.tensor(
        [lib.Conv1d(3, 4, 3, padding=1, padding_mode="reflect")(normal(2, 3, 9)).shape[-1]]
    ),
    "causal attention of fewer queries than keys": lambda lib: attention(
        lib, QKV[0][..., :5, :], *QKV[1:], is_causal=True
    ),
    "causal attention of two positions": lambda lib: attention(
        lib, *(x[..., :2, :] for x in QKV), is_causal=True
    ),
    "attention whose values are wider or narrower than its queries": lambda lib: attention(
        lib, *QKV[:2], normal(2, 3, 17, 24)
    ),
    "`rms_norm` in float64": lambda lib: lib.functional.rms_norm(
        normal(3, 8, dtype=torch.float64) * 1e30, (8,)
    ),
    "gradients in bfloat16 and float16": gradient_in(torch.bfloat16),
    "`FPFormat(4, 3)` and other formats": lambda lib: rounded(lib, 300.0, 1e-3),
    '`FPFormat(..., rounding="nearest")`, ties': lambda lib: rounded(lib, 1.1875, -1.1875),
    "`FPFormat.quantise` of infinity": lambda lib: (
        rounded(lib, math.inf, fmt=(5, 2)).isnan().double()
    ),
    "`simulate_fp8`": lambda lib: lib.transforms.simulate_fp8(seeded(Residual))(normal(16, 8)),
    "`simulate_format` of `matmul` and convolutions": lambda lib: simulated(lib, Multiplies())(
        normal(3, 5, 8)
    ),
    "`simulate_format`, gradient of a bias": bias_gradient,
    "`unit_scale`, weights of residual branches": lambda lib: unit_scaled(lib, Residual())(
        normal(16, 8)
    ),
    "`unit_scale`, parameters": lambda lib: unit_scaled(lib, nn.Sequential(nn.Conv1d(3, 4, 3)))[
        0
    ].weight.detach(),
}


def test_the_page_has_a_row_for_each_and_each_has_its_row():
    table = PAGE.split("\n### ")[1]
    assert re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:] == list(RESULTS)


@pytest.mark.parametrize("row", RESULTS)
def test_the_other_one_computes_something_else(row, theirs):
    ours, other = (RESULTS[row](lib).detach().double() for lib in (OURS, theirs))
    assert ours.shape == other.shape
    assert 1e-4 < float((ours - other).norm() / ours.norm()) < math.inf


def test_a_decoder_is_the_other_ones_in_everything_else(theirs):
    """Its loss and gradients, and the learning rates and decays of its parameters."""
    models = [lib.TransformerDecoder(8, 20, 2, 2) for lib in (OURS, theirs)]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(20, (3, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for lib, model in zip((OURS, theirs), models, strict=True):
        loss = model.loss(ids)
        loss.backward()
        groups = lib.optim.AdamW(list(model.parameters()), lr=0.3, weight_decay=0.1).param_groups
        rates = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
        numbers = torch.tensor([rates[id(p)] for p in model.parameters()])
        found.append([loss.detach(), numbers, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)
