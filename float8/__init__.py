"""Train PyTorch models with 8-bit floating point matrix products.

Start with `convert_to_float8_training`; the recipes are in `float8.config.RECIPES`. The map of the
package is in docs/architecture.md.
"""

import importlib as _importlib
from typing import Any as _Any

import float8.distributed.gathered_weights as _gathered_weights  # noqa: F401  stores weights
import float8.distributed.rank_comparison as _rank_comparison  # noqa: F401  compares ranks
import float8.integrations.torchao as _torchao  # noqa: F401  Float8LinearConfig.from_torchao
import float8.integrations.transformer_engine as _te  # noqa: F401  .from_te_recipe
from float8.activations import saved_activations
from float8.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    GemmConfig,
    ScalingType,
)
from float8.convert import filters
from float8.convert.after_step import after_step
from float8.convert.convert import (
    convert_from_float8_training,
    convert_to_float8_training,
    high_precision,
)
from float8.convert.inference import convert_to_float8_inference
from float8.distributed.gathered_weights import precompute_float8_dynamic_scale_for_fsdp
from float8.distributed.sync import sync_float8_amax_and_scale_history
from float8.estimate import estimate, faster_layers
from float8.experts.grouped_mm import grouped_mm
from float8.experts.modules import register_experts
from float8.formats import E4M3, E5M2, Format, ScaleFormat
from float8.fusion import (
    LayerNormCast,
    RMSNormCast,
    fuse_feed_forwards,
    fuse_norms,
)
from float8.granularity import Blockwise, Rowwise, Tensorwise
from float8.linear.layer import Float8Linear, float8_linear
from float8.linear.weight_cache import cached_weights
from float8.tensor import Float8Tensor
from float8.version import __version__ as __version__

# Imported on first use: tensor parallelism takes long to import, and most programs need none of it.
_ON_DEMAND = {
    "Float8ColwiseParallel": "float8.distributed.tensor_parallel",
    "Float8ExpertParallel": "float8.distributed.expert_parallel",
    "Float8RowwiseParallel": "float8.distributed.tensor_parallel",
    "PrepareFloat8ModuleInput": "float8.distributed.tensor_parallel",
    "accurate_layers": "float8.numerics",
    "calibrate": "float8.numerics",
    "clip_grad_norm_": "float8.distributed.clipping",
    "compare": "float8.numerics",
    "find_nan": "float8.numerics",
    "inspect": "float8.numerics",
    "inspect_every": "float8.numerics",
    "ms_amp": "float8.ms_amp",
}
# Packages that are imported on first use too, so that ``float8.optim.AdamW`` works as written.
_PACKAGES = ("numerics", "optim", "unit_scaling")


def __getattr__(name: str) -> _Any:
    if name in _ON_DEMAND:
        value = getattr(_importlib.import_module(_ON_DEMAND[name]), name)
        globals()[name] = value  # for the next use; importing float8.ms_amp has bound the package
        return value
    if name in _PACKAGES:
        return _importlib.import_module(f"float8.{name}")
    raise AttributeError(f"module 'float8' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND, *_PACKAGES})


__all__ = [
    "E4M3",
    "E5M2",
    "Blockwise",
    "CastConfig",
    "DelayedScalingConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8Tensor",
    "Format",
    "GemmConfig",
    "LayerNormCast",
    "RMSNormCast",
    "Rowwise",
    "ScaleFormat",
    "ScalingType",
    "Tensorwise",
    "after_step",
    "cached_weights",
    "convert_from_float8_training",
    "convert_to_float8_inference",
    "convert_to_float8_training",
    "estimate",
    "faster_layers",
    "filters",
    "float8_linear",
    "fuse_feed_forwards",
    "fuse_norms",
    "grouped_mm",
    "high_precision",
    "precompute_float8_dynamic_scale_for_fsdp",
    "register_experts",
    "saved_activations",
    "sync_float8_amax_and_scale_history",
]
# Without float8.inspect: ``from float8 import *`` would replace Python's inspect.
__all__ += [name for name in _ON_DEMAND if name != "inspect"]
