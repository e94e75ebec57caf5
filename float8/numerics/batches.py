"""How a model is run on a batch whose shape nobody knows, and what its backward starts from.

====================== ============================ ==========================================
a batch that is        runs as                      its result
====================== ============================ ==========================================
a mapping              ``model(**batch)``           is searched for tensors through tuples,
a tuple or a list      ``model(*batch)``            lists, mappings and dataclasses (the
anything else          ``model(batch)``             outputs of Transformers are both)
====================== ============================ ==========================================

Backward starts from, in this order: what ``loss_fn(output)`` returns; ``output.loss`` (or
``output["loss"]``); the output itself if it is a scalar; the output's first floating point tensor
times a random cotangent drawn from the seed. Random, because a constant one, as of ``sum()``, hides
most errors of a backward: they cancel.

Where tensors of a batch ask for a gradient, copies of them get it. Parameters that ``loss_fn``
reads beside the model are not the model's, and keep the gradients that they get.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

LossFn = Callable[[Any], Tensor]


def is_one_of_many() -> bool:
    """Whether other ranks run along: who stops early leaves them waiting."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks; a sparse one with its zeros."""
    # By name: DTensor takes long to import.
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.to_dense() if value.is_sparse else value


def run_model(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a nested structure, in its order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):  # before dataclasses: it leaves out the fields that are None
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_of(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors_of(getattr(tree, field.name))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same structure with other tensors, of the same types; the rest as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [map_tensors(function, value) for value in tree]
    if isinstance(tree, Mapping):
        found = {name: map_tensors(function, value) for name, value in tree.items()}
        is_plain = type(tree) is dict or not isinstance(tree, MutableMapping)
        return found if is_plain else _replaced(tree, found)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [item.name for item in fields(tree)]
        found = {name: map_tensors(function, getattr(tree, name)) for name in names}
        return _replaced(tree, found)
    return tree


def _replaced(tree: Any, values: dict[Any, Any]) -> Any:
    """A copy of a mapping or dataclass with other values: those of Transformers are both."""
    same = copy.copy(tree)
    for name, value in values.items():
        if isinstance(tree, MutableMapping):
            same[name] = value
        else:
            object.__setattr__(same, name, value)  # of frozen ones too
    return same


def own_batch(batch: Any) -> Any:
    """A copy of a batch to run and differentiate: what becomes of it does not reach the caller."""
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)


def main_tensor(output: Any) -> Tensor:
    """The first floating point tensor of an output that is not a scalar, or the first scalar.

    Raises:
        TypeError: there is none.
    """
    found = [t for t in tensors_of(output) if t.is_floating_point()]
    if not found:
        raise TypeError(
            f"the model returned a {type(output).__name__} without a floating point tensor: there "
            "is nothing to measure"
        )
    return next((t for t in found if t.numel() != 1), found[0])


class Start(NamedTuple):
    """Where a backward starts: a tensor and its cotangent, None for a scalar (the loss)."""

    tensor: Tensor
    cotangent: Tensor | None

    @property
    def loss(self) -> float | None:
        """The loss, if there is one."""
        return float(self.tensor.detach()) if self.cotangent is None else None

    def backward(self) -> bool:
        """Run it; False where nothing asks for a gradient."""
        if not self.tensor.requires_grad:
            return False
        self.tensor.backward(self.cotangent)
        return True


def start_of(output: Any, loss_fn: LossFn | None, seed: int) -> Start:
    """What the backward of an output starts from; see the table of this file.

    Args:
        output: of the model.
        loss_fn: of the output, or None.
        seed: of the random cotangent; the same numbers on every device.

    Raises:
        TypeError: ``loss_fn`` returned something else than a scalar tensor.
    """
    loss = _loss_in(output) if loss_fn is None else _checked(loss_fn(output))
    if loss is not None:
        return Start(loss, None)
    main = main_tensor(output)
    if main.numel() == 1:
        return Start(main, None)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(main.shape, generator=generator).to(main)
    return Start(main, cotangent)


def _loss_in(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
        raise TypeError(f"loss_fn must return a scalar tensor, the loss of the output; got {what}")
    return loss
