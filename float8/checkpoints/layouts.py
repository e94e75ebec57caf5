"""Layouts: how the checkpoints of other libraries store the float8 weight of a linear layer.

In memory a float8 weight is a `Float8Tensor` of shape (N, K), E4M3, ``value = data * scale``. In a
file it is ``weight`` and one or two scales, which dequantise by a product too:

==================== ================ ========================== ============ ====================
layout, granularity  strategy         scale of the weight        stored as    inputs
==================== ================ ========================== ============ ====================
fine_grained         (blocks)         ``weight_scale_inv``,      float32 or   dynamic 1x128
                                      (N / 128, K / 128)         E8M0
compressed_tensors,
 `Tensorwise`        ``tensor``       ``weight_scale``, (1,)     float32      per token or static
 `Rowwise`           ``channel``      ``weight_scale``, (N, 1)   float32      per token or static
 128x128             ``block``        ``weight_scale``, blocks   float32      1x128
 1x32 (MX)           ``group``        ``weight_scale``, blocks   E8M0, uint8  1x32, E8M0
modelopt             (per tensor)     ``weight_scale``, ()       float32      static
==================== ================ ========================== ============ ====================

``input_scale`` is stored where inputs are static. Read are also scales in bfloat16 and float16, and
scales per tensor of shape (), (1,) or (1, 1): published files have them.

Sources: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md (blocks at an edge are padded with zeros before
their scale is computed); compressed-tensors 0.20, ``quantization/quant_scheme.py``; vLLM 0.33,
``compressed_tensors/schemes`` and ``parameter.py``; NVIDIA/TensorRT-Model-Optimizer at 5a4242f,
``modelopt/torch/export/quant_utils.py``.

Each layout lists the layers that stay in high precision. Readers do not compare whole names only: a
name in the list that also stands for a layer in float8 would make a reader take the codes of that
layer for values. Such a list is refused when it is written.

What is said of Transformers was tried with version 5.23 on a CPU. What is said of engines is taken
from their sources: none of them has loaded a file of this library.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.arguments import check_bool, check_type
from float8.checkpoints.files import kinds_of
from float8.formats import E4M3, ScaleFormat
from float8.granularity import (
    Blockwise,
    Granularity,
    Rowwise,
    Tensorwise,
    block_name,
    scale_shape,
)
from float8.kernels import e8m0
from float8.tensor import Float8Tensor

_FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
_BYTES: tuple[torch.dtype, ...] = (torch.float8_e8m0fnu, torch.uint8)
_READABLE = {
    ScaleFormat.FLOAT32: (*_FLOATS, torch.float8_e8m0fnu),
    ScaleFormat.POWER_OF_TWO: (*_FLOATS, *_BYTES),
    ScaleFormat.E8M0: _BYTES,
}
_ONE_ELEMENT: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
_BAD = "a scale is finite and > 0"
TRANSFORMERS = "Transformers 5.23"
Shapes = Mapping[str, tuple[int, ...]]  # layer in float8, as files name it -> (N, K)


@dataclass(frozen=True)
class Layer:
    """The name, weight and input scale of one linear layer in float8.

    ``weight`` is E4M3 (N, K), on the meta device where only names and sizes are asked for.
    ``input_scale`` is float32 of one element, None where inputs are cast with dynamic scales.
    """

    name: str
    weight: Float8Tensor
    input_scale: Tensor | None = None


class Layout(ABC):
    """Abstract: one variant of one file format. Final: a frozen dataclass per format.

    It converts a `Layer` to named tensors and back, and reads neither files nor modules.

    Attributes:
        name: of the format, as users write it: ``fine_grained``.
        scale_key: the name of the weight's scale.
        one_scale: the shape of a scale per tensor.
        skipped_key: the field of the config that lists layers in high precision.
        granularity: which elements of a weight share a scale.
        scale_format: which numbers a scale may be; weights in high precision are cast to it.
        static_inputs: whether each layer stores the scale of its input.
    """

    name: ClassVar[str]
    scale_key: ClassVar[str] = "weight_scale"
    one_scale: ClassVar[tuple[int, ...]] = ()
    skipped_key: ClassVar[str] = "ignore"
    static_inputs: Any = False

    @property
    @abstractmethod
    def granularity(self) -> Granularity:
        """Which elements of a weight share a scale."""

    @property
    @abstractmethod
    def scale_format(self) -> ScaleFormat:
        """Which numbers the scale of a weight may be."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of a layer's keys beside ``.weight``."""
        return (f".{self.scale_key}", *([".input_scale"] if self.static_inputs else []))

    def __str__(self) -> str:
        granularity = block_name(self.granularity.block_of((0, 0)))
        inputs = "static" if self.static_inputs else "dynamic"
        return f"{self.name}, {granularity} {self.scale_format.value} scales, {inputs} inputs"

    # --- layers

    def without_data(
        self, name: str, shape: tuple[int, ...], input_scale: Tensor | None = None
    ) -> Layer:
        """A layer with a weight of this shape (N, K) and any input scale, on the meta device."""
        block, scales = self.granularity.block_of(shape), self.scale_format.dtype
        data = torch.empty(shape, dtype=E4M3.dtype, device="meta")
        scale = torch.empty(scale_shape(shape, block), dtype=scales, device="meta")
        weight = Float8Tensor(data, scale, block, torch.float32)
        return Layer(name, weight, None if input_scale is None else input_scale.to("meta"))

    def refuses(self, layer: Layer) -> str | None:
        """The reason why this layout cannot store a layer as it is, or None.

        Its weight has another granularity, format or scale than the layout's, or its input scale is
        missing. Asked of layers without data too.
        """
        return next(self._reasons(layer), None)

    def _reasons(self, layer: Layer) -> Iterator[str]:
        weight, scale, wanted = layer.weight, layer.weight.scale, self.scale_format
        if weight.dim() != 2 or weight.format != E4M3:
            yield f"its weight is {weight.format} {tuple(weight.shape)}, not {E4M3} (N, K)"
        block = self.granularity.block_of(weight.shape)
        if weight.block != block:
            found = block_name(weight.block)
            yield f"its weight has {found} scales, and the layout stores {block_name(block)} ones"
        if scale.dtype != wanted.dtype:
            yield f"its scales are {scale.dtype}, and the layout's {wanted.dtype}"
        if (bad := _bad_scale(scale)) is not None:
            yield f"its weight has the scale {bad}; {_BAD}"
        if wanted is ScaleFormat.POWER_OF_TWO and not powers_of_two(scale):
            yield f"not all of its scales are powers of two, as {wanted} asks for"
        if self.static_inputs and layer.input_scale is None:
            yield (
                "it has no static input scale, which this layout stores: give input_scales="
                "float8.calibrate(model, batches).static_scales(), which has those of linear layers"
                " and none of experts, or take a layout with dynamic inputs"
            )
        if self.static_inputs and (bad := _bad_scale(layer.input_scale)) is not None:
            yield f"its input scale is {bad}; {_BAD}"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer by their keys in the file, the weight first; nothing is copied.

        A bias is no part of it: biases stay as they are.
        """
        scale = layer.weight.scale
        if self.granularity == Tensorwise():
            scale = scale.reshape(self.one_scale)
        found = {"weight": layer.weight.float8_data, self.scale_key: scale}
        if self.static_inputs:
            assert layer.input_scale is not None  # refuses() says so
            found["input_scale"] = layer.input_scale.reshape(self.one_scale)
        return {f"{layer.name}.{key}": x for key, x in found.items()}

    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> Layer:
        """The layer that a file stores: the inverse of `tensors`, to the same bits.

        ``{name}.weight`` exists and is float8; ``keys`` are all keys under ``{name}.``. The weight
        dequantises to ``dtype``. E8M0 scales become float32, exactly, unless the layout has E8M0.
        Raises ValueError, with the key and the values, if a tensor is missing or has a wrong dtype
        or shape, or if a scale is not finite and positive.
        """
        data = read(f"{name}.weight")
        if data.dtype != E4M3.dtype or data.dim() != 2:
            raise ValueError(
                f"{name}.weight is {data.dtype} of shape {tuple(data.shape)}, expected a matrix "
                f"(N, K) of {E4M3.dtype}"
            )
        found = []
        block = self.granularity.block_of(data.shape)
        for suffix in self.suffixes:
            key, shapes, readable = name + suffix, _ONE_ELEMENT, _FLOATS
            if suffix != ".input_scale":
                shapes, readable = _ONE_ELEMENT[::-1], _READABLE[self.scale_format]
                if self.granularity != Tensorwise():
                    shapes = (scale_shape(data.shape, block),)
            if key not in keys:
                raise ValueError(f"{key} is missing: the layer is in float8 and needs this scale")
            scale = read(key)
            if scale.dtype not in readable or tuple(scale.shape) not in shapes:
                raise ValueError(
                    f"{key} is {scale.dtype} of shape {tuple(scale.shape)}, expected "
                    f"{' or '.join(map(str, shapes))} of {' or '.join(map(str, readable))}"
                )
            if scale.dtype in _FLOATS:
                scale = scale.to(torch.float32)
            else:
                scale = scale.view(torch.float8_e8m0fnu)
                scale = scale if self.scale_format.is_e8m0 else e8m0.as_float32(scale)
            if (bad := _bad_scale(scale)) is not None:
                raise ValueError(f"{key} holds {bad}; {_BAD}")
            found.append(scale.reshape(shapes[0]))
        weight = Float8Tensor(data, found[0], block, dtype)
        return Layer(name, weight, found[1] if self.static_inputs else None)

    # --- configs

    def quantization_config(self, layers: Iterable[str], skipped: Iterable[str]) -> dict[str, Any]:
        """What ``config.json`` says of the checkpoint under ``quantization_config``.

        ``layers`` are all layers in float8, ``skipped`` the linear layers that stay in high
        precision, by their names in the file. Raises ValueError if readers would take a name of
        ``skipped`` for one of ``layers``.
        """
        names = sorted(set(skipped))
        for layer in layers:
            for name in names:
                if self.skips(layer, name):
                    raise ValueError(
                        f"{layer} is in float8 and {name} is not, but skipping {name} makes readers"
                        f" of {self.name} skip {layer} too: leave {layer} in high precision, or "
                        "take another layout"
                    )
        return self._config() | {self.skipped_key: names}

    @staticmethod
    @abstractmethod
    def skips(layer: str, name: str) -> bool:
        """Whether readers leave out a layer for a name in their list."""

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """The ``quantization_config`` without the list of skipped layers."""

    def other_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files that readers of a ``quantization_config`` want beside it; mostly none."""
        return {}

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout | None:
        """The layout that a ``quantization_config`` describes; None if it is of another format.

        Raises ValueError if the config is of this format and not readable.
        """


