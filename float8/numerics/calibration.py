"""`calibrate`: static input scales for inference, from data, without training.

::

    found = calibrate(model, (x for x, y in loader))
    print(found)                                    # what each layer's scale loses
    convert_to_float8_inference(model, static_scales=found.static_scales())

A static scale saves the pass over a layer's input that finds a dynamic one. In return, one number
has to suit all later data. Two ways to choose it:

============== ===================================================================================
method         the scale
============== ===================================================================================
"sqnr"         the one with the highest signal-to-noise ratio over the data, searched among powers
               of two and the amax scale
"amax"         maps the largest magnitude of the data to the format's largest value, so that
               nothing in the data saturates
============== ===================================================================================

A power of two per tensor is the "scaling bias" of Perez et al., "Training and inference of large
language models using 8-bit floating point", arXiv 2309.17224. They take it from the amax of each
tensor (FP8-AMAX), or use one for all (FP8-CSCALE); searching it by SQNR over data is our addition.
E4M3 has 18 octaves, so that one outlier does less harm than in INT8. The methods often agree to a
fraction of a decibel, and "sqnr" matters for operands that span more octaves.

Every element counts, also those of padded tokens. Weights need no data: conversion scales them from
themselves. Static scales are for tensorwise inputs. A model that was trained with another recipe is
calibrated as it is, and converted after `convert_from_float8_training`.

**Counting.** bfloat16 has 2^15 magnitudes. A `Distribution` counts how often each occurs, in 256
KiB per layer for any amount of data. For any scale s and format, ::

    error(s) = sum_v n_v (v - s * round(clamp(v / s)))^2        n_v elements of magnitude v

is the error of casting the data itself. float32 and float16 operands are rounded to bfloat16 first,
to one part in 2^9, where E4M3 rounds to one in 2^4. Signs do not matter: casts are odd functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.arguments import described
from float8.config import Float8LinearConfig
from float8.convert.conversion import plan_conversion
from float8.convert.convert import high_precision
from float8.convert.filters import ModuleFilter
from float8.convert.folding import folded
from float8.formats import Format
from float8.granularity import WHOLE
from float8.linear.plan import compute_dtype
from float8.numerics.passes import model_unchanged, own_batch, run_model, watched
from float8.numerics.snapshot import FORMAT_NAME, LAYER, Column, text_table

METHODS = ("sqnr", "amax")
_MAGNITUDES = 2**15  # of bfloat16, inf and NaN included
_FIRST_NONFINITE = 0x7F80
_TABLE = (
    LAYER,
    FORMAT_NAME,
    Column("amax", "amax", ".4g"),
    Column("scale", "scale", ".4g"),
    Column("sqnr", "SQNR dB", ".1f"),
    Column("saturated", "satur. %", ".3f", factor=100),
    Column("flushed", "flushed %", ".2f", factor=100),
    Column("amax_sqnr", "amax's", ".1f"),
)
_OCTAVES = 16  # how far below the amax scale a search goes: 2^-16 of the range is left


class Distribution:
    """Counts how often each magnitude of bfloat16 occurs.

    Attributes:
        elements: how many were counted.
        nonfinite: how many of them were inf or NaN.
        amax: the largest finite magnitude, not rounded.
        values: the finite magnitudes that occurred, ascending, in float32, and how often each did.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(_MAGNITUDES, dtype=torch.int64)
        self.amax = 0.0

    def add(self, x: Tensor) -> None:
        """Count the elements of a tensor, of any shape and floating point type."""
        if x.numel():
            bits = x.detach().to(torch.bfloat16).contiguous().view(torch.int16) & 0x7FFF
            counts = torch.bincount(bits.flatten(), minlength=_MAGNITUDES)
            self._counts += counts.to(self._counts.device)
            self.amax = max(self.amax, float(torch.where(x.isfinite(), x, 0.0).abs().max()))

    @property
    def elements(self) -> int:
        """See the class."""
        return int(self._counts.sum())

    @property
    def nonfinite(self) -> int:
        """See the class."""
        return int(self._counts[_FIRST_NONFINITE:].sum())

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """See the class."""
        found = self._counts[:_FIRST_NONFINITE].nonzero().squeeze(1)
        return found.to(torch.int16).view(torch.bfloat16).float(), self._counts[found]

    def losses(self, scales: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
        """What casts to a format by some scales lose of the data.

        Args:
            scales: (C,) float32; ``value = data * scale``.
            fmt: the format.

        Returns:
            (C,) each, float64: the SQNR in dB, inf where a cast is exact; and the shares of the
            elements that saturate, and that are flushed from nonzero to zero.
        """
        (values_V, counts_V), scale_C1 = self.values, scales.float().unsqueeze(1)
        exact_CV = values_V.expand(len(scales), -1)
        data_CV = kernels.cast_by_scale(exact_CV, scale_C1, (1, WHOLE), fmt.dtype).double()
        exact_CV, scale_C1 = exact_CV.double(), scale_C1.double()
        noise_C = ((data_CV * scale_C1 - exact_CV).square() * counts_V).sum(1)
        sqnr_C = 10 * torch.log10((exact_CV.square() * counts_V).sum(1) / noise_C)
        # The tolerance is the rounding to bfloat16: nothing saturates at the amax scale.
        beyond_CV = exact_CV > fmt.max * scale_C1 * (1 + 2**-8)
        zero_CV = (exact_CV > 0) & (data_CV == 0)
        shares = ((lost_CV * counts_V).sum(1) / self.elements for lost_CV in (beyond_CV, zero_CV))
        return sqnr_C, *shares  # type: ignore[return-value]

    def scale(self, fmt: Format, method: str) -> float:
        """The scale for a format by one of `METHODS`."""
        amax = torch.tensor([self.amax], dtype=torch.float32)
        widest = float(kernels.scale_from_amax(amax, fmt.max))
        if method == "amax":
            return widest
        # A shift by a power of two does not change the mantissas. It trades what saturates at the
        # top for what is flushed at the bottom, so that the SQNR has one maximum. Also an octave
        # above, for data that saturates an octave below.
        top = math.ceil(math.log2(widest))
        exponents = torch.arange(top - _OCTAVES, top + 2, dtype=torch.float64)
        scales = torch.cat([torch.exp2(exponents), torch.tensor([widest])])
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny).float()
        return float(scales[self.losses(scales, fmt)[0].argmax()])


