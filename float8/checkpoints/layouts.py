"""Layouts: how the checkpoints of other libraries store the float8 weight of a linear layer.

In memory a float8 weight is a `Float8Tensor` of shape (N, K), E4M3, ``value = data * scale``. In a
file it is ``weight`` and one or two scales, which dequantise by a product too. MXFP4 weights are
such tensors too, since E2M1 values are E4M3 numbers (`float8.kernels.mxfp4`); files have them
packed, as ``weight_packed`` or, of a stack of experts, ``NAME_blocks``:

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
mxfp4                ``group``        ``weight_scale``, 1x32     E8M0, uint8  high precision
gpt_oss              (1x32)           ``NAME_scales``,           E8M0, uint8  high precision
                                      (E, N, K / 32)
==================== ================ ========================== ============ ====================

``input_scale`` is stored where inputs are static. Read are also scales in bfloat16 and float16, and
scales per tensor of shape (), (1,) or (1, 1): published files have them.

Sources: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md (blocks at an edge are padded with zeros before
their scale is computed); compressed-tensors 0.20, ``quantization/quant_scheme.py``; vLLM 0.33,
``compressed_tensors/schemes`` and ``parameter.py``; NVIDIA/TensorRT-Model-Optimizer at 5a4242f,
``modelopt/torch/export/quant_utils.py``. Of MXFP4: compressed-tensors 0.20, ``compressors/mxfp4``;
vLLM, ``compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py`` and ``mxfp4.py``; Transformers
5.23, ``integrations/mxfp4.py``.

Each layout lists the layers that stay in high precision. Readers do not compare whole names only: a
name in the list that also stands for a layer in float8 would make a reader take the codes of that
layer for values. Such a list is refused when it is written.

A format is a class: its names are class attributes, and a function each says what its config has,
how that is read back, and what its list of layers means. What is said of engines is taken from
their sources: none of them has loaded a file of this library.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.arguments import check_bool
from float8.config import OperandCast, ScalingType
from float8.formats import E4M3, ScaleFormat
from float8.granularity import (
    Block,
    Blockwise,
    Granularity,
    Rowwise,
    Tensorwise,
    block_name,
    scale_shape,
)
from float8.kernels import e8m0, mxfp4
from float8.linear.casts import cast_alone
from float8.tensor import Float8Tensor

Dims = tuple[int, ...]
COMPRESSED_TENSORS = "compressed-tensors"  # the ``quant_method``
WEIGHT = ".weight"  # the end of the key of every weight that may be in float8
ROWS_OF_32, BLOCKS = Blockwise(1, 32), Blockwise(128, 128)
_FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
_BYTES: tuple[torch.dtype, ...] = (torch.float8_e8m0fnu, torch.uint8)


class Layout(ABC):
    """Abstract: one variant of one file format. Final: a frozen dataclass per format.

    It converts the float8 weight of a layer to named tensors and back, and reads neither files nor
    modules. The input scale of a layer is float32 of one element, None where inputs are cast with
    dynamic scales.

    Attributes:
        name: of the format, as users write it: ``fine_grained``.
        method: the ``quant_method`` of the config.
        weight_key, data_key, scale_key: the end of the key of a weight in high precision, of its
            data, and of its scale.
        data_dtype: of the data in a file.
        dims: of a weight: 3 for stacks of experts.
        is_mxfp4: whether it stores MXFP4 weights.
        one_scale: the shape of a scale per tensor.
        scale_bytes: the dtype under which E8M0 scales are stored.
        skipped_key: the field of the config that lists layers in high precision.
        skips: (layer, name): whether readers leave out a layer for a name in their list.
        granularity: which elements of a weight share a scale.
        scale_format: which numbers a scale may be; weights in high precision are cast to it.
        static_inputs: whether each layer stores the scale of its input.
    """

    name: ClassVar[str]
    method: ClassVar[str]
    weight_key: ClassVar[str] = WEIGHT
    data_key: ClassVar[str] = WEIGHT
    scale_key: ClassVar[str] = ".weight_scale"
    data_dtype: ClassVar[torch.dtype] = E4M3.dtype
    dims: ClassVar[int] = 2
    is_mxfp4: ClassVar[bool] = False
    one_scale: ClassVar[Dims] = ()
    scale_bytes: ClassVar[torch.dtype] = torch.uint8
    skipped_key: ClassVar[str] = "ignore"
    skips: ClassVar[Any]
    granularity: Any
    scale_format: Any
    static_inputs: Any = False

    @property
    def block(self) -> Block:
        """The granularity, as the extents of a block."""
        return self.granularity.block_of((0,) * self.dims)

    # --- layers

    def parts(self, shape: Dims) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[Dims, ...]]]:
        """What a file has of a layer (N, K): the end of a key -> its dtypes and shapes.

        All of them are read, and the first of each is written.
        """
        one: tuple[Dims, ...] = (self.one_scale, (), (1,), (1, 1))
        is_e8m0 = self.scale_format.is_e8m0
        dtypes = (self.scale_bytes, *_BYTES) if is_e8m0 else (*_FLOATS, torch.float8_e8m0fnu)
        scales = one if self.granularity == Tensorwise() else (scale_shape(shape, self.block),)
        data = (self.data_dtype,), (self.data_shape(shape),)
        parts = {self.data_key: data, self.scale_key: (dtypes, scales)}
        return parts | ({".input_scale": (_FLOATS, one)} if self.static_inputs else {})

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of a layer's keys, the data's first."""
        return tuple(self.parts((1,) * self.dims))

    def data_shape(self, shape: Dims) -> Dims:
        """The shape that a file has of the data of a weight."""
        return shape

    def shape_of(self, data_shape: Dims) -> Dims:
        """The inverse of `data_shape`."""
        return data_shape

    def turned(self, shape: Dims) -> Dims:
        """The shape in a file of what a model has in this shape, and the reverse.

        Files have stacks as (E, N, K), models as (E, K, N).
        """
        return shape if self.dims == 2 else shape[:-2] + shape[:-3:-1]

    def cast(self, x: Tensor, scale_format: ScaleFormat, scale: Tensor | None) -> Float8Tensor:
        """A weight in high precision as this layout stores it; ``scale`` is its scale, if known."""
        how = OperandCast(ScalingType.DYNAMIC, E4M3, self.block, scale_format)
        data, scale, _ = cast_alone(x, how, scale=scale)
        return Float8Tensor(data, scale, self.block, x.dtype, None, scale_format.value)

    def fit(self, weight: Float8Tensor) -> Float8Tensor | str:
        """A weight as this layout stores it, with the same values, or why it cannot store it."""
        scale, wanted = weight.scale, self.scale_format
        if wanted.is_e8m0 and scale.dtype == torch.float32:
            in_bytes = scale.to(wanted.dtype)
            scale = in_bytes if scale.is_meta or torch.equal(in_bytes.float(), scale) else scale
        if (weight.format, weight.block, scale.dtype) != (E4M3, self.block, wanted.dtype):
            found = f"{weight.format} with {block_name(weight.block)} scales of {scale.dtype}"
            stored = f"{E4M3} with {block_name(self.block)} ones of {wanted.dtype}"
            return f"its weight is {found}, and the layout stores {stored}"
        if (bad := _bad_scale(scale)) is not None:
            return f"the scale of its weight {bad}"
        is_read = wanted is ScaleFormat.POWER_OF_TWO and not scale.is_meta
        if is_read and not bool((scale.frexp().mantissa == 0.5).all()):
            return f"not all of its scales are powers of two, as {wanted} asks for"
        return weight._replace(scale=scale)

    def tensors(
        self, name: str, weight: Float8Tensor, input_scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The tensors of a layer by their keys in the file, the weight first; nothing is copied.

        ``weight`` is as of `fit`. A bias is no part of it: biases stay as they are.
        """
        parts = self.parts(weight.shape).items()
        data = mxfp4.pack(weight.float8_data) if self.is_mxfp4 else weight.float8_data
        values: Any = (data, weight.scale, input_scale)
        return {
            name + suffix: x.view(dtypes[0]).reshape(shapes[0])
            for (suffix, (dtypes, shapes)), x in zip(parts, values, strict=False)
        }

    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> tuple[Float8Tensor, Tensor | None]:
        """The weight and input scale of a layer: the inverse of `tensors`, to the same bits.

        The weight dequantises to ``dtype``. E8M0 scales become float32, exactly, unless the layout
        has E8M0. For the other arguments and the errors see `checked`.
        """
        data, scale, *others = self.checked(name, read, keys)
        shape = self.shape_of(tuple(data.shape))
        scale = scale.reshape(scale_shape(shape, self.block))
        data = mxfp4.unpack(data) if self.is_mxfp4 else data
        weight = Float8Tensor(data.reshape(shape), scale, self.block, dtype)
        return weight, others[0].reshape(()) if self.static_inputs else None

    def checked(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str]
    ) -> list[Tensor]:
        """The tensors of a layer as a file has them, with scales of the layout's dtype.

        ``read`` returns the tensor of a key. The key of the data exists; ``keys`` are the others of
        the layer. Raises ValueError, with the key and the values, if a tensor is missing or has a
        wrong dtype or shape, or if a scale is not finite and positive. No data is read.
        """
        data = read(name + self.data_key)
        found, shape = [data], self.shape_of(tuple(data.shape))
        if len(shape) != self.dims:
            wanted = "a matrix (N, K)" if self.dims == 2 else "a stack (E, N, K / 32, 16)"
            raise ValueError(f"{name}{self.data_key} is {tuple(data.shape)}, expected {wanted}")
        for suffix, (dtypes, shapes) in self.parts(shape).items():
            key, is_scale = name + suffix, suffix != self.data_key
            if is_scale and key not in keys:
                raise ValueError(f"{key} is missing: the layer is in float8 and needs this scale")
            x = read(key)
            if x.dtype not in dtypes or tuple(x.shape) not in shapes:
                wanted = f"{shapes[0]} of {' or '.join(map(str, dict.fromkeys(dtypes)))}"
                raise ValueError(f"{key} is {x.dtype} of shape {tuple(x.shape)}, expected {wanted}")
            if is_scale:
                x = x.view(_BYTES[0]) if x.dtype in _BYTES else x.float()
                found.append(x if self.scale_format.is_e8m0 else e8m0.as_float32(x))
                if (bad := _bad_scale(x)) is not None:
                    raise ValueError(f"{key} {bad}")
        return found

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
                        f"{layer} is in float8 and {name} is not, and readers of {self.name} take "
                        "both for one: leave both in high precision, or take another layout"
                    )
        return {"quant_method": self.method} | self._config() | {self.skipped_key: names}

    def all_of(self, module: str) -> str:
        """The entry of the list for all that is inside of a module."""
        return f"re:{re.escape(module)}\\." if self.method == COMPRESSED_TENSORS else module

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """The fields of the ``quantization_config`` that say how weights are stored."""

    def other_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files that readers of a ``quantization_config`` want beside it; mostly none."""
        return {}

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout | None:
        """The layout that a ``quantization_config`` of this format describes.

        None if no values of this class store what it describes.
        """


def _bad_scale(scale: Tensor) -> str | None:
    """The first element that is not finite and > 0, and where it is, or None."""
    if scale.is_meta:
        return None
    scale32 = e8m0.as_float32(scale)
    bad = (~(scale32.isfinite() & (scale32 > 0))).nonzero().tolist()
    if not bad:
        return None
    return f"holds {scale32[tuple(bad[0])].item()} at {bad[0]}; a scale is finite and > 0"


# --- the formats


@dataclass(frozen=True)
class FineGrained(Layout):
    """Store one scale per 128x128 block of a weight, as DeepSeek-V3; engines cast the inputs.

    Args:
        block: the rows and columns that share a scale, integers >= 1.
        scale_format: which numbers a scale is: ``FLOAT32``; ``POWER_OF_TWO``, in float32, as
            DeepSeek-V3.1; ``E8M0``, one byte, as DeepSeek-V4 and what transformers 5.23 writes.
    """

    block: tuple[int, int] = (128, 128)
    scale_format: ScaleFormat = ScaleFormat.FLOAT32

    name: ClassVar[str] = "fine_grained"
    method: ClassVar[str] = "fp8"
    scale_key: ClassVar[str] = ".weight_scale_inv"
    scale_bytes: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    skipped_key: ClassVar[str] = "modules_to_not_convert"

    def __post_init__(self) -> None:
        rows, columns = self.block
        object.__setattr__(self, "block", (rows, columns))
        object.__setattr__(self, "granularity", Blockwise(rows, columns))  # checks both

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
        own = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*self.block]}
        return own | ({} if is_float32 else {"scale_fmt": "ue8m0"})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FineGrained | None:
        """``scale_fmt="ue8m0"`` gives ``POWER_OF_TWO``, and of MX blocks ``E8M0``."""
        block: Any = config.get("weight_block_size")
        powers = ScaleFormat.E8M0 if block in ([1, 32], [32, 32]) else ScaleFormat.POWER_OF_TWO
        formats = {"float": ScaleFormat.FLOAT32, "ue8m0": powers}
        scale_format = formats.get(config.get("scale_fmt") or "float")
        fmt, inputs = (config.get(name) for name in ("fmt", "activation_scheme"))
        is_ours = fmt in (None, "e4m3") and inputs in (None, "dynamic")
        is_block = isinstance(block, list) and [*map(type, block)] == [int, int]
        if not (is_ours and is_block and scale_format):
            return None
        return cls((block[0], block[1]), scale_format)


