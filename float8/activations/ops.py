"""The table of ops whose backward is served from float8: name -> `Op` or `MaskOp`.

An `Op` says how its calls are spelt, which tensors a backward needs, and the gradient. To add one:
its spellings in ``calls``, a gradient in ``derivatives``, one row here, and one row in
``measure.CASES``, from where the tests take it.

Two ops are off unless asked for. ``softmax`` keeps its output; where a product reads that output
(attention spelt out, without dropout), torch saves it in full for the product anyway, and a float8
copy is one more. ``linear`` keeps the input of layers that nobody converted, and makes their weight
gradients those of a float8 input, which one should have chosen.

Not here, on purpose:

- ``scaled_dot_product_attention``: its backward computes the probabilities again as ``exp(q k^T -
  logsumexp)``. With q and k rounded they no longer sum to 1: an error of 6 % of a logit of 20
  multiplies a probability by 3, and nothing pulls it back.
- cross entropy and ``log_softmax``: what they keep is a log-probability y, and backward takes
  exp(y): an error of 6 % of y = -10 is a factor of 1.8. The norm of a gradient hides it (38 dB):
  the target's element is most of it. A loss over chunks of tokens saves more, and loses nothing.
- divisions and roots: their derivatives are infinite where the code of a small element is 0.
- sums, views, ``cat``, rotations by a table without gradient: they keep nothing that is large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8.activations import calls, derivatives
from float8.activations.calls import Read, Readers
from float8.activations.derivatives import Grads, Needs
from float8.activations.keeper import OUTPUT, Keeper, Recipe
from float8.activations.keeping import keeping, masked

SMALL = 16  # times fewer elements than another input's


@dataclass(frozen=True)
class Saving(ABC):
    """Abstract: an op that keeps little. Final: `Op`, `MaskOp`."""

    name: str
    readers: Readers

    @abstractmethod
    def call(self, keeper: Keeper, read: Read) -> Tensor | None:
        """The op's result, or None: nothing would be gained, run torch's own."""


@dataclass(frozen=True)
class Op(Saving):
    """An op whose gradient is computed from its inputs, or its output, as they were kept.

    Args:
        forward: torch's function, ``forward(*inputs, **options)``.
        keeps: which tensors a backward needs, by index, given the inputs that need gradients.
        gradient: ``gradient(g, kept, needs, **options)``.
        inputs: how many there are; absent ones are None.
        exact: indices of those that are never rounded: weights.
        again: its result may be computed again in backward, from its one kept input.
    """

    forward: Callable[..., Tensor]
    keeps: Callable[[Needs], tuple[int, ...]]
    gradient: Callable[..., Grads]
    inputs: int = 1
    exact: tuple[int, ...] = ()
    again: bool = False

    def call(self, keeper: Keeper, read: Read) -> Tensor | None:
        """By `keeping`, if it keeps anything that is large."""
        inputs, options = read
        needs = tuple(x is not None and x.requires_grad for x in inputs)
        wanted = [i for i in self.keeps(needs) if i == OUTPUT or inputs[i] is not None]
        if not any(self._is_worth_it(keeper, inputs, i) for i in wanted):
            return None
        kept = [self._keep(keeper, inputs, i) for i in wanted]
        out = keeping(self, inputs, options, kept)
        recipe, parts = kept[0]
        if self.again and recipe.again is None:
            keeper.remember(out, (recipe._replace(again=(self.forward, options)), parts))
        return out

    def _is_worth_it(self, keeper: Keeper, inputs: tuple[Any, ...], index: int) -> bool:
        if self._is_exact(inputs, index):
            return False
        return keeper.is_worth_it(inputs[0] if index == OUTPUT else inputs[index])

    def _is_exact(self, inputs: tuple[Any, ...], index: int) -> bool:
        """Weights; and what meets far more elements than it has, as rstd does in a norm spelt out:
        its codes save next to nothing, and one error of it would be that of a whole row."""
        most = max(x.numel() for x in inputs if x is not None)
        return index in self.exact or (index != OUTPUT and SMALL * inputs[index].numel() <= most)

    def _keep(self, keeper: Keeper, inputs: tuple[Any, ...], index: int) -> Any:
        if index == OUTPUT:
            x = inputs[0]
            return Recipe(OUTPUT, keeper.groups, tuple(x.shape), torch.float32), ()
        return keeper.keep(inputs[index], index, exact=self._is_exact(inputs, index))


@dataclass(frozen=True)
class MaskOp(Saving):
    """An op whose gradient needs one bit per element, which float8 could only store worse.

    Args:
        run: ``run(x, **options)``, the result.
    """

    run: Callable[..., Tensor]

    def call(self, keeper: Keeper, read: Read) -> Tensor | None:
        """By `masked`, if x is large."""
        (x,), options = read
        assert x is not None
        if not (x.requires_grad and keeper.is_worth_it(x)):
            return None
        return self.run(x, **options)


def _keeps_input(needs: Needs) -> tuple[int, ...]:
    return (0,)


def _keeps_output(needs: Needs) -> tuple[int, ...]:
    return (OUTPUT,)


def _keeps_the_other(needs: Needs) -> tuple[int, ...]:
    return (1,) * needs[0] + (0,) * needs[1]


def _keeps_normed(needs: Needs) -> tuple[int, ...]:
    return (0, 1) if needs[0] or needs[1] else ()


def _normed_by_rms(x: Tensor, weight: Any, normalized_shape: Any, eps: float | None) -> Tensor:
    return F.rms_norm(x, normalized_shape, weight, eps)


def _normed(x: Tensor, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> Tensor:
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def _soft(x: Tensor, dim: int, dtype: Any) -> Tensor:
    return torch.softmax(x, dim, dtype)


def _relu(x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.logical_not(x <= 0)  # of a NaN, torch passes the gradient
    return masked("relu", torch.relu, x, mask)


def _drop(x: Tensor, p: float) -> Tensor:
    """As torch draws and scales: by one kernel on CUDA; elsewhere by a tensor of noise."""
    if x.is_cuda:
        with torch.no_grad():
            out, mask = torch.native_dropout(x, p, True)
        return masked("dropout", lambda _: out, x, mask, 1 / (1 - p))
    noise = torch.empty_like(x, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    factor = float(torch.ones((), dtype=x.dtype).div_(1 - p))
    return masked("dropout", lambda x: x * noise, x, noise != 0, factor)


_ROWS: tuple[Saving, ...] = (
    Op("rms_norm", calls.RMS_NORM, _normed_by_rms, _keeps_normed, derivatives.rms_norm, 2, (1,)),
    Op("layer_norm", calls.LAYER_NORM, _normed, _keeps_normed, derivatives.layer_norm, 3, (1, 2)),
    Op("silu", calls.SILU, F.silu, _keeps_input, derivatives.silu, again=True),
    Op("gelu", calls.GELU, F.gelu, _keeps_input, derivatives.gelu, again=True),
    Op("sigmoid", calls.SIGMOID, torch.sigmoid, _keeps_input, derivatives.sigmoid, again=True),
    Op("tanh", calls.TANH, torch.tanh, _keeps_input, derivatives.tanh, again=True),
    Op("mul", calls.MUL, torch.mul, _keeps_the_other, derivatives.mul, 2),
    Op("pow", calls.POW, torch.pow, _keeps_input, derivatives.pow),
    MaskOp("relu", calls.RELU, _relu),
    MaskOp("dropout", calls.DROPOUT, _drop),
    Op("softmax", calls.SOFTMAX, _soft, _keeps_output, derivatives.softmax),
    Op("linear", calls.LINEAR, F.linear, _keeps_the_other, derivatives.linear, 3, (1, 2)),
)
OPS = {row.name: row for row in _ROWS}
OPTIONAL = ("softmax", "linear")  # off unless asked for
