"""Static scales from data: what is counted, and where the scales go."""

from __future__ import annotations

import math
import re

import oracle
import pytest
import torch
from assertions import sqnr
from shapes import FORMATS, Case, pairs
from torch import Tensor, nn

from float8.config import Float8LinearConfig
from float8.convert.convert import convert_to_float8_training
from float8.formats import E4M3, format_of
from float8.numerics.calibration import Distribution, calibrate


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 16)
    )


def batches(count: int = 3) -> list[Tensor]:
    return list(torch.randn(count, 20, 16, generator=torch.Generator().manual_seed(5)).unbind())


RECIPES = [None, "tensorwise", "delayed", "unit", "rowwise"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_model_gives_the_scales_of_the_plain_one(recipe):
    model = mlp()
    if recipe is not None:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    plain = mlp().eval()
    hidden = torch.cat([plain[:4](x) for x in batches()])
    scales = calibrate(model, batches()).static_scales("amax")
    # As the largest of the dynamic scales, of all batches together.
    expected = {"0": torch.cat(batches()), "4": hidden}
    for layer, x in expected.items():
        assert scales[layer] == pytest.approx(float(x.detach().abs().max()) / 448, rel=1e-6)
    assert scales.keys() == expected.keys()


def test_the_model_itself_may_be_a_layer_and_a_shared_layer_sees_both_inputs():
    layer = nn.Linear(16, 16)
    x = torch.randn(4, 16)
    assert calibrate(layer, [x]).static_scales("amax") == {
        "": pytest.approx(float(x.abs().max()) / 448, rel=1e-6)
    }
    shared = nn.ModuleDict({"a": layer, "b": layer, "c": nn.ReLU()})
    shared.forward = lambda x: shared["b"](1000 * shared["a"](x))
    (scale,) = calibrate(shared, [x]).static_scales("amax").values()
    assert scale == pytest.approx(float((1000 * layer(x)).detach().abs().max()) / 448, rel=1e-5)


def test_autocast_rounds_before_it_is_counted():
    x = torch.full((4, 16), 1 + 2.0**-9)
    with torch.autocast("cpu", torch.bfloat16):
        found = calibrate(nn.Linear(16, 16), [x])
    assert found.inputs[""].amax == 1.0


def test_rows_say_what_each_scale_loses():
    found = calibrate(mlp(), batches())
    rows = {row["layer"]: row for row in found.rows()}
    for layer, row in rows.items():
        assert row["scale"] == found.static_scales()[layer]
        assert row["sqnr"] >= row["amax_sqnr"] > 30
        assert row["saturated"] < 0.05
    assert rows["0"]["elements"] == 3 * 20 * 16
    text = str(found)
    assert text.startswith('static scales by "sqnr" of 2 layers')
    assert found.table(top=1).endswith("and 1 more")


BFLOAT16 = torch.bfloat16
CASES = (
    Case((64, 33), BFLOAT16),
    Case((5, 123), BFLOAT16, exponent=-40, fill="wide", layout="transposed"),
    Case((130, 257), BFLOAT16, exponent=20, fill="one_large"),
    Case((37, 1), BFLOAT16, fill="ties", layout="sliced"),
    Case((4, 16), BFLOAT16, fill="codes", layout="expanded"),
)


def counted(*tensors: Tensor) -> Distribution:
    seen = Distribution()
    for x in tensors:
        seen.add(x)
    return seen


def exact_sqnr(x: Tensor, scale: float, dtype: torch.dtype) -> float:
    """Of the oracle's cast of the data itself."""
    scales = torch.full((1, 1), scale, dtype=torch.float32)
    codes = oracle.cast(x, scales, (-1, -1), dtype)
    return sqnr(oracle.values(codes, scales, (-1, -1), dtype), x)


@pairs(case=CASES, dtype=FORMATS, factor=[1.0, 0.3, 2.0**-5, 2.0**9])
def test_the_sqnr_of_any_scale_is_that_of_casting_the_data(case, dtype, factor):
    x, fmt = case.make(), format_of(dtype)
    seen = counted(x)
    scale = float(torch.tensor(seen.scale(fmt, "amax") * factor, dtype=torch.float32))
    found = float(seen.losses(torch.tensor([scale]), fmt)[0])
    assert found == pytest.approx(exact_sqnr(x, scale, dtype), rel=1e-9), (case, scale)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_search_finds_the_best_power_of_two(dtype):
    """Against a loop over the grid with the oracle's casts."""
    fmt = format_of(dtype)
    # Two octaves wider than the format, its power spread evenly: something has to give.
    exponents = torch.rand(4000, 1, dtype=torch.float64) * 42
    x = torch.exp2(exponents / 2 - 10).bfloat16()
    seen = counted(x)
    top = math.log2(seen.scale(fmt, "amax"))
    grid = [2.0**k for k in range(math.floor(top - 6), math.ceil(top + 2))]
    best = max(exact_sqnr(x, scale, dtype) for scale in grid)
    found = exact_sqnr(x, seen.scale(fmt, "sqnr"), dtype)
    assert found >= best - 1e-6


@pytest.mark.parametrize("factor", [1.0, 2.0**-4, 2.0**14])
def test_what_is_lost_at_both_ends(factor):
    x = Case((64, 100), BFLOAT16, fill="wide").make()
    seen = counted(x)
    scale = seen.scale(E4M3, "amax") * factor
    _, saturated, flushed = map(float, seen.losses(torch.tensor([scale]), E4M3))
    magnitudes = x.double().abs()
    exact = float((magnitudes > 448 * scale * (1 + 2**-8)).double().mean())
    assert saturated == pytest.approx(exact)
    codes = oracle.cast(x, torch.full((1, 1), scale), (-1, -1), E4M3.dtype)
    zero = (oracle.table(E4M3.dtype)[codes.long()] == 0) & (magnitudes > 0)
    assert flushed == pytest.approx(float(zero.double().mean()))
    assert (saturated > 0) == (factor < 1)


def test_a_layer_that_no_batch_reaches_is_named_below_the_table():
    model = mlp()
    model[3].unused = nn.Linear(16, 16)
    found = calibrate(model, batches())
    assert [row["layer"] for row in found.rows()] and "3.unused" not in found.table()
    message = "no static scale fits these layers.*\n  3.unused: no batch reached it"
    assert re.search(message, str(found))
    with pytest.raises(ValueError, match=message):
        found.static_scales()
