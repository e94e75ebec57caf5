"""Training stops and resumes with equal bits; its errors name the fix."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.models import text as texts
from float8 import Float8Linear, Float8Tensor
from float8.numerics import load_run
from scripts import train_gpt
from scripts.train_gpt import Trainer
from scripts.training import gpt, savings
from scripts.training.options import Options, options_from, parser

slow = pytest.mark.slow

TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"]
TINY += ["--device", "cpu", "--eval-batches", "2"]


@pytest.fixture
def options(data: Path, tmp_path: Path) -> Options:
    arguments = [*TINY, "--data", str(data), "--steps", "8", "--eval-interval", "3"]
    args = parser("").parse_args(arguments)
    args.recipe, args.checkpoint = "bf16", tmp_path / "gpt.pt"
    return options_from(args)


@pytest.fixture
def text(data: Path) -> texts.Text:
    return texts.load(data)


def stop_after(steps: int) -> Callable[[], bool]:
    answers = iter([False] * steps + [True])
    return lambda: next(answers)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Float8Tensor) else x


@pytest.mark.parametrize(
    "run",
    [
        "delayed",
        *(
            pytest.param(run, marks=slow)
            for run in ("unit", "bf16+float8_adamw_v16", "rowwise+O2",
                        "tensorwise+saved_activations+float8_adamw",
                        "tensorwise+saved_activations+O3")
        ),
    ],
)  # fmt: skip
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(
    run: str, options: Options, text: texts.Text
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


@slow
def test_a_watched_training_has_the_same_losses_and_goes_on_with_its_file(
    options: Options, text: texts.Text, tmp_path: Path
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "float9"], "unknown recipe 'float9'.*bf16, bf16_rounded, .*delayed"),
        (["--resume"], "no checkpoint at .*leave out --resume"),
        (["--checkpoint", "DIR/file", "--resume"], "file is not a whole checkpoint"),
        (["--checkpoint", "DIR/file/x"], "take another --checkpoint"),
        (["--out", "DIR/file/x"], "take another --out"),
        (["--width", "100"], "width 100 must be a multiple of 16"),
        (["--heads", "3"], "width 32 must be .* of twice the 3 heads"),
        (["--context", "100000"], "one window of --context 100000 needs 100001"),
        (["--data", "/nowhere"], "/nowhere has 0 text files.* give --data"),
        (["--data", "DIR"], "has 1 text files, but two are needed"),
        (["--ms-amp", "O2"], "take --recipe tensorwise"),
        (["--recipe", "unit", "--optimizer", "float8_adamw"], "recipe unit has u-muP's AdamW"),
        (["--recipe", "tensorwise", "--ms-amp", "O2", "--optimizer", "float8_adamw"],
         "leave out --optimizer"),
        (["--batch", "5", "--nproc", "2"], "--batch 5 does not divide among --nproc 2"),
        (["--compile", "--nproc", "2"], "--compile trains in one process"),
        (["--recipe", "tensorwise", "--ms-amp", "O2", "--nproc", "2"], "leave out --nproc"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_the_fix(
    arguments: list[str], message: str, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    given = [*TINY, "--data", str(data), "--checkpoint", str(tmp_path / "none.pt")]
    given += [argument.replace("DIR", str(tmp_path)) for argument in arguments]
    with pytest.raises(SystemExit, match=message) as caught:
        train_gpt.main(given)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(options: Options, text: texts.Text) -> None:
    Trainer(options, text).save()
    assert list(options.checkpoint.parent.iterdir()) == [options.checkpoint]
    for change, message in (
        ({"width": 64}, "trained with --width 32, not 64: resume"),
        ({"optimizer": "float8_adamw"}, "trained with --optimizer adamw, not float8_adamw"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(replace(options, **change, resume=True), text)
    with pytest.raises(ValueError, match="trained on another text"):
        Trainer(replace(options, resume=True), replace(text, held_out=text.held_out.flip(0)))


def test_recipes_start_alike_and_leave_the_head_alone(options: Options, text: texts.Text) -> None:
    parameters = dict(Trainer(options, text).model.named_parameters())
    scaled = Trainer(replace(options, recipe="rowwise"), text).model
    assert parameters.keys() == dict(scaled.named_parameters()).keys()
    for name, parameter in scaled.named_parameters():
        assert torch.equal(parameter, parameters[name])
    linears = {n: type(m) for n, m in scaled.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linears.pop("head") is torch.nn.Linear
    assert [*linears.values()] == [Float8Linear] * 4


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


def test_a_name_of_a_run_is_read_as_it_is_written() -> None:
    for run in ("bf16", "bf16+float8_adamw_v16", "tensorwise+saved_activations+O3"):
        defaults = {"optimizer": "adamw", "saved_activations": False, "ms_amp": None}
        assert savings.name_of(**{**defaults, **savings.parts_of(run)}) == run
    for run, message in (
        ("bf16+float9", "nothing is called 'float9'; .* adamw, float8_adamw, .* O3"),
        ("bf16+O1+O2", "O2 is a second ms-amp; name one"),
    ):
        with pytest.raises(ValueError, match=message):
            savings.parts_of(run)
