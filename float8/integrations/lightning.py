"""Float8 by a plugin of Lightning: ``Trainer(plugins=Float8Precision())``, ``Fabric(plugins=...)``.

=================== =============================== ==============================================
what                when                            how
=================== =============================== ==============================================
conversion          before wrapping, and before the `convert_module`; parameters are shared, so an
                    Trainer's optimizers are built  optimizer that Fabric is given stays right
compute dtype       every forward                   autocast, or parameters in bfloat16
scales              once per optimizer step, not    `optimizer_step` calls `float8.after_step`
                    per microbatch
evaluation          eval mode without gradients     in high precision, unless asked otherwise
checkpoints         the Trainer's                   `state_dict`, `load_state_dict`
=================== =============================== ==============================================

Trainer::

    import lightning.pytorch as pl
    import torch
    from torch import nn
    from float8.integrations.lightning import Float8Precision

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch, batch_idx):
            return (self.model(batch) - batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = torch.utils.data.DataLoader(torch.randn(64, 32), batch_size=16)
    trainer = pl.Trainer(plugins=Float8Precision("delayed"), max_epochs=1, accelerator="cpu")
    trainer.fit(Regression(), data)

Fabric; call its ``backward``, not the tensor's::

    from lightning.fabric import Fabric

    fabric = Fabric(plugins=Float8Precision("tensorwise"), accelerator="cpu", devices=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in fabric.setup_dataloaders(data):
        fabric.backward((model(batch) - batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

The Trainer's checkpoints hold the plain model and, under the plugin's name, the histories of
delayed scaling: a run resumes to the same bits, and ``state_dict()`` of a model has plain keys from
then on. Fabric saves what it is given, histories too. `Float8Monitor`, a callback of the Trainer,
shows the statistics of casts; in Fabric loops `float8.inspect_every` does. `float8.compare` takes
``model.module``.

A plugin belongs to one Trainer or Fabric. With ``ModelParallelStrategy`` call
``self.trainer.precision_plugin.convert_module(self)`` in ``configure_model`` before ``fully_shard``
wraps the layers. ``FSDPStrategy`` (FSDP1) takes no plugin but its own: convert before, and call
`float8.after_step`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import HalfPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from float8.convert.after_step import after_step, tell_what_ran
from float8.convert.filters import ModuleFilter
from float8.integrations.conversion import Adapter, check_optimizer, delayed_casts, warn_of_version
from float8.linear.casts import DelayedCast
from float8.linear.layer import Float8Linear
from float8.numerics.alarms import Alarm
from float8.numerics.monitor import inspect_every
from float8.numerics.snapshot import Report

warn_of_version("lightning", "2.6", "2.7")

__all__ = ["Float8Monitor", "Float8Precision"]

Computes = Literal["bf16-mixed", "bf16-true", "32-true"]


class Float8Precision(Precision):
    """Trains linear layers in float8, under the Trainer or under Fabric.

    Args:
        config: a `Float8LinearConfig`, a recipe's name, or TransformerEngine's or torchao's
            settings (`float8.integrations.conversion.as_config`); dynamic tensorwise by default. A
            model that was converted before keeps its config: this one must be equal.
        module_filter_fn: as in `float8.convert_to_float8_training`; names are those of the module
            that the framework is given.
        precision: of everything else, in place of the framework's own ``precision``, which excludes
            plugins. ``"bf16-mixed"``: autocast to bfloat16, parameters stay float32.
            ``"bf16-true"``: parameters and inputs in bfloat16. ``"32-true"``: nothing is changed;
            for FSDP2's ``MixedPrecisionPolicy`` too.
        float8_in_evaluation: keep float8 where a model in eval mode runs without gradients.

    Raises:
        ValueError: an unknown recipe or precision.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        module_filter_fn: ModuleFilter | None = None,
        precision: Computes = "bf16-mixed",
        float8_in_evaluation: bool = False,
    ) -> None:
        if precision not in ("bf16-mixed", "bf16-true", "32-true"):
            raise ValueError(
                f'precision must be "bf16-mixed", "bf16-true" or "32-true", got {precision!r}'
            )
        self.precision, self._by_trainer = precision, False
        self._adapter = Adapter(config, module_filter_fn, float8_in_evaluation)
        is_true = precision == "bf16-true"
        self._dtype: Precision = HalfPrecision("bf16-true") if is_true else Precision()
        # In the order of their conversion, in which all ranks sync them.
        self._models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the models out: a copy, as a spawned process gets it, converts its own."""
        return {name: value for name, value in vars(self).items() if name != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _models=weakref.WeakKeyDictionary())

    # --- the model

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the layers of ``module``; a model that is converted already stays as it is.

        Raises:
            ValueError: a layer was converted with another config, or cannot be converted, or FSDP2
                has wrapped the model already.
        """
        module = self._dtype.convert_module(self._adapter.convert(module))
        for part in set(self._models) & set(module.modules()):
            del self._models[part]
        self._models[module] = None
        return module

    def tensor_init_context(self) -> AbstractContextManager:
        """New tensors get the parameters' dtype."""
        return self._dtype.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager:
        """New parameters get their dtype; conversion comes later."""
        return self._dtype.module_init_context()

    def convert_input(self, data: Any) -> Any:
        """With ``"bf16-true"``, floating point inputs in bfloat16."""
        return self._dtype.convert_input(data)

    def forward_context(self) -> AbstractContextManager:
        """Autocast, or bfloat16 as the default."""
        stack = ExitStack()
        stack.enter_context(self._dtype.forward_context())
        if self.precision == "bf16-mixed":
            for device in {_device_of(model) for model in self._models} or {"cpu"}:
                stack.enter_context(torch.autocast(device, torch.bfloat16, cache_enabled=False))
        return stack

    # --- the step

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Called by the Trainer before it trains or evaluates: move histories to its checkpoints.

        Raises:
            ValueError: an optimizer was built from parameters that the model no longer has; or a
                callback averages the buffers of a copy without histories.
        """
        self._by_trainer = True
        trainer = next(m for m in model.modules() if isinstance(m, LightningModule)).trainer
        if trainer.state.fn is TrainerFn.FITTING:  # otherwise the optimizers are the last fit's
            for optimizer in optimizers:
                check_optimizer(optimizer, model)
            for callback in trainer.callbacks:
                _check_average(callback, model)
        for other in set(self._models) - set(model.modules()):  # of an earlier fit
            del self._models[other]
        for cast in self._delayed_casts().values():
            cast.hidden = True  # in state dicts: `state_dict` of this plugin has the histories
        return super().connect(model, optimizers, lr_schedulers)

    @property
    def _framework(self) -> Any:
        """The methods that this plugin extends: the Trainer's, or Fabric's."""
        return super() if self._by_trainer else super(Precision, self)

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """The Trainer's hooks; Fabric has none."""
        return self._framework.pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """The LightningModule's ``backward``, or the tensor's under Fabric."""
        self._framework.backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """The Trainer's hooks; Fabric has none."""
        return self._framework.post_backward(tensor, module)

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, then compute the next scales from the amaxes of all microbatches."""
        given = {"model": model} if self._by_trainer else {}
        if self._by_trainer or closure is not None:
            given["closure"] = closure
        result = self._framework.optimizer_step(optimizer, **given, **kwargs)
        for each in list(self._models):
            _after_step(optimizer, each)
        return result

    # --- checkpoints of the Trainer

    def state_dict(self) -> dict[str, Any]:
        """Name -> buffers, for each delayed cast."""
        return {name: dict(cast.named_buffers()) for name, cast in self._delayed_casts().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the histories of a checkpoint; those of other casts are left out."""
        casts = self._delayed_casts()
        for name in casts.keys() & state_dict.keys():
            casts[name].load_state_dict(state_dict[name])

    def _delayed_casts(self) -> dict[str, DelayedCast]:
        return {n: cast for model in self._models for n, cast in delayed_casts(model).items()}