@dataclass(eq=False, repr=False)
class Calibration:
    """The inputs of a model's layers, and the scales that suit them.

    Attributes:
        inputs: layer name -> the `Distribution` of its input.
        formats: layer name -> the format of the cast of its input.
    """

    inputs: dict[str, Distribution]
    formats: dict[str, Format]

    def static_scales(self, method: str = "sqnr") -> dict[str, float]:
        """Layer name -> scale of its input, for ``convert_to_float8_inference(static_scales=...)``.

        Args:
            method: how a scale is chosen. "sqnr": the highest signal-to-noise ratio over the data,
                searched among powers of two and the amax scale. "amax": the largest magnitude maps
                to the format's largest value, so that nothing in the data saturates.

        Raises:
            ValueError: an unknown method; or a layer got no input, or one that was all zero or not
                finite.
        """
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if problems := self._problems():
            raise ValueError(problems)
        return {name: of.scale(self.formats[name], method) for name, of in self.inputs.items()}

    def _problems(self) -> str:
        """The layers that no static scale fits, with reasons; empty if there is none."""
        reasons = ((layer, _reason_against(values)) for layer, values in self.inputs.items())
        found = folded((layer, why) for layer, why in reasons if why is not None)
        message = (
            "no static scale fits these layers; calibrate on data that reaches them, or leave "
            "them out by module_filter_fn, in calibrate and in the conversion:"
        )
        return "\n  ".join([message, *found]) if found else ""

    def rows(self) -> list[dict[str, Any]]:
        """What the scale of each layer by method "sqnr" loses of the data, lowest SQNR first.

        Keys: layer, format, elements, amax, scale, sqnr (dB), saturated, flushed (fractions),
        amax_scale and amax_sqnr, those of method "amax". Layers that no scale fits have no row.
        """
        rows = []
        for layer, values in self.inputs.items():
            if _reason_against(values) is not None:
                continue
            fmt = self.formats[layer]
            scale, widest = (values.scale(fmt, method) for method in METHODS)
            found = values.losses(torch.tensor([scale, widest]), fmt)
            (sqnr, amax_sqnr), (saturated, _), (flushed, _) = (each.tolist() for each in found)
            row = {"layer": layer, "format": fmt.name, "elements": values.elements}
            row |= {"amax": values.amax, "amax_scale": widest, "amax_sqnr": amax_sqnr}
            row |= {"scale": scale, "sqnr": sqnr, "saturated": saturated, "flushed": flushed}
            rows.append(row)
        return sorted(rows, key=lambda row: row["sqnr"])

    def table(self, top: int | None = None) -> str:
        """The rows as text, lowest SQNR first.

        Args:
            top: how many; None is all.
        """
        return text_table(_TABLE, self.rows(), top)

    def __str__(self) -> str:
        head = f'static scales by "sqnr" of {len(self.inputs)} layers'
        problems = self._problems()
        return "\n".join([head, self.table(10), *([problems] if problems else [])])


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    config: Float8LinearConfig | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
) -> Calibration:
    """Run a model over data and find a static scale for the input of every linear layer.

    The layers are those that `convert_to_float8_inference` converts with the same ``config`` and
    ``module_filter_fn``, of a plain model or a converted one. The model runs in eval mode, in high
    precision, without gradients, and is left as it was.

    Args:
        model: the model.
        batches: an iterable of batches: mappings, tuples, lists or single arguments of the model.
            Of a loader of pairs with labels: ``(x for x, y in loader)``.
        config: of layers that are no Float8Linear yet; dynamic tensorwise by default.
        module_filter_fn: called with each candidate and its name; False leaves it alone.

    Raises:
        ValueError: no layer whose config casts inputs.
        TypeError: ``batches`` is a batch and no iterable of them.
    """
    plan = plan_conversion(
        model, config, module_filter_fn, "calibrate", replaces_weights=True, takes_experts=False
    )
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"calibrate: batches is an iterable of batches, got {described(batches)}")
    casts = {name: own.gemms.output.a for name, own in plan.configs.items()}
    formats = {name: cast.format for name, cast in casts.items() if cast is not None}
    if not formats:
        why = " its config casts no input" if casts else plan.reasons
        raise ValueError(f"the model has no linear layer to calibrate:{why}")
    inputs = {name: Distribution() for name in formats}

    def count(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if output is not None:  # the layer did not raise
            x = args[0] if args else kwargs["input"]
            inputs[name].add(x.to(compute_dtype(x)))  # from which conversion casts, with autocast

    layers = {name: plan.layers[name] for name in formats}
    with model_unchanged(model), high_precision(model), watched(layers, count):
        for module in model.modules():  # not eval(), which a module may override to merge weights
            module.training = False
        for batch in batches:
            run_model(model, own_batch(batch))
    return Calibration(inputs, formats)


def _reason_against(values: Distribution) -> str | None:
    """Why no static scale fits these values, or None."""
    if not values.elements:
        return "no batch reached it"
    if values.nonfinite:
        return f"{values.nonfinite} elements of its input were not finite (float8.find_nan)"
    return None if values.amax else "its input was all zero"
