"""A stubbed GPU: a layer's step launches what is counted for it, and nothing of it stays."""

import json

import pytest
import torch

pytest.importorskip("triton")

from assertions import assert_all_bitwise

from benchmarks import bench_linear
from benchmarks.measuring.step import moved_by_casts, settled
from benchmarks.measuring.stubbed_gpu import stubbed_gpu
from float8 import Float8Linear, sync_float8_amax_and_scale_history
from float8.linear.plan import plan_for


def step(layer, x, g):
    x = x.detach().requires_grad_()
    layer.weight.grad = None
    out = layer(x)
    out.backward(g)
    return out.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        ("delayed", "sm_90"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rowwise", "sm_90"), ("blockwise", "sm_90"), ("mxfp8", "sm_100"))
        ),
    ],
)
def test_a_step_launches_the_casts_that_are_counted(recipe, family):
    config = settled(recipe)
    layer = Float8Linear(32, 32, bias=False, dtype=torch.bfloat16, config=config)
    x, g = torch.randn(2, 32, 32, dtype=torch.bfloat16)
    step(layer, x, g)  # records amaxes, which a stubbed GPU does not
    sync_float8_amax_and_scale_history(layer)
    expected = step(layer, x, g)
    with stubbed_gpu(family) as stub:
        step(layer, x, g)
        launched = len(stub.launches)
    _, counted = moved_by_casts(plan_for(config, family, torch.bfloat16), (1, 1, 1))
    by_torch = 3 if recipe in ("rowwise", "delayed") else 0  # zeros for maxima; records of amaxes
    assert launched + by_torch == counted
    assert_all_bitwise(step(layer, x, g), expected)


def test_the_command_measures_the_host(tmp_path):
    file = tmp_path / "out.json"
    options = ["--recipes", "tensorwise", "--repeats", "1", "--warmup", "1", "-o", str(file)]
    assert bench_linear.main(["--stub-gpu", "sm_90", *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["layer"], row["mode"]) for row in rows] == [
        ("nn.Linear", "stubbed"),
        ("tensorwise", "stubbed"),
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert all(256 <= rows[1][width] <= 16384 for width in ("graphed_from", "eager_from"))


def test_a_slow_host_moves_the_width_from_which_eager_code_gains():
    """Where the host takes 3 ms for float8, bfloat16 must take longer: the roofline's own times."""
    rows = [{"layer": "nn.Linear", "ms": 1, "min_ms": 0.1}]
    rows += [{"layer": "tensorwise", "ms": 1, "min_ms": ms} for ms in (0.1, 3.0)]
    bench_linear.widths(rows, "sm_90")
    quick, slow = rows[1:]
    assert quick["graphed_from"] == slow["graphed_from"] == quick["eager_from"]
    width = slow["eager_from"]
    seconds = [3 * 2 * 4096 * n**2 / 792e12 for n in (width - 512, width + 512)]  # the GEMMs alone
    assert seconds[0] < 3e-3 < seconds[1]