def _bad_scale(scale: Tensor | None) -> str | None:
    """The first element that is not finite and > 0, and where it is, or None."""
    if scale is None or scale.device.type == "meta":
        return None
    scale32 = e8m0.as_float32(scale)
    bad = (~(scale32.isfinite() & (scale32 > 0))).nonzero()
    if not bad.shape[0]:
        return None
    where = tuple(bad[0].tolist())
    return f"{scale32[where].item()}" + (f" at {list(where)}" if where else "")


def powers_of_two(scale: Tensor) -> bool:
    """Whether all of these scales are powers of two, as far as there are data."""
    known = scale.device.type == "meta" or scale.dtype != torch.float32
    return known or bool((scale.frexp().mantissa == 0.5).all())


# --- the formats


@dataclass(frozen=True)
class FineGrained(Layout):
    """One scale per 128x128 block of a weight, as DeepSeek-V3; inputs are cast while serving.

    Args:
        block: the rows and columns that share a scale.
        scale_format: which numbers a scale is: ``FLOAT32``; ``POWER_OF_TWO``, in float32, as
            DeepSeek-V3.1; ``E8M0``, one byte, as DeepSeek-V4 and what transformers 5.23 writes.

    Raises:
        TypeError: ``block`` is no tuple of integers, or ``scale_format`` no `ScaleFormat`.
        ValueError: ``block`` is not two integers >= 1, or ``scale_format`` another one.
    """

    block: tuple[int, int] = (128, 128)
    scale_format: ScaleFormat = ScaleFormat.FLOAT32

    name: ClassVar[str] = "fine_grained"
    scale_key: ClassVar[str] = "weight_scale_inv"
    skipped_key: ClassVar[str] = "modules_to_not_convert"

    def __post_init__(self) -> None:
        check_type(self.block, (tuple, list), "FineGrained", "block", "such as (128, 128)")
        such_as = "a ScaleFormat, such as ScaleFormat.FLOAT32"
        check_type(self.scale_format, ScaleFormat, "FineGrained", "scale_format", such_as)
        if len(self.block) != 2 or self.scale_format not in _READABLE:
            raise ValueError(
                "FineGrained: block must be (rows, columns), and scale_format must be one of "
                f"{', '.join(map(str, _READABLE))}; got {self.block}, {self.scale_format}"
            )
        object.__setattr__(self, "block", tuple(self.block))
        Blockwise(*self.block)  # checks both

    @property
    def granularity(self) -> Blockwise:
        """One scale per block."""
        return Blockwise(*self.block)

    @staticmethod
    def skips(layer: str, name: str) -> bool:
        """Transformers goes by the end and the beginning of names."""
        return layer.endswith(name) or layer.startswith(f"{name}.")

    def _config(self) -> dict[str, Any]:
        """What transformers' ``FineGrainedFP8Config`` and vLLM's ``Fp8Config`` read.

        ``scale_fmt`` asks engines to round the scales of inputs to powers of two as well (vLLM
        0.33, ``transformers_utils/config.py``). How scales are stored is read from their dtype.
        """
        is_float32 = self.scale_format is ScaleFormat.FLOAT32
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
            **({} if is_float32 else {"scale_fmt": "ue8m0"}),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FineGrained | None:
        """The layout of ``quant_method="fp8"``; ``scale_fmt="ue8m0"`` gives ``POWER_OF_TWO``.

        Of MX blocks, 1x32, it gives ``E8M0``.
        """
        if config.get("quant_method") != "fp8":
            return None
        block: Any = config.get("weight_block_size")
        fmt = config.get("scale_fmt")
        for field, values in (
            ("fmt", ("e4m3", None)),
            ("activation_scheme", ("dynamic", None)),
            ("scale_fmt", ("ue8m0", "float", None)),
            ("weight_block_size", (block,) if _is_block(block) else ("two integers",)),
        ):
            if config.get(field) not in values:
                raise ValueError(
                    f"quantization_config has {field}={config.get(field)!r}, readable: "
                    + ", ".join(repr(value) for value in values if value is not None)
                )
        is_mx = fmt == "ue8m0" and tuple(block) == (1, 32)
        scales = ScaleFormat.POWER_OF_TWO if fmt == "ue8m0" else ScaleFormat.FLOAT32
        return cls(tuple(block), ScaleFormat.E8M0 if is_mx else scales)


