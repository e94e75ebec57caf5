"""`WeightCast`: how the weight of one layer becomes the float8 bits that a layout stores.

The first of these that applies:

1. *stored*: the weight is in float8, resident, cached, or in the files of a source, with the
   layout's granularity and scales: its bytes as they are.
2. *training cast*: the layer casts its weight with that granularity and such scales: that cast,
   with its state. The file has the bits that the next forward would multiply.
3. *cast anew*: any other weight in high precision: one cast with the layout's own granularity.

A resident weight of another granularity has no high precision any more. Casting it again would
round twice, so it is refused unless the user asks for it.

**Scales that layers share.** Engines fuse the projections that read the same input, and a fused
weight with one scale per tensor has one scale. If the parts had their own, the engine would
dequantise them and cast again with the largest. So the parts of `FUSED` that are cast with one
scale per tensor get their largest, once, from high precision. Stored weights keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.checkpoints.layouts import Layer, Layout, powers_of_two
from float8.config import OperandCast, ScalingType
from float8.convert.conversion import own_config
from float8.formats import E4M3, ScaleFormat
from float8.granularity import WHOLE
from float8.linear.float8_weight import cached_tensor, is_resident
from float8.linear.layer import Float8Linear
from float8.linear.scaling import DelayedState, bind_and_cast
from float8.tensor import Float8Tensor

STORED = "float8 bits as they are"
TRAINING_CAST = "the cast it trains with"
CAST_ANEW = "cast from high precision"
RECAST = "float8, cast again"
TENSORWISE = (WHOLE, WHOLE)
# The last parts of the names of projections that engines fuse.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# Which scales of a training cast a layout's scale format can hold, exactly.
_HOLDS = {
    ScaleFormat.FLOAT32: (ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO),
    ScaleFormat.POWER_OF_TWO: (ScaleFormat.POWER_OF_TWO,),
    ScaleFormat.E8M0: (ScaleFormat.E8M0, ScaleFormat.E8M0_FLOOR, ScaleFormat.POWER_OF_TWO),
}


@dataclass(frozen=True)
class WeightCast:
    """How a weight (N, K) becomes float8 under a layout.

    ``how`` is `STORED`, `TRAINING_CAST`, `CAST_ANEW` or `RECAST`. ``scale_format`` is the layout's.
    ``operand`` is None for a stored weight, and ``state`` for a cast that is not delayed.
    ``stored`` is the float8 weight of a cache; None where the weight itself is in float8.
    """

    how: str
    scale_format: ScaleFormat
    operand: OperandCast | None = None
    state: DelayedState | None = None
    stored: Float8Tensor | None = None

    def has_powers_of_two(self, weight: Tensor) -> bool:
        """Whether all scales of a weight are powers of two; (N, K), or the stack that has it."""
        if self.operand is not None:
            return self.operand.scale_format is not ScaleFormat.FLOAT32
        found = weight if self.stored is None else self.stored
        assert isinstance(found, Float8Tensor)
        return powers_of_two(found.scale)

    def scale(self, amax: Callable[[], Tensor]) -> Tensor:
        """The scale (1, 1) of a weight that has one for the whole tensor.

        ``amax`` finds the largest magnitude of the weight; it is called only where that is needed.
        """
        assert self.operand is not None
        if self.operand.static_scale is not None:
            return torch.full((1, 1), float(self.operand.static_scale))
        is_delayed = self.operand.scaling_type is ScalingType.DELAYED
        if is_delayed and self.state is not None and self.state.ready:
            return self.state.scale.detach().reshape(1, 1)
        found = amax().reshape(1, 1)
        largest, scale_format = self.operand.format.max, self.operand.scale_format.value
        return kernels.scale_from_amax(found, largest, scale_format)

    @torch.no_grad()
    def of(self, weight: Tensor, scale: Tensor | None = None) -> Float8Tensor:
        """The float8 weight (N, K), from high precision or from a `Float8Tensor`.

        ``scale`` is the one that it shares with other weights; None computes its own.
        """
        if self.operand is None:
            found = weight if self.stored is None else self.stored
            assert isinstance(found, Float8Tensor)
            return with_scales_of(found, self.scale_format)
        source = weight.dequantize(torch.float32) if is_resident(weight) else weight
        if scale is not None:
            scale = scale.to(source.device)
        data, used = bind_and_cast(source, self.operand, self.state, scale=scale)
        cast = Float8Tensor(data, used, self.operand.block, weight.dtype)
        return with_scales_of(cast, self.scale_format)


def with_scales_of(weight: Float8Tensor, scale_format: ScaleFormat) -> Float8Tensor:
    """The same weight, its float32 scales as bytes of E8M0 where a layout has those."""
    scale = weight.scale
    if not scale_format.is_e8m0 or scale.dtype != torch.float32:
        return weight
    if scale.is_meta:
        return weight._replace(scale=scale.to(torch.float8_e8m0fnu))
    mantissa, exponent = scale.frexp()  # 0.5 and n + 1 of 2^n
    if not bool(((mantissa == 0.5) & (exponent >= -126)).all()):
        return weight
    return weight._replace(scale=(exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu))


def cast_anew(layout: Layout, how: str = CAST_ANEW) -> WeightCast:
    """One cast with the layout's own granularity."""
    block, scales = layout.granularity.block_of((0, 0)), layout.scale_format
    return WeightCast(how, scales, OperandCast(ScalingType.DYNAMIC, E4M3, block, scales))


