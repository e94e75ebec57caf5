"""What an addition in a model means: residual layer, mix of signals, or part of a formula.

Unit scaling divides a sum of independent signals by the root of their number, and gives a residual
sum ``x + f(x)`` weights of its own. A formula that happens to contain a plus, the
``x * cos + rotate(x) * sin`` of rotary embeddings or the ``x + 0.044715 * x**3`` of a hand-written
gelu, must stay what it is. `kind_of` tells them apart when the addition comes, by what its operands
were computed from:

    KEEP      left as it is: a number, a bias vector, a mask (what is added to attention scores
              without depending on a parameter), or an addition inside a formula: both operands
              are arithmetic of one value
    RESIDUAL  one operand, the skip, is what the other, the branch, was computed from; or the sum
              of such a skip and other branches of it
    SUM       the rest: signals that are taken for independent

A value is *arithmetic* of those that it was computed from by functions that hold no parameter and
that unit scaling has no rule for. What has a rule (a product, norm, activation, softmax) makes a
new value of its own, and so do sums and residual layers. *Scores* are arithmetic of a product of
two activations, or a sum with one: ``q k^T`` before its softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from float8.unit_scaling.transforms.recording import Call, History, Value

KEEP, SUM, RESIDUAL = "keep", "sum", "residual"
ADDITIONS = (torch.add, Tensor.add_)


@dataclass(frozen=True)
class Kind:
    """What an addition is; of a residual one, which operand is the skip and what the branch reads.

    ``root`` is the value at which branch and skip part: the skip operand itself, or what came into
    the residual layer whose result it is (``x + attention(x) + mlp(x)``).
    """

    name: str
    skip: int = 0
    root: int = -1


def kind_of(history: History, earlier: Mapping[int, Kind], call: Call, is_plain: bool) -> Kind:
    """The kind of an addition.

    Args:
        history: what the forward has done so far.
        earlier: the kinds of the additions before (index of the call -> kind).
        call: a call of ``torch.add`` in any spelling.
        is_plain: whether both operands have one shape and ``alpha`` is 1.
    """
    left, right = call.operand(0, "input"), call.operand(1, "other")
    if left is None or right is None or _is_kept(history, left, right):
        return Kind(KEEP)
    if is_plain:
        for root, skip in _roots(history, earlier, left, right):
            return Kind(RESIDUAL, skip, root)
    return Kind(SUM)


def _is_kept(history: History, left: Value, right: Value) -> bool:
    if any(v.learned and v.dims <= 1 for v in (left, right)):
        return True
    return bool(left.terms & right.terms) or any(
        scores.scores
        and history.is_learned(scores)
        and not history.is_learned(mask)
        and not scores.origins >> mask.number & 1
        for scores, mask in ((left, right), (right, left))
    )


def _roots(
    history: History, earlier: Mapping[int, Kind], left: Value, right: Value
) -> Iterator[tuple[int, int]]:
    """Where branch and skip part, and which operand is the skip; the nearest first."""
    operands = (left, right)
    for roots in zip_longest(*[_stream(history, earlier, value) for value in operands]):
        for skip, root in enumerate(roots):
            if root is not None and operands[1 - skip].origins >> root & 1:
                yield root, skip


def _stream(history: History, earlier: Mapping[int, Kind], value: Value) -> Iterator[int]:
    """A value, and what came into the residual layers that it is the result of."""
    yield value.alias
    while (call := history.values[value.alias].call) is not None:
        kind = earlier.get(call)
        if kind is None or kind.name != RESIDUAL:
            break
        skip = history.calls[call].operand(kind.skip, ("input", "other")[kind.skip])
        assert skip is not None
        value = skip
        yield value.alias