# granularity -> format's arguments of weights, of dynamic inputs
_TOKEN, _GROUP = {"strategy": "token", "dynamic": True}, {"strategy": "group", "dynamic": True}
_OF_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_OF_128 = {"strategy": "block", "block_structure": [128, 128]}
SCHEMES: dict[Granularity, tuple[dict[str, Any], dict[str, Any]]] = {
    Tensorwise(): ({"strategy": "tensor"}, _TOKEN),
    Rowwise(): ({"strategy": "channel"}, _TOKEN),
    BLOCKS: (_OF_128, {**_GROUP, "group_size": 128}),
    ROWS_OF_32: (_OF_32, {**_GROUP, **_OF_32}),
}
_STATIC = {"strategy": "tensor"}  # arguments of static inputs
_WITH_STATIC = (Tensorwise(), Rowwise())
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
        TypeError: ``static_inputs`` is no bool.
        ValueError: the format has no such granularity, or none with static inputs.
    """

    granularity: Granularity = Tensorwise()
    static_inputs: bool = False

    name: ClassVar[str] = "compressed_tensors"
    method: ClassVar[str] = COMPRESSED_TENSORS
    one_scale: ClassVar[Dims] = (1,)
    # Names are compared whole (compressed-tensors, ``utils/match.py``).
    skips = operator.eq

    def __post_init__(self) -> None:
        check_bool(self.static_inputs, "CompressedTensors: static_inputs")
        known = _WITH_STATIC if self.static_inputs else (*SCHEMES,)
        if self.granularity not in known:
            raise ValueError(
                f"CompressedTensors: granularity must be one of {', '.join(map(repr, known))} with "
                f"static_inputs={self.static_inputs}, got {self.granularity}"
            )
        scales = ScaleFormat.E8M0 if self.granularity == ROWS_OF_32 else ScaleFormat.FLOAT32
        object.__setattr__(self, "scale_format", scales)

    def _config(self) -> dict[str, Any]:
        """What compressed-tensors' ``QuantizationConfig`` reads."""
        weights, inputs = SCHEMES[self.granularity]
        kind = "mxfp8-quantized" if self.granularity == ROWS_OF_32 else "float-quantized"
        inputs = _STATIC if self.static_inputs else inputs
        return _one_group(kind, _arguments(weights), _arguments(inputs))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensors | None:
        """One scheme of 8 bit floats for all groups; neither sparse nor transformed weights."""
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        schemes = _decisive(config)
        if sparsity != "dense" or config.get("transform_config") or not schemes:
            return None
        variants = [*map(cls, SCHEMES), *(cls(each, static_inputs=True) for each in _WITH_STATIC)]
        own = ((x, _decisive(x._config())[0]) for x in variants)
        return next((x for x, scheme in own if all(scheme == its for its in schemes)), None)


