"""`plan_cluster.py` prints a prediction and every assumption; its errors name the fix."""

from pathlib import Path

import pytest

from float8.estimate import DEVICES
from scripts import plan_cluster
from scripts.training.cluster import MODELS


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert plan_cluster.main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_it_says_that_nothing_was_measured_and_names_what_it_assumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = lines_of(capsys, "--gpus", "8", "16384")
    assert lines[0].startswith("PREDICTED, NOT MEASURED")
    rows = [line.split() for line in lines if line.strip().startswith(("8 ", "16,384 "))]
    assert [(row[0], row[3]) for row in rows] == [
        ("8", "bf16"),
        ("8", "tensorwise"),
        ("16,384", "bf16"),
        ("16,384", "tensorwise"),
    ]
    assert rows[0][-1] == rows[2][-1] == "1.00x"
    text = "\n".join(lines)
    for word in (
        *("8.03e9 parameters", "450 GB/s", "50 GB/s", "80%", "10 us", "overlapping compute"),
        *("NVIDIA H100", "ConnectX-7", "attention reaches 50%", "recomputed", "bf16 (--gradients"),
    ):
        assert word in text, word
    # 2 gathers and 1 reduction of 2 bytes: 7/8 * 6 * 8.03e9 in the node
    assert rows[0][4] == f"{7 / 8 * 6 * MODELS['8b'].parameters / 1e9:,.1f}"
    assert rows[0][5] == "0.0"


def test_options_change_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--gpus 64 --gradients float8 --no-overlap --keep-activations --link-efficiency 0.5"
    text = "\n".join(lines_of(capsys, *given.split(), "--network-bandwidth", "25e9"))
    for word in ("as float8 (--gradients", "without overlap", "all that backward", "50%"):
        assert word in text, word
    assert "25 GB/s each way. given: --network-bandwidth" in text


def test_what_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines_of(capsys, "--model", "70b", "--gpus", "8", "512")[4:8]
    assert ["!" in row for row in rows] == [True, True, False, False]  # 16 bytes * 70e9 / 8


def test_a_model_of_given_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 32 --hidden 4096 --feed-forward 14336 --heads 32 --kv-heads 8"
    given = lines_of(capsys, *sizes.split(), "--gpus", "64")
    preset = lines_of(capsys, "--model", "8b", "--gpus", "64")
    assert given[:6] == preset[:6]


def test_a_vocabulary_is_that_of_a_preset_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(lines_of(capsys, "--model", "8b", "--gpus", "8", "--vocabulary", "32000"))
    assert f"{8.030261248 - 2 * (128256 - 32000) * 4096 / 1e9:.2f}e9 parameters" in text
    assert "32 heads of 128 (8 of keys), vocabulary 32000" in text


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("layout", ["--strategy hsdp", "--tensor-parallel 8"])
def test_every_device_and_layout(
    device: str, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(capsys, "--device", device, *layout.split(), "--gpus", "8", "1024")
    assert sum("tensorwise" in line for line in lines[:8]) == 2


def test_a_device_from_a_file_needs_its_link_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    file = tmp_path / "mine.json"
    replace(DEVICES["H100"], name="mine").save(file)
    with pytest.raises(SystemExit, match="give --node-bandwidth and --memory"):
        plan_cluster.main(["--device", str(file)])
    own = ["--node-bandwidth", "1e11", "--memory", "1e11"]
    assert "100 GB/s each way. given" in "\n".join(lines_of(capsys, "--device", str(file), *own))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "12"], "--gpus 12 does not divide into nodes of 8 .*: take 16"),
        (["--gpus", "4", "--tensor-parallel", "8"], "--gpus 4 does not divide"),
        (
            [f"--{name}=32" for name in ("layers", "feed-forward", "heads", "kv-heads")]
            + ["--hidden=2048"],
            "--heads 32 of 128, .* are not --hidden 2048: take --heads 16",
        ),
        (["--hidden", "64"], "a model is --model NAME, or all of --layers"),
        (["--device", "abacus"], "unknown device 'abacus'"),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as caught:
        plan_cluster.main(arguments)
    assert "\n" not in str(caught.value)


def test_the_help_explains_the_columns_and_points_to_the_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan_cluster.main(["--help"])
    text = capsys.readouterr().out
    for word in ("docs", "left out", "scripts/training/cluster.py", "bench_comm.py", "memory GB"):
        assert word in text


def test_the_moments_bytes_are_those_that_an_optimizer_really_keeps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from benchmarks.measuring.memory import bytes_of, state_tensors
    from scripts.training import savings

    assert plan_cluster.MOMENTS.keys() == savings.OPTIMIZERS.keys()
    weight = torch.nn.Parameter(torch.randn(64, 256))
    weight.grad = torch.randn_like(weight)
    for name, planned in plan_cluster.MOMENTS.items():
        optimizer = savings.adamw(name, [{"params": [weight]}], 1e-3, (0.9, 0.95))
        optimizer.step()
        step = 4
        assert bytes_of(state_tensors(optimizer)) - step == planned * weight.numel()
    text = "\n".join(lines_of(capsys, "--gpus", "8", "--optimizer", "float8_adamw"))
    assert "Adam's moments take 2.09 bytes per parameter (--optimizer)" in text