def _is_block(block: Any) -> bool:
    return isinstance(block, (list, tuple)) and [type(size) for size in block] == [int, int]


# granularity -> format's arguments of weights, of dynamic inputs
_TOKEN, _GROUP = {"strategy": "token", "dynamic": True}, {"strategy": "group", "dynamic": True}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_SCHEMES: dict[Granularity, tuple[dict[str, Any], dict[str, Any]]] = {
    Tensorwise(): ({"strategy": "tensor"}, _TOKEN),
    Rowwise(): ({"strategy": "channel"}, _TOKEN),
    Blockwise(128, 128): (
        {"strategy": "block", "block_structure": [128, 128]},
        {**_GROUP, "group_size": 128},
    ),
    Blockwise(1, 32): (_MX, {**_GROUP, **_MX}),
}
_STATIC = {"strategy": "tensor"}  # arguments of static inputs
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

    granularity: Granularity = Tensorwise()
    static_inputs: bool = False

    name: ClassVar[str] = "compressed_tensors"
    one_scale: ClassVar[tuple[int, ...]] = (1,)

    def __post_init__(self) -> None:
        such_as = "a Granularity, such as Rowwise()"
        check_type(self.granularity, Granularity, "CompressedTensors", "granularity", such_as)
        check_bool(self.static_inputs, "CompressedTensors: static_inputs")
        known = [g for g in _SCHEMES if not (self.static_inputs and isinstance(g, Blockwise))]
        if self.granularity not in known:
            raise ValueError(
                f"CompressedTensors: granularity must be one of {', '.join(map(repr, known))} with "
                f"static_inputs={self.static_inputs}, got {self.granularity}"
            )

    @property
    def scale_format(self) -> ScaleFormat:
        """``E8M0`` in blocks of 1x32, ``FLOAT32`` otherwise."""
        return ScaleFormat.E8M0 if self._is_mx else ScaleFormat.FLOAT32

    @property
    def _is_mx(self) -> bool:
        return self.granularity == Blockwise(1, 32)

    def _reasons(self, layer: Layer) -> Iterator[str]:
        yield from super()._reasons(layer)
        if self._is_mx and layer.weight.shape[1] % 32:
            yield f"in_features={layer.weight.shape[1]} is not a multiple of 32"

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """``weight``, ``weight_scale``, and with static inputs ``input_scale``."""
        found = super().tensors(layer)
        key = f"{layer.name}.weight_scale"
        return found | ({key: found[key].view(torch.uint8)} if self._is_mx else {})

    @staticmethod
    def skips(layer: str, name: str) -> bool:
        """Names are compared whole (compressed-tensors, ``utils/match.py``)."""
        return layer == name

    def _config(self) -> dict[str, Any]:
        """What compressed-tensors' ``QuantizationConfig`` reads."""
        weights, dynamic = _SCHEMES[self.granularity]
        kind = "mxfp8-quantized" if self._is_mx else "float-quantized"
        group = {
            "targets": ["Linear"],
            "weights": _arguments(weights),
            "input_activations": _arguments(_STATIC if self.static_inputs else dynamic),
            "output_activations": None,
            "format": kind,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensors | None:
        """The layout of ``quant_method="compressed-tensors"``; None for others."""
        if config.get("quant_method") != "compressed-tensors":
            return None
        odd = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
        odd = odd or bool(config.get("transform_config"))
        found = [
            tuple(_decisive(group.get(which)) for which in ("weights", "input_activations"))
            for group in (config.get("config_groups") or {}).values()
        ]
        for granularity, (weights, dynamic) in _SCHEMES.items():
            is_block = isinstance(granularity, Blockwise)
            for is_static in (False,) if is_block else (False, True):
                inputs = _STATIC if is_static else dynamic
                scheme = tuple(_decisive(_arguments(x)) for x in (weights, inputs))
                if found and not odd and all(group == scheme for group in found):
                    return cls(granularity, is_static)
        raise ValueError(
            "quantization_config is readable with one scheme of 8 bit floats for all config_groups,"
            f" of {', '.join(map(repr, _SCHEMES))}, and neither sparse nor transformed weights; it "
            f"has {dict(config)!r}"
        )


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


_PRODUCER = {"name": "modelopt", "version": "0.40.0"}  # whose format this is


@dataclass(frozen=True)
class ModelOpt(Layout):
    """NVIDIA Model Optimizer's FP8: one scale per weight, and one for each layer's inputs."""

    granularity: ClassVar[Tensorwise] = Tensorwise()
    scale_format: ClassVar[ScaleFormat] = ScaleFormat.FLOAT32
    static_inputs = True
    name: ClassVar[str] = "modelopt"

    @staticmethod
    def skips(layer: str, name: str) -> bool:
        """vLLM goes by names that contain another (``quantization/modelopt.py``)."""
        return name in layer

    def _config(self) -> dict[str, Any]:
        """What vLLM's ``ModelOptFp8Config`` and SGLang read (``convert_hf_config.py``)."""
        float8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        group = {"input_activations": float8, "weights": float8, "targets": ["Linear"]}
        return {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {"group_0": group},
            "producer": _PRODUCER,
        }

    def other_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """``hf_quant_config.json``, which TensorRT-LLM reads."""
        details = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": config["ignore"],
        }
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": details}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOpt | None:
        """The layout of ``quant_method="modelopt"``, or of an ``hf_quant_config.json``."""
        producer = (config.get("producer") or {}).get("name")
        if "modelopt" not in (config.get("quant_method"), producer):
            return None
        found = config.get("quantization", config).get("quant_algo")
        if str(found).upper() != "FP8":
            raise ValueError(f"quantization_config has quant_algo={found!r}; readable: 'FP8'")
        return cls()


