"""The cost model against measurements that others published."""

from __future__ import annotations

import json
from itertools import product

import pytest
from torch import nn

from benchmarks import check_estimate
from benchmarks.cost_model.published import (
    FILE,
    PREDICTIONS,
    board_of,
    fitted_rates,
    predicted_against_published,
)
from benchmarks.measuring.report import ROOT
from float8.estimate import DEVICES, faster_layers
from float8.estimate import devices as figures
from float8.estimate.gemms import gemm_seconds

PUBLISHED = json.loads(FILE.read_text())
CHECK = predicted_against_published()
BOARDS = PUBLISHED["boards"]
TORCHAO = board_of("H100 500 W")


def errors(source: str, *words: str) -> list[float]:
    return [
        abs(row.error)
        for row in CHECK.tests
        if source in row.source and all(word in row.what for word in words)
    ]


def test_the_median_error_of_rows_that_fitted_nothing_is_below_ten_percent():
    assert len(CHECK.tests) > 3 * (len(CHECK.rows) - len(CHECK.tests))
    assert CHECK.median_error < 0.1


def test_the_page_says_what_the_program_says():
    page = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    rows, tests = len(CHECK.rows), len(CHECK.tests)
    assert f"with {rows} measurements" in page and f"{rows - tests} of them fitted" in page
    assert f"The median error of the other {tests} is {CHECK.median_error * 100:.0f} %" in page
    for row in CHECK.rows:
        if "pull request 2185" in row.source:
            assert f"| {row.predicted:.2f}x | {row.published:.2f}x |" in page


@pytest.mark.parametrize("what", PREDICTIONS)
def test_the_median_error_of_each_kind_of_row_is_below_fifteen_percent(what):
    kinds = [row["what"] for row in PUBLISHED["rows"]]
    own = [
        abs(row.error) for row, kind in zip(CHECK.rows, kinds, strict=True)
        if kind == what and not row.fits
    ]  # fmt: skip
    assert sorted(own)[len(own) // 2] < 0.15


@pytest.mark.parametrize("name", BOARDS)
def test_the_boards_rates_are_those_at_which_their_rows_are_met(name):
    assert fitted_rates(name) == pytest.approx(BOARDS[name]["rates"], rel=0.002)


def test_layers_of_torchao_are_within_ten_percent():
    found = errors("pull request 2185", "layer")
    assert len(found) == 4 and max(found) < 0.1


def test_layers_of_transformer_engine_on_an_h200_are_within_five_percent():
    found = errors("TransformerEngine GEMM profiling, H200", "12 GEMMs")
    assert len(found) == 2 and max(found) < 0.05


def test_rowwise_gains_less_than_half_of_tensorwise_end_to_end():
    gains = {
        row.what: (row.predicted - 1, row.published - 1)
        for row in CHECK.rows
        if row.source == "torchao training documentation"
    }
    rowwise, tensorwise = (gains[f"Llama-3-8B {kind}, x"] for kind in ("rowwise", "tensorwise"))
    for predicted in (0, 1):
        assert rowwise[predicted] < tensorwise[predicted] / 2


def converts_by_torchao(K: int, N: int) -> bool:
    """torchao's filter for its recipe rowwise, on shapes that are multiples of 16."""
    return not (N <= 2048 or K <= 1024 or (N <= 4096 and K <= 2048))


def test_the_filter_for_torchaos_kernels_is_torchaos_filter():
    # The tokens of its Llama-3-8B: one sequence of 8192 per GPU.
    takes = faster_layers("rowwise", 8192, TORCHAO, min_speedup=1.05)
    sizes = [512 * 2**i for i in range(6)]
    agrees = {}
    for K, N in product(sizes, sizes):
        layer = nn.Linear(K, N, bias=False, device="meta").bfloat16()
        agrees[K, N] = takes(layer, "") == converts_by_torchao(K, N)
    assert [shape for shape, same in agrees.items() if not same] == [(8192, 2048), (16384, 2048)]


def test_layers_that_torchao_leaves_out_hardly_gain():
    for K, N in ((8192, 2048), (4096, 2048), (2048, 4096), (1024, 16384)):
        layer = nn.Linear(K, N, bias=False, device="meta").bfloat16()
        assert not faster_layers("rowwise", 8192, TORCHAO, min_speedup=1.1)(layer, "")
        assert faster_layers("rowwise", 8192, "H100", min_speedup=0.9)(layer, "")


def test_ratios_of_kinds_are_those_of_the_boards():
    torchao, nvl = BOARDS["H100 500 W"]["rates"], BOARDS["H200 NVL"]["rates"]
    assert figures.CUTLASS_ROWWISE.value == pytest.approx(
        torchao["rowwise"] / torchao["tensorwise"], rel=0.005
    )
    assert figures.BLOCKS.value == pytest.approx(nvl["blockwise"] / nvl["tensorwise"], rel=0.005)


def test_writing_results_last_explains_short_contractions():
    board = board_of("H800")
    seconds = gemm_seconds(board, "blockwise", 4096, 32768, 512)
    assert 2 * 4096 * 32768 * 512 / seconds / 1e12 == pytest.approx(775, rel=0.05)


def test_every_row_has_a_source_that_says_where_and_what():
    for name, source in PUBLISHED["sources"].items():
        needed = ("url", "date", "read", "hardware", "versions", "timed")
        assert all(source[field] for field in needed), name
    assert {row["source"] for row in PUBLISHED["rows"]} == set(PUBLISHED["sources"])
    assert all(fact["url"] and fact["read"] for fact in PUBLISHED["facts"])
    known = {*BOARDS, *DEVICES}
    assert {row["board"] for row in PUBLISHED["rows"]} <= known


def test_the_program_prints_every_row_and_the_median(capsys):
    assert check_estimate.main([]) == 0
    said = capsys.readouterr().out
    assert f"Median error: {CHECK.median_error:.1%} of {len(CHECK.tests)} rows" in said
    assert all(row.what in said for row in CHECK.rows)


def test_published_rows_name_their_own_devices(capsys):
    with pytest.raises(SystemExit):
        check_estimate.main(["--device", "H100"])
    assert "--device is for a FILE" in capsys.readouterr().err
