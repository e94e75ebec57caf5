"""Lightning's plugin: precisions, evaluation, checkpoints, and the callback that inspects casts.

`test_frameworks.py` trains with it.
"""

from __future__ import annotations

import pytest
import torch
from fresh import example_of
from one_process import assert_same_model
from torch import nn

from float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)

pl = pytest.importorskip("lightning.pytorch")
from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch import loggers  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: E402

from float8.integrations import lightning as plugin_file  # noqa: E402
from float8.integrations.lightning import Float8Monitor, Float8Precision  # noqa: E402
from float8.numerics import load_run  # noqa: E402

# Lightning's own: about a hook that a test has no use for, and its use of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step`",
    "ignore:.*isinstance.treespec",
    "ignore:The .*workers",
)
MICROBATCHES = 2
ONE = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "accumulate_grad_batches": MICROBATCHES,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def batches(seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 32, generator=random) for _ in range(3 * MICROBATCHES)]


def loss_of(model, x):
    return (model(x) - x.roll(1, 0)).square().mean()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Module(pl.LightningModule):
    """The network; it notes what it computed while it was evaluated."""

    def __init__(self, optimizers=None):
        super().__init__()
        self.model, self.evaluated = network(), []
        self._optimizers_of = optimizers or adamw

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return loss_of(self.model, batch)

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(self.model(batch))

    def configure_optimizers(self):
        return self._optimizers_of(self)


def data(seed=0):
    return torch.utils.data.DataLoader(batches(seed), batch_size=None)


def fit(module, plugin, ckpt_path=None, validate=None, **options):
    trainer = pl.Trainer(plugins=plugin, **{**ONE, **options})
    # The file holds the histories' tensors and Lightning's own classes.
    trainer.fit(module, data(), validate, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def by_hand(model):
    """The bare loop, with parameters and inputs in bfloat16."""
    optimizer = adamw(model.bfloat16())
    for index, x in enumerate(batches()):
        (loss_of(model, x.bfloat16()) / MICROBATCHES).backward()
        if index % MICROBATCHES == MICROBATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
            sync_float8_amax_and_scale_history(model)
    return model


def converted(recipe, **options):
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(network(), config=config, **options)


# --- training


def test_bf16_true_equals_the_bare_loop_in_bfloat16():
    module, expected = Module(), by_hand(converted("delayed"))
    fit(module, Float8Precision("delayed", precision="bf16-true"))
    assert_same_model(module.model, expected, "Trainer")
    model = network()
    plugin = Float8Precision("delayed", precision="bf16-true")
    fabric = Fabric(plugins=plugin, accelerator="cpu", devices=1)
    ours, optimizer = fabric.setup(model, adamw(model))
    for index, x in enumerate(batches()):
        fabric.backward(loss_of(ours, x.bfloat16()) / MICROBATCHES)
        if index % MICROBATCHES == MICROBATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(model, expected, "Fabric")


def test_two_optimizers_each_move_the_histories_of_their_own_layers():
    class TakesTurns(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.model, batch))
                optimizer.step()

    sgd = torch.optim.SGD
    each = TakesTurns(lambda self: [sgd(m.parameters(), lr=0.1) for m in self.model[::2]])
    fit(each, Float8Precision("delayed"), accumulate_grad_batches=1, limit_train_batches=3)
    for layer in each.model[::2]:
        history = layer.cast_input.amax_history
        assert history.count_nonzero() == 3


# --- evaluation


@pytest.mark.parametrize("float8_in_evaluation", [False, True])
def test_evaluation_is_in_high_precision_unless_asked_otherwise(float8_in_evaluation):
    x = batches(3)[0]
    plugin = Float8Precision("tensorwise", float8_in_evaluation=float8_in_evaluation)
    module, plain, low = Module(), network(), converted("tensorwise")
    pl.Trainer(plugins=plugin, **ONE).validate(module, data(3), verbose=False)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        high, low = plain(x), low(x)
    assert not torch.equal(high, low)
    assert torch.equal(module.evaluated[0], low if float8_in_evaluation else high)


# --- checkpoints


def test_a_checkpoint_holds_the_plain_model_and_the_histories_beside_it(tmp_path):
    file = tmp_path / "half.ckpt"
    fit(Module(), Float8Precision("delayed")).save_checkpoint(file, weights_only=False)
    saved = torch.load(file, weights_only=False)
    assert saved["state_dict"].keys() == Module().state_dict().keys()
    histories = [x for cast in saved["Float8Precision"].values() for x in cast.values()]
    assert {type(x) for x in histories} == {torch.Tensor}


def test_a_checkpoint_of_another_recipe_loads(tmp_path):
    file = tmp_path / "a.ckpt"
    fit(Module(), Float8Precision("delayed")).save_checkpoint(file, weights_only=False)
    fit(Module(), Float8Precision("tensorwise"), file, max_epochs=2)
    plain = Module()
    fit(plain, None, file)  # a Trainer without float8
    loaded = Module.load_from_checkpoint(file, weights_only=False)
    assert_same_model(plain, loaded, "lightning")


# --- seeing the numbers


class Metrics(loggers.logger.DummyLogger):
    """A logger that records metrics by step."""

    def __init__(self):
        super().__init__()
        self.recorded = {}

    def log_metrics(self, metrics, step=None):
        self.recorded[step] = metrics


def test_the_monitor_inspects_every_nth_batch_and_changes_nothing(tmp_path):
    logger, file = Metrics(), tmp_path / "run.json"
    plain, watched = Module(), Module()
    fit(plain, Float8Precision("delayed"))
    monitor = Float8Monitor(n=4, path=file)
    options = {"logger": logger, "callbacks": [monitor], "log_every_n_steps": 1}
    trainer = fit(watched, Float8Precision("delayed"), **options)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert_same_model(watched, plain, "lightning")
    assert [report.step for report in load_run(file)] == [0, 4]
    assert monitor.report.rows() == load_run(file)[-1].rows()
    seen = {name for metrics in logger.recorded.values() for name in metrics}
    assert "float8/model.0/weight/sqnr" in seen
    again = Float8Monitor(n=4, path=file)  # a resumed run continues its file
    fit(Module(), Float8Precision("delayed"), tmp_path / "a.ckpt", max_epochs=2, callbacks=[again])
    assert [report.step for report in load_run(file)] == [0, 4, 8]


# --- what cannot be


def test_an_average_of_buffers_needs_the_model_converted_before():
    class Normed(Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(16)  # as many as a history has

    def average(module):
        callback = EMAWeightAveraging(decay=0.5)
        fit(module, Float8Precision("delayed"), callbacks=[callback], validate=data(1))
        return callback._average_model.module.norm

    with pytest.raises(ValueError, match="3 buffers with the first of 21, amax histories among"):
        average(Normed())
    config = Float8LinearConfig.from_recipe_name("delayed")
    norm = average(convert_to_float8_training(Normed(), config=config))
    assert norm.running_mean.eq(0).all(), "which never ran"


# --- the examples


@pytest.mark.filterwarnings("ignore")  # Lightning has advice for every short run
def test_the_examples_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code = example_of(plugin_file.__doc__)
    assert 20 < len(code.splitlines()) < 60
    # As a user would: a module's classes are looked up where they were defined.
    exec(compile(code, "an example", "exec"), {"__name__": "example"})
