"""`StoredLayer`: how the weight of one layer becomes the float8 bits that a layout stores.

The first of these that applies:

1. *stored*: the weight is in float8, resident or in the files of a source, with the layout's
   granularity and scales: its bytes as they are.
2. *training cast*: the layer casts its weight with that granularity and such scales: that cast,
   with its state. The file has the bits that the next forward would multiply.
3. *cast anew*: any other weight in high precision: one cast with the layout's own granularity.

A resident weight of another granularity has no high precision any more. Casting it again would
round twice: of a model it is refused, of files that a user converts it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from float8.checkpoints.files import Spec
from float8.checkpoints.layouts import ROWS_OF_32, Layout
from float8.config import ScalingType
from float8.formats import E4M3, ScaleFormat
from float8.linear.layer import Float8Linear
from float8.linear.module import own_config
from float8.linear.resident import is_resident
from float8.tensor import Float8Tensor

STORED = "float8 bits as they are"
TRAINING_CAST = "the cast it trains with"
CAST_ANEW = "cast from high precision"
RECAST = "float8, cast again"


@dataclass(frozen=True)
class StoredLayer:
    """A layer in float8, as a checkpoint will have it.

    Attributes:
        name: in the file.
        shape: of its weight (N, K).
        layout: how it is stored.
        input_scale: the static scale of its input, or None.
        how: `STORED`, `TRAINING_CAST`, `CAST_ANEW` or `RECAST`.
        scale_format: which numbers its scales are, where it is cast.
        known: the scale of a static or delayed cast; None computes it.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    input_scale: Tensor | None
    how: str
    scale_format: ScaleFormat
    known: Tensor | None = None

    @property
    def specs(self) -> dict[str, Spec]:
        """What the file has of the layer."""
        parts = self.layout.parts(self.shape).items()
        return {
            self.name + suffix: Spec(dtypes[0], shapes[0]) for suffix, (dtypes, shapes) in parts
        }

    @torch.no_grad()
    def tensors(self, weight: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of the file by key; ``weight`` is in high precision or a `Float8Tensor`.

        ``scale`` is the one that it shares with other layers. Raises ValueError if a weight that is
        cast is not finite.
        """
        found = weight
        if self.how != STORED:
            plain = weight.dequantize(torch.float32) if is_resident(weight) else weight
            if not bool(plain.isfinite().all()):  # a given scale would make an inf finite
                raise ValueError(f"{self.name}: its weight has NaN or inf, which no cast may hide")
            scale = self.known if scale is None else scale
            scale = None if scale is None else scale.to(plain.device)
            found = self.layout.cast(plain, self.scale_format, scale)
        assert isinstance(found, Float8Tensor)
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
) -> StoredLayer | str:
    """How a layer is stored, or the reason why the layout cannot store it.

    Only scales of ``weight`` are read; it is (N, K), or the stack that has it; None of a file in
    high precision. ``module`` is a `Float8Linear`, or experts in float8; None of a file.
    The float8 weights of files may be cast again.
    """
    anew = StoredLayer(name, shape, layout, input_scale, CAST_ANEW, layout.scale_format)
    problem = None
    fits = layout.fit(weight) if weight is not None and is_resident(weight) else None
    if layout.name != "fine_grained" and layout.granularity == ROWS_OF_32 and shape[-1] % 32:
        problem = f"in_features={shape[-1]} is not a multiple of 32"
    elif layout.static_inputs and input_scale is None:
        problem = (
            "it has no static input scale, which this layout stores: give input_scales="
            "float8.calibrate(model, batches).static_scales(), or take a layout with dynamic inputs"
        )
    elif isinstance(fits, str) and module is not None:
        problem = (
            f"{fits}: save it in its own layout, then python -m float8.checkpoints convert casts "
            "again, which rounds twice"
        )
    if problem is not None:
        return problem
    if fits is not None:
        return replace(anew, how=RECAST if isinstance(fits, str) else STORED)
    config = None if module is None else own_config(module)
    trained = None if config is None else config.gemms.output.b
    if layout.is_mxfp4:
        is_trained = config is not None and config.mxfp4_weights
        return replace(anew, how=TRAINING_CAST) if is_trained else anew
    if (
        trained is None
        or (trained.format, trained.block) != (E4M3, layout.block)
        or not _holds(layout.scale_format, trained.scale_format)
    ):
        return anew
    known, state = None, module.states[1] if isinstance(module, Float8Linear) else None
    if trained.static_scale is not None:
        known = torch.full((1, 1), float(trained.static_scale))
    elif trained.scaling_type is ScalingType.DELAYED and state is not None and state.ready:
        known = state.scale.detach().reshape(1, 1)
    return replace(anew, how=TRAINING_CAST, scale_format=trained.scale_format, known=known)


def _holds(stored: ScaleFormat, trained: ScaleFormat) -> bool:
    """Whether scales of a training cast are stored exactly: all formats hold powers of two."""
    powers = ScaleFormat.POWER_OF_TWO
    return trained is powers or (trained.dtype == stored.dtype and stored is not powers)
