"""Inputs on which code breaks, each with the words that make it again.

A `Case` is an input said in six words: shape, dtype, exponent (the magnitude is about 2^exponent),
fill (the distribution), layout (the strides) and specials. Its ``repr`` is Python that replays it::

    Case((5, 123), torch.float32, exponent=-130, fill="wide", layout="transposed", seed=7).make()

The lists are for ``pytest.mark.parametrize``, several at once for `pairs`; `cases` draws a Case
with hypothesis.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Granularity, Rowwise, Tensorwise

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_FORMATS = tuple(ScaleFormat)  # each equals its name in the oracle
FLOAT32_SCALES = (ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO)

# Nothing a multiple of a tile, one row, one column, one element, empty, a block and one more.
WEIRD_SHAPES = (
    (5, 123),
    (1, 1),
    (1, 128),
    (37, 1),
    (130, 257),
    (0, 16),
    (16, 0),
)
GRANULARITIES: dict[str, Granularity] = {
    "tensorwise": Tensorwise(),
    "rowwise": Rowwise(),
    "1x32": Blockwise(1, 32),
    "1x128": Blockwise(1, 128),
    "128x128": Blockwise(128, 128),
    "3x5": Blockwise(3, 5),
}
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")
FILLS = ("normal", "wide", "ties", "codes", "zeros", "one_large")
# name -> value in a dtype
SPECIALS = {
    "zero": lambda dtype: 0.0,
    "negative_zero": lambda dtype: -0.0,
    "inf": lambda dtype: math.inf,
    "negative_inf": lambda dtype: -math.inf,
    "nan": lambda dtype: math.nan,
    "max": lambda dtype: torch.finfo(dtype).max,
    "lowest": lambda dtype: torch.finfo(dtype).min,
    "tiny": lambda dtype: torch.finfo(dtype).tiny,
    "subnormal": lambda dtype: torch.finfo(dtype).tiny * torch.finfo(dtype).eps,
}
# What each dtype holds of the magnitudes 2^-130 to 2^120.
EXPONENTS = {torch.float32: (-130, 120), torch.bfloat16: (-130, 120), torch.float16: (-22, 12)}


@dataclass(frozen=True)
class Case:
    """One input and how to make it again.

    Args:
        shape: of the tensor, after ``layout`` has done its work.
        dtype: float32, bfloat16 or float16.
        exponent: magnitudes are about ``2**exponent``; what leaves the dtype's range becomes the
            dtype's largest value or zero.
        fill: "normal"; "wide" (magnitudes over 2^20, so that some flush to zero and some are
            subnormal in float8); "ties" (halfway between float8 codes, under a scale of
            2^exponent); "codes" (float8 values, under that scale); "zeros"; "one_large" (one
            element 2^16 times the others).
        layout: "contiguous", "transposed" (the last two dimensions), "sliced" (every other element
            of the last dimension), "offset" (starts inside its storage) or "expanded" (the first
            dimension has stride 0).
        specials: names from `SPECIALS`, each put at a random place.
        seed: of the random numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    exponent: int = 0
    fill: str = "normal"
    layout: str = "contiguous"
    specials: tuple[str, ...] = ()
    seed: int = 0

    def make(self, device: str = "cpu") -> Tensor:
        """The input. Made on the CPU, so that every device sees the same numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (1, *self.shape[1:]) if self.layout == "expanded" and self.shape else self.shape
        x = _FILL[self.fill](shape, generator) * 2.0**self.exponent
        largest = torch.finfo(self.dtype).max
        x = x.clamp(-largest, largest).to(self.dtype)
        if x.numel():
            for name in self.specials:
                place = torch.randint(x.numel(), (), generator=generator)
                x.view(-1)[place] = SPECIALS[name](self.dtype)
        return _LAYOUT[self.layout](x.to(device), self.shape)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _wide(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * 20 - 20
    return _normal(shape, generator).sign() * torch.exp2(exponents)


def _one_large(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = _normal(shape, generator) * 2.0**-16
    if x.numel():
        x.view(-1)[torch.randint(x.numel(), (), generator=generator)] = 1.0
    return x


def _one_of(candidates: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    picked = torch.randint(len(candidates), shape, generator=generator)
    return candidates[picked] * _normal(shape, generator).sign()


def _ties(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _one_of(torch.cat([oracle.ties(f) for f in FORMATS]), shape, generator)


def _codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _one_of(torch.cat([oracle.magnitudes(f) for f in FORMATS]), shape, generator)


_FILL = {
    "normal": _normal,
    "wide": _wide,
    "one_large": _one_large,
    "ties": _ties,
    "codes": _codes,
    "zeros": lambda shape, generator: torch.zeros(shape, dtype=torch.float64),
}


def _sliced(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]


def _offset(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    storage = torch.cat([x.new_ones(3), x.reshape(-1), x.new_ones(1)])
    return storage[3 : 3 + x.numel()].view(x.shape)


def _transposed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


_LAYOUT = {
    "contiguous": lambda x, shape: x,
    "transposed": _transposed,
    "sliced": _sliced,
    "offset": _offset,
    "expanded": lambda x, shape: x.expand(shape),
}


def pairs(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by rows in which any two values of different axes meet.

    They are far fewer than the product of all axes, and what breaks a kernel is hardly ever three
    values at once. Of a large product, rows are chosen from a sample.
    """
    places = [range(len(values)) for values in axes.values()]
    rows, product = [], list(itertools.product(*places))
    product = random.Random(0).sample(product, min(len(product), 1000))
    left = {pair for row in product for pair in _meetings(row)}
    while left:
        rows.append(max(product, key=lambda row: len(left.intersection(_meetings(row)))))
        left.difference_update(_meetings(rows[-1]))
    values = list(axes.values())
    return pytest.mark.parametrize(
        tuple(axes), [tuple(v[i] for v, i in zip(values, row, strict=True)) for row in rows]
    )


def _meetings(row: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    return itertools.combinations(enumerate(row), 2)


def cases(shape: Any = None, finite: bool = False, max_size: int = 40) -> Any:
    """A strategy that draws a `Case`: a matrix unless ``shape`` says otherwise.

    Hypothesis is imported here, because a machine with a GPU may lack it, and most tests need the
    other lists alone.

    Args:
        shape: the strategy of the shape; by default a weird one, or up to ``max_size`` a side.
        finite: leave inf and NaN out.
        max_size: of the default shapes.
    """
    from hypothesis import strategies as st

    names = [n for n in SPECIALS if not (finite and n in ("inf", "negative_inf", "nan"))]
    dimension = st.integers(0, max_size)
    shapes = shape or st.one_of(st.sampled_from(WEIRD_SHAPES), st.tuples(dimension, dimension))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        dtype = draw(st.sampled_from(HIGH_PRECISION))
        return Case(
            shape=draw(shapes),
            dtype=dtype,
            exponent=draw(st.integers(*EXPONENTS[dtype])),
            fill=draw(st.sampled_from(FILLS)),
            layout=draw(st.sampled_from(LAYOUTS)),
            specials=tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True))),
            seed=draw(st.integers(0, 2**16)),
        )

    return case()
