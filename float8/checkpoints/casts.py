"""`StoredLayer`: how the weight of one layer becomes the float8 bits that a layout stores.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from float8 import kernels
from float8.checkpoints.files import Spec
from float8.checkpoints.layouts import MX, Layout, powers_of_two
from float8.config import OperandCast, ScalingType
from float8.convert.conversion import own_config
from float8.formats import E4M3, ScaleFormat
from float8.granularity import Tensorwise
from float8.linear.float8_weight import cached_tensor, is_resident
from float8.linear.layer import Float8Linear
from float8.linear.scaling import bind_and_cast
from float8.tensor import Float8Tensor

STORED = "float8 bits as they are"
TRAINING_CAST = "the cast it trains with"
CAST_ANEW = "cast from high precision"
RECAST = "float8, cast again"
# The last parts of the names of projections that engines fuse.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
# Which scales of a training cast a layout's scale format can hold, exactly.
_IN_BYTES = (ScaleFormat.E8M0, ScaleFormat.E8M0_FLOOR, ScaleFormat.POWER_OF_TWO)
_HOLDS = {
    ScaleFormat.FLOAT32: (ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO),
    ScaleFormat.POWER_OF_TWO: (ScaleFormat.POWER_OF_TWO,),
    ScaleFormat.E8M0: _IN_BYTES,
    ScaleFormat.E8M0_FLOOR: _IN_BYTES,
}


@dataclass(frozen=True)
class StoredLayer:
    """A layer in float8, as a checkpoint will have it.

    Attributes:
        name: in the file.
        shape: of its weight (N, K).
        layout: how it is stored.
        input_scale: the static scale of its input, or None.
        how: `STORED`, `TRAINING_CAST`, `CAST_ANEW` or `RECAST`.
        scale_format: which numbers its scales are.
        known: the scale of a static or delayed cast; None computes it.
        cached: the stored weight of a cache; None where the weight itself is in float8.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    input_scale: Tensor | None
    how: str
    scale_format: ScaleFormat
    known: Tensor | None = None
    cached: Float8Tensor | None = None

    @property
    def specs(self) -> dict[str, Spec]:
        """What the file has of the layer."""
        parts = self.layout.parts(self.shape).items()
        return {
            self.name + suffix: Spec(dtypes[0], shapes[0]) for suffix, (dtypes, shapes) in parts
        }

    def fused_with(self, layers: Mapping[str, StoredLayer]) -> list[StoredLayer]:
        """The layers that engines fuse to one scale with this one, itself among them, or none."""
        if self.layout.granularity != Tensorwise():
            return []
        parent, dot, last = self.name.rpartition(".")
        names = next((names for names in FUSED if last in names), ())
        found = [layers[each] for n in names if (each := f"{parent}{dot}{n}") in layers]
        return found if len(found) > 1 else []

    def shared_scale(
        self, layers: Mapping[str, StoredLayer], amax: Callable[[StoredLayer], Tensor]
    ) -> Tensor | None:
        """The scale (1, 1) that it has with the layers of which engines fuse the weights, or None.

        ``amax`` finds the largest magnitude of a weight; it is called only where that is needed.
        """
        casts = [each for each in self.fused_with(layers) if each.how != STORED]
        if self.how == STORED or len(casts) < 2:
            return None
        scales = [
            kernels.scale_from_amax(amax(each).reshape(1, 1), E4M3.max, each.scale_format.value)
            if each.known is None
            else each.known
            for each in casts
        ]
        return torch.stack([scale.to(scales[0].device) for scale in scales]).amax(0)

    @torch.no_grad()
    def tensors(self, weight: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of the file by key; ``weight`` is in high precision or a `Float8Tensor`.

        ``scale`` is the one that it shares with other layers. Raises ValueError if it is cast to
        scales that no layout stores, as with a NaN in the weight.
        """
        if self.how == STORED:
            found = weight if self.cached is None else self.cached
            assert isinstance(found, Float8Tensor)
        else:
            plain = weight.dequantize(torch.float32) if is_resident(weight) else weight
            scale = self.known if scale is None else scale
            scale = None if scale is None else scale.to(plain.device)
            block = self.layout.block
            how = OperandCast(ScalingType.DYNAMIC, E4M3, block, self.scale_format)
            data, scale = bind_and_cast(plain, how, scale=scale)
            found = Float8Tensor(data, scale, block, plain.dtype)
        stored = self.layout.fit(found)
        if isinstance(stored, str):
            raise ValueError(f"{self.name}: {stored}")
        return self.layout.tensors(self.name, stored, self.input_scale)


def stored_layer(
    name: str,
    shape: tuple[int, ...],
    weight: Tensor | None,
    layout: Layout,
    input_scale: Tensor | None,
    module: nn.Module | None,
    recast: bool,
) -> StoredLayer | str:
    """How a layer is stored, or the reason why the layout cannot store it.

    Only scales of ``weight`` are read; it is (N, K), or the stack that has it; None of a file in
    high precision. ``module`` is a `Float8Linear`, or experts in float8; None of a file.
    ``recast`` allows casting a float8 weight of another granularity again.
    """
    anew = StoredLayer(name, shape, layout, input_scale, CAST_ANEW, layout.scale_format)
    linear = module if isinstance(module, Float8Linear) else None
    stored: Float8Tensor | None = None
    if weight is not None and is_resident(weight):
        stored = weight
    elif linear is not None and weight is linear.weight:
        stored = cached_tensor(linear)
    if layout.name == "compressed_tensors" and layout.granularity == MX and shape[1] % 32:
        return f"in_features={shape[1]} is not a multiple of 32"
    if layout.static_inputs and input_scale is None:
        return (
            "it has no static input scale, which this layout stores: give input_scales="
            "float8.calibrate(model, batches).static_scales(), which has those of linear layers"
            " and none of experts, or take a layout with dynamic inputs"
        )
    reason = layout.fit(stored) if stored is not None else ""
    if isinstance(reason, Float8Tensor):
        powers = powers_of_two(reason.scale)
        scales = ScaleFormat.POWER_OF_TWO if powers else ScaleFormat.FLOAT32
        cached = None if stored is weight else stored
        return replace(anew, how=STORED, scale_format=scales, cached=cached)
    if stored is not None and stored is weight:
        way_out = (
            ". It has no copy in high precision: take a layout that stores it, or recast=True to "
            "dequantise it and cast again, which rounds twice"
        )
        return replace(anew, how=RECAST) if recast else reason + way_out
    config = None if module is None else own_config(module)
    trained = None if config is None else config.plan.output.b
    if (
        trained is None
        or (trained.format, trained.block) != (E4M3, layout.block)
        or trained.scale_format not in _HOLDS[layout.scale_format]
    ):
        return anew
    known, state = None, None if linear is None else linear.casts[1].state
    if trained.static_scale is not None:
        known = torch.full((1, 1), float(trained.static_scale))
    elif trained.scaling_type is ScalingType.DELAYED and state is not None and state.ready:
        known = state.scale.detach().reshape(1, 1)
    return replace(anew, how=TRAINING_CAST, scale_format=trained.scale_format, known=known)