# The name that users write -> the class. A row also makes `layout_of` read the format.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (FineGrained, CompressedTensors, ModelOpt)
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a ``quantization_config`` describes; ValueError if none reads it."""
    for layout in LAYOUTS.values():
        if (found := layout.from_config(config)) is not None:
            return found
    raise ValueError(
        f"quantization_config has quant_method={config.get('quant_method')!r}; readable: "
        + ", ".join(LAYOUTS)
    )


# --- which libraries read a checkpoint


def transformers_refuses(layout: Layout, shapes: Shapes) -> str | None:
    """The reason why Transformers does not read a checkpoint, or None.

    Where it dequantises blocks, it takes the shape of a weight divided by that of its scales for
    the block.
    """
    if layout.name == "modelopt":
        return "it takes the float8 data for values, without their scales"
    by = layout.granularity
    if not isinstance(by, Blockwise):
        return None
    if layout.name == "fine_grained":
        sizes = (by.rows, by.cols)
        odd = [
            name
            for name, shape in shapes.items()
            if any(n > size and n % size for n, size in zip(shape, sizes, strict=True))
        ]
        why = (
            f"where it dequantises, as without a GPU, sizes that are no multiples of {by.rows}x"
            f"{by.cols} give wrong values or an error"
        )
    elif any(re.search(r"\bexperts\.\d+\.", name) for name in shapes):  # in memory a stack
        return "it fails to stack experts that have scales of blocks"
    else:
        odd = [name for name, shape in shapes.items() if shape[1] % by.cols]
        why = (
            f"without dequantize=True, its forward fails where columns are no multiple of {by.cols}"
        )
    return f"{why}: {kinds_of(odd)}" if odd else None


def read_by(layout: Layout, shapes: Shapes) -> str:
    """The libraries that read a checkpoint, in words, and why Transformers does not."""
    engines = ["vLLM", "SGLang"] + ["TensorRT-LLM"] * (layout.name == "modelopt")
    if layout.name == "fine_grained" and layout.granularity != Blockwise(128, 128):
        engines = []
    reason = transformers_refuses(layout, shapes)
    readers = [] if reason else [f"{TRANSFORMERS} (tested on a CPU)"]
    readers += [f"{', '.join(engines)} (by their sources, not run)"] if engines else []
    found = f"read by {' and '.join(readers) or 'no library that is known'}"
    return f"{found}; not by {TRANSFORMERS}: {reason}" if reason else found
