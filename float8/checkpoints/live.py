"""`weight_updates`: the tensors of a float8 checkpoint one after the other, without files.

Reinforcement learning samples with a serving engine and trains with this library. After each step
the engine gets the new weights::

    for name, tensor in weight_updates(model):
        engine.load_weights([(name, tensor)])

The names, tensors and bits are those that `save_pretrained` writes (``weights.py`` says which), in
the order of the model's layers, each scale after its weight. Data and scales are those that the
trainer multiplies, so both compute with the same numbers. An engine that gets high-precision
weights casts them with scales of its own, and samples from another policy than the one that trains.

One parameter is gathered at a time, and its matrices are cast one after the other. All of them are
of one step: a write to a parameter that follows is an error, because the engine would have weights
of two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from float8.arguments import check_module
from float8.checkpoints.finite import refuses_values
from float8.checkpoints.layout import Layout
from float8.checkpoints.ranks import Sharing, agree
from float8.checkpoints.weights import Checkpoint, items


def weight_updates(
    model: nn.Module,
    layout: Layout | str | None = None,
    *,
    input_scales: Mapping[str, float | Tensor] | None = None,
    recast: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model as a float8 checkpoint has them, one tensor at a time.

    Weights that are in float8 already, resident or by `float8.cached_weights`, are not cast again.

    Args:
        model: a converted model; it may be compiled, or sharded by FSDP2. Then all ranks call this
            and iterate to the end, in step with each other, and each gets whole tensors.
        layout: how layers are stored, as in `save_pretrained`.
        input_scales: layer -> the static scale of its input, as in `save_pretrained`.
        recast: cast float8 weights of another granularity again, as in `save_pretrained`.

    Returns:
        An iterator of (name, tensor), for one use. Tensors may share memory with the model: an
        engine copies them before the next optimizer step.

    Raises:
        TypeError: an argument has another type.
        ValueError: the layout cannot store a layer, or a parameter has NaN or inf.
        RuntimeError: of a sharded model, on every rank: the error of any rank. While iterating: a
            parameter was written to since the call.
    """
    check_module(model, "weight_updates")
    checkpoint, error = None, None
    try:
        checkpoint = items(model, layout, input_scales=input_scales, recast=recast)
        if (reason := refuses_values(checkpoint.items)) is not None:
            raise ValueError(reason)
    except Exception as caught:
        error = caught
    agree(Sharing.of(model), "calls weight_updates", error, checkpoint)
    assert checkpoint is not None
    return _in_order(checkpoint, _Watch(model))


def _in_order(checkpoint: Checkpoint, watch: _Watch) -> Iterator[tuple[str, Tensor]]:
    handle = register_optimizer_step_post_hook(watch.note)
    try:
        for item in checkpoint.items:
            watch.check()
            gathered = item.gather()
            tensors = item.cast(gathered)
            del gathered  # freed with the last of its tensors
            for _ in item.specs:
                watch.check()  # a stack of experts is read matrix by matrix
                yield next(tensors)
    finally:
        handle.remove()


class _Watch:
    """Notices writes to the parameters of a model, from the moment when this is made.

    Version counters show all writes but those of multi-tensor optimizers to sharded parameters
    (torch 2.13), which a hook on optimizers shows.
    """

    def __init__(self, model: nn.Module) -> None:
        # Inference tensors have no version, and are written to under inference_mode alone.
        own = {name: p for name, p in model.named_parameters() if not p.is_inference()}
        self.names, self.parameters = list(own), list(own.values())
        self.versions = [p._version for p in self.parameters]
        self.stepped: set[int] = set()

    def note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Remember which parameters an optimizer has stepped."""
        self.stepped |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def check(self) -> None:
        """Raise if a parameter was written to."""
        # One list for all: a model has thousands of parameters, and each tensor asks.
        if not self.stepped and [p._version for p in self.parameters] == self.versions:
            return
        for name, p, version in zip(self.names, self.parameters, self.versions, strict=True):
            if p._version != version or id(p) in self.stepped:
                raise RuntimeError(
                    f"weight_updates: {name} was written to since the call, and what was yielded "
                    "is of the weights before. Finish the iteration before the optimizer steps, "
                    "then call weight_updates again"
                )
