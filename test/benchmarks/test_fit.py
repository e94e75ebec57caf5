"""Figures are recovered from the times that they predict; costs are never negative."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from result_files import linear_rows, matmul_rows, write

from benchmarks.cost_model.fit import explain, fit, fitted, nonnegative, timed_gemm, timed_layer
from float8.config import RECIPES
from float8.estimate import DEVICES, Device, Figure, GemmSpeed
from float8.estimate.devices import ANY_PASS, BF16, FLOAT8
from float8.estimate.gemms import gemm_seconds
from float8.estimate.roofline import layer_seconds
from float8.estimate.shapes import Shape, Use

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SOURCE = "fitted: this test"
RUN = (BF16, "tensorwise", "rowwise", "blockwise")
LARGE = [Shape(16384, 8192, 10240), Shape(16384, 8192, 8192), Shape(16384, 8192, 57344)]
MIXED = [Shape(size, size, size) for size in (512, 1024, 2048, 4096, 8192)]
PRODUCTS = DEVICES["H100"].products
H100 = replace(DEVICES["H100"], products={kind: PRODUCTS[kind] for kind in RUN})
RUN_ON_H100 = [recipe for recipe in RECIPES if recipe != "mxfp8"]


def truth(best: float = 0.6, half_size: float = 1e10, **changes) -> Device:
    """An H100 that is not as assumed: every product at another efficiency."""
    figure = lambda value: Figure(value, "assumed: the truth to be found")  # noqa: E731
    products = {
        kind: replace(product, best=figure(best - 0.05 * i), half_size=figure(half_size * (i + 1)))
        for i, (kind, product) in enumerate(H100.products.items())
    }
    return replace(H100, products=products, **changes)


def times_of(device: Device, shapes: list[Shape], kinds=tuple(H100.products)):
    """Single products of a device, timed by the model itself."""
    return [
        timed_gemm(kind, *sizes, gemm_seconds(device, kind, *sizes), device)
        for s in shapes
        for kind in kinds
        for sizes in [(s.M, s.N, s.K)]
    ]


def steps_of(device: Device, shapes: list[Shape], recipes=tuple(RUN_ON_H100)):
    """Layers of a device, timed by the model itself; the plain one too."""
    plans = [None, *(RECIPES[recipe].plan for recipe in recipes)]
    return [
        timed_layer(shape, plan, layer_seconds(device, shape, plan, Use()).total, device)
        for shape in shapes
        for plan in plans
    ]


def assert_same_products(found: Device, expected: Device) -> None:
    for kind, product in expected.products.items():
        for flops in (1e10, 1e11, 1e13):
            mine = found.products[kind].seconds(flops, 1e6)
            assert mine == pytest.approx(product.seconds(flops, 1e6), rel=1e-3), kind


def test_products_of_many_sizes_tell_the_whole_curve():
    found = fitted(times_of(truth(), MIXED), H100, SOURCE)
    assert_same_products(found, truth())
    for kind, product in found.products.items():
        expected = truth().products[kind]
        assert product.best.value == pytest.approx(expected.best.value, rel=1e-3)
        assert product.half_size.value == pytest.approx(expected.half_size.value, rel=1e-3)
        assert product.peak == H100.products[kind].peak, "the datasheet's peak stays"
        assert product.best.source == product.half_size.source == SOURCE


def test_large_products_tell_the_best_and_keep_the_assumed_half_size():
    assumed = {kind: product.half_size for kind, product in H100.products.items()}
    expected = replace(
        truth(),
        products={k: replace(p, half_size=assumed[k]) for k, p in truth().products.items()},
    )
    found = fitted(times_of(expected, LARGE), H100, SOURCE)
    assert_same_products(found, expected)
    assert {kind: product.half_size for kind, product in found.products.items()} == assumed


def test_layers_tell_products_and_casts():
    casts = Figure(2e12, "assumed: the truth to be found")
    expected = truth(half_size=1e9, passes={ANY_PASS: casts})
    found = fitted(steps_of(expected, [*MIXED[2:], *LARGE]), H100, SOURCE)
    assert_same_products(found, expected)
    assert found.passes[ANY_PASS].value == pytest.approx(2e12, rel=1e-3)
    assert found.passes[ANY_PASS].source == SOURCE


def test_emulation_is_told_from_multiplying():
    rate, figure = Figure(1e12, "assumed: x"), Figure(1.0, "exact: x")
    own = GemmSpeed(rate, figure, Figure(2e7, "assumed: x"))
    decoding = replace(own, decode=Figure(3e-9, "assumed: x"))
    fast = Figure(1e15, "assumed: x")
    launch, products = Figure(1e-5, "assumed: x"), {BF16: own, "rowwise": decoding}
    cpu = Device("c", "cpu", fast, figure, launch, products)
    shapes = [Shape(128, 256, 256), Shape(512, 512, 64), Shape(64, 2048, 512), Shape(1024, 64, 64)]
    times, unknown = times_of(cpu, shapes, (BF16, "rowwise")), replace(cpu, products={BF16: own})
    found = fitted(times, unknown, SOURCE)
    product = found.products["rowwise"]
    assert product.decode.value == pytest.approx(3e-9, rel=1e-3)
    assert product.peak.value * product.best.value == pytest.approx(1e12, rel=1e-3)
    assert found.products[BF16].decode.value == 0


def test_operations_never_come_out_free():
    # These times shrink with the operations, which no positive cost explains.
    timed = [timed_gemm("rowwise", 64, 64, 64 * i, 1e-3 / i, H100) for i in (1, 2, 3)]
    cpu = replace(H100, arch="cpu", products={BF16: H100.products[BF16]})
    assert fitted(timed, cpu, SOURCE).products["rowwise"].peak.value > 0


def test_products_bound_by_memory_tell_nothing():
    moved = 2 * (16 + 8192) * 8192 + 2 * 16 * 8192
    at_bandwidth = moved / H100.bytes_per_second + H100.launch.value
    assert timed_gemm(BF16, 16, 8192, 8192, at_bandwidth, H100) is None
    assert timed_gemm(BF16, 16, 8192, 8192, 2 * at_bandwidth, H100) is not None
    assert timed_gemm(BF16, 16, 16, 16, H100.launch.value, H100) is None


def test_a_step_shorter_than_its_launches_tells_nothing():
    assert timed_layer(Shape(16, 16, 16), None, 3 * H100.launch.value, H100) is None


def test_nothing_timed_is_an_error():
    with pytest.raises(ValueError, match="no time was given"):
        fitted([None], H100, SOURCE)


# --- files


def test_files_of_both_benchmarks_are_fitted_together(tmp_path):
    expected = truth(half_size=1e9, passes={ANY_PASS: Figure(2e12, "assumed: x")})
    matmul = write(tmp_path / "m.json", "bench_matmul", matmul_rows(expected, MIXED[2:]))
    linear = write(tmp_path / "l.json", "bench_linear", linear_rows(expected, LARGE))
    found = fit(linear, matmul)
    assert_same_products(found, expected)
    assert found.passes[ANY_PASS].value == pytest.approx(2e12, rel=1e-3)
    assert found.passes[ANY_PASS].source == "fitted: l.json, m.json"
    assert found.name == "NVIDIA H100 80GB HBM3" and found.bandwidth == H100.bandwidth


def test_a_base_says_what_the_files_do_not(tmp_path):
    slow = replace(H100, launch=Figure(1e-4, "assumed: x"))
    path = write(tmp_path / "m.json", "bench_matmul", matmul_rows(slow, MIXED), "H100 PCIe")
    assert fit(path, base=slow).launch == slow.launch
    with pytest.raises(ValueError, match="no datasheet row for 'H100 PCIe'; give the device"):
        fit(path)


def test_files_of_two_devices_are_refused(tmp_path):
    files = [
        write(tmp_path / f"{i}.json", "bench_matmul", [], device)
        for i, device in enumerate(("NVIDIA H100", "NVIDIA H200"))
    ]
    with pytest.raises(ValueError, match=r"files of one device, got 2: \['NVIDIA H100', 'NVI"):
        fit(*files)
    with pytest.raises(ValueError, match="files of one device, got 0"):
        fit()


def test_the_committed_cpu_files_fit_a_cpu():
    files = [RESULTS / "cpu_bench_linear.json", RESULTS / "cpu_bench_matmul.json"]
    device = fit(*files)
    assert device.emulates
    assert set(device.products) == {BF16, *FLOAT8}
    kinds = {figure.kind for figure in device.figures().values()}
    assert "fitted" in kinds and not kinds & {"datasheet", "measured"}


POSITIVE = st.floats(0.1, 10.0)


@given(st.lists(POSITIVE, min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_known_costs_are_recovered(costs, seed):
    torch.manual_seed(seed)
    counts = (torch.rand(12, 4, dtype=torch.float64) + 0.01).tolist()
    seconds = [sum(c * n for c, n in zip(costs, row, strict=True)) for row in counts]
    assert explain(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_magnitudes_do_not_matter():
    counts = [[1e12, 1.0, 1e6], [4e12, 1.0, 5e6], [2e13, 1.0, 1e7], [1e11, 1.0, 2e5]]
    costs = [2e-15, 5e-6, 1e-9]
    seconds = [sum(c * n for c, n in zip(costs, row, strict=True)) for row in counts]
    assert explain(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_a_cost_that_would_be_negative_is_zero():
    # Free of the bound, the line through these is 2 n - 1.
    (slope, offset) = explain([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]], [1.0, 3.0, 5.0])
    assert offset == 0 and slope > 0


def test_errors_count_relative_to_the_time():
    # One cost for both: relative errors of 1 and 1e6 weigh alike, absolute ones would not.
    (cost,) = explain([[1.0], [1e6]], [1.0, 2e6])
    assert cost == pytest.approx(1.2)  # least (cost - 1)^2 + (cost/2 - 1)^2


def test_a_column_of_nothing_costs_nothing():
    assert explain([[1.0, 0.0], [2.0, 0.0]], [3.0, 6.0]) == pytest.approx([3.0, 0.0])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_no_step_from_the_solution_goes_down(seed, unknowns):
    # The conditions of Karush, Kuhn and Tucker, which only the minimum meets.
    torch.manual_seed(seed)
    a = torch.randn(8, unknowns, dtype=torch.float64)
    assert_is_the_minimum(a, torch.randn(8, dtype=torch.float64))


def assert_is_the_minimum(a, b):
    x = nonnegative(a, b)
    downhill = a.t() @ (b - a @ x)
    assert bool((x >= 0).all())
    assert bool((downhill <= 1e-8).all())
    assert bool((downhill[x > 0].abs() <= 1e-8).all())


@pytest.fixture
def within_a_minute():
    """An active set that grows where it has to shrink never ends."""

    def end(*_):
        raise AssertionError("nonnegative does not end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_unknowns_that_leave_stay_out_until_they_are_wanted_again(within_a_minute):
    # Of twelve, several leave in one step, and some of them come back.
    for seed in range(60):
        torch.manual_seed(seed)
        a = torch.randn(15, 12, dtype=torch.float64)
        assert_is_the_minimum(a, torch.randn(15, dtype=torch.float64))


def test_nothing_to_fit_is_an_error():
    with pytest.raises(ValueError, match="nothing to fit"):
        explain([], [])
