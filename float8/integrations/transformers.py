"""Float8 in the Trainer of Hugging Face Transformers, by one callback: `Float8Callback`.

::

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from float8.integrations.transformers import Float8Callback

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes, **heads))
    tokens = torch.randint(128, (32, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments("out", bf16=True, max_steps=4, save_steps=2, use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Float8Callback("delayed")])
    trainer.train()
    trainer.train(resume_from_checkpoint=True)  # or in another process: to the same bits
    print(trainer.evaluate(data))
    LlamaForCausalLM.from_pretrained("out/checkpoint-4")  # a plain model, as its files are

The methods of the callback, which the Trainer calls:

===================== ==========================================================================
``on_init_end``       converts the model, before an optimizer is built; a model that is converted
                      already stays as it is: ``Trainer(convert(model), callbacks=[...])``
``on_train_begin``    checks that the optimizer steps this model; converts the ``ref_model`` of a
                      trainer of TRL; continues the histories of the checkpoint that is resumed
``on_optimizer_step`` `float8.after_step`, once per step whatever ``gradient_accumulation_steps``
``on_log``            adds the number of active alarms to the Trainer's logs, with ``inspect_every``
``on_train_end``      with ``load_best_model_at_end``, loads the histories of that checkpoint
===================== ==========================================================================

**Which layers.** By default `convert` takes the layers of a model's body. It leaves out:

- what a ``PreTrainedModel`` has outside of its ``base_model`` (a classifier), and the output head
  (``get_output_embeddings()``): its errors are the logits' errors;
- poolers (one row per sequence) and PEFT's ``lora_`` layers: too small to gain. The layers that
  those adapt are converted.

Tensor cores refuse numbers of tokens in a microbatch that are no multiples of 16: let the data
collator pad them (``pad_to_multiple_of=16``).
A ``module_filter_fn`` replaces this choice. Converted are ``nn.Linear`` and stacked experts, not
GPT-2's ``Conv1D``. ``model.float8_conversion`` reports the result.

**Checkpoints** of a ``PreTrainedModel`` hold plain tensors under the plain model's names. The
histories of delayed scaling are in ``trainer_state.json``, in the callback's state. FSDP
checkpoints, and those of other modules, hold them beside the weights too.

**Looking at casts.** With ``inspect_every=50`` alarms (`float8.numerics.Alarm`) are warnings of
``logging.getLogger("float8")``, and how many are active is ``float8/alarms`` in the Trainer's own
logs. To stop the training raise in ``on_alarm``, or set ``trainer.control.should_training_stop``.

**Evaluation** and generation run in high precision, unless ``float8_in_evaluation=True``.

Activation checkpointing, bf16, ``torch_compile=True`` (one more compilation after the first 16
steps with delayed scaling), DDP and FSDP2 work as the Trainer sets them up. ``nn.DataParallel``,
which it takes for several GPUs in one process, copies a model for each forward and would lose
amaxes: delayed recipes are refused there. With ``model_init`` let that return ``convert(...)``.
Tested with Transformers 5.23 and 5.24.
"""

from __future__ import annotations

import base64
import json
import os
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from float8.config import Float8LinearConfig
from float8.convert.after_step import after_step
from float8.convert.filters import Because, ModuleFilter
from float8.integrations.conversion import (
    Adapter,
    delayed_casts,
    is_converted,
    refuse_fp8,
    warn_of_version,
)
from float8.linear.module import Float8Module
from float8.numerics import monitor

warn_of_version("transformers", "5.23", "5.25")

__all__ = ["Float8Callback", "convert", "layers_of_a_pretrained_model"]

_SMALL = re.compile(r"\bpooler\b|\blora_")


