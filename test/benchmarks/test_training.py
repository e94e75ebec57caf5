"""Training for benchmarks of quality: the schedule, the result of a run, and when it stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.models import training
from benchmarks.quality import study
from scripts.training import corpus

TOKENS = torch.zeros(2, 3, dtype=torch.long)


class Constant(nn.Module):
    """A loss of (p - 1)**2, whatever the batch."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(start))

    def forward(self, tokens, targets):
        return (self.p - 1) ** 2


def run(model, steps, batches=None, lr=0.1):
    batches = [(TOKENS, TOKENS)] * steps if batches is None else batches
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return training.train(model, optimizer, batches, steps, [(TOKENS, TOKENS)])


def test_the_learning_rate_rises_linearly_and_falls_like_a_cosine_to_a_tenth():
    factors = [training.schedule(step, 100) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx(0.55)  # half way down
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_a_run_takes_its_steps_and_reports_the_held_out_loss():
    model = Constant(3.0)
    result = run(model, 5)
    p = 3.0
    expected = []
    for step in range(5):
        expected.append((p - 1) ** 2)
        p -= 0.1 * training.schedule(step, 5) * 2 * (p - 1)
    assert result.train_loss == pytest.approx(expected, rel=1e-5)
    assert result.val_loss == pytest.approx((p - 1) ** 2, rel=1e-5)
    assert result.row()["steps_taken"] == 5


def test_a_run_that_diverges_stops_and_has_no_loss():
    result = run(Constant(3.0), 2000, lr=1e3)
    assert result.val_loss is None
    assert len(result.train_loss) < 100
    assert all(map(math.isfinite, result.train_loss))
    row = result.row()
    assert training.held_out(row) is None
    assert "diverged" in row["error"]


def test_the_held_out_loss_of_a_row_has_two_names():
    assert training.held_out({"loss": 2.0}) == training.held_out({"val_loss": 2.0}) == 2.0


def test_the_held_out_loss_is_a_mean_without_gradients():
    losses = iter([1.0, 2.0, 6.0])

    def loss(tokens, targets):
        assert not torch.is_grad_enabled()
        return torch.tensor(next(losses))

    assert training.mean_loss(loss, [(TOKENS, TOKENS)] * 3) == 3.0


def test_every_run_with_a_seed_sees_the_same_batches(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(range(1, 256)) * 2 + name.encode())
    text = corpus.load(tmp_path)
    run = training.Run(seed=0, steps=3, batch=2, context=8, layers=1, val_batches=1)
    first, again = (list(training.train_batches(text, run, "cpu")) for _ in range(2))
    assert len(first) == 3
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    other = next(iter(training.train_batches(text, replace(run, seed=1), "cpu")))
    assert not torch.equal(other[0], first[0][0])


def options():
    parser = study.parser(None, seeds=1)
    study.add_numbers(parser, **training.SIZES)
    return parser


def test_a_device_that_is_not_there_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        options().parse_args(["--device", "abacus"])
    assert "no device 'abacus' here: take cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], "/nowhere is not a folder"),
        (["--context", "99999999"], "one window of --context 99999999"),
    ],
)
def test_text_that_is_missing_or_too_short_is_one_line(arguments, message, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"text {name}")
    chosen = options().parse_args(["--data", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match=message) as caught:
        training.load(chosen)
    assert "\n" not in str(caught.value)
