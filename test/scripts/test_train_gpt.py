"""Training stops and resumes with equal bits; its errors name the fix."""

import json
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disk import full_after

from float8 import Float8Tensor
from float8.experts.modules import Float8Experts
from float8.numerics import load_run
from scripts import demo, train_gpt
from scripts.train_gpt import Trainer
from scripts.training import corpus, gpt, savings
from scripts.training import options as options_module
from scripts.training.half_products import HalfProducts
from scripts.training.options import SIZES, Options, options_from, parser

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


def test_a_lost_amax_history_would_show_in_the_losses(
    options: Options, text: corpus.Corpus
) -> None:
    """The test above distinguishes resumed histories from reset ones."""
    options = replace(options, recipe="delayed")
    whole = Trainer(options, text)
    assert whole.fit()
    assert not Trainer(options, text).fit(stop_after(4))
    rest = Trainer(replace(options, resume=True), text)
    for name, buffer in rest.model.named_buffers():
        if name.endswith("amax_history"):
            buffer.zero_()
            buffer[..., 0] = 1e4
    assert rest.fit()
    assert rest.history.train_loss != whole.history.train_loss


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


@pytest.fixture
def python_handles_ctrl_c():
    """Also where the tests were started in the background, which has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_a_second_ctrl_c_is_not_held_back() -> None:
    with train_gpt.CtrlC() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)  # to this thread, which has run the handler by now
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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


def given(data: Path, checkpoint: Path, *arguments: str) -> list[str]:
    every = [*TINY, "--data", str(data), "--steps", "4", "--eval-interval", "2"]
    return [*every, "--checkpoint", str(checkpoint), *arguments]


def line_of(arguments: list[str]) -> str:
    """What train_gpt.py says as it gives up."""
    with pytest.raises(SystemExit) as caught:
        train_gpt.main(arguments)
    line = str(caught.value)
    assert line.startswith("train_gpt.py: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("--checkpoint", "folder", "it is a folder"),
        ("--checkpoint", "file/gpt.pt", "File exists"),
        ("--out", "folder", "it is a folder"),
        ("--inspect", "no/run.json", "No such file"),
    ],
)
def test_a_path_that_cannot_be_written_ends_it_before_training(
    option: str, name: str, reason: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Trainer, "fit", lambda *_: pytest.fail("it trained"))
    path = tmp_path / name
    arguments = given(data, tmp_path / "gpt.pt", "--recipe", "tensorwise", option, str(path))
    assert f"{path} cannot be written ({reason}" in line_of(arguments)
    assert {p.name for p in tmp_path.iterdir()} - {data.name} == {"folder", "file"}


def test_a_disk_that_is_full_before_training_is_found_then(data: Path, tmp_path: Path) -> None:
    with full_after(0):
        line = line_of(given(data, tmp_path / "gpt.pt"))
    assert f"{tmp_path / 'gpt.pt'} cannot be written (" in line
    assert line.endswith("take another --checkpoint")
    assert not list(tmp_path.glob("gpt*"))


def test_a_disk_that_is_full_later_leaves_the_last_checkpoint_and_nothing_else(
    data: Path, tmp_path: Path, options: Options, text: corpus.Corpus
) -> None:
    path = tmp_path / "gpt.pt"
    Trainer(options, text).save()
    before = path.read_bytes()
    with full_after(1000):
        line = line_of(given(data, path))
    assert f"the checkpoint of step 2 could not be written to {path} (" in line
    assert f"{path} was kept as it was" in line
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.glob("gpt*")] == ["gpt.pt"]


def test_a_report_that_cannot_be_written_costs_a_line_and_not_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    original = train_gpt.write_json

    def on_a_full_disk(path: Path, content: dict) -> None:
        with full_after(10):
            original(path, content)

    monkeypatch.setattr(train_gpt, "write_json", on_a_full_disk)
    assert f"{out} could not be written (" in line_of(
        given(data, tmp_path / "gpt.pt", "--out", str(out))
    )
    assert "validation loss" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["gpt.pt"]


def whole_checkpoint(options: Options, text: corpus.Corpus) -> bytes:
    Trainer(options, text).save()
    return options.checkpoint.read_bytes()


@pytest.mark.parametrize(
    "junk", ["empty", "words", "bytes", "zip", "half", "list", "parts", "model"]
)
def test_whatever_is_no_checkpoint_is_one_line_that_names_the_file(
    junk: str, options: Options, text: corpus.Corpus, tmp_path: Path
) -> None:
    whole = whole_checkpoint(options, text)
    state = torch.load(options.checkpoint, weights_only=True)
    path = tmp_path / "other.pt"
    if junk == "list":
        torch.save([1, 2], path)
    elif junk == "parts":
        torch.save({"text": text.digest}, path)
    elif junk == "model":
        state["model"].popitem()
        torch.save(state, path)
    else:
        contents = {"empty": b"", "words": b"hello world this is junk", "half": whole[:20000]}
        contents |= {"bytes": random.Random(1).randbytes(5000), "zip": b"PK\x03\x04" + bytes(99)}
        path.write_bytes(contents[junk])
    with pytest.raises(
        ValueError, match=f"^{path} is not a whole checkpoint of .*--checkpoint"
    ) as e:
        Trainer(replace(options, checkpoint=path, resume=True), text)
    assert "\n" not in str(e.value)


def test_a_second_ctrl_c_prints_no_traceback(data: Path, tmp_path: Path) -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(SCRIPTS.parent)!r})\n"
        "from scripts import train_gpt\n"
        "from scripts.training.ctrl_c import at_once\n"
        "def step(self):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "train_gpt.Trainer._train_step = step\n"
        f"sys.exit(at_once(lambda: train_gpt.main({given(data, tmp_path / 'gpt.pt')!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "stopped at once: --resume goes on from the last checkpoint" in done.stderr
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--recipe", "float9"],
            "unknown recipe 'float9'.*bf16, naive, unit_bf16, .*delayed",
        ),
        (["--resume"], "no checkpoint at .*leave out --resume"),
        (["--width", "100"], "--width 100 is not a multiple of 16.*--width 96"),
        (["--heads", "3"], "--width 32 does not split into --heads 3"),
        (["--context", "100000"], "one window of --context 100000 needs 100001"),
        (["--data", "/nowhere"], "/nowhere is not a folder: point --data"),
        (["--device", "abacus"], "no device 'abacus' here: take --device cpu"),
        (["--ms-amp", "O2"], "recipe bf16 does not: take --recipe tensorwise"),
        (
            ["--recipe", "tensorwise", "--ms-amp", "O2", "--optimizer", "float8_adamw"],
            "leave out --optimizer float8_adamw",
        ),
        (["--device", "meta"], "no device 'meta' here: take --device cpu"),
        (["--inspect", "run.json"], "--inspect looks at float8 layers; --recipe bf16 has none"),
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
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: 0 is not a positive number"),
        (["--batch", "-1"], "--batch: -1 is not a positive number"),
        (["--seed", "1" + 20 * "0"], "--seed: 1.* is beyond"),
        (["--learning-rate", "-1"], "--learning-rate: -1 is not a finite number >= 0"),
        (["--learning-rate", "nan"], "--learning-rate: nan is not a finite number >= 0"),
        (["--unit-learning-rate", "inf"], "--unit-learning-rate: inf is not a finite number"),
    ],
)
def test_numbers_that_train_nothing_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        train_gpt.main([*TINY, *arguments])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, "trained with --width 32, not 64: resume with --width 32"),
        ({"recipe": "tensorwise"}, "trained with --recipe bf16, not tensorwise"),
        (
            {"optimizer": "float8_adamw"},
            "trained with --optimizer adamw, not float8_adamw: resume with --optimizer adamw",
        ),
        ({"saved_activations": True}, "resume with no --saved-activations, or leave out --resume"),
        ({"learning_rate": 1.0}, "trained with --learning-rate .*, not 1.0"),
        ({"unit_learning_rate": 1.0}, "trained with --unit-learning-rate .*, not 1.0"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    change: dict, message: str, options: Options, text: corpus.Corpus
) -> None:
    Trainer(options, text).save()
    other = replace(options, **change, resume=True)
    with pytest.raises(ValueError, match=message):
        Trainer(other, text)


def test_a_checkpoint_from_before_these_options_had_names_is_resumed(
    options: Options, text: corpus.Corpus
) -> None:
    Trainer(options, text).save()
    state = torch.load(options.checkpoint, weights_only=True)
    for name in ("optimizer", "saved_activations", "ms_amp", "nproc"):
        del state["identity"][name]
    torch.save(state, options.checkpoint)
    assert Trainer(replace(options, resume=True), text).step == 0


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


def test_float8_keeps_less_for_backward_by_what_the_linears_keep(
    options: Options, text: corpus.Corpus
) -> None:
    """At least half of the bf16 inputs of the four layers: 3 of width C and one of F, per token."""
    plain = Trainer(options, text).saved_for_backward()
    scaled = Trainer(replace(options, recipe="tensorwise"), text).saved_for_backward()
    tokens = options.batch * options.context
    hidden = gpt.Sizes(1, 32, 2, 16).hidden
    assert plain - scaled >= tokens * (3 * options.width + hidden)


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


def test_unit_scaled_recipes_start_from_the_same_directions(
    options: Options, text: corpus.Corpus
) -> None:
    parameters = dict(Trainer(options, text).model.named_parameters())
    for recipe in gpt.UNIT:
        for name, unit in Trainer(replace(options, recipe=recipe), text).model.named_parameters():
            plain = parameters[name].detach()
            start = plain / plain.std() if plain.ndim == 2 else plain  # gains of norms are 1
            torch.testing.assert_close(unit.detach(), start, msg=f"{recipe} {name}")


def test_the_unit_recipe_multiplies_all_but_the_head_in_float8(
    options: Options, text: corpus.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from float8.unit_scaling.transforms import in_float8

    shapes: list[tuple[int, ...]] = []
    original = in_float8.linear_in_float8

    def counted(
        input: torch.Tensor, weight: torch.Tensor, *rest: object, **named: object
    ) -> object:
        shapes.append(tuple(weight.shape))
        return original(input, weight, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(in_float8, "linear_in_float8", counted)
    Trainer(replace(options, recipe="unit"), text)._train_step()
    assert shapes == [(96, 32), (32, 32), (256, 32), (32, 128)]  # qkv, proj, gate_up, down
    Trainer(replace(options, recipe="unit_bf16"), text)._train_step()
    assert len(shapes) == 4


def test_the_naive_recipe_is_recipe_unit_on_a_model_that_is_not_unit_scaled(
    options: Options, text: corpus.Corpus
) -> None:
    from float8 import Float8Linear, Float8LinearConfig, convert_to_float8_training

    unit = Float8LinearConfig.from_recipe_name("unit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not unit-scaled"):
            convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(16, 16)), config=unit)
        model = Trainer(replace(options, recipe="naive"), text).model  # means it: not warned
    assert {m.config for m in model.modules() if isinstance(m, Float8Linear)} == {unit}


def test_each_kind_of_model_trains_with_its_own_learning_rate(
    options: Options, text: corpus.Corpus
) -> None:
    options = replace(options, learning_rate=0.5, unit_learning_rate=2.0)
    plain, unit = (Trainer(replace(options, recipe=r), text).optimizer for r in ("bf16", "unit"))
    assert {group["initial_lr"] for group in plain.param_groups} == {0.5}
    rates = {id(p): g["initial_lr"] for g in unit.param_groups for p in g["params"]}
    model = Trainer(replace(options, recipe="unit"), text)
    rates = {
        id(p): group["initial_lr"]
        for group in model.optimizer.param_groups
        for p in group["params"]
    }
    named = {name: rates[id(p)] for name, p in model.model.named_parameters()}
    # u-muP, table 2: 1 / sqrt(fan-in) for hidden weights, 1 for the readout and for norms
    assert named["blocks.0.attention.qkv.weight"] == pytest.approx(2 / 32**0.5)
    assert named["blocks.0.feed_forward.down.weight"] == pytest.approx(2 / 128**0.5)
    assert named["head.weight"] == named["norm.weight"] == 2.0


def test_only_large_half_products_on_a_slow_cpu_take_the_detour(
    options: Options, text: corpus.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(options, batch=64, context=64)
    for row, expected in (("slow cpu", True), ("cpu", False), ("cuda", False)):
        monkeypatch.setattr(train_gpt, "row_of", lambda _, row=row: row)
        assert (Trainer(large, text).products is HalfProducts) is expected
        assert Trainer(options, text).products is not HalfProducts
        assert Trainer(replace(large, compile=True), text).products is not HalfProducts


def test_every_option_of_a_size_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for row, values in SIZES.items():
        monkeypatch.setattr(options_module, "row_of", lambda _, row=row: row)
        found = options_from(parser("").parse_args(["--device", "cpu"]))
        assert {name: getattr(found, name) for name in values} == values
        given = options_from(parser("").parse_args(["--device", "cpu", "--learning-rate", "7"]))
        assert given.learning_rate == 7


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


# --- mixtures of experts


def test_experts_train_in_every_recipe_to_losses_near_bf16s(
    options: Options, text: corpus.Corpus
) -> None:
    losses, kept = {}, {}
    for recipe in demo.MIXED:
        trainer = Trainer(replace(options, experts=4, steps=4, recipe=recipe), text)
        assert trainer.fit()
        experts = trainer.model.get_submodule("blocks.0.feed_forward.experts")
        router = trainer.model.get_submodule("blocks.0.feed_forward.router")
        assert type(router) is torch.nn.Linear
        assert isinstance(experts, Float8Experts) == (recipe != "bf16")
        losses[recipe], kept[recipe] = trainer.history.val_loss[-1][1], trainer.saved_for_backward()
    for recipe, loss in losses.items():
        assert loss == pytest.approx(losses["bf16"], rel=0.01), recipe
        assert kept[recipe] <= kept["bf16"], recipe


def test_experts_resume_to_the_same_bits(options: Options, text: corpus.Corpus) -> None:
    options = replace(options, experts=4, recipe="rowwise", steps=4)
    whole = Trainer(options, text)
    assert whole.fit()
    assert not Trainer(options, text).fit(stop_after(2))
    rest = Trainer(replace(options, resume=True), text)
    assert rest.fit()
    assert rest.history.train_loss == whole.history.train_loss


def test_each_token_passes_its_best_experts_and_the_shared_one() -> None:
    """Against a loop over tokens, in float64."""
    torch.manual_seed(0)
    sizes = gpt.Sizes(layers=1, width=32, heads=2, context=8, experts=4, top_k=2)
    mixture = gpt.MixtureOfExperts(sizes)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_BTC = torch.randn(2, 5, 32)
    out, mixture = mixture(x_BTC), mixture.double()
    for x, y in zip(x_BTC.flatten(0, 1).double(), out.flatten(0, 1), strict=True):
        scores = mixture.router(x)
        best = scores.topk(2).indices
        expected = mixture.shared(x)
        for p, e in zip(scores[best].softmax(0), best, strict=True):
            gate, up = (mixture.experts.gate_up[e] @ x).chunk(2)
            expected = expected + p * (
                mixture.experts.down[e] @ (torch.nn.functional.silu(gate) * up)
            )
        assert torch.allclose(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--experts", "4", "--top-k", "5"], "--top-k 5 of --experts 4: a token takes from 1 to"),
        (["--experts", "4", "--recipe", "delayed"], "--recipe delayed does not train --experts 4"),
        (["--experts", "4", "--recipe", "unit"], "unit_scale no rule for them; take tensorwise"),
    ],
)
def test_experts_that_do_not_train_are_refused(
    arguments: list[str], reason: str, data: Path, tmp_path: Path
) -> None:
    assert reason in line_of(given(data, tmp_path / "gpt.pt", *arguments))


def test_a_checkpoint_without_experts_is_not_resumed_with_them(
    options: Options, text: corpus.Corpus
) -> None:
    assert Trainer(replace(options, steps=3), text).fit()
    with pytest.raises(ValueError, match="trained with --experts 0, not 4: resume with no --exp"):
        Trainer(replace(options, steps=3, experts=4, resume=True), text)