def layers_of_a_pretrained_model(model: nn.Module) -> ModuleFilter:
    """The filter that `convert` takes by default.

    It leaves out what a ``PreTrainedModel`` has outside of its ``base_model``, the output head,
    poolers and PEFT's ``lora_`` layers.

    Args:
        model: the model to convert.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = set() if head is None else set(head.modules())  # a head with an adapter has parts
    if isinstance(model, PreTrainedModel):
        heads |= set(model.modules()) - set(model.base_model.modules())

    def reason(module: nn.Module, fqn: str) -> str | None:
        if module in heads:
            return "it is outside of the model's body: its errors are those of the output"
        return "a pooler or an adapter is too small to gain" if _SMALL.search(fqn) else None

    return Because(reason)


def convert(
    model: nn.Module,
    config: Float8LinearConfig | str | None = None,
    *,
    module_filter_fn: ModuleFilter | None = None,
) -> nn.Module:
    """Convert a model of Transformers, in place; one that is converted already stays as it is.

    Args:
        model: a ``PreTrainedModel``, or any module.
        config: a `Float8LinearConfig` or a recipe's name; dynamic tensorwise by default.
        module_filter_fn: as in `float8.convert_to_float8_training`; by default
            `layers_of_a_pretrained_model`.

    Returns:
        ``model``, or the new layer if ``model`` itself was one.

    Raises:
        ValueError: it was converted before with another config, or layers cannot be converted.
    """
    return _convert(Adapter(config, module_filter_fn, float8_in_evaluation=True), model)


def _convert(adapter: Adapter, model: nn.Module, optimizer: Any = None) -> nn.Module:
    model = adapter.convert(model, optimizer, layers_of_a_pretrained_model(model))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):  # its save_pretrained leaves out histories
            own = {f"{name}.{key}" for name, c in delayed_casts(part).items() for key in c._buffers}
            part._keys_to_ignore_on_save = {*(part._keys_to_ignore_on_save or ()), *own}
    return model


class Float8Callback(TrainerCallback, ExportableState):
    """Trains the Trainer's model in float8.

    Args:
        config, module_filter_fn: as in `convert`; or Accelerate's ``TERecipeKwargs`` or
            ``AORecipeKwargs``, with the filter that it names. A model that was converted before
            keeps its layers; a config that is given must then be theirs.
        float8_in_evaluation: keep float8 in eval mode where gradients are disabled; by default
            what ``TERecipeKwargs`` says as ``use_autocast_during_eval``, or False.
        inspect_every: look at the casts of every n-th step (`float8.numerics.inspect_every`), or
            of no step: 0.
        report_path: where these reports go, for ``python -m float8.numerics.report``.
        on_alarm: called with each alarm that starts (`float8.numerics.inspect_every`).
        writer: a ``SummaryWriter`` for the numbers of these reports. The callbacks of ``report_to``
            run before this one, and do not see what it adds to the Trainer's logs.

    Attributes:
        monitor: of ``inspect_every``; its ``report`` is the last one.

    Raises:
        ValueError: an unknown recipe; ``report_path``, ``on_alarm`` or ``writer`` without
            ``inspect_every``.
        TypeError: ``config`` is of another type.
    """

    def __init__(
        self,
        config: Float8LinearConfig | str | Any | None = None,
        *,
        module_filter_fn: ModuleFilter | None = None,
        float8_in_evaluation: bool | None = None,
        inspect_every: int = 0,
        report_path: str | Path | None = None,
        on_alarm: Callable[[Any], object] | None = None,
        writer: Any = None,
    ) -> None:
        if not inspect_every and any(x is not None for x in (report_path, on_alarm, writer)):
            raise ValueError("report_path, on_alarm and writer need inspect_every=n")
        self.adapter = Adapter(config, module_filter_fn, float8_in_evaluation)
        self.inspect_every, self.report_path = inspect_every, report_path
        self.on_alarm, self.writer = on_alarm, writer
        self.monitor: Any = None
        self._model: nn.Module | None = None

    # --- what the Trainer calls

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Convert, and update an optimizer that was built before."""
        # Set by accelerate launch, from its arguments or its file.
        refuse_fp8(args.mixed_precision, os.environ.get("ACCELERATE_FP8_BACKEND", "NO"))
        self._model = _convert(self.adapter, given["model"], given.get("optimizer"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check model and optimizer, and continue the histories of a checkpoint."""
        model = given["model"]
        if model is not self._model and not is_converted(model):
            raise ValueError(
                "Float8Callback has not converted this model: Trainer(..., callbacks=["
                "Float8Callback(...)]) does, and model_init must return "
                "float8.integrations.transformers.convert(model, config)"
            )
        self._model = _convert(self.adapter, model, given["optimizer"])
        self._convert_reference(args, model)
        if args.n_gpu > 1 and delayed_casts(model):
            raise ValueError(
                f"nn.DataParallel over {args.n_gpu} GPUs would lose amaxes: start one process per "
                "GPU (torchrun --nproc-per-node), or take a dynamic recipe"
            )
        stored = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if isinstance(stored, list):
            raise ValueError(f"this Trainer has {len(stored)} Float8Callbacks: give it one")
        if state.global_step:  # of a checkpoint; otherwise these are the model's own
            self._restore(stored)
        if self.monitor is not None:
            self.monitor.abandon_step()  # of an earlier call that ended in an error
        if self.inspect_every:
            self.monitor = monitor.inspect_every(
                model,
                self.inspect_every,
                path=self.report_path,
                writer=self.writer,
                step=state.global_step,
                on_alarm=self.on_alarm,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start an inspected step."""
        if self.monitor is not None:
            self.monitor.start_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Update scales: the optimizer has stepped, or a GradScaler has skipped the step."""
        after_step(given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End an inspected step; evaluating and saving come after."""
        if self.monitor is not None and self.monitor.is_open:
            self.monitor.end_step()

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Add the number of active alarms to what the Trainer logs of a training."""
        if self.monitor is not None and "loss" in given["logs"]:
            count = len(self.monitor.alarms)
            for logs in (given["logs"], state.log_history[-1]):
                logs["float8/alarms"] = count

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Load the histories of the best checkpoint, whose weights the Trainer has loaded."""
        self.on_step_end(args, state, control)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            file = Path(state.best_model_checkpoint, "trainer_state.json")
            stored = json.loads(file.read_text(encoding="utf-8"))["stateful_callbacks"]
            if type(self).__name__ in stored:  # otherwise loading the weights has started new ones
                self._restore(stored[type(self).__name__])

    def _convert_reference(self, args: Any, model: nn.Module) -> None:
        """Convert the frozen model that trainers of TRL compare ``model`` with.

        Equal models then have equal log probabilities, in evaluation too.
        """
        # A Trainer does not hand itself to its callbacks, but it is among the callers.
        callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
        trainer: Any = next((each for each in callers if hasattr(each, "callback_handler")), None)
        reference = getattr(trainer, "ref_model", None)
        stays = getattr(args, "precompute_ref_log_probs", False)
        if reference is not None and not is_converted(reference):
            stays |= trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled  # sharded by now
        if stays:
            warnings.warn(
                "the reference has log probabilities of high precision, and the model trains in "
                "float8: set precompute_ref_log_probs=False; for FSDP give the trainer ref_model="
                "convert(ref_model, config) of float8.integrations.transformers",
                stacklevel=2,
            )
        elif reference is not None:
            reference = _convert(self.adapter, reference)
            casts = delayed_casts(model)  # both cast by the scales of the one that is trained
            for name in delayed_casts(reference).keys() & casts.keys():
                reference.set_submodule(name, casts[name])
            layers = [module for module in reference.modules() if isinstance(module, Float8Module)]

            def follow(reference: nn.Module, inputs: Any) -> None:
                for layer in layers:
                    layer.training = model.training  # in eval mode both may leave float8

            reference.register_forward_pre_hook(follow)

    # --- the histories

    def state(self) -> dict[str, Any]:
        """The state for ``trainer_state.json``: arguments, and the histories.

        These are a safetensors file in base64: the exact bits, whatever digits JSON would write.
        """
        casts = {} if self._model is None else delayed_casts(self._model)
        buffers = {f"{n}.{key}": b for n, cast in casts.items() for key, b in cast.named_buffers()}
        histories = safetensors.save({n: b.detach().cpu().contiguous() for n, b in buffers.items()})
        path = None if self.report_path is None else str(self.report_path)
        given = {"inspect_every": self.inspect_every, "report_path": path}
        return {
            "args": {"float8_in_evaluation": self.adapter.float8_in_evaluation, **given},
            "attributes": {"histories": base64.b64encode(histories).decode("ascii")},
        }

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._model is not None
        histories = safetensors.load(base64.b64decode(state["attributes"]["histories"]))
        for name, cast in delayed_casts(self._model).items():
            keys = [key for key, _ in cast.named_buffers() if f"{name}.{key}" in histories]
            if keys:  # otherwise it starts a new one
                cast.load_state_dict({key: histories[f"{name}.{key}"] for key in keys})
