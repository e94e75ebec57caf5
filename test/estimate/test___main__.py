"""The command line, called in-process."""

import json
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
    main(
        [
            "8192,8192,8192",
            "--weights-cached",
            "--gradient-accumulation",
            "8",
            "--recipes",
            *RECIPES,
        ]
    )
    expected = estimate(
        [(8192,) * 3], recipes=list(RECIPES), weights_cached=True, gradient_accumulation=8,
    )  # fmt: skip
    assert capsys.readouterr().out == f"{expected}\n"
    main(["8192,8192,8192", "--weights-cached"])
    assert capsys.readouterr().out == f"{estimate([(8192,) * 3], weights_cached=True)}\n"
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


def test_sources_of_the_figures_are_printed_on_request(capsys):
    main(["64,64,64"])
    assert "datasheet: " not in capsys.readouterr().out
    main(["64,64,64", "--sources"])
    assert capsys.readouterr().out.endswith("\n".join(H100.sources) + "\n")


def test_a_prediction_is_written_as_json(tmp_path, capsys):
    main(["8192,8192,8192", "-o", str(tmp_path / "out.json")])
    fields = json.loads((tmp_path / "out.json").read_text())
    assert fields == estimate([(8192,) * 3]).as_dict()
    assert "speed-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1,2"], "argument M,K,N[,E]: invalid shape value: '1,2'"),
        (["1,2,3,0"], "invalid shape value: '1,2,3,0'"),
        (["16,16,16", "--device", "A100"], "unknown device 'A100'; known: H100"),
        (
            ["16,16,16", "--gradient-accumulation", "0"],
            "gradient_accumulation must be an integer >= 1, got 0",
        ),
    ],
)
def test_bad_input_ends_with_what_to_do(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
