"""Modules that moved: their old import paths keep working, for scripts and for pickles.

An old path imports the module at its new place: both names are one module object.
``float8.linear``, ``float8.tensor``, ``float8.convert`` and ``float8.ms_amp`` are packages now,
which export the public names that the modules had, and those that pickles contain.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from float8.tensor.tensor import Float8Tensor, _rebuild

# old path -> new path, up to version 0.7
MOVED = {
    "float8.activations.saved": "float8.activations.scope",
    "float8.autograd": "float8.linear.autograd",
    "float8.cast": "float8.linear.cast",
    "float8.config.other_names": "float8.integrations.torchao",
    "float8.config.torchao": "float8.integrations.torchao",
    "float8.config.transformer_engine": "float8.integrations.transformer_engine",
    "float8.config.transformer_engine_recipes": "float8.integrations.transformer_engine",
    "float8.conversion": "float8.convert.conversion",
    "float8.distributed.gradients.controller": "float8.distributed.gradients.state",
    "float8.distributed.shards": "float8.distributed.exchange",
    "float8.estimate.casts": "float8.estimate.roofline",
    "float8.estimate.layers": "float8.estimate.predict",
    "float8.estimate.lookup": "float8.estimate.devices",
    "float8.filters": "float8.convert.filters",
    "float8.fused": "float8.fusion.producers",
    "float8.inference": "float8.convert.inference",
    "float8.integrations.evaluation": "float8.integrations.conversion",
    "float8.integrations.versions": "float8.integrations.conversion",
    "float8.kernels.reference": "float8.kernels.cpu",
    "float8.levels": "float8.ms_amp.levels",
    "float8.norm_fusion": "float8.fusion",
    "float8.numerics.accurate": "float8.numerics.comparison",
    "float8.numerics.batches": "float8.numerics.passes",
    "float8.numerics.culprit": "float8.numerics.nonfinite",
    "float8.numerics.distribution": "float8.numerics.calibration",
    "float8.numerics.findings": "float8.numerics.problems",
    "float8.numerics.page": "float8.numerics.report",
    "float8.numerics.plot": "float8.numerics.display",
    "float8.numerics.rows": "float8.numerics.statistics",
    "float8.numerics.table": "float8.numerics.display",
    "float8.numerics.untouched": "float8.numerics.passes",
    "float8.optim.adamw": "float8.optim.optimizers",
    "float8.optim.core": "float8.optim.optimizer",
    "float8.optim.lion": "float8.optim.optimizers",
    "float8.optim.sgd": "float8.optim.optimizers",
    "float8.refusals": "float8.linear.refusals",
    "float8.resident_weight": "float8.linear.float8_weight",
    "float8.scaling": "float8.linear.scaling",
    "float8.switch": "float8.linear.switch",
    "float8.sync": "float8.linear.delayed",
    "float8.unit_scaling.float8_layers": "float8.unit_scaling.modules.converted",
    "float8.unit_scaling.learning_rates": "float8.unit_scaling.optim",
    "float8.unit_scaling.modules.norms": "float8.unit_scaling.modules.layers",
    "float8.unit_scaling.modules.rotary": "float8.unit_scaling.modules.attention",
    "float8.unit_scaling.override": "float8.unit_scaling.registry",
    "float8.unit_scaling.parameter_groups": "float8.unit_scaling.optim",
    "float8.unit_scaling.rules": "float8.unit_scaling.core.functional",
    "float8.unit_scaling.spellings": "float8.unit_scaling.registry",
    "float8.weight_cache": "float8.linear.weight_cache",
}


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what sys.modules holds after this call.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


sys.meta_path.append(_Moved())
# For torch.load(weights_only=True) of files that name a function or type by its old path.
torch.serialization.add_safe_globals(
    [(Float8Tensor, "float8.tensor.Float8Tensor"), (_rebuild, "float8.tensor._rebuild")]
)
