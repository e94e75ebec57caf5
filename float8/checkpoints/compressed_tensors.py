"""`CompressedTensors`: the format of llm-compressor, which vLLM, SGLang and transformers read.

A layer is ``weight``, E4M3 (N, K), and ``weight_scale``, with ``value = weight * weight_scale``;
with static inputs, ``input_scale`` too. The granularity says which of the format's schemes it is:

==================== =========== ======================================= =========================
granularity          strategy    ``weight_scale``                        inputs
==================== =========== ======================================= =========================
`Tensorwise`         ``tensor``  float32 (1,)                            per token, or static (1,)
`Rowwise`            ``channel`` float32 (N, 1)                          per token, or static (1,)
`Blockwise(128,128)` ``block``   float32 (ceil(N / 128), ceil(K / 128))  1x128
`Blockwise(1,32)`    ``group``   E8M0 as uint8 (N, K / 32)               1x32, E8M0
==================== =========== ======================================= =========================

(compressed-tensors 0.20: ``FP8``, ``FP8_DYNAMIC``, ``FP8_BLOCK`` and ``MXFP8`` in
``quantization/quant_scheme.py``. vLLM 0.33: ``compressed_tensors/schemes``, files ``w8a8_fp8`` and
``w8a8_mxfp8``.) Published files have ``weight_scale`` in bfloat16 too, and a scale per tensor as ()
or (1, 1): these are read. Written are the shapes that vLLM's loader takes (``parameter.py``): () or
(1,), and (N, 1).

``ignore`` lists the layers in high precision. Readers compare whole names (``utils/match.py``), or
regular expressions after ``re:``. vLLM multiplies q/k/v in one GEMM, and gate/up in another: all of
one are in float8, or none. It casts their weights again unless their scales per tensor are equal.
transformers has scales in the dtype of the model, unless it loads with ``dequantize=True``: in
bfloat16 it rounds all but powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.arguments import check_bool, check_type
from float8.checkpoints.layer_checks import (
    E8M0_BYTES,
    FLOATS,
    ONE_ELEMENT,
    read_data,
    read_scale,
    refuses_input_scale,
    refuses_weight,
)
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.skipped_names import checked_names
from float8.formats import ScaleFormat
from float8.granularity import Blockwise, Granularity, Rowwise, Tensorwise, scale_shape
from float8.tensor import Float8Tensor


@dataclass(frozen=True)
class _Scheme:
    """The format's names for a granularity: what differs from `_DEFAULTS`."""

    weights: dict[str, Any]
    dynamic_inputs: dict[str, Any]
    format: str = "float-quantized"
    can_be_static: bool = False  # the inputs


