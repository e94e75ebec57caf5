"""`FineGrained`: weights in blocks of 128x128, as DeepSeek-V3 is published.

A layer is ``weight``, E4M3 (N, K), and ``weight_scale_inv``, (ceil(N / 128), ceil(K / 128)), with
``value = weight * weight_scale_inv`` (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md). Inputs are cast
while serving, in blocks of 1x128. Scales are stored in one of three ways:

============ ======================== =========== =============================================
scale_format ``weight_scale_inv``     scale_fmt   as in
============ ======================== =========== =============================================
FLOAT32      float32                  (absent)    DeepSeek-V3
POWER_OF_TWO float32                  ``"ue8m0"`` DeepSeek-V3.1 (all but some ``o_proj``)
E8M0         ``torch.float8_e8m0fnu`` ``"ue8m0"`` what transformers 5.23 writes; DeepSeek-V4
============ ======================== =========== =============================================

``scale_fmt`` asks engines to round the scales of inputs to powers of two as well, as the recipe
``"blockwise"`` trains (vLLM 0.33, ``transformers_utils/config.py``). It does not tell how scales
are stored: that is read from their dtype.

N and K need not be multiples of 128: a block at an edge is padded with zeros before its scale is
computed (README_WEIGHTS.md, "Dequantization Method"), as in DeepSeek-V3's own
``kv_a_proj_with_mqa``, of 576 rows. vLLM reads such a layer, unless it would fuse or shard it
inside a block: then it raises an error (``utils/fp8_utils.py``, ``validate_fp8_block_shape``).
transformers misreads it where it dequantises (``readers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.arguments import check_type
from float8.checkpoints.layer_checks import (
    E8M0_BYTES,
    FLOATS,
    read_data,
    read_scale,
    refuses_weight,
)
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.skipped_names import checked_names
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, scale_shape
from float8.kernels import e8m0
from float8.tensor import Float8Tensor

_SCALE_FORMATS = (ScaleFormat.FLOAT32, ScaleFormat.POWER_OF_TWO, ScaleFormat.E8M0)


@dataclass(frozen=True)
class FineGrained(Layout):
    """One scale per 128x128 block of a weight, as DeepSeek-V3; inputs are cast while serving.

    Args:
        block: the rows and columns that share a scale.
        scale_format: which numbers a scale is: ``FLOAT32``; ``POWER_OF_TWO``, in float32, as
            DeepSeek-V3.1; ``E8M0``, one byte, as DeepSeek-V4.

    Raises:
        TypeError: ``block`` is no tuple of integers, or ``scale_format`` no `ScaleFormat`.
        ValueError: ``block`` is not two integers >= 1, or ``scale_format`` another one.
    """

    block: tuple[int, int] = (128, 128)
    scale_format: ScaleFormat = ScaleFormat.FLOAT32

    name: ClassVar[str] = "fine_grained"
    static_inputs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_type(self.block, (tuple, list), "FineGrained", "block", "such as (128, 128)")
        if len(self.block) != 2:
            raise ValueError(f"FineGrained: block must be (rows, columns), got {self.block}")
        object.__setattr__(self, "block", tuple(self.block))
        Blockwise(*self.block)  # checks both
        such_as = "a ScaleFormat, such as ScaleFormat.FLOAT32"
        check_type(self.scale_format, ScaleFormat, "FineGrained", "scale_format", such_as)
        if self.scale_format not in _SCALE_FORMATS:
            known = ", ".join(str(known) for known in _SCALE_FORMATS)
            raise ValueError(
                f"FineGrained: scale_format must be one of {known}, got {self.scale_format}"
            )

    @property
    def granularity(self) -> Blockwise:
        """One scale per block."""
        return Blockwise(*self.block)

    def refuses(self, layer: Layer) -> str | None:
        """The reason why this layout cannot store a layer as it is, or None."""
        return refuses_weight(layer.weight, self.granularity, self.scale_format)

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """``weight`` and ``weight_scale_inv``."""
        data, scale = layer.weight.float8_data, layer.weight.scale
        return {f"{layer.name}.weight": data, f"{layer.name}.weight_scale_inv": scale}

    def quantization_config(self, layers: Iterable[str], skipped: Iterable[str]) -> dict[str, Any]:
        """What transformers' ``FineGrainedFP8Config`` and vLLM's ``Fp8Config`` read.

        Raises:
            ValueError: a reader would skip a float8 layer too, whose name ends or begins as a
                skipped one.
        """
        names = checked_names(
            layers,
            skipped,
            lambda layer, name: layer.endswith(name) or layer.startswith(f"{name}."),
            "transformers goes by the end and the beginning of names",
        )
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            "modules_to_not_convert": names,
        }
        if self.scale_format is not ScaleFormat.FLOAT32:
            config["scale_fmt"] = "ue8m0"
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FineGrained | None:
        """The layout of ``quant_method="fp8"`` with a ``weight_block_size``; None for others.

        ``scale_fmt="ue8m0"`` gives ``POWER_OF_TWO``, whatever stores the scales; of MX blocks,
        1x32, ``E8M0``.

        Raises:
            ValueError: the weights have one scale per tensor, or inputs static ones, or a field
                has a value that is not readable.
        """
        if config.get("quant_method") != "fp8":
            return None
        wanted = {
            "fmt": ("e4m3", None),
            "activation_scheme": ("dynamic", None),
            "scale_fmt": ("ue8m0", "float", None),
        }
        for field, values in wanted.items():
            if config.get(field) not in values:
                raise ValueError(
                    f"quantization_config has {field}={config[field]!r}, readable: "
                    + ", ".join(repr(value) for value in values if value is not None)
                )
        block = config.get("weight_block_size")
        if not isinstance(block, (list, tuple)) or [type(size) for size in block] != [int, int]:
            raise ValueError(
                f"quantization_config has weight_block_size={block!r}; readable: two integers, "
                "such as [128, 128]"
            )
        scales = ScaleFormat.FLOAT32
        if config.get("scale_fmt") == "ue8m0":
            scales = ScaleFormat.E8M0 if tuple(block) == (1, 32) else ScaleFormat.POWER_OF_TWO
        return cls((block[0], block[1]), scales)

    def suffixes(self) -> tuple[str, ...]:
        """``.weight_scale_inv``."""
        return (".weight_scale_inv",)

    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> Layer:
        """The layer that a file stores; scales become float32, exactly, unless E8M0 is asked for.

        Raises:
            ValueError: a tensor is missing, or of a wrong dtype or shape, or a scale is not finite
                and positive.
        """
        data = read_data(name, read)
        expected = scale_shape(data.shape, self.block)
        dtypes = {
            ScaleFormat.FLOAT32: (*FLOATS, torch.float8_e8m0fnu),
            ScaleFormat.POWER_OF_TWO: (*FLOATS, *E8M0_BYTES),
            ScaleFormat.E8M0: E8M0_BYTES,
        }[self.scale_format]
        scale = read_scale(f"{name}.weight_scale_inv", read, keys, [expected], dtypes)
        if not self.scale_format.is_e8m0:
            scale = e8m0.as_float32(scale)
        return Layer(name, Float8Tensor(data, scale, self.block, dtype))
