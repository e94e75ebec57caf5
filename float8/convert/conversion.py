"""What a conversion did: the report that a converted model carries as ``float8_conversion``."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from float8.convert.filters import unmatched_patterns
from float8.linear.layer import Float8Linear
from float8.linear.refusals import refuses_on_gpu

logger = logging.getLogger("float8")


@dataclass
class Conversion:
    """Names of converted layers, and name -> reason of the others.

    Attributes:
        converted: the layers that are float8 now.
        skipped: name -> why it was left alone.
        gathered_in_high_precision: under enable_fsdp_float8_all_gather, name -> why its weight is
            gathered in high precision.
        refused_on_gpu: name -> why a GPU will refuse a converted layer that a CPU runs.
        unmatched_patterns: patterns of `float8.filters.skip_names` that match no layer, with the
            nearest name.
    """

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    gathered_in_high_precision: dict[str, str] = field(default_factory=dict)
    refused_on_gpu: dict[str, str] = field(default_factory=dict)
    unmatched_patterns: list[str] = field(default_factory=list)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a report that was pickled when it had fewer attributes."""
        vars(self).update(vars(Conversion()) | state)

    def __str__(self) -> str:
        lines = [f"converted to float8: {len(self.converted)} layers"]
        lines += [f"  left alone: {fqn}: {reason}" for fqn, reason in self.skipped.items()]
        lines += [
            f"  weight gathered in high precision: {fqn}: {reason}"
            for fqn, reason in self.gathered_in_high_precision.items()
        ]
        lines += [
            f"  a GPU will refuse: {fqn}: {reason}" for fqn, reason in self.refused_on_gpu.items()
        ]
        lines += [
            f"  skip_names: no layer is called {pattern}" for pattern in self.unmatched_patterns
        ]
        return "\n".join(lines)


def report_bypasses(root: nn.Module, conversion: Conversion) -> None:
    """Report the modules that go around their own Linears."""
    for fqn, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            conversion.skipped[fqn] = (
                "nn.MultiheadAttention multiplies by its weights itself and stays in high "
                "precision; write q, k, v and output projections as nn.Linear to convert them"
            )
        elif isinstance(module, nn.TransformerEncoderLayer):
            conversion.skipped[fqn] = (
                "nn.TransformerEncoderLayer has a fused inference path that goes around its float8 "
                "layers; torch.backends.mha.set_fastpath_enabled(False) avoids it"
            )


def tell(
    root: nn.Module,
    conversion: Conversion,
    module_filter_fn: object = None,
    by: str = "convert_to_float8_training",
) -> None:
    """Complete and log the report, and warn if the model is left without a float8 layer.

    Args:
        root: the converted model.
        conversion: what was done.
        module_filter_fn: asked for patterns that match nothing.
        by: the public function, for the warning.
    """
    layers = {fqn: m for fqn, m in root.named_modules() if isinstance(m, Float8Linear)}
    for fqn in conversion.converted:
        if fqn in layers and (reason := _refused_on_gpu(layers[fqn])) is not None:
            conversion.refused_on_gpu[fqn] = reason
    names = [*layers, *conversion.skipped]
    conversion.unmatched_patterns = unmatched_patterns(module_filter_fn, names)
    logger.info("%s", conversion)
    if conversion.refused_on_gpu:
        fqn, reason = next(iter(conversion.refused_on_gpu.items()))
        logger.warning(
            "a GPU will refuse %d of the %d converted layers, which a CPU runs; the first is %s: "
            "%s. model.float8_conversion lists them all",
            len(conversion.refused_on_gpu),
            len(conversion.converted),
            fqn or "the module itself",
            reason,
        )
    if not conversion.converted and not layers:
        reasons = "".join(f"\n  {fqn}: {why}" for fqn, why in conversion.skipped.items())
        found = reasons or "the model has no nn.Linear"
        warnings.warn(f"{by} converted no layer: {found}", stacklevel=3)


def _refused_on_gpu(layer: Float8Linear) -> str | None:
    if layer.weight.device.type == "cuda":
        return None  # its first call says so, for the GPU at hand
    return refuses_on_gpu(layer.config, layer.weight, tokens=16, grad=True)
