"""What is kept of which tensor, and that a tensor is kept once.

`Keeper.keep` says for a tensor that a backward will need what to save and how to find it again:

- float8 codes (`groups`), encoded now, so that writing to the tensor later changes nothing;
- if the tensor was just computed from kept codes by a cheap op (``silu(gate)`` in ``silu(gate) *
  up``): the same codes, and the op, which backward runs again;
- the tensor itself where float8 would save nothing, or spoil what it should not: parameters and
  views of them and what needs no gradient (rotary tables, masks: in memory anyway, and exact),
  broadcast views, fewer than ``min_size`` elements, and what is not float32, bfloat16 or float16.

Two ops that need one tensor save one copy. The keeper remembers codes by the tensor (by its base,
place and version, so that another view of the same elements is found too), and only weakly: the
codes belong to the autograd graph and go with it.

Under ``torch.compile`` a list does the remembering, between `open` and `close`, because a graph
must not leave tensors behind. A scope for every op that was entered outside of the graph has no
such end, and remembers nothing in it: equal encodings are merged by the compiler, but then
``silu(gate) * up`` keeps three tensors, not two.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8.activations.groups import Codes, Groups, decode, encode, fits
from float8.linear.float8_weight import version_of

OUTPUT = -1  # as the index of a tensor: the op's result


class Recipe(NamedTuple):
    """How a tensor is found again from what was saved of it."""

    which: int  # which of the op's inputs it is, or `OUTPUT`
    groups: Groups | None  # None: the tensor itself was saved
    shape: tuple[int, ...]
    dtype: torch.dtype
    again: tuple[Callable[..., Tensor], dict[str, Any]] | None = None  # to run on what was decoded

    def restore(self, saved: list[Tensor]) -> Tensor:
        """The tensor, or its decoded copy."""
        if self.groups is None:
            return saved[0]
        x = decode(Codes(saved[0], saved[1]), self.groups.size, self.shape, self.dtype)
        return x if self.again is None else self.again[0](x, **self.again[1])


Kept = tuple[Recipe, tuple[Tensor, ...]]
Key = tuple[Any, ...]


class _Memory(NamedTuple):
    """Codes of a tensor, and the version that it had."""

    version: int
    parts: tuple[weakref.ref[Tensor], ...]
    recipe: Recipe


class Keeper:
    """Keeps tensors for backward.

    Args:
        groups: how.
        min_size: elements below which a tensor is saved as it is.
    """

    def __init__(self, groups: Groups, min_size: int) -> None:
        self.groups, self.min_size = groups, min_size
        self._memories: dict[int, dict[Key, _Memory]] = {}
        self._alive: dict[int, weakref.ref[Tensor]] = {}
        self._traced: list[tuple[Tensor, Kept]] | None = None

    def open(self) -> None:
        """A compiled graph begins, which ends with `close`: until then it may hold tensors."""
        if torch.compiler.is_compiling():
            self._traced = []

    def close(self) -> None:
        """The graph forgets."""
        if torch.compiler.is_compiling():
            self._traced = None

    def is_worth_it(self, x: Tensor) -> bool:
        """Whether a float8 copy of x takes less memory than x."""
        if x.numel() < self.min_size or not fits(x) or not x.requires_grad:
            return False
        is_parameter = isinstance(_base(x), nn.Parameter)
        is_broadcast = any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
        return not is_parameter and not is_broadcast

    def keep(self, x: Tensor, index: int, exact: bool = False) -> Kept:
        """What to save of an op's input; ``exact``: the tensor as it is."""
        if exact or not self.is_worth_it(x):
            return Recipe(index, None, tuple(x.shape), x.dtype), ()
        if (known := self._recall(x)) is not None:
            return known[0]._replace(which=index, shape=tuple(x.shape)), known[1]
        kept = self._encoded(x, index)
        self.remember(x, kept)
        return kept

    def _encoded(self, x: Tensor, index: int) -> Kept:
        with torch.no_grad():
            codes = encode(x.detach(), self.groups)
        return Recipe(index, self.groups, tuple(x.shape), x.dtype), tuple(codes)

    def remember(self, x: Tensor, kept: Kept) -> None:
        """That x can be found again from what was saved."""
        if torch.compiler.is_compiling():
            if self._traced is not None:
                self._traced.append((x, kept))
            return
        base, place = _base(x), _place(x)
        if (number := id(base)) not in self._alive:
            self._alive[number] = weakref.ref(base, functools.partial(self._forget, number))
            self._memories[number] = {}
        of_base = self._memories[number]
        codes_die = functools.partial(_forget_place, of_base, place)
        parts = tuple(weakref.ref(part, codes_die) for part in kept[1])
        of_base[place] = _Memory(version_of(x), parts, kept[0])

    def _forget(self, number: int, _: Any) -> None:
        self._memories.pop(number, None)
        self._alive.pop(number, None)

    def _recall(self, x: Tensor) -> Kept | None:
        if torch.compiler.is_compiling():
            found = [kept for y, kept in self._traced or () if y is x]
            return found[0] if found else None
        memory = self._memories.get(id(_base(x)), {}).get(_place(x))
        if memory is None or memory.version != version_of(x):
            return None
        parts = tuple(ref() for ref in memory.parts)
        if any(part is None for part in parts):
            return None
        return memory.recipe, parts  # type: ignore[return-value]


def _forget_place(of_base: dict[Key, _Memory], place: Key, dead: Any) -> None:
    memory = of_base.get(place)
    if memory is not None and any(part is dead for part in memory.parts):
        del of_base[place]


def _base(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _place(x: Tensor) -> Key:
    """Where x lies in its base, whether it is read negated, and what decides its groups."""
    last = x.shape[-1] if x.dim() else 1
    if x.is_contiguous():
        return x.storage_offset(), x.is_neg(), x.numel(), last
    return x.storage_offset(), x.is_neg(), tuple(x.shape), x.stride()
