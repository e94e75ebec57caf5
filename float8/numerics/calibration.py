"""`calibrate`: static input scales for inference, from data, without training.

::

    found = calibrate(model, (x for x, y in loader))
    print(found)                                    # what each layer's scale loses
    convert_to_float8_inference(model, static_scales=found.static_scales())

Static scales spare each layer the pass over its input that finds a dynamic one; the price is that
one number has to suit all data to come. Three ways to choose it:

============== ===================================================================================
method         the scale
============== ===================================================================================
"sqnr"         the one with the highest signal-to-noise ratio over the data (rounded to bfloat16:
               `float8.numerics.distribution`), searched among powers of two and the amax scale
"amax"         maps the largest magnitude that was seen to the format's largest value: nothing that
               was seen saturates
"percentile"   the same of a percentile: outliers beyond saturate
============== ===================================================================================

A power of two per tensor is the "scaling bias" of Perez et al., "Training and inference of large
language models using 8-bit floating point", arXiv 2309.17224. They take it from the amax of each
tensor as it comes (FP8-AMAX), or one for all (FP8-CSCALE); searching it by SQNR over data is ours.

E4M3 has 18 octaves, so that one outlier does less harm than it would in INT8: the methods often
agree to a fraction of a decibel, and "sqnr" matters where operands are wider than that.

Every element counts, those of padded tokens too. Weights need no data: conversion scales them from
themselves. Static scales are for tensorwise inputs: a model that was trained with another recipe is
calibrated as it is, and converted after `convert_from_float8_training`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from float8.arguments import check_type
from float8.config import Float8LinearConfig
from float8.convert.conversion import plan_conversion
from float8.convert.convert import high_precision
from float8.convert.filters import ModuleFilter
from float8.formats import Format, on_device
from float8.linear.autograd import compute_dtype
from float8.numerics.batches import own_batch, run_model
from float8.numerics.distribution import Distribution
from float8.numerics.untouched import untouched

METHODS = ("sqnr", "amax", "percentile")


class Calibration:
    """What inputs the layers of a model had, and the scales that follow.

    Attributes:
        inputs: layer name -> the `Distribution` of its input.
        formats: layer name -> the format that its input will be cast to.
        method: the default of `static_scales`.
    """

    def __init__(
        self,
        inputs: dict[str, Distribution],
        formats: dict[str, Format],
        method: str,
        percentile: float,
        steps_per_octave: int,
    ) -> None:
        self.inputs = inputs
        self.formats = formats
        self.method = _checked_method(method)
        self.percentile = percentile
        self.steps_per_octave = steps_per_octave

    def static_scales(self, method: str | None = None) -> dict[str, float]:
        """Layer name -> scale of its input, for ``convert_to_float8_inference(static_scales=...)``.

        Args:
            method: by default the one that `calibrate` was given; nothing is run again.

        Raises:
            ValueError: a layer's input was never seen, was all zero, or was not finite.
        """
        problems = [
            f"{layer or 'the module itself'}: {reason}"
            for layer, seen in self.inputs.items()
            if (reason := _refuses(seen)) is not None
        ]
        if problems:
            raise ValueError(
                "no static scale fits these layers; calibrate on data that reaches them, or leave "
                "them out by module_filter_fn, here and in the conversion:\n  "
                + "\n  ".join(problems)
            )
        chosen = _checked_method(method or self.method)
        return {layer: self._scale(layer, chosen) for layer in self.inputs}

    def _scale(self, layer: str, method: str) -> float:
        seen, fmt = self.inputs[layer], self.formats[layer]
        if method == "amax":
            return seen.amax_scale(fmt)
        if method == "percentile":
            return seen.percentile_scale(fmt, self.percentile)
        return seen.sqnr_scale(fmt, self.steps_per_octave)

    def rows(self) -> list[dict[str, Any]]:
        """For each layer, lowest SQNR first: what its scale loses of the data.

        Keys: layer, format, elements, amax, scale, sqnr (dB), saturated, flushed (fractions),
        amax_scale and amax_sqnr, those of method "amax".

        Raises:
            ValueError: as `static_scales`.
        """
        scales = self.static_scales()
        return sorted((self._row(*each) for each in scales.items()), key=lambda row: row["sqnr"])

    def _row(self, layer: str, scale: float) -> dict[str, Any]:
        seen, fmt = self.inputs[layer], self.formats[layer]
        widest = seen.amax_scale(fmt)
        sqnr, amax_sqnr = seen.sqnr(torch.tensor([scale, widest]), fmt).tolist()
        saturated, flushed = seen.lost(scale, fmt)
        return {
            "layer": layer,
            "format": fmt.name,
            "elements": seen.elements,
            "amax": seen.amax,
            "scale": scale,
            "sqnr": sqnr,
            "saturated": saturated,
            "flushed": flushed,
            "amax_scale": widest,
            "amax_sqnr": amax_sqnr,
        }

    def table(self, top: int | None = None) -> str:
        """The rows as text, lowest SQNR first.

        Args:
            top: how many; None is all.
        """
        from tabulate import tabulate

        rows = self.rows()
        headers = ("layer", "format", "amax", "scale", "SQNR dB", "satur. %", "flushed %", "amax's")
        cells = [
            (
                row["layer"],
                row["format"],
                f"{row['amax']:.4g}",
                f"{row['scale']:.4g}",
                f"{row['sqnr']:.1f}",
                f"{100 * row['saturated']:.3f}",
                f"{100 * row['flushed']:.2f}",
                f"{row['amax_sqnr']:.1f}",
            )
            for row in rows[:top]
        ]
        align = ["left"] * 2 + ["right"] * (len(headers) - 2)
        text = tabulate(cells, headers, "simple", colalign=align, disable_numparse=True)
        left = len(rows) - len(cells)
        return f"{text}\nand {left} more" if left else text

    def __str__(self) -> str:
        return f'static scales by "{self.method}" of {len(self.inputs)} layers\n{self.table(10)}'


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: str = "sqnr",
    percentile: float = 99.99,
    steps_per_octave: int = 1,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> Calibration:
    """Run a model over data and find a static scale for the input of every linear layer.

    The layers are those that `convert_to_float8_inference` converts with the same ``config`` and
    ``module_filter_fn``, of a plain model or a converted one. The model runs in eval mode, in high
    precision, without gradients, and is left as it was. Each layer holds 256 KiB of counts on the
    host; counting reads the input of each layer once more.

    Args:
        model: the model.
        batches: an iterable of batches: mappings, tuples, lists or single arguments of the model.
            Of a loader of pairs with labels: ``(x for x, y in loader)``.
        method: "sqnr", "amax" or "percentile"; see this file.
        percentile: of an input's nonzero elements, which shall not saturate; of "percentile" only.
        steps_per_octave: how finely "sqnr" searches; 1 is powers of two.
        config: of layers that are no Float8Linear yet; dynamic tensorwise by default.
        module_filter_fn: called with each candidate and its name; False leaves it alone.

    Raises:
        ValueError: no batch or no layer; an unknown method, a percentile or number of steps that
            makes no sense; a layer whose config casts no inputs.
        TypeError: ``batches`` is a batch and no iterable of them.
    """
    plan = plan_conversion(model, config, module_filter_fn, "calibrate", replaces_weights=True)
    _check_numbers(method, percentile, steps_per_octave)
    if isinstance(batches, (Tensor, Mapping, str)):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}: [batch]"
        )
    check_type(batches, Iterable, "calibrate", "batches", "an iterable of batches")
    layers = plan.layers
    if not layers:
        raise ValueError(f"the model has no linear layer to calibrate:{plan.reasons}")
    formats = {name: _format(name, layers[name], own) for name, own in plan.configs.items()}
    seen = {name: Distribution() for name in layers}
    count = 0
    with untouched(model), high_precision(model), ExitStack() as stack:
        for module in model.modules():  # not eval(): a train() of its own may merge weights
            module.training = False
        for name, layer in layers.items():
            hook = partial(_count, seen[name])
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for count, batch in enumerate(batches, 1):  # noqa: B007  counted for the check below
            run_model(model, own_batch(batch))
    if not count:
        raise ValueError("batches was empty: a generator that was used up before, perhaps")
    return Calibration(seen, formats, method, percentile, steps_per_octave)


def _count(seen: Distribution, layer: nn.Module, args: Any, kwargs: Any) -> None:
    x = args[0] if args else kwargs["input"]
    if not isinstance(x, Tensor):
        return  # the layer says so
    seen.add(x.to(compute_dtype(x)))  # what conversion casts, under autocast too


def _format(name: str, layer: Any, config: Float8LinearConfig) -> Format:
    cast = config.plan.output.a
    if cast is None:
        raise ValueError(
            f"{name or 'the module itself'}: its config casts no input; leave it out by "
            "module_filter_fn"
        )
    return on_device(cast.format, layer.weight.device)


def _refuses(seen: Distribution) -> str | None:
    if not seen.elements:
        return "no batch reached it"
    if seen.nonfinite:
        return f"{seen.nonfinite} elements of its input were not finite (float8.find_nan)"
    return None if seen.amax else "its input was all zero"


def _checked_method(method: str) -> str:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    return method


def _check_numbers(method: str, percentile: float, steps_per_octave: int) -> None:
    _checked_method(method)
    check_type(percentile, (int, float), "calibrate", "percentile", "a number in (0, 100]")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be in (0, 100], got {percentile}")
    if not isinstance(steps_per_octave, int) or steps_per_octave < 1:
        raise ValueError(f"steps_per_octave must be an integer >= 1, got {steps_per_octave!r}")
