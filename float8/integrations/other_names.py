"""Names of MS-AMP and nanochat, whose configs are not translated: only what to write instead."""

from __future__ import annotations

from float8.config.suggestions import DIALECTS, Dialect

_OPTIMIZER = "use the optimizer that ms_amp(model, optimizer, level) returns, or float8.optim"
_TENSOR = "float8 calls it Float8Tensor"
_LAYERS = "use convert_to_float8_training(model), or ms_amp(model, optimizer, level)"
# public name of MS-AMP 0.4 -> its counterpart in float8
MSAMP_NAMES = {
    "initialize": 'use ms_amp(model, optimizer, "O2")',
    "clip_grad_norm_": "use torch.nn.utils.clip_grad_norm_",
    "LBAdam": _OPTIMIZER,
    "LBAdamW": _OPTIMIZER,
    "DSAdam": _OPTIMIZER,
    "FSDPAdam": _OPTIMIZER,
    "FSDPAdamW": _OPTIMIZER,
    "ScalingTensor": _TENSOR,
    "ScalingParameter": _TENSOR,
    "ScalingMeta": _TENSOR,
    "FP8Linear": _LAYERS,
    "LinearReplacer": _LAYERS,
    "FsdpReplacer": "use convert_to_float8_training, fully_shard, then ms_amp",
    "FP8DistributedDataParallel": "use DistributedDataParallel, then ms_amp",
    "FP8FullyShardedDataParallel": "use convert_to_float8_training, fully_shard, then ms_amp",
}
# public name of nanochat's fp8.py and base_train.py -> its counterpart in float8
NANOCHAT_NAMES = {"disable_fp8": "use `with high_precision(model):`"}

DIALECTS["msamp"] = Dialect("MS-AMP", names=MSAMP_NAMES)
DIALECTS["nanochat"] = Dialect("nanochat", names=NANOCHAT_NAMES)