def _one_group(kind: str, weights: Any, inputs: Any) -> dict[str, Any]:
    """The config of compressed-tensors of one format, with arguments of weights and of inputs."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group | {"format": kind}}
    return {"format": kind, "quantization_status": "compressed", "config_groups": groups}


def _arguments(differing: Mapping[str, Any]) -> dict[str, Any]:
    """The format's arguments of weights or inputs in float8, without those that are None."""
    found = {**_DEFAULTS, "type": "float", **differing}
    return {name: value for name, value in found.items() if value is not None}


def _decisive(config: Mapping[str, Any]) -> list[list[dict[str, Any] | None]]:
    """The arguments that decide how each group's values are read, with defaults.

    Of weights and of inputs; None where inputs are not cast.
    """

    def of(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if given is None:
            return None
        return {n: x if given.get(n) is None else given[n] for n, x in _DEFAULTS.items()}

    groups = (config.get("config_groups") or {}).values()
    return [[of(group.get(x)) for x in ("weights", "input_activations")] for group in groups]


_PRODUCER = {"name": "modelopt", "version": "0.40.0"}  # whose format this is


@dataclass(frozen=True)
class ModelOpt(Layout):
    """NVIDIA Model Optimizer's FP8: one scale per weight, and one for each layer's inputs."""

    granularity, scale_format, static_inputs = Tensorwise(), ScaleFormat.FLOAT32, True
    name: ClassVar[str] = "modelopt"
    method: ClassVar[str] = "modelopt"
    # vLLM goes by names that contain another (``quantization/modelopt.py``).
    skips = operator.contains

    def _config(self) -> dict[str, Any]:
        """What vLLM's ``ModelOptFp8Config`` and SGLang read (``convert_hf_config.py``)."""
        float8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        group = {"input_activations": float8, "weights": float8, "targets": ["Linear"]}
        return {"quant_algo": "FP8", "config_groups": {"group_0": group}, "producer": _PRODUCER}

    def other_files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """``hf_quant_config.json``, which TensorRT-LLM reads."""
        fields = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
        details = fields | {"exclude_modules": config["ignore"]}
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": details}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOpt | None:
        """Read a ``quantization_config``, or an ``hf_quant_config.json``."""
        found = config.get("quantization", config).get("quant_algo")
        return cls() if str(found).upper() == "FP8" else None


@dataclass(frozen=True)
class MXFP4(Layout):
    """Packed MXFP4 weights in the format of llm-compressor; engines choose how inputs are cast.

    Two E2M1 values a byte, one E8M0 scale per 32 input features.
    """

    granularity, scale_format = ROWS_OF_32, ScaleFormat.E8M0_FLOOR
    name: ClassVar[str] = "mxfp4"
    method: ClassVar[str] = COMPRESSED_TENSORS
    data_key: ClassVar[str] = ".weight_packed"
    data_dtype: ClassVar[torch.dtype] = torch.uint8
    is_mxfp4: ClassVar[bool] = True
    skips: ClassVar[Any] = operator.eq

    def data_shape(self, shape: Dims) -> Dims:
        """(N, K) -> (N, K / 2)."""
        return (*shape[:-1], shape[-1] // 2)

    def shape_of(self, data_shape: Dims) -> Dims:
        """(N, K / 2) -> (N, K)."""
        return (*data_shape[:-1], data_shape[-1] * 2)

    def cast(self, x: Tensor, scale_format: ScaleFormat, scale: Tensor | None) -> Float8Tensor:
        """A weight in high precision, rounded to MXFP4, whose scales are its own."""
        return Float8Tensor(*mxfp4.cast_to_mxfp4(x), self.block, x.dtype)

    def fit(self, weight: Float8Tensor) -> Float8Tensor | str:
        """A weight of any granularity whose values are MXFP4; its data is read."""
        found, values = weight, weight.dequantize(torch.float32)
        if weight.shape[-1] % mxfp4.MXFP4_BLOCK == 0:
            found = self.cast(values, self.scale_format, None)._replace(dtype=weight.dtype)
        if values.is_meta or torch.equal(found.dequantize(torch.float32), values):
            return found
        return "its weight has values that MXFP4 does not hold"

    def _config(self) -> dict[str, Any]:
        """What compressed-tensors' ``MXFP4PackedCompressor`` reads."""
        return _one_group("mxfp4-pack-quantized", _arguments(_MXFP4), None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MXFP4 | None:
        """One scheme of MXFP4 weights for all groups, with inputs of any kind."""
        weights = [scheme[0] for scheme in _decisive(config)]
        own = _decisive(cls()._config())[0][0]
        return cls() if weights and all(each == own for each in weights) else None


_MXFP4 = {**_OF_32, "num_bits": 4}


@dataclass(frozen=True)
class GptOss(MXFP4):
    """Packed MXFP4 experts in the format of gpt-oss, which stores all other layers as they are.

    ``NAME_blocks`` is (E, N, K / 32, 16) and ``NAME_scales`` (E, N, K / 32), uint8, of a stack of
    experts that a model has as ``NAME`` (E, K, N).
    """

    name: ClassVar[str] = "gpt_oss"
    method: ClassVar[str] = "mxfp4"
    weight_key: ClassVar[str] = ""
    data_key: ClassVar[str] = "_blocks"
    scale_key: ClassVar[str] = "_scales"
    dims: ClassVar[int] = 3
    skipped_key: ClassVar[str] = "modules_to_not_convert"
    skips = staticmethod(FineGrained.skips)

    def data_shape(self, shape: Dims) -> Dims:
        """(E, N, K) -> (E, N, K / 32, 16)."""
        return (*shape[:-1], shape[-1] // 32, 16)

    def shape_of(self, data_shape: Dims) -> Dims:
        """(E, N, K / 32, 16) -> (E, N, K)."""
        return (*data_shape[:-2], data_shape[-2] * 32)

    def _config(self) -> dict[str, Any]:
        """Transformers' ``Mxfp4Config`` and vLLM's ``Mxfp4Config`` have no fields of weights."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GptOss:
        """The format has one variant."""
        return cls()


# The name that users write -> the class. A row also makes `layout_of` read the format.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (FineGrained, CompressedTensors, ModelOpt, MXFP4, GptOss)
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a ``quantization_config`` describes; ValueError if none reads it."""
    method = config.get("quant_method") or (config.get("producer") or {}).get("name")
    for layout in LAYOUTS.values():
        if layout.method == method and (found := layout.from_config(config)) is not None:
            return found
    raise ValueError(
        f"quantization_config has {dict(config)!r}; readable are fine_grained (E4M3, dynamic "
        "inputs), compressed_tensors (one scheme of 8 bit floats or of MXFP4 weights, neither "
        "sparse nor transformed), modelopt (FP8) and gpt_oss (MXFP4)"
    )