def stores(layout: Layout, weight: Float8Tensor, input_scale: Tensor | None) -> str | None:
    """The reason why a layout cannot store a float8 weight with its bits, or None."""
    return layout.refuses(Layer("", with_scales_of(weight, layout.scale_format), input_scale))


def weight_cast(
    module: nn.Module, weight: Tensor, layout: Layout, input_scale: Tensor | None, recast: bool
) -> WeightCast | str:
    """How a layer's weight is cast, or the reason why the layout cannot store it.

    ``module`` is a `Float8Linear`, or experts in float8. Only scales of ``weight`` (N, K) are read.
    ``recast`` allows casting a float8 weight of another granularity again.
    """
    wanted = layout.scale_format
    if is_resident(weight):
        reason = stores(layout, weight, input_scale)
        if reason is None:
            return WeightCast(STORED, wanted)
        if recast:
            return cast_anew(layout, RECAST)
        return (
            f"{reason}. It has no copy in high precision: take a layout that stores it, or "
            "recast=True to dequantise it and cast again, which rounds twice"
        )
    config = own_config(module)
    trained = None if config is None else config.plan.output.b
    anew, state = cast_anew(layout), None
    if isinstance(module, Float8Linear):
        cached = cached_tensor(module) if weight is module.weight else None
        if cached is not None and stores(layout, cached, input_scale) is None:
            return WeightCast(STORED, wanted, stored=cached)
        state = module.casts[1].state
    assert anew.operand is not None
    if (
        trained is not None
        and (trained.format, trained.block) == (E4M3, anew.operand.block)
        and trained.scale_format in _HOLDS[wanted]
    ):
        return WeightCast(TRAINING_CAST, wanted, trained, state)
    return anew


# --- scales that layers share


def fused(name: str, layers: Collection[str], layout: Layout) -> list[str]:
    """The layers whose weights engines fuse to one scale with that of one, itself among them.

    Empty if there are no others in ``layers``.
    """
    if layout.granularity.block_of((0, 0)) != TENSORWISE:
        return []
    parent, dot, last = name.rpartition(".")
    names = next((names for names in FUSED if last in names), ())
    found = [each for n in names if (each := f"{parent}{dot}{n}") in layers]
    return found if len(found) > 1 else []


def sharing(name: str, casts: Mapping[str, WeightCast], layout: Layout) -> list[str]:
    """The layers that share the scale of one, itself among them; empty if it has its own."""
    group = [each for each in fused(name, casts, layout) if casts[each].operand is not None]
    return group if name in group and len(group) > 1 else []


def largest(scales: Iterable[Tensor]) -> Tensor:
    """The largest of scales (1, 1), on the device of the first."""
    first, *others = scales
    return torch.stack([first, *(scale.to(first.device) for scale in others)]).amax(0)
