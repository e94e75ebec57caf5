"""The command line, called in-process."""

from dataclasses import replace

import pytest

from float8.config import RECIPES, GemmConfig
from float8.estimate import DEVICES, estimate
from float8.estimate.__main__ import main

H100 = DEVICES["H100"]


def test_shapes_are_predicted_as_by_the_function(capsys):
    assert main(["8192,8192,8192", "512,256,256", "--device", "H200", "--recipes", "delayed"]) == 0
    shapes = [(8192,) * 3, (512, 256, 256)]
    expected = estimate(shapes, device="H200", recipes=["delayed"])
    assert capsys.readouterr().out == f"{expected}\n"


def test_options_reach_the_prediction(capsys):
    main(["8192,8192,8192", "--cached-microbatches", "8", "--recipes", *RECIPES])
    expected = estimate([(8192,) * 3], recipes=list(RECIPES), cached_microbatches=8)
    assert capsys.readouterr().out == f"{expected}\n"
    main(["8192,8192,8192", "--forward"])
    assert "Forward of one batch" in capsys.readouterr().out


def test_fast_sums_reach_the_prediction(capsys):
    shape, names = (16384, 4096, 28672, 8), ("output", "grad_input", "grad_weight")
    main(["16384,4096,28672,8", "--recipes", "rowwise", "blockwise", "--fast-sums"])
    sums = dict.fromkeys((f"gemm_config_{name}" for name in names), GemmConfig(use_fast_accum=True))
    configs = {name: replace(RECIPES[name], **sums) for name in ("rowwise", "blockwise")}
    expected = estimate([shape], recipes=configs)
    assert capsys.readouterr().out == f"{expected}\n"
    precise = {name: GemmConfig(use_fast_accum=False) for name in sums}
    (slow,) = estimate([shape], recipes=replace(RECIPES["rowwise"], **precise)).rows
    (fast,) = expected.rows
    assert fast.recipes["rowwise"].speedup > 1.1 * slow.recipes["config 1"].speedup


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1,2"], "argument M,K,N[,E]: invalid shape value: '1,2'"),
        (["1,2,3,0"], "invalid shape value: '1,2,3,0'"),
        (["16,16,16", "--device", "A100"], "unknown device 'A100'; known: H100"),
        (
            ["16,16,16", "--cached-microbatches", "-1"],
            "cached_microbatches must be an integer >= 0, got -1",
        ),
    ],
)
def test_bad_input_ends_with_what_to_do(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
