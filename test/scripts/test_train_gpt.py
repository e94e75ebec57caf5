"""Training stops and resumes with equal bits; its errors name the fix."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from float8 import Float8Tensor
from float8.numerics import load_run
from scripts import train_gpt
from scripts.train_gpt import Trainer
from scripts.training import corpus, gpt, savings
from scripts.training.options import Options, options_from, parser

pytestmark = pytest.mark.slow

SCRIPTS = Path(train_gpt.__file__).parent
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
TINY += ["--device", "cpu", "--eval-batches", "2"]


@pytest.fixture
def options(data: Path, tmp_path: Path) -> Options:
    arguments = [*TINY, "--data", str(data), "--steps", "8", "--eval-interval", "3"]
    args = parser("").parse_args(arguments)
    args.recipe, args.checkpoint = "bf16", tmp_path / "gpt.pt"
    return options_from(args)


@pytest.fixture
def text(data: Path) -> corpus.Corpus:
    return corpus.load(data)


def stop_after(steps: int) -> Callable[[], bool]:
    answers = iter([False] * steps + [True])
    return lambda: next(answers)


@pytest.mark.parametrize(
    "run",
    [
        *("delayed", "unit"),
        *("tensorwise+saved_activations+float8_adamw", "bf16+float8_adamw_v16"),
        *("rowwise+O2", "tensorwise+saved_activations+O3"),
    ],
)
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(
    run: str, options: Options, text: corpus.Corpus
) -> None:
    options = replace(options, **savings.parts_of(run))
    assert options.run == run
    whole = Trainer(options, text)
    assert whole.fit()
    assert not Trainer(options, text).fit(stop_after(4))
    torch.rand(1)  # whatever else used the global generator in between
    rest = Trainer(replace(options, resume=True), text)
    assert rest.step == 4
    assert rest.fit()
    assert rest.history.train_loss == whole.history.train_loss
    assert rest.history.val_loss == whole.history.val_loss
    state = rest.model.state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(plain(state[name]), plain(value)), name


def test_a_watched_training_has_the_same_losses_and_goes_on_with_its_file(
    options: Options, text: corpus.Corpus, tmp_path: Path
) -> None:
    options = replace(options, recipe="delayed")
    alone = Trainer(options, text)
    assert alone.fit()
    watched = replace(options, inspect=tmp_path / "run.json")
    assert not Trainer(watched, text).fit(stop_after(4))
    rest = Trainer(replace(watched, resume=True), text)
    assert rest.fit()
    assert rest.history.train_loss == alone.history.train_loss
    reports = load_run(tmp_path / "run.json")
    assert [report.step for report in reports] == [0, 3, 4, 6]
    assert {row.operand for row in reports[-1].casts} == {"input", "weight", "grad_output"}


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Float8Tensor) else x


@pytest.mark.usefixtures("full_start")  # as the process that is interrupted
def test_ctrl_c_in_a_terminal_leaves_a_checkpoint_to_resume(
    data: Path, tmp_path: Path, options: Options, text: corpus.Corpus
) -> None:
    options = replace(options, recipe="delayed", steps=100, eval_interval=10)
    command = [sys.executable, str(SCRIPTS / "train_gpt.py"), *TINY, "--data", str(data)]
    command += ["--recipe", "delayed", "--steps", "100", "--eval-interval", "10"]
    command += ["--checkpoint", str(tmp_path / "c.pt"), "--out", str(tmp_path / "out.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "c.pt").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "continue with the same command and --resume" in out
    assert not (tmp_path / "out.json").exists()

    assert train_gpt.main([*command[2:], "--resume"]) == 0
    resumed = json.loads((tmp_path / "out.json").read_text())["runs"][0]
    whole = Trainer(options, text)
    assert whole.fit()
    assert resumed["train_loss"] == whole.history.train_loss
    assert resumed["final_val_loss"] == whole.history.val_loss[-1][1]


def test_a_crash_while_saving_leaves_the_old_checkpoint(
    options: Options, text: corpus.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(options, text)
    trainer.save()
    assert list(options.checkpoint.parent.iterdir()) == [options.checkpoint]

    def fail(_: object, path: Path) -> None:
        path.write_bytes(b"half a checkpoint")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer.save()
    assert Trainer(replace(options, resume=True), text).step == 0


# --- files that cannot be read or written: one line, that names them and the fix


def line_of(arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        train_gpt.main(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("option", ["--checkpoint", "--out"])
def test_a_path_that_cannot_be_written_ends_it_before_training(
    option: str, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    said = line_of([*TINY, "--data", str(data), option, str(tmp_path / "file" / "x")])
    assert f"take another {option}" in said


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut off"])
def test_whatever_is_no_checkpoint_is_one_line_that_names_the_file(
    content: bytes, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpt.pt"
    path.write_bytes(content)
    said = line_of([*TINY, "--data", str(data), "--checkpoint", str(path), "--resume"])
    assert f"{path} is not a whole checkpoint" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--recipe", "float9"],
            "unknown recipe 'float9'.*bf16, naive, unit_bf16, .*delayed",
        ),
        (["--resume"], "no checkpoint at .*leave out --resume"),
        (["--width", "100"], "--width 100: float8 products need a multiple of 16"),
        (["--heads", "3"], "--width 32 is not --heads 3 of even width"),
        (["--context", "100000"], "one window of --context 100000 needs 100001"),
        (["--data", "/nowhere"], "/nowhere is not a folder: point --data"),
        (["--ms-amp", "O2"], "take --recipe tensorwise"),
        (
            ["--recipe", "tensorwise", "--ms-amp", "O2", "--optimizer", "float8_adamw"],
            "leave out --optimizer",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(
    arguments: list[str], message: str, data: Path, tmp_path: Path
) -> None:
    given = [*TINY, "--data", str(data), "--checkpoint", str(tmp_path / "none.pt"), *arguments]
    with pytest.raises(SystemExit, match=message) as caught:
        train_gpt.main(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, "trained with --width 32, not 64: resume"),
        ({"recipe": "tensorwise"}, "trained with --recipe bf16, not tensorwise"),
        ({"optimizer": "float8_adamw"}, "trained with --optimizer adamw, not float8_adamw"),
        ({"learning_rate": 1.0}, "trained with --learning-rate .*, not 1.0"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    change: dict, message: str, options: Options, text: corpus.Corpus
) -> None:
    Trainer(options, text).save()
    other = replace(options, **change, resume=True)
    with pytest.raises(ValueError, match=message):
        Trainer(other, text)


def test_a_checkpoint_of_another_text_is_refused(options: Options, text: corpus.Corpus) -> None:
    Trainer(options, text).save()
    other = replace(text, val=text.val.flip(0))
    resumed = replace(options, resume=True)
    with pytest.raises(ValueError, match="trained on another text"):
        Trainer(resumed, other)


def test_recipes_start_alike_and_leave_the_head_alone(
    options: Options, text: corpus.Corpus
) -> None:
    from float8 import Float8Linear

    plain = Trainer(options, text).model
    scaled = Trainer(replace(options, recipe="rowwise"), text).model
    parameters = dict(plain.named_parameters())
    assert parameters.keys() == dict(scaled.named_parameters()).keys()
    for name, parameter in scaled.named_parameters():
        assert torch.equal(parameter, parameters[name])
    linears = {n: m for n, m in scaled.named_modules() if isinstance(m, torch.nn.Linear)}
    assert type(linears.pop("head")) is torch.nn.Linear
    assert len(linears) == 4
    assert all(isinstance(linear, Float8Linear) for linear in linears.values())


def test_a_summary_says_what_is_held(options: Options, text: corpus.Corpus) -> None:
    options = replace(options, steps=1, recipe="tensorwise")
    sizes = {}
    for run in ("tensorwise", "tensorwise+saved_activations+float8_adamw", "tensorwise+O2"):
        trainer = Trainer(replace(options, **savings.parts_of(run)), text)
        assert trainer.fit()
        sizes[run] = trainer.summary()
    plain, ours, level = sizes.values()
    count = plain["parameters"]
    assert plain["parameters_mib"] == plain["gradients_mib"] == 4 * count / 2**20
    assert plain["optimizer_mib"] * 2**20 == pytest.approx(8 * count, rel=0.01)  # and steps
    assert ours["optimizer_mib"] < 0.4 * plain["optimizer_mib"]
    assert ours["gradients_mib"] == plain["gradients_mib"] > 1.5 * level["gradients_mib"]
    assert plain["parameters_mib"] > level["parameters_mib"]
    assert ours["saved_for_backward_mib"] <= plain["saved_for_backward_mib"]
    assert min(run["peak_rss_mib"] for run in sizes.values()) > 100
    assert all(p.grad is None for p in trainer.model.parameters())


def test_the_schedule_warms_up_and_decays() -> None:
    rates = [train_gpt.schedule(step, 100) for step in range(101)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[10] == max(rates) == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(1 / 10)


def test_the_model_does_not_see_the_future() -> None:
    model = gpt.GPT(gpt.Sizes(layers=2, width=32, heads=2, context=16))
    tokens = torch.randint(256, (2, 16))
    targets = tokens.roll(-1, 1)
    targets[:, 8:] = -100  # cross_entropy ignores these
    later, earlier = tokens.clone(), tokens.clone()
    later[:, 8:] = 0
    earlier[:, :8] = 0
    assert torch.equal(model(tokens, targets), model(later, targets))
    assert not torch.equal(model(tokens, targets), model(earlier, targets))


def test_rotary_products_depend_on_distance_alone() -> None:
    table = gpt.rotary_table(32, 16).double()
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turned_q, turned_k = (gpt.rotate(z.expand(1, 1, 32, 16), table)[0, 0] for z in (q, k))
    products = turned_q @ turned_k.T
    torch.testing.assert_close(products.diagonal(-5), products[5, 0].expand(27), atol=1e-5, rtol=0)
    assert products[5, 0] != products[6, 0]
