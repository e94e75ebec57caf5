"""The meaning of an addition in a model: residual layer, sum of signals, or part of a formula.

Unit scaling divides a sum of independent signals by the root of their number, and gives a residual
sum ``x + f(x)`` weights of its own. A formula that happens to contain a plus, the
``x * cos + rotate(x) * sin`` of rotary embeddings or the ``x + 0.044715 * x**3`` of a hand-written
gelu, must stay as it is. `classify` tells them apart by what the operands were computed from:

    KEEP      left as it is: the addition of a number, a bias vector or a mask (added to attention
              scores, and independent of parameters), or an addition inside a formula, where both
              operands are arithmetic of one value
    RESIDUAL  one operand, the skip, is what the other, the branch, was computed from; or the sum
              of such a skip and other branches of it
    SUM       the rest: signals that are taken for independent

A value is *arithmetic* of those that it was computed from by functions that hold no parameter and
that unit scaling has no unit-scaled function for. The results of contractions, norms, activations,
softmax, sums and residual layers are new signals. *Scores* are arithmetic of a product of two
activations, or a sum with one: ``q k^T`` before its softmax.

A residual addition computes ``y = (tau f(x) + x) / sqrt(1 + tau**2)``. **tau** is that of
`core.functional.transformer_residual_scaling_rule` (u-muP, arXiv 2407.17465, appendix G, both
multipliers 1) for all residual layers of the model in the order of their additions,
``tau_i = 1 / sqrt(L/2 + i)``.
The stream's first value, all branches at even places and all at odd places (a transformer's
attention and feed-forward layers) then contribute the same variance to the end of the stream. With
these multipliers the rule gives the ``i``-th branch the same ``tau`` whether it is attention or
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from float8.unit_scaling.core.functional import transformer_residual_scaling_rule
from float8.unit_scaling.transforms.contractions import Argument
from float8.unit_scaling.transforms.history import History, Value

KEEP, SUM, RESIDUAL = "keep", "sum", "residual"
ADDITIONS = (torch.add, Tensor.add_)
OPERANDS = (Argument(0, "input"), Argument(1, "other"))

tau_of = transformer_residual_scaling_rule()


def classify(history: History, number: int, is_plain: bool) -> None:
    """Set what an addition means: its ``kind``, and ``skip`` and ``root`` of a residual one.

    ``skip`` says which operand is the skip, 0 or 1. ``root`` is the value at which branch and skip
    part: the skip operand itself, or the input of the residual layer that returned it
    (``x + attention(x) + mlp(x)``).

    ``history`` is the forward so far, and ``number`` that of a call of ``torch.add`` in any
    spelling. ``is_plain`` says that both operands have one shape and ``alpha`` is 1.
    """
    call = history.calls[number]
    left, right = (call.operand(argument) for argument in OPERANDS)
    if left is None or right is None or _is_kept(history, left, right):
        call.kind = KEEP
        return
    call.kind = SUM
    if is_plain:
        for call.root, call.skip in _roots(history, left, right):
            call.kind = RESIDUAL
            return


def _is_kept(history: History, left: Value, right: Value) -> bool:
    if any(v.is_learned and v.dims <= 1 for v in (left, right)):
        return True
    return bool(left.terms & right.terms) or any(
        scores.is_scores
        and history.depends_on_parameters(scores)
        and not history.depends_on_parameters(mask)
        and not scores.origins >> mask.number & 1
        for scores, mask in ((left, right), (right, left))
    )


def _roots(history: History, left: Value, right: Value) -> Iterator[tuple[int, int]]:
    """Where branch and skip part, and which operand is the skip; the nearest first."""
    operands = (left, right)
    for roots in zip_longest(*[_stream(history, value) for value in operands]):
        for skip, root in enumerate(roots):
            if root is not None and operands[1 - skip].origins >> root & 1:
                yield root, skip


def _stream(history: History, value: Value | None) -> Iterator[int]:
    """A value, and the inputs of the residual layers that it is the result of."""
    while value is not None:
        yield value.alias
        number = history.values[value.alias].call
        call = None if number is None else history.calls[number]
        value = call.operand(OPERANDS[call.skip]) if call and call.kind == RESIDUAL else None
