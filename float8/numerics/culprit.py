"""`Finding`: a tensor that is not finite, whose it is, what it was made of, and what float8 did.

A `Float8Linear` turns finite operands into what is not finite in few ways, and `remarks` looks at
each: an infinite element makes a dynamic scale infinite and every product with it NaN, under a
given scale it becomes NaN itself; a scale that was loaded or written may be NaN, inf or 0; and a
product that the formats hold may be too large for float16. Saturation is said too: it makes nothing
infinite, but a stale scale is often how a run got there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.config import ScalingType
from float8.formats import on_device
from float8.linear.cast import Cast, DelayedCast, NoCast
from float8.linear.layer import Float8Linear
from float8.numerics.batches import local
from float8.tensor import Float8Tensor


@dataclass(frozen=True)
class Finding:
    """The first tensor of a model that is not finite.

    Attributes:
        module, module_type: the name of the module that made it; "" is the model itself.
        tensor: which: "output", "input of NAME", "parameter weight", "gradient of its input", ...
        phase: "before" the run, "forward" or "backward".
        shape, dtype: of the tensor.
        elements, nan, inf: how many there are; -inf counts as inf.
        first: the index of the first that is not finite.
        amax: the largest finite magnitude.
        went_in: what the tensor was made of: name -> amax, inf or NaN where that is not finite.
        after: what was seen last, and was finite.
        remarks: what else is known, such as the scales of a float8 layer.
        led_to: where NaN followed, if this is an inf that became one.
    """

    module: str
    module_type: str
    tensor: str
    phase: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    nan: int
    inf: int
    first: tuple[int, ...]
    amax: float
    went_in: dict[str, float] = field(default_factory=dict)
    after: str | None = None
    remarks: tuple[str, ...] = ()
    led_to: str | None = None

    @property
    def where(self) -> str:
        """Module and tensor, in words."""
        return f"{self.module or 'the model'} ({self.module_type}): {self.tensor}"

    def that_led_to(self, other: Finding) -> Finding:
        """This one, as the origin of another."""
        return replace(self, led_to=f"{other.where} in the {other.phase}")

    def __str__(self) -> str:
        counts = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "inf")) if n]
        when = "before the run" if self.phase == "before" else f"in the {self.phase}"
        lines = [
            f"{self.where}, {when}: {' and '.join(counts)} of {self.elements} elements, first at "
            f"{self.first}; {_short(self.dtype)} {list(self.shape)}, largest finite {self.amax:.4g}"
        ]
        if self.went_in:
            amaxes = ", ".join(f"{name} {amax:.4g}" for name, amax in self.went_in.items())
            lines.append(f"  made of (amax): {amaxes}")
        if self.after is not None:
            lines.append(f"  last seen, and finite: {self.after}")
        lines += [f"  {remark}" for remark in self.remarks]
        if self.led_to is not None:
            lines.append(f"  led to NaN or inf at {self.led_to}")
        return "\n".join(lines)


def finding(
    module: tuple[str, nn.Module],
    tensor: str,
    phase: str,
    value: Tensor,
    went_in: Mapping[str, Tensor] | None = None,
    after: str | None = None,
    remarks: tuple[str, ...] = (),
) -> Finding:
    """A `Finding` of a value that is not finite; its numbers are counted here."""
    x = plain(value)
    bad = ~x.isfinite()
    nan = int(x.isnan().sum())
    if x.dtype == torch.float16 and nan < int(bad.sum()):
        remarks = (*remarks, "float16 ends at 65504: larger values become inf")
    return Finding(
        module[0],
        type(module[1]).__name__,
        tensor,
        phase,
        tuple(x.shape),
        value.dtype,
        x.numel(),
        nan,
        int(bad.sum()) - nan,
        tuple(bad.nonzero()[0].tolist()),
        amax_of(torch.where(bad, 0.0, x)),
        {name: amax_of(tensor) for name, tensor in (went_in or {}).items()},
        after,
        remarks,
    )


def plain(value: Tensor) -> Tensor:
    """A tensor as ordinary numbers, without a graph; of a sharded one this rank's part."""
    value = local(value.detach())
    return value.dequantize() if isinstance(value, Float8Tensor) else value


def amax_of(value: Tensor) -> float:
    """The largest magnitude, NaN if there is one; 0 of nothing."""
    x = plain(value)
    return float(x.abs().max()) if x.numel() else 0.0


def remarks_of(
    module: nn.Module, input: Any = None, grad_output: Tensor | None = None
) -> tuple[str, ...]:
    """What a float8 layer's casts make of its operands; nothing of other modules."""
    if not isinstance(module, Float8Linear) or module.high_precision:
        return ()
    operands = zip(
        ("input", "weight", "grad_output"),
        module.casts,
        (input, module.weight, grad_output),
        strict=True,
    )
    return tuple(
        remark
        for name, cast, value in operands
        if isinstance(value, Tensor) and (remark := _remark(name, cast, value)) is not None
    )


def _remark(name: str, cast: Cast, value: Tensor) -> str | None:
    if isinstance(cast, NoCast) or local(value) is not value:  # a shard says nothing of the scale
        return None
    fmt = on_device(cast.format, value.device)
    kind = cast.config.scaling_type.value
    if isinstance(cast, DelayedCast) and not cast.history_ready:
        kind = "dynamic (no history yet)"
    scale, amax = _scale(cast, value, fmt.max), amax_of(value)
    low, high = float(scale.min()), float(scale.max())
    text = f"{name}: amax {amax:.4g}, {kind} {fmt} scale {low:.4g}"
    text += "" if low == high else f" to {high:.4g}"
    if not math.isfinite(amax):
        return f"{text}: not finite before its cast"
    if not (math.isfinite(low) and math.isfinite(high) and low > 0):
        return f"{text}: the scale itself is not finite and > 0"
    share = float((plain(value).abs().double() > fmt.max * high).double().mean())
    return f"{text}: {share:.2%} saturated" if share else text


def _scale(cast: Cast, value: Tensor, largest: float) -> Tensor:
    if isinstance(value, Float8Tensor):
        return value.data_and_scale[1].detach()
    if isinstance(cast, DelayedCast) and cast.history_ready:
        return cast.scale.detach()
    if cast.config.scaling_type is ScalingType.STATIC:
        return torch.tensor(cast.config.static_scale, device=value.device)
    amax = kernels.amax(value.detach(), cast.config.granularity.block_of(value.shape))
    return kernels.scale_from_amax(amax, largest, cast.config.power_of_two_scale)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