def _device_of(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _check_average(callback: Callback, model: nn.Module) -> None:
    average = vars(callback).get("_average_model")  # of Lightning's WeightAveraging
    if not (isinstance(average, AveragedModel) and average.use_buffers):
        return
    theirs, ours = (len(list(each.buffers())) for each in (average.module, model))
    if theirs and theirs != ours:
        raise ValueError(
            f"{type(callback).__name__} would pair its {theirs} buffers with the first of {ours}, "
            "amax histories among them: convert the model before trainer.fit, or pass the "
            "callback use_buffers=False"
        )


def _after_step(optimizer: Optimizer, model: nn.Module) -> None:
    """Update the scales of the layers that this optimizer trains, and of frozen layers.

    Where two optimizers take turns, as those of a generator and a discriminator do, a history moves
    once per step of its own layer. An optimizer may step between a forward and a backward through
    layers of the other optimizer, whose scales must not change then.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers, own = [], []
    for layer in model.modules():
        gathers = isinstance(layer, Float8Linear) and layer.config.enable_fsdp_float8_all_gather
        if gathers or any(isinstance(child, DelayedCast) for child in layer.children()):
            layers.append(layer)
            trained = [p for p in layer.parameters() if p.requires_grad]
            if not trained or any(id(p) in stepped for p in trained):
                own.append(layer)
    tell_what_ran()
    if own:
        after_step(model if len(own) == len(layers) else nn.ModuleList(own))


class Float8Monitor(Callback):
    """Inspects the casts every n batches: `float8.numerics.inspect_every` for the Trainer.

    The statistics go into a file, of which ``python -m float8.numerics.report`` makes a page, and
    to the Trainer's loggers, as ``float8/<layer>/<operand>/<number>``. Alarms
    (`float8.numerics.Alarm`) are warnings of ``logging.getLogger("float8")``, and how many are
    active is ``float8/alarms`` in the loggers.

    Args:
        n: inspect every n-th batch; with gradient accumulation a batch is a microbatch.
        path: of the file; None writes none.
        log: whether to write to the Trainer's loggers.
        on_alarm: called with each alarm that starts. To stop the training raise in it, or set
            ``trainer.should_stop``.
    """

    def __init__(
        self,
        n: int = 50,
        path: str | os.PathLike[str] | None = None,
        log: bool = True,
        on_alarm: Callable[[Alarm], object] | None = None,
    ):
        self.n, self.path, self.log, self.on_alarm = n, path, log, on_alarm
        self._monitor: Any = None
        self._scalars: dict[str, float] = {}

    @property
    def report(self) -> Report | None:
        """The last one."""
        return None if self._monitor is None else self._monitor.report

    @property
    def alarms(self) -> list[Alarm]:
        """Those that are active."""
        return [] if self._monitor is None else self._monitor.alarms

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Collect a number: loggers get all numbers of a step at once."""
        self._scalars[tag] = value

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set up, once the model is converted and loaded; a resumed run continues its file."""
        writer = self if self.log and trainer.loggers else None
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._monitor = inspect_every(
            pl_module, self.n, path=self.path, writer=writer, step=done, on_alarm=self.on_alarm
        )

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Start to inspect, if it is this batch's turn."""
        self._monitor.start_step()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End, write the file, and log."""
        try:
            self._monitor.end_step()
        finally:  # also where on_alarm raises
            for logger in trainer.loggers if self._scalars else ():
                logger.log_metrics(self._scalars, trainer.global_step)
            self._scalars = {}

    def on_train_end(self, trainer: Any, pl_module: Any, exception: Any = None) -> None:
        """Stop inspecting; ``report`` has the results so far."""
        if self._monitor is not None:
            self._monitor.abandon_step()

    on_exception = on_train_end