_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor"}
_GROUP = {"strategy": "group", "dynamic": True}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_TENSORWISE, _ROWWISE, _MX_BLOCKS = Tensorwise(), Rowwise(), Blockwise(1, 32)
_SCHEMES: dict[Granularity, _Scheme] = {
    _TENSORWISE: _Scheme({"strategy": "tensor"}, _TOKEN, can_be_static=True),
    _ROWWISE: _Scheme({"strategy": "channel"}, _TOKEN, can_be_static=True),
    Blockwise(128, 128): _Scheme(
        {"strategy": "block", "block_structure": [128, 128]}, {**_GROUP, "group_size": 128}
    ),
    _MX_BLOCKS: _Scheme(_MX, {**_GROUP, **_MX}, "mxfp8-quantized"),
}
# What decides how values are read; the format's own defaults (QuantizationArgs).
_DEFAULTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
}


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """The format of llm-compressor: scales per tensor, per channel, or in blocks.

    Args:
        granularity: which elements of a weight share a scale: ``Tensorwise()``, ``Rowwise()``,
            ``Blockwise(128, 128)``, or ``Blockwise(1, 32)``, whose scales are E8M0.
        static_inputs: whether each layer stores the scale of its input. Otherwise inputs are cast
            with dynamic scales.

    Raises:
        TypeError: ``granularity`` is no `Granularity`, or ``static_inputs`` no bool.
        ValueError: the format has no such granularity, or none with static inputs.
    """

    granularity: Granularity = _TENSORWISE
    static_inputs: bool = False

    name: ClassVar[str] = "compressed_tensors"

    def __post_init__(self) -> None:
        such_as = "a Granularity, such as Rowwise()"
        check_type(self.granularity, Granularity, "CompressedTensors", "granularity", such_as)
        check_bool(self.static_inputs, "CompressedTensors: static_inputs")
        if self.granularity not in _SCHEMES:
            known = ", ".join(repr(known) for known in _SCHEMES)
            raise ValueError(
                f"CompressedTensors: granularity must be one of {known}, got {self.granularity}"
            )
        if self.static_inputs and not self._scheme.can_be_static:
            raise ValueError(
                f"CompressedTensors: static_inputs=True needs Tensorwise() or Rowwise(), got "
                f"{self.granularity}, whose inputs are cast in blocks"
            )

    @property
    def _scheme(self) -> _Scheme:
        return _SCHEMES[self.granularity]

    @property
    def scale_format(self) -> ScaleFormat:
        """``E8M0`` in blocks of 1x32, ``FLOAT32`` otherwise."""
        return ScaleFormat.E8M0 if self.granularity == _MX_BLOCKS else ScaleFormat.FLOAT32

    def refuses(self, layer: Layer) -> str | None:
        """The reason why this layout cannot store a layer as it is, or None."""
        reason = refuses_weight(layer.weight, self.granularity, self.scale_format)
        if reason is None and self.static_inputs:
            reason = refuses_input_scale(layer.input_scale)
        if reason is None and self.granularity == _MX_BLOCKS and layer.weight.shape[1] % 32:
            reason = f"in_features={layer.weight.shape[1]} is not a multiple of 32"
        return reason

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """``weight``, ``weight_scale``, and with static inputs ``input_scale``."""
        data, scale = layer.weight.float8_data, layer.weight.scale
        if self.granularity == _TENSORWISE:
            scale = scale.reshape(1)
        elif self.granularity == _MX_BLOCKS:
            scale = scale.view(torch.uint8)
        found = {f"{layer.name}.weight": data, f"{layer.name}.weight_scale": scale}
        if self.static_inputs:
            assert layer.input_scale is not None  # refuses() says so
            found[f"{layer.name}.input_scale"] = layer.input_scale.reshape(1)
        return found

    def quantization_config(self, layers: Iterable[str], skipped: Iterable[str]) -> dict[str, Any]:
        """What compressed-tensors' ``QuantizationConfig`` reads.

        Raises:
            ValueError: a layer is in ``layers`` and in ``skipped``.
        """
        names = checked_names(
            layers, skipped, lambda layer, name: layer == name, "names are compared whole"
        )
        scheme = self._scheme
        inputs = _STATIC if self.static_inputs else scheme.dynamic_inputs
        group = {
            "targets": ["Linear"],
            "weights": _arguments(scheme.weights),
            "input_activations": _arguments(inputs),
            "output_activations": None,
            "format": scheme.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": scheme.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": names,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensors | None:
        """The layout of ``quant_method="compressed-tensors"``; None for others.

        Raises:
            ValueError: weights or inputs are of another scheme than the table's, layers of several
                ones, or weights are sparse or rotated.
        """
        if config.get("quant_method") != "compressed-tensors":
            return None
        sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
        for kind, given in (("sparsity", sparse), ("transform", config.get("transform_config"))):
            if given:
                raise ValueError(
                    f"quantization_config has {kind}_config={config[f'{kind}_config']!r}: weights "
                    "that are sparse or transformed are not readable"
                )
        groups = config.get("config_groups") or {}
        found = {cls._of_group(name, group) for name, group in groups.items()}
        if len(found) != 1:
            raise ValueError(
                f"quantization_config has config_groups of {len(found)} different schemes, "
                f"readable is one: {groups!r}"
            )
        return found.pop()

    @classmethod
    def _of_group(cls, name: str, group: Mapping[str, Any]) -> CompressedTensors:
        weights = _decisive(group.get("weights"))
        inputs = _decisive(group.get("input_activations"))
        for granularity, scheme in _SCHEMES.items():
            if weights == _decisive(_arguments(scheme.weights)):
                if inputs == _decisive(_arguments(scheme.dynamic_inputs)):
                    return cls(granularity)
                if scheme.can_be_static and inputs == _decisive(_arguments(_STATIC)):
                    return cls(granularity, static_inputs=True)
        known = "; ".join(f"{s.weights} with {s.dynamic_inputs}" for s in _SCHEMES.values())
        raise ValueError(
            f"quantization_config has config_groups[{name!r}] with weights="
            f"{group.get('weights')!r} and input_activations={group.get('input_activations')!r}; "
            f"readable are 8 bit floats with {known}; and static inputs, {_STATIC}, with the first "
            "two"
        )

    def suffixes(self) -> tuple[str, ...]:
        """``.weight_scale``, and with static inputs ``.input_scale``."""
        return (".weight_scale", *([".input_scale"] if self.static_inputs else []))

    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> Layer:
        """The layer that a file stores.

        Raises:
            ValueError: a tensor is missing, or of a wrong dtype or shape, or a scale is not finite
                and positive.
        """
        data = read_data(name, read)
        block = self.granularity.block_of(data.shape)
        shapes: tuple[tuple[int, ...], ...] = (scale_shape(data.shape, block),)
        if self.granularity == _TENSORWISE:
            shapes += ONE_ELEMENT
        dtypes = E8M0_BYTES if self.scale_format.is_e8m0 else FLOATS
        scale = read_scale(f"{name}.weight_scale", read, keys, shapes, dtypes)
        input_scale = None
        if self.static_inputs:
            input_scale = read_scale(f"{name}.input_scale", read, keys, ONE_ELEMENT)
        return Layer(name, Float8Tensor(data, scale, block, dtype), input_scale)


def _arguments(differing: Mapping[str, Any]) -> dict[str, Any]:
    """The format's arguments of weights or inputs in float8, without those that are None."""
    found = {**_DEFAULTS, "type": "float", **differing}
    return {name: value for name, value in found.items() if value is not None}


def _decisive(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The arguments that decide how values are read, with defaults; None if there are none."""
    if arguments is None:
        return None
    given = {name: value for name, value in arguments.items() if value is not None}
    return {name: given.get(name, default) for name, default in _DEFAULTS.items()}
