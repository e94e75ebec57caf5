"""`ModelOpt`: NVIDIA Model Optimizer's FP8, read by vLLM, SGLang and TensorRT-LLM.

A layer is ``weight``, E4M3 (N, K), ``weight_scale`` and ``input_scale``, one float32 of shape ()
each: ``amax / 448``, so ``value = data * scale`` (NVIDIA/TensorRT-Model-Optimizer at 5a4242f:
``modelopt/torch/export/quant_utils.py``, ``get_scaling_factor``; ``unified_export_hf.py``). Inputs
are cast with the stored scale.

``config.json`` has a ``quantization_config`` (``convert_hf_config.py``), which vLLM 0.33 and SGLang
read. TensorRT-LLM takes ``hf_quant_config.json`` beside it (`ModelOpt.other_files`).

``ignore`` holds wildcards. vLLM leaves out each layer whose name contains one of them
(``quantization/modelopt.py``, ``is_layer_excluded``): a router ``mlp.gate`` in it would take
``mlp.gate_proj`` along. Such names are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8.checkpoints.layer_checks import (
    ONE_ELEMENT,
    read_data,
    read_scale,
    refuses_input_scale,
    refuses_weight,
)
from float8.checkpoints.layout import Layer, Layout
from float8.checkpoints.skipped_names import checked_names
from float8.formats import ScaleFormat
from float8.granularity import Tensorwise
from float8.tensor import Float8Tensor

_PRODUCER = {"name": "modelopt", "version": "0.40.0"}  # whose format this is


@dataclass(frozen=True)
class ModelOpt(Layout):
    """NVIDIA Model Optimizer's FP8: one scale per weight, and one for each layer's inputs."""

    granularity: ClassVar[Tensorwise] = Tensorwise()
    scale_format: ClassVar[ScaleFormat] = ScaleFormat.FLOAT32
    static_inputs: ClassVar[bool] = True
    name: ClassVar[str] = "modelopt"

    def refuses(self, layer: Layer) -> str | None:
        """The reason why this layout cannot store a layer as it is, or None."""
        reason = refuses_weight(layer.weight, self.granularity, self.scale_format)
        return refuses_input_scale(layer.input_scale) if reason is None else reason

    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """``weight``, ``weight_scale`` and ``input_scale``."""
        data, scale = layer.weight.float8_data, layer.weight.scale
        assert layer.input_scale is not None  # refuses() says so
        return {
            f"{layer.name}.weight": data,
            f"{layer.name}.weight_scale": scale.reshape(()),
            f"{layer.name}.input_scale": layer.input_scale.reshape(()),
        }

    def quantization_config(self, layers: Iterable[str], skipped: Iterable[str]) -> dict[str, Any]:
        """What vLLM's ``ModelOptFp8Config`` reads.

        Raises:
            ValueError: the name of a float8 layer contains a skipped one.
        """
        excluded = self._excluded(layers, skipped)
        float8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        group = {"input_activations": float8, "weights": float8, "targets": ["Linear"]}
        return {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {"group_0": group},
            "ignore": excluded,
            "producer": _PRODUCER,
        }

    def other_files(
        self, layers: Iterable[str], skipped: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        """``hf_quant_config.json``, which TensorRT-LLM reads."""
        details = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": self._excluded(layers, skipped),
        }
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": details}}

    @staticmethod
    def _excluded(layers: Iterable[str], skipped: Iterable[str]) -> list[str]:
        return checked_names(
            layers,
            skipped,
            lambda layer, name: name in layer,
            "vLLM goes by names that contain another",
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOpt | None:
        """The layout of ``quant_method="modelopt"``, or of an ``hf_quant_config.json``.

        Raises:
            ValueError: its ``quant_algo`` is not ``"FP8"``.
        """
        details = config.get("quantization", config)
        producer = config.get("producer") or {}
        if "modelopt" not in (config.get("quant_method"), producer.get("name")):
            return None
        if str(details.get("quant_algo")).upper() != "FP8":
            raise ValueError(
                f"quantization_config has quant_algo={details.get('quant_algo')!r}; readable: 'FP8'"
            )
        return cls()

    def suffixes(self) -> tuple[str, ...]:
        """``.weight_scale`` and ``.input_scale``."""
        return (".weight_scale", ".input_scale")

    def layer(
        self, name: str, read: Callable[[str], Tensor], keys: Collection[str], dtype: torch.dtype
    ) -> Layer:
        """The layer that a file stores.

        Raises:
            ValueError: a tensor is missing, or of a wrong dtype or shape, or a scale is not finite
                and positive.
        """
        data = read_data(name, read)
        scale = read_scale(f"{name}.weight_scale", read, keys, ONE_ELEMENT)
        input_scale = read_scale(f"{name}.input_scale", read, keys, ONE_ELEMENT)
        block = self.granularity.block_of(data.shape)
        return Layer(name, Float8Tensor(data, scale.reshape(1, 1), block, dtype), input_scale)
