"""`Layout`: how a checkpoint stores the float8 weight of a linear layer.

In memory a float8 weight is a `Float8Tensor` of shape (N, K), E4M3, with
``value = data * scale``. In a file it is two or three tensors, whose names and shapes differ from
library to library:

================== ======================================== =========================
layout             scale of the weight                      activations
================== ======================================== =========================
fine_grained       ``weight_scale_inv``, (N / 128, K / 128) dynamic 1x128
compressed_tensors ``weight_scale``, (1,), (N, 1) or blocks dynamic per token, static
modelopt           ``weight_scale``, ()                     static
================== ======================================== =========================

All of these dequantise by a product, also ``weight_scale_inv``, whose name says the inverse of the
factor that the cast multiplied by. A layout is data (which variant) and four pure functions. It
reads no file and no module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.formats import E4M3, ScaleFormat
from float8.granularity import Granularity, scale_shape
from float8.tensor import Float8Tensor


@dataclass(frozen=True)
class Layer:
    """The name, weight and input scale of one linear layer in float8.

    ``name`` is the module's, as ``model.layers.0.mlp.up_proj``. ``weight`` is E4M3 (N, K), on the
    meta device where only names and sizes are asked for. ``input_scale`` is the static scale of the
    layer's input, float32 of one element, ``value = data * scale``; None where inputs are cast with
    dynamic scales.
    """

    name: str
    weight: Float8Tensor
    input_scale: Tensor | None = None


class Layout(ABC):
    """Abstract: one variant of one file format. Final: a frozen dataclass per format.

    Attributes:
        name: of the format, as users write it: ``fine_grained``.
        granularity: which elements of a weight share a scale.
        scale_format: which numbers a scale may be; weights in high precision are cast to it.
        static_inputs: whether each layer stores the scale of its input.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def granularity(self) -> Granularity:
        """Which elements of a weight share a scale."""

    @property
    @abstractmethod
    def scale_format(self) -> ScaleFormat:
        """Which numbers the scale of a weight may be."""

    @property
    @abstractmethod
    def static_inputs(self) -> bool:
        """Whether each layer stores the scale of its input."""

    def layer_without_data(
        self, name: str, shape: torch.Size | tuple[int, ...], input_scale: Tensor | None = None
    ) -> Layer:
        """A layer with a weight of this shape (N, K), all of it on the meta device."""
        block, scales = self.granularity.block_of(shape), self.scale_format.dtype
        data = torch.empty(shape, dtype=E4M3.dtype, device="meta")
        scale = torch.empty(scale_shape(shape, block), dtype=scales, device="meta")
        weight = Float8Tensor(data, scale, block, torch.float32)
        return Layer(name, weight, None if input_scale is None else input_scale.to("meta"))

    @abstractmethod
    def refuses(self, layer: Layer) -> str | None:
        """The reason why this layout cannot store a layer as it is, or None.

        Its weight has another granularity, format or scale than the layout's, or its input scale is
        missing. Asked of layers without data too.
        """

    @abstractmethod
    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer by their keys in the file, the weight first; nothing is copied.

        A bias is no part of it: biases stay as they are.
        """

    @abstractmethod
    def quantization_config(self, layers: Iterable[str], skipped: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says of the checkpoint under ``quantization_config``.

        ``layers`` are all layers in float8, ``skipped`` the linear layers that stay in high
        precision, by their names in the file. Raises ValueError if readers would take a name of
        ``skipped`` for one of ``layers``.
        """

    def other_files(
        self, layers: Iterable[str], skipped: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        """JSON files that readers want beside ``config.json``, by name; mostly none."""
        return {}

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout | None:
        """The layout that a ``quantization_config`` describes; None if it is of another format.

        Raises ValueError if the config is of this format and not readable. The message names the
        field, its value and what is readable.
        """

    @abstractmethod
    def suffixes(self) -> tuple[str, ...]:
        """The ends of a layer's keys beside ``.weight``: ``.weight_scale`` and so on."""

    @abstractmethod
    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> Layer:
        """The layer that a file stores: the inverse of `tensors`, to the same bits.

        ``{name}.weight`` exists and is float8; ``keys`` are all keys under ``{name}.``. ``read`` is
        called only for keys that exist, once each. The weight dequantises to ``dtype``. Raises
        ValueError, with the key and the values, if a tensor is missing or has a wrong dtype or
        shape, or if a scale is not finite and positive.
        """
